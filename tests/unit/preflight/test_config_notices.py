"""The check: its notices, the plan of batches, the other programs."""

from __future__ import annotations

import pytest

from tests.unit.preflight.cases import ARR, notices, only, problems, write_model, write_rows
from verl.config import load
from verl.planning.devices import keep
from verl.preflight.check import check, prediction

RC = "algorithm.rollout_correction"
REWARD = "reward_model.reward_kwargs"

TEACHER, LOSS = "distillation.teacher_models.teacher_model", "distillation.distillation_loss"
TAUGHT = ("distillation.enabled=True", f"{TEACHER}.model_path={{model}}")
NOTICES = [
    (
        [*TAUGHT, f"{LOSS}.loss_mode=forward_kl_topk", f"{LOSS}.use_policy_gradient=True"],
        "says nothing of the token that was sampled",
    ),
    ([*TAUGHT, f"+{TEACHER}.inference.name=vllm"], "serves every teacher"),
    ([*TAUGHT, "distillation.n_gpus_per_node=4"], "teachers run on the policy's devices"),
    (
        [*TAUGHT, f"{LOSS}.use_task_rewards=False", f"{ARR}.actor.entropy_coeff=0.1"],
        "entropy_coeff: use_task_rewards=False",
    ),
    (
        ["distillation.enabled=True", "+distillation.teacher_models.math.model_path={model}"],
        "teacher_model has no model_path and is left out",
    ),
    ([f"+{REWARD}.penalty=3"], "reward_kwargs.penalty: no manager of ours takes it"),
    (["trainer.critic_warmup=3"], "no critic to warm up"),
    (["critic.strategy=mindspeed", "critic.optim.optimizer=Nope"], "critic.strategy=mindspeed: there is no"),
    ([f"{ARR}.rollout.enable_rollout_routing_replay=True"], "only actor_rollout_ref.actor.router_replay"),
    ([f"{ARR}.actor.ppo_mini_batch_size=16"], "one update on the batch"),
    ([f"{ARR}.actor.ppo_mini_batch_size=3"], "3 mini-batches of 2 to 3 prompts"),
    ([f"{ARR}.rollout.n=1"], "the score is the advantage"),
    ([f"{ARR}.rollout.val_kwargs.n=2"], "all responses to a prompt will be the same"),
    (["trainer.test_freq=5", "data.val_files=null"], "nothing to validate on"),
    ([f"{ARR}.model.exclude_modules=[x]"], "LoRA only"),
    ([f"{ARR}.actor.freeze_vision_tower=True"], "sees no images"),
    (["data.augmentation.rotate=5"], "data.augmentation.rotate=5.0: this model sees no images"),
    (["reward_model.images=True"], "sees no images"),
    ([f"{ARR}.rollout.top_p=0.9", f"{ARR}.rollout.replay_sampling_mask=False"], "compares two supports"),
    ([f"{ARR}.rollout.top_k=5", f"{ARR}.rollout.logprobs_mode=raw_logprobs"], "compares two supports"),
    ([f"{ARR}.actor.loss_agg_mode=seq-mean-token-sum-norm"], "Dr. GRPO"),
    ([f"{REWARD}.overlong_buffer_cfg={{enable:True,len:5}}", f"{REWARD}.max_resp_len=9"], "is not data.max_"),
    (["algorithm.kl_ctrl.kl_coef=0.1"], "nothing uses it"),
    ([f"{ARR}.actor.ppo_max_token_len_per_gpu=100"], "goes alone"),
    ([f"{ARR}.model.use_remove_padding=False"], "packed without padding"),
    ([f"{ARR}.rollout.engine_kwargs.vllm.x=1"], "belong to vllm and sglang"),
    ([f"{ARR}.actor.use_kl_loss=True", f"{ARR}.actor.kl_loss_type=k1"], "expected gradient is 0"),
    ([f"{ARR}.actor.checkpoint.save_contents=[model,hf_model]"], "hf_model has no effect"),
    (["trainer.logger=[vemlp_wandb]"], "not in this release, left out"),
    ([f"{ARR}.rollout.multi_stage_wake_up=True"], "multi_stage_wake_up=True: the native engine decides"),
    ([f"{ARR}.ref.fsdp_config.offload_policy=True"], "nothing is sharded"),
    ([f"{ARR}.actor.fsdp_config.param_offload=True"], "stay where they are"),
    ([f"{ARR}.actor.fsdp_config.model_dtype=bf16"], "master weights and the optimizer's state are float32"),
    (["trainer.esi_redundant_time=5"], "trainer.esi_redundant_time=5.0: not"),
    ([f"{ARR}.actor.profiler.enable=True"], "nothing is profiled without global_profiler.tool=torch"),
    ([f"{RC}.bypass_mode=True", f"{RC}.loss_type=reinforce"], "trained on uncorrected"),
    ([f"{RC}.bypass_mode=True", f"{RC}.rollout_is=token"], "whose ratio is to the sampler already"),
    (["global_profiler.tool=torch"], "no step is named"),
    ([f"{ARR}.model.mtp.enable_train=True"], "model.mtp.enable=False"),
    ([f"{ARR}.model.use_liger=True"], "model.use_liger=True: norms, gated MLPs, rotations and the head have kernels"),
    ([f"{ARR}.actor.megatron.grad_offload=True"], "megatron.grad_offload=True: strategy=megatron alone"),
    ([f"{ARR}.model.use_shm=True"], "model.use_shm=True: not in this release"),
    ([f"{ARR}.actor.optim.total_training_steps=9"], "a schedule has the run's length"),
    ([f"{ARR}.actor.fsdp_config.seed=9"], "every role has trainer.seed"),
    (["critic.checkpoint.async_save=True"], "the critic is saved as the policy is"),
    (["trainer.resume_from_path=/x"], "resume_from_path=/x without trainer.resume_mode=resume_path"),
    ([f"{ARR}.rollout.response_length=2000"], "responses end at the smaller one"),
    (["data.train_batch_size=9", f"{ARR}.actor.ppo_mini_batch_size=4"], "3 mini-batches of 3 prompts"),
    (["global_profiler.tool=npu", "global_profiler.steps=[2]"], "no Ascend device"),
    (
        [
            "global_profiler.tool=torch",
            "global_profiler.steps=[2]",
            f"{ARR}.actor.profiler.tool_config.npu.discrete=True",
        ],
        "a profile here is of whole steps",
    ),
]


