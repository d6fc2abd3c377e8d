"""Engines from the configuration: the same for the roles of one process and for hosts of a cluster.

Everything here takes the configuration as typed groups or as the same keys in mappings (a worker gets JSON).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from verl.algorithms.needs import needed_columns, teacher_roles
from verl.config.layout import own_pools, samplers_per_node
from verl.config.reward_weights import scores_by_model
from verl.config.rollout_engines import CAPABILITIES, sampler_dtype
from verl.data.media import load_processor
from verl.data.tokenizer import load_tokenizer
from verl.engine.rollout.base import RolloutEngine
from verl.engine.training import get_engine
from verl.engine.training.base import TrainingEngine
from verl.engine.training.lora import AdapterSource, LoraSettings, inject
from verl.errors import UserError
from verl.platform import Platform, detect
from verl.reward.judge_server import ServedJudge

_CRITIC_KEYS = (
    *("strategy", "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu", "use_dynamic_bsz", "optim"),
    *("grad_clip", "ulysses_sequence_parallel_size", "checkpoint"),
)
_FORWARD_KEYS = ("micro_batch_size_per_gpu", "max_token_len_per_gpu")


def longest(config: Any) -> int:
    """Most tokens of prompt and response together."""
    data, rollout = config.data, config.actor_rollout_ref.rollout
    return int(rollout.max_model_len or data.max_prompt_length + data.max_response_length)


def roles_by_pool(config: Any) -> dict[str, list[str]]:
    """The roles that the ranks of a run play, by the pool of devices they are on: "training", the policy's, or one of
    `own_pools`."""
    roles, needed = ["actor"], needed_columns(config)
    if "ref_log_probs" in needed:
        roles.append("ref")
    roles += teacher_roles(config)
    if "values" in needed:
        roles.append("critic")
    if scores_by_model(config):
        roles.append("reward_model")
    separate, by_pool = own_pools(config), dict[str, list[str]]()
    for role in roles:
        pool = "teacher" if role.startswith("teacher_") else role
        by_pool.setdefault(pool if pool in separate else "training", []).append(role)
    return by_pool


def engines_of(
    config: Any, roles: Sequence[str], total_steps: int, platform: Platform, *, shared: bool = False
) -> dict[str, TrainingEngine]:
    """The engines of roles that are on the same ranks; `shared` as in `actor_engine`."""
    engines: dict[str, TrainingEngine] = {}
    teachers = teacher_roles(config)
    for role in roles:
        if role == "actor":
            engines[role] = actor_engine(config, total_steps, platform, shared=shared)
        elif role == "ref":
            engines[role] = reference_engine(config, engines["actor"], platform)
        elif role in teachers:
            engines[role] = teacher_engine(config, role, teachers[role], platform)
        elif role == "critic":
            engines[role] = critic_engine(config, total_steps, platform)
        else:
            engines[role] = reward_engine(config, platform)
    return engines


def actor_engine(
    config: Any, total_steps: int, platform: Platform, *, shared: bool = False
) -> TrainingEngine:
    """The idle engine of the policy in training, its schedule set. With several ranks, they must have joined before.

    shared: a sampler of this process is to work on its tensors (one rank only).
    """
    arr = config.actor_rollout_ref
    engine = _engine(config, arr.model.path, arr.actor, platform, log_prob_cfg=arr.rollout, shared=shared)
    engine.schedule(total_steps)
    return engine


def reference_engine(config: Any, actor: TrainingEngine, platform: Platform) -> TrainingEngine:
    """The engine of the frozen reference. With LoRA it is the actor's, unless ref.model.path names another."""
    arr = config.actor_rollout_ref
    if actor.adapted and not arr.ref.model.path:
        return actor
    path, model = arr.model.path, arr.model
    if arr.ref.model.path:
        path, model = arr.ref.model.path, _frozen(arr.model)
    return _engine(config, path, arr.ref, platform, model_cfg=model, trainable=False, role="ref")


def _frozen(policys: Any) -> dict[str, Any]:
    """Settings of a frozen model beside the policy: the policy's without what is of its own model's configuration."""
    return {**policys, "hf_config_path": None, "override_config": {}}


