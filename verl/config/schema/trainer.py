"""`trainer.`: length of the run, devices, folder, tracking, saving, validation."""

from verl.config.schema.base import SEEDS, FilePath, Group, Map, choice, items, key, open_map

LOGGERS: tuple[str, ...] = ("console", "file", "wandb", "tracking", "tensorboard", "swanlab", "mlflow")
LOGGERS += ("clearml", "trackio", "vemlp_wandb")
EACH_EPOCH = "after_each_epoch"
DEVICES = ("auto", "cuda", "npu", "cpu")


class TrainerConfig(Group):
    """The run.

    Attributes:
        total_epochs: Passes over the training files.
        total_training_steps: Steps; wins over epochs.
        project_name: First part of the run's name.
        experiment_name: Second part of the run's name.
        default_local_dir: Run folder.
        default_hdfs_dir: URL (hdfs://, s3://, …) or directory to which checkpoints are copied after they are sealed,
            all of them kept; a resume fetches the newest from there if it is not in the run folder.
        logger: Trackers: `console`, `wandb` (= `tracking`), `tensorboard`, `swanlab`, `mlflow`, `clearml`, `trackio`,
            `vemlp_wandb`, `file`.
        wandb_proxy: Proxy of wandb.
        device: `auto` (cuda, npu, cpu by detection), `cuda`, `npu`, `cpu`: honoured or refused.
        compiled_kernels: On a CPU: `auto` (kernels that the machine's C++ compiler builds once, where it has one), `off`
            (torch's operators; the same numbers to rounding).
        nnodes: Nodes of the training devices.
        n_gpus_per_node: Training devices per node; also for NPUs.
        save_freq: Steps between checkpoints; ≤ 0 = never; the last step is saved when > 0.
        test_freq: Steps between validations; ≤ 0 = never.
        val_before_train: Validate before the first step.
        val_only: Validate and stop.
        log_val_generations: Validation responses sent to trackers.
        rollout_data_dir: `{step}.jsonl` of sampled responses go here.
        validation_data_dir: `{step}.jsonl` of validation responses go here.
        resume_mode: `auto` (newest complete checkpoint), `disable`, `resume_path`.
        resume_from_path: The checkpoint of `resume_mode=resume_path`: a run folder or a `global_step_N`.
        del_local_ckpt_after_load: Delete the checkpoint of the run folder once it is loaded, if `default_hdfs_dir`
            has it too.
        max_actor_ckpt_to_keep: Actor checkpoints kept; null = all.
        max_critic_ckpt_to_keep: Critic checkpoints kept; null = all.
        max_ckpt_to_keep: Both; checkpoints left in the folder by earlier runs count.
        critic_warmup: The actor is trained from this step on, the critic from the first; needs a critic.
        balance_batch: Groups spread over ranks by cost.
        esi_redundant_time: Save this long ahead of a known end of the instance.
        ray_wait_register_center_timeout: Wait this long for workers to appear.
        seed: Everything random.
        max_staleness: Weight versions a response may lag (0 = synchronous).
        weight_sync_every: Steps between pushes of weights to the sampler; above 1 it needs devices of its own.
        max_steps_per_version: Steps whose groups may be begun under one weight version; null = all that `max_staleness`
            allows.
        partial_rollout: Responses in flight go on with new weights; False: weights are pushed when all of them are
            back.
        logprob_diff_limit: Stop when max |sampler − trainer| log-prob exceeds it.
        max_refused_steps: Non-finite updates in a row that stop the run.
        watchdog_timeout: Report who waits for what after this long without progress.
        verify_weight_sync: Checksums on both sides after each sync.
        sync_proof: After each sync the sampler's log-probs of a few tokens must have moved as the trainer's did:
            `error` ends the run if not, `warn` says so, `off` does not look.
        journal: GiB of the run folder for what the newest steps were made of (docs/replay.md); 0 = none.
        worker_env: Environment variables of every process of the run, by name.
    """

    total_epochs: int = key(30, low=1)
    total_training_steps: int | None = key(None, low=1)
    project_name: str = "verl_examples"
    experiment_name: str = "gsm8k"
    default_local_dir: FilePath = key(None, shown="checkpoints/${project_name}/${experiment_name}", nullable=True)
    default_hdfs_dir: str | None = None
    logger: list[str] = items("console", options=LOGGERS, ours=True)
    wandb_proxy: str | None = None
    device: str = choice("auto", *DEVICES, ours=True)
    compiled_kernels: str = choice("auto", "auto", "off", ours=True)
    nnodes: int = key(1, low=1, high=100_000)
    n_gpus_per_node: int = key(None, low=1, high=1024, nullable=True, ours=True, shown="found (1 on cpu)")
    save_freq: int = -1
    test_freq: int = -1
    val_before_train: bool = True
    val_only: bool = False
    log_val_generations: int = key(0, low=0)
    rollout_data_dir: FilePath | None = None
    validation_data_dir: FilePath | None = None
    resume_mode: str = choice("auto", "auto", "disable", "resume_path")
    resume_from_path: FilePath | None = None
    del_local_ckpt_after_load: bool = False
    max_actor_ckpt_to_keep: int | None = key(None, low=1)
    max_critic_ckpt_to_keep: int | None = key(None, low=1)
    max_ckpt_to_keep: int | None = key(None, low=1)
    critic_warmup: int = key(0, low=0)
    balance_batch: bool = True
    esi_redundant_time: float = key(0.0, low=0)
    ray_wait_register_center_timeout: float = key(300.0, above=0, inf=True)
    seed: int = key(42, low=0, high=SEEDS, ours=True)
    max_staleness: int = key(0, low=0, ours=True)
    weight_sync_every: int = key(1, low=1, ours=True)
    max_steps_per_version: int | None = key(None, low=1, ours=True)
    partial_rollout: bool = key(True, ours=True)
    logprob_diff_limit: float | None = key(None, above=0, inf=True, ours=True)
    max_refused_steps: int = key(3, low=1, ours=True)
    watchdog_timeout: float = key(600.0, low=5, inf=True, ours=True)
    verify_weight_sync: bool = key(False, ours=True)
    sync_proof: str = choice("error", "error", "warn", "off", ours=True)
    journal: float = key(1.0, low=0, inf=True, ours=True)
    worker_env: Map = open_map()