@pytest.mark.parametrize(("overrides", "part"), NOTICES, ids=lambda v: v[0][-48:] if isinstance(v, list) else None)
def test_notices(base, tmp_path, overrides, part):
    words = [word.replace("{model}", str(tmp_path / "model")) for word in overrides]
    report = check(load([*base, *words]))
    assert report.exit_code == 0, report.problems
    said = report.notices + report.check_only
    assert sum(part in notice for notice in said) == 1, said


NOTICES_BESIDE = [
    (
        [f"{ARR}.rollout={{data_parallel_size:2,name:vllm}}", "trainer.n_gpus_per_node=4"],
        "data_parallel_size=2: each copy is an engine of its own, of which there are 4",
    ),
    (["trainer.max_staleness=1", "trainer.n_gpus_per_node=2"], "sampler and trainer compete"),
    ([f"{ARR}.actor.policy_loss.loss_mode=gspo"], "its paper has clip_ratio_low=3e-4"),
    ([f"{ARR}.actor.policy_loss.loss_mode=dppo_kl"], "set both"),
    (["trainer.max_staleness=1"], "trained on uncorrected"),
]


@pytest.mark.parametrize(("overrides", "part"), NOTICES_BESIDE)
def test_notices_of_what_this_release_refuses(base, overrides, part):
    assert part in notices(*base, *overrides)


def test_another_name_of_the_default_is_no_news(base):
    assert "model_dtype" not in notices(*base, f"{ARR}.actor.fsdp_config.model_dtype=float32")


def test_staleness_with_a_pool_of_its_own_and_a_correction(base):
    """Nothing is left to say: not shared, and corrected, by weights or by the ratio to the sampler."""
    pool = ["trainer.max_staleness=2", f"{ARR}.rollout.nnodes=1", f"{ARR}.rollout.n_gpus_per_node=1"]
    for how in ("rollout_is=token", "bypass_mode=True"):
        found = check(load([*base, *pool, f"{RC}.{how}"]))
        assert not [p for p in found.problems if p.kind == "configuration"], found.problems
        assert not any("stal" in notice or "compete" in notice for notice in found.notices), found.notices


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.train_batch_size=7", f"{ARR}.rollout.n=3"],
        [f"{ARR}.actor.ppo_micro_batch_size_per_gpu=3"],
        [f"{ARR}.actor.ppo_micro_batch_size_per_gpu=null"],
        [f"{ARR}.rollout.agent.num_workers=5"],
        ["data.gen_batch_size=3"],
        [f"{ARR}.actor.checkpoint.async_save=True"],
        [f"{ARR}.actor.strategy=fsdp2"],
        ["algorithm.adv_estimator=grpo_vectorized", "algorithm.norm_adv_by_std_in_grpo=False"],
        ["trainer.n_gpus_per_node=1", "trainer.nnodes=1", f"{ARR}.rollout.tensor_model_parallel_size=1"],
        ["data.val_files=null"],
        [f"{RC}.rollout_is=token", f"{RC}.rollout_is_threshold=2.0"],
        [f"{RC}.rollout_is=token", f"{RC}.rollout_is_threshold=0.5_5.0"],
    ],
)
def test_lifted(base, overrides):
    """What the public system refuses and nothing in the method asks for; thresholds in their forms."""
    assert problems(*base, *overrides) == []