def teacher_engine(config: Any, role: str, teacher: Any, platform: Platform) -> TrainingEngine:
    """A frozen teacher's engine, with the reference's settings. UserError if it has fewer tokens than the policy."""
    arr, loss = config.actor_rollout_ref, config.distillation.distillation_loss
    path, key = teacher["model_path"], f"distillation.teacher_models.{role.removeprefix('teacher_')}"
    inference = teacher.get("inference") or {}
    fsdp = {**arr.ref.fsdp_config, "tensor_parallel_size": inference.get("tensor_model_parallel_size") or 1}
    settings = {**arr.ref, "fsdp_config": fsdp}
    if "teacher" in own_pools(config):
        settings["ulysses_sequence_parallel_size"] = 1  # the reference's is that of the policy's ranks
    model = _frozen(arr.model)
    topk = loss.topk if loss.loss_mode == "forward_kl_topk" else 0
    try:
        size, needed = _vocabulary(path, model), _vocabulary(arr.model.path, arr.model)
        if size < needed:
            raise UserError(f"model_path={path}: its vocabulary has {size} tokens, the policy's {needed}")
        options = {"model_cfg": model, "trainable": False, "role": role, "topk": topk}
        return _engine(config, path, settings, platform, **options)
    except UserError as error:
        raise UserError(f"{key}: {error}") from error


def _vocabulary(path: str, model_cfg: Any) -> int:
    from verl.models.pretrained import check_directory, load_config

    check_directory(path)
    return int(load_config(path, model_cfg).get_text_config().vocab_size)


def critic_engine(config: Any, total_steps: int, platform: Platform) -> TrainingEngine:
    """The engine of the value model, its schedule set, idle. UserError if its vocabulary is not the policy's."""
    critic = config.critic
    settings = {
        **{name: critic[name] for name in _CRITIC_KEYS},
        **{f"log_prob_{name}": critic[f"forward_{name}"] for name in _FORWARD_KEYS},
        "log_prob_use_dynamic_bsz": critic.use_dynamic_bsz,
        "fsdp_config": critic.model.fsdp_config,
    }
    policy = config.actor_rollout_ref.model
    path = critic.model.path or policy.path
    options = {"model_cfg": critic.model, "head": "value", "role": "critic"}
    try:
        tokens, policy_tokens = _vocabulary(path, critic.model), _vocabulary(policy.path, policy)
        if tokens != policy_tokens:
            raise UserError(
                f"model.path={path}: its vocabulary has {tokens} tokens, the policy's {policy_tokens}; "
                "the critic reads the policy's tokens, so use a model of the same family"
            )
        engine = _engine(config, path, settings, platform, **options)
    except UserError as error:
        raise UserError(f"critic.{error}") from error
    engine.schedule(total_steps)
    return engine


def reward_engine(config: Any, platform: Platform) -> Any:
    """The engine of a sequence classifier that scores, sharded over all ranks; one that cannot be packed is a
    `PaddedClassifier`, whole on each. UserError if the model is no classifier with one label."""
    from verl.engine.training.padded_classifier import PaddedClassifier
    from verl.models.pretrained import NotPacked, check_directory

    cfg = config.reward_model
    settings = {
        "strategy": config.actor_rollout_ref.actor.strategy,
        "ppo_max_token_len_per_gpu": cfg.rollout.max_num_batched_tokens,
        "fsdp_config": {"dtype": cfg.rollout.dtype, "param_offload": "reward_model" not in own_pools(config)},
    }
    options = {"model_cfg": cfg.model, "head": "score", "role": "reward_model", "trainable": False}
    try:
        check_directory(cfg.model.path)
        try:
            return _engine(
                config, cfg.model.path, settings, platform, longest=cfg.rollout.max_model_len, **options
            )
        except NotPacked:
            whole = PaddedClassifier(cfg.model.path, model_cfg=cfg.model, role_cfg=settings, device=platform)
            whole.offload()
            return whole
    except UserError as error:
        raise UserError(f"reward_model.{error}") from error


def _engine(config: Any, path: str, role_cfg: Any, platform: Platform, **options: Any) -> TrainingEngine:
    """An engine of the strategy of a role, idle."""
    options = {
        "model_cfg": config.actor_rollout_ref.model,
        "seed": config.trainer.seed,
        "longest": longest(config),
        **options,
    }
    engine = get_engine(role_cfg["strategy"])(path, role_cfg=role_cfg, device=platform, **options)
    engine.offload()
    engine.release_cached_memory()
    return engine


def moving_adapter(config: Any) -> LoraSettings | None:
    """The adapter's settings if a sampler with weights of its own holds base and adapter apart, so that a sync is the
    adapter's alone.

    None without LoRA, and where the engine cannot add the adapter itself (experts, output layer) or its `engine_kwargs`
    say enable_lora=False: then it is sent merged weights.
    """
    from verl.models.layers import expert_count
    from verl.models.pretrained import load_config

    arr = config.actor_rollout_ref
    engine = CAPABILITIES[arr.rollout.name]
    settings = LoraSettings.of(arr.model, arr.model.path)
    if settings is None:
        return None
    if engine.takes_arguments and arr.rollout.engine_kwargs[arr.rollout.name].get("enable_lora") is False:
        return None
    if not engine.lora_head and "lm_head" in str(settings.described().get("target_modules")):
        return None
    dense = engine.lora_experts or not expert_count(load_config(arr.model.path, arr.model))
    return settings if dense else None