class SFTTrainerConfig(TrainerConfig):
    """The run of supervised fine-tuning.

    Attributes:
        save_freq: Steps between checkpoints, or `after_each_epoch`; ≤ 0 = never.
        test_freq: Steps between validations, or `after_each_epoch`; ≤ 0 = never.
    """

    save_freq: int | str = -1  # type: ignore[assignment]
    test_freq: int | str = -1  # type: ignore[assignment]
    total_epochs: int = key(4, low=1)
    project_name: str = "gsm8k-sft"
    experiment_name: str = "test"
    seed: int = key(1, low=0, high=SEEDS)


class RecordsConfig(Group):
    """Records of a command that trains nothing.

    Attributes:
        project_name: First part of the name on the page and in trackers.
        experiment_name: Second part of that name.
        default_local_dir: Folder of the records: metrics, events, sampled responses, the page.
        logger: Trackers, as in training; `console` is the line of all metrics.
    """

    project_name: str = "verl_examples"
    experiment_name: str | None = key(None, shown="the data file's name")
    default_local_dir: FilePath = key(None, shown="a folder beside the data file", nullable=True)
    logger: list[str] = items(options=LOGGERS)


class GenerationTrainerConfig(RecordsConfig):
    """Devices and records of generation.

    Attributes:
        nnodes: Nodes.
        n_gpus_per_node: Devices per node.
        device: `auto`, `cuda`, `npu`, `cpu`.
    """

    logger: list[str] = items("console", options=LOGGERS)
    nnodes: int = key(1, low=1, high=100_000)
    n_gpus_per_node: int = key(None, low=1, high=1024, nullable=True, shown="found (1 on cpu)")
    device: str = choice("auto", *DEVICES)
