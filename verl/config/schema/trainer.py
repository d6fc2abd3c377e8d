"""`trainer.`: length of the run, devices, folder, tracking, saving, validation."""

from verl.config.schema.base import FilePath, Group, choice, items, key

LOGGERS: tuple[str, ...] = (
    "console",
    "wandb",
    "tracking",
    "tensorboard",
    "swanlab",
    "mlflow",
    "clearml",
    "trackio",
)
LOGGERS += ("vemlp_wandb", "file")
DEVICES = ("auto", "cuda", "npu", "cpu")


class TrainerConfig(Group):
    """The run."""

    total_epochs: int = key(30, low=1)
    """Passes over the training files."""
    total_training_steps: int | None = key(None, low=1)
    """Steps; wins over epochs."""
    project_name: str = "verl_examples"
    """First part of the run's name."""
    experiment_name: str = "gsm8k"
    """Second part of the run's name."""
    default_local_dir: FilePath = key(
        None, shown="checkpoints/${project_name}/${experiment_name}", nullable=True
    )
    """Run folder."""
    default_hdfs_dir: str | None = None
    """URL (hdfs://, s3://, …) or directory to which checkpoints are copied after they are sealed, all of them kept; a
    resume fetches the newest from there if it is not in the run folder."""
    logger: list[str] = items("console", options=LOGGERS, ours=True)
    """Trackers: `console`, `wandb` (= `tracking`), `tensorboard`, `swanlab`, `mlflow`, `clearml`, `trackio`,
    `vemlp_wandb`, `file`."""
    wandb_proxy: str | None = None
    """Proxy of wandb."""
    device: str = choice("auto", *DEVICES, ours=True)
    """`auto` (cuda, npu, cpu by detection), `cuda`, `npu`, `cpu`: honoured or refused."""
    nnodes: int = key(1, low=1)
    """Nodes of the training devices."""
    n_gpus_per_node: int = key(None, low=1, nullable=True, ours=True, shown="devices found (1 on cpu)")
    """Training devices per node; also for NPUs."""
    save_freq: int = -1
    """Steps between checkpoints; ≤ 0 = never; the last step is saved when > 0."""
    test_freq: int = -1
    """Steps between validations; ≤ 0 = never."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Validate and stop."""
    log_val_generations: int = key(0, low=0)
    """Validation responses sent to trackers."""
    rollout_data_dir: FilePath | None = None
    """`{step}.jsonl` of sampled responses go here."""
    validation_data_dir: FilePath | None = None
    """`{step}.jsonl` of validation responses go here."""
    resume_mode: str = choice("auto", "auto", "disable", "resume_path")
    """`auto` (newest complete checkpoint), `disable`, `resume_path`."""
    resume_from_path: FilePath | None = None
    """The checkpoint of `resume_mode=resume_path`: a run folder or a `global_step_N`."""
    del_local_ckpt_after_load: bool = False
    """Delete the checkpoint of the run folder once it is loaded, if `default_hdfs_dir` has it too."""
    max_actor_ckpt_to_keep: int | None = key(None, low=1)
    """Actor checkpoints kept; null = all."""
    max_critic_ckpt_to_keep: int | None = key(None, low=1)
    """Critic checkpoints kept; null = all."""
    max_ckpt_to_keep: int | None = key(None, low=1)
    """Both; checkpoints left in the folder by earlier runs count."""
    critic_warmup: int = key(0, low=0)
    """The actor is trained from this step on, the critic from the first; needs a critic."""
    balance_batch: bool = True
    """Groups spread over ranks by cost."""
    esi_redundant_time: float = key(0.0, low=0)
    """Save this long ahead of a known end of the instance."""
    ray_wait_register_center_timeout: float = key(300.0, above=0)
    """Wait this long for workers to appear."""
    seed: int = key(42, ours=True)
    """Everything random."""
    max_staleness: int = key(0, low=0, ours=True)
    """Weight versions a response may lag (0 = synchronous)."""
    logprob_diff_limit: float | None = key(None, above=0, ours=True)
    """Stop when max |sampler − trainer| log-prob exceeds it."""
    max_refused_steps: int = key(3, low=1, ours=True)
    """Non-finite updates in a row that stop the run."""
    watchdog_timeout: float = key(600.0, above=0, ours=True)
    """Report who waits for what after this long without progress."""
    verify_weight_sync: bool = key(False, ours=True)
    """Checksums on both sides after each sync."""


class SFTTrainerConfig(TrainerConfig):
    """The run of supervised fine-tuning."""

    total_epochs: int = key(4, low=1)
    project_name: str = "gsm8k-sft"
    experiment_name: str = "test"
    seed: int = 1


class RecordsConfig(Group):
    """Records of a command that trains nothing."""

    project_name: str = "verl_examples"
    """First part of the name on the page and in trackers."""
    experiment_name: str | None = key(None, shown="the data file's name")
    """Second part of that name."""
    default_local_dir: FilePath = key(None, shown="a folder beside the data file", nullable=True)
    """Folder of the records: metrics, events, sampled responses, the page."""
    logger: list[str] = items(options=LOGGERS)
    """Trackers, as in training; `console` is the line of all metrics."""


class GenerationTrainerConfig(RecordsConfig):
    """Devices and records of generation."""

    logger: list[str] = items("console", options=LOGGERS)
    nnodes: int = key(1, low=1)
    """Nodes."""
    n_gpus_per_node: int = key(None, low=1, nullable=True, shown="devices found (1 on cpu)")
    """Devices per node."""
    device: str = choice("auto", *DEVICES)
    """`auto`, `cuda`, `npu`, `cpu`."""