def native_sampler(
    config: Any, module: Any, tokenizer: Any, trainer_dtype: str, *, owns_weights: bool = False
) -> RolloutEngine:
    """The embedded sampler on a Hugging Face model's tensors; owns_weights: they are nobody else's."""
    from verl.engine.rollout.native.engine import NativeEngine
    from verl.models.pretrained import end_token_ids

    rollout = config.actor_rollout_ref.rollout
    return NativeEngine(
        module,
        eos_token_ids=end_token_ids(module.config, module.generation_config, tokenizer),
        max_model_len=longest(config),
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        dtype=sampler_dtype("native", rollout.dtype, trainer_dtype),
        enforce_eager=rollout.enforce_eager,
        tokenizer=tokenizer,
        engines=samplers_per_node(config),
        record_routes=config.actor_rollout_ref.actor.router_replay.mode == "R3",
        owns_weights=owns_weights,
    )


def own_sampler(config: Any, tokenizer: Any, platform: Platform) -> Any:
    """The configured sampling engine with weights of its own (`RolloutEngine` and `WeightReceiver`), to be filled by a
    weight transfer. UserError when it cannot be used, or not with these settings."""
    return _OWN_SAMPLERS[config.actor_rollout_ref.rollout.name](config, tokenizer, platform)


def judge(config: Any, sampler: RolloutEngine | None = None) -> ServedJudge:
    """`reward_model.model`, sampled as `reward_model.rollout` says, at an address; in `sampler` or an engine of this
    process."""
    run = judge_config(config)
    model = run.actor_rollout_ref.model
    tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
    engine = own_sampler(run, tokenizer, detect(run.trainer.device)) if sampler is None else sampler
    processor = load_processor(model.path, tokenizer, {}, trust_remote_code=model.trust_remote_code)
    return ServedJudge(engine, tokenizer, config.reward_model, processor)


def judge_config(config: Any) -> Any:
    """The configuration of a run whose policy is the judge: what its engine is built from."""
    cfg, run = config.reward_model, copy.deepcopy(config)
    model = run.actor_rollout_ref.model = type(run.actor_rollout_ref.model)()
    model.path, model.trust_remote_code = cfg.model.path, cfg.model.trust_remote_code
    rollout = run.actor_rollout_ref.rollout = run.reward_model.rollout
    run.data.tokenizer = None
    if pool := own_pools(config).get("judge"):
        rollout.nnodes, rollout.n_gpus_per_node = pool.nodes, pool.per_node
    return run


def _own_vllm(config: Any, tokenizer: Any, platform: Platform) -> Any:
    from verl.engine.rollout.vllm.arguments import engine_settings
    from verl.engine.rollout.vllm.engine import VLLMEngine
    from verl.engine.rollout.vllm.launch import end_token_ids
    from verl.engine.training.settings import compute_dtype
    from verl.models.pretrained import load_config

    model = config.actor_rollout_ref.model
    trainer_dtype = str(compute_dtype(config.actor_rollout_ref.actor, platform))
    settings = engine_settings(config, trainer_dtype)
    settings["eos_token_ids"] = end_token_ids(load_config(model.path, model), model.path, tokenizer)
    if lora := moving_adapter(config):
        # The base comes from the model's files: a transfer brings the adapter alone.
        dummy = settings["load_format"] == "dummy"
        settings |= {"lora": lora.described(), "load_format": "auto" if dummy else settings["load_format"]}
    return VLLMEngine(**settings)


def _own_native(config: Any, tokenizer: Any, platform: Platform) -> RolloutEngine:
    from verl.engine.training.settings import compute_dtype
    from verl.models.pretrained import load_model

    arr = config.actor_rollout_ref
    platform.prepare()
    module = load_model(arr.model.path, arr.model).to(platform.device())  # type: ignore[arg-type]
    module.requires_grad_(False)
    if lora := moving_adapter(config):
        inject(module, lora).materialise(AdapterSource(module, lora, 0, None), platform.device())
        module.requires_grad_(False)
    dtype = str(compute_dtype(arr.actor, platform))
    return native_sampler(config, module, tokenizer, dtype, owns_weights=True)


_OWN_SAMPLERS = {"native": _own_native, "vllm": _own_vllm}