# ---- the plan, the other programs ----


def test_the_plan(base):
    def plan(*words):
        return "\n".join(check(load([*base, *words])).plan)

    whole = plan("trainer.total_epochs=3", f"{ARR}.actor.ppo_epochs=2")
    assert "16 rows, 2 steps an epoch × 3 epochs = 6 steps" in whole
    assert "8 prompts × 4 responses = 32 trajectories" in whole
    assert "4 updates (2 mini-batches of 16 responses × 2 epochs)" in whole
    assert "up to 16384 tokens each" in whole and "validation: 4 prompts × 1" in whole
    few = plan("data.val_max_samples=3", "data.train_max_samples=9", "trainer.total_epochs=3")
    assert "validation: 3 prompts × 1" in few and "9 rows, 1 step an epoch × 3 epochs = 3 steps" in few
    sized = plan(f"{ARR}.actor.ppo_micro_batch_size_per_gpu=3", "trainer.total_training_steps=9")
    assert "6 of 3 responses per mini-batch" in sized and "9 steps over 16 rows" in sized
    assert plan("trainer.val_only=True") == "validation: 4 prompts × 1"


def test_the_prediction(base, tmp_path, monkeypatch):
    monkeypatch.setattr("verl.planning.devices.bench_file", lambda: tmp_path / "bench.json")
    assert prediction(check(load(base))) == []  # config.json leaves hidden_size to the library
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    words = [*base, f"{ARR}.model.path={write_model(tmp_path / 'sized', **sizes)}"]
    memory, time = prediction(check(load(words)))
    assert "GiB" in memory and "doctor --bench" in time
    keep(4e11, 2e11, 1e10, 16e9)
    assert "s (" in prediction(check(load(words)))[1]


def test_supervised(tmp_path):
    argv = [f"model.path={write_model(tmp_path / 'model')}", "data.train_batch_size=4", "trainer.device=cpu"]
    messages = [[{"role": role, "content": "x"} for role in ("user", "assistant")]] * 16
    chat = f"data.train_files={write_rows(tmp_path / 'chat.parquet', messages=messages)}"
    assert problems(*argv, chat, entry="sft") == []
    columns = {"question": ["x"] * 16, "answer": ["y"] * 16}
    pairs = f"data.train_files={write_rows(tmp_path / 'pairs.parquet', **columns)}"
    only(problems(*argv, pairs, entry="sft"), "configuration", "no column 'messages'", "data.prompt_key")
    assert problems(*argv, pairs, "data.prompt_key=question", "data.response_key=answer", entry="sft") == []
    only(problems(*argv, chat, "data.train_batch_size=17", entry="sft"), "configuration", "16 rows")
    only(problems(*argv, chat, "model.external_lib=no_such", entry="sft"), "configuration", "no module no_such")
    report = check(
        load(
            [*argv, chat, "data.micro_batch_size=2", "trainer.total_training_steps=3", "trainer.journal=1"], entry="sft"
        )
    )
    assert any("no effect: trainer.journal" in notice for notice in report.notices)
    assert "3 steps over 16 rows" in report.plan
    assert any("micro_batch_size_per_gpu=2: data.use_dynamic_bsz=True" in notice for notice in report.notices)
    tiled = problems(*argv, chat, "model.use_liger=True", "model.tiled_mlp.enabled=True", entry="sft")
    assert ["not in this release" in problem for problem in tiled] == [True]


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"messages": [[{"role": "user", "content": "x"}]] * 600}, "no assistant turn"),
        (
            {"messages": [[{"role": "assistant", "content": "x"}]] * 600, "tools": ["calculator"] * 600},
            "tools",
        ),
    ],
)
@pytest.mark.parametrize("ratio", [0.5, 1])
def test_supervised_files_without_a_usable_row(tmp_path, columns, problem, ratio):
    rows = write_rows(tmp_path / "chat.parquet", 600, **columns)
    argv = [f"data.train_files={rows}", f"model.path={write_model(tmp_path / 'model')}", "trainer.device=cpu"]
    found = problems(*argv, f"data.max_bad_row_ratio={ratio}", entry="sft")
    only(found, "configuration", f"{301 if ratio < 1 else 600} rows cannot be used", problem)


def test_generation_and_evaluation(tmp_path):
    file = write_rows(tmp_path / "a.parquet", responses=[["a"]] * 16)
    assert len(problems(entry="eval")) == 1
    assert problems(f"data.path={file}", entry="eval") == []
    wrong = problems(f"data.path={file}", "data.response_key=response", entry="eval")
    only(wrong, "configuration", "nearest: responses")
    argv = [f"data.path={file}", f"model.path={write_model(tmp_path / 'model')}", "trainer.device=cpu"]
    only(problems(*argv, entry="generation"), "configuration", "data.output_path: is required")
    assert problems(*argv, f"data.output_path={tmp_path}/o.parquet", entry="generation") == []


def test_keys_of_more_than_one_device_are_without_effect_on_one_only(base):
    size = f"{ARR}.rollout.checkpoint_engine.update_weights_bucket_megabytes=64"
    offload = f"{ARR}.actor.fsdp_config.param_offload=True"
    alone = notices(*base, size, offload)
    assert f"no effect: {offload}, {size}: in one process" in alone
    moved = f"{ARR}.ref.fsdp_config.param_offload=True", f"{ARR}.actor.fsdp_config.optimizer_offload=True"
    assert "offload" not in notices(*base, *moved)
    several = notices(*base, size, offload, "trainer.n_gpus_per_node=2")
    assert "update_weights_bucket_megabytes" not in several and "param_offload" not in several


def test_the_way_that_weights_travel_is_said_when_another_is_asked_for(base, monkeypatch):
    """Without a cluster's address samplers of a pool are on this machine, too."""
    backend = f"{ARR}.rollout.checkpoint_engine.backend=nccl"
    pool = f"{ARR}.rollout.nnodes=1"
    for words in ([backend], [backend, pool], [backend, pool, "+ray_kwargs.ray_init.address=local"]):
        assert f"{backend}: weights travel through shared memory; only nodes" in notices(*base, *words)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert "checkpoint_engine.backend" not in notices(*base, backend, pool)
    assert f"{backend}: weights travel" in notices(*base, backend)


def test_an_attention_kernel_that_the_user_names_has_no_effect(base):
    overrides = f"+{ARR}.model.override_config.attn_implementation=flash_attention_3"
    assert f"no effect: {overrides[1:]}: attention is computed by verl's own" in notices(*base, overrides)
    backend = f"{ARR}.actor.megatron.override_transformer_config.attention_backend=flash"
    assert f"no effect: {backend}: the backends are" in notices(*base, f"+{backend}", f"{ARR}.actor.strategy=megatron")


def test_a_profiler_of_other_devices_is_what_the_machine_lacks(base):
    found = problems(*base, "global_profiler.tool=nsys", "global_profiler.steps=[2]")
    only(found, "machine", "records CUDA devices", "set it to torch")


def test_steps_of_one_version_are_within_the_bound(base):
    pool = [f"{ARR}.rollout.nnodes=1", "trainer.weight_sync_every=4", "trainer.max_staleness=1"]
    for steps, wrong in ((4, False), (8, False), (3, True), (9, True)):
        found = problems(*base, *pool, f"trainer.max_steps_per_version={steps}")
        assert any("between weight_sync_every=4 and 8" in problem for problem in found) is wrong


def test_a_run_folder_inside_a_submitted_jobs_copy_is_said_to_be_lost(base, tmp_path, monkeypatch):
    copy = tmp_path / "session_x/runtime_resources/working_dir_files/_ray_pkg_1"
    copy.mkdir(parents=True)
    assert "temporary copy" not in notices(*base)
    monkeypatch.chdir(copy)
    assert "trainer.default_local_dir=runs/a is inside Ray's temporary copy" in notices(
        *base, "trainer.default_local_dir=runs/a"
    )
    assert "temporary copy" not in notices(*base, f"trainer.default_local_dir={tmp_path}/runs")
