"""Engines from the configuration: the same for the roles of one process and for hosts of a cluster.

Everything here takes the configuration as typed groups or as the same keys in mappings (a worker gets JSON).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from verl.algorithms.distillation import compares_teachers_tokens
from verl.algorithms.needs import needed_columns, teacher_path, teacher_roles
from verl.config import Config
from verl.config.layout import own_pools, sampling_mask_from
from verl.config.reward_weights import scores_by_model
from verl.data.media import load_processor
from verl.data.tokenizer import load_tokenizer
from verl.engine.registry import ROLLOUT_ENGINES, TRAINING_ENGINES, Placement, placement
from verl.engine.rollout.base import RolloutEngine
from verl.engine.rollout.settings import longest
from verl.engine.training.base import TrainingEngine
from verl.errors import UserError
from verl.platform import Platform, detect
from verl.reward.judge_server import ServedJudge

_FORWARD_KEYS = ("micro_batch_size_per_gpu", "max_token_len_per_gpu")


def roles_by_pool(config: Config) -> dict[str, list[str]]:
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
    config: Config, roles: Sequence[str], total_steps: int, platform: Platform, *, shared: bool = False
) -> dict[str, TrainingEngine]:
    """The engines of roles that are on the same ranks; `shared` as in `actor_engine`."""
    engines: dict[str, TrainingEngine] = {}
    teachers = teacher_roles(config)
    for role in roles:
        if role == "actor":
            engines[role] = actor_engine(config, total_steps, platform, shared=shared)
        elif role == "ref":
            engines[role] = reference_engine(config, engines["actor"], platform)
        elif role in teachers and not teacher_path(teachers[role], config):
            engines[role] = engines["actor"]  # the policy itself, with a prompt of its own
        elif role in teachers:
            engines[role] = teacher_engine(config, role, teachers[role], platform)
        elif role == "critic":
            engines[role] = critic_engine(config, total_steps, platform)
        else:
            engines[role] = reward_engine(config, platform)
    return engines


def actor_engine(config: Config, total_steps: int, platform: Platform, *, shared: bool = False) -> TrainingEngine:
    """The idle engine of the policy in training, its schedule set. With several ranks, they must have joined before.

    shared: a sampler of this process is to work on its tensors (one rank only).
    """
    arr = config.actor_rollout_ref
    loss = config.distillation.distillation_loss
    teachers = teacher_roles(config).values()
    of_teacher = compares_teachers_tokens(loss)
    itself = of_teacher and any(not teacher_path(teacher, config) for teacher in teachers)
    reverse = teachers and loss.loss_mode == "reverse_kl_topk" and not of_teacher
    options: dict[str, Any] = {"topk": loss.topk} if reverse or itself else {}
    if sampling_mask_from(config) == "trainer":
        options["truncation"] = (arr.rollout.top_k, arr.rollout.top_p, arr.rollout.min_p)
    engine = _engine(config, arr.model.path, arr.actor, platform, log_prob_cfg=arr.rollout, shared=shared, **options)
    engine.schedule(total_steps)
    return engine


def reference_engine(config: Config, actor: TrainingEngine, platform: Platform) -> TrainingEngine:
    """The engine of the frozen reference. With LoRA it is the actor's, unless ref.model.path names another."""
    arr = config.actor_rollout_ref
    if actor.adapted and not arr.ref.model.path:
        return actor
    path = arr.model.path
    model: Mapping[str, Any] = arr.model
    if arr.ref.model.path:
        path, model = arr.ref.model.path, _frozen(arr.model)
    return _engine(config, path, arr.ref, platform, model_cfg=model, trainable=False, role="ref")


def _frozen(policys: Any) -> dict[str, Any]:
    """Settings of a frozen model beside the policy: the policy's without what is of its own model's configuration."""
    return {**policys, "hf_config_path": None, "override_config": {}}


def teacher_engine(config: Config, role: str, teacher: Any, platform: Platform) -> TrainingEngine:
    """A frozen teacher's engine, with the reference's settings. UserError if it has fewer tokens than the policy."""
    arr, loss = config.actor_rollout_ref, config.distillation.distillation_loss
    path, key = teacher_path(teacher, config), f"distillation.teacher_models.{role.removeprefix('teacher_')}"
    inference = teacher.get("inference") or {}
    placed = replace(placement(arr.ref), tensor=inference.get("tensor_model_parallel_size") or 1)
    if "teacher" in own_pools(config):
        placed = replace(placed, sequence=1)  # the reference's is that of the policy's ranks
    model = _frozen(arr.model)
    topk = loss.topk if compares_teachers_tokens(loss) else 0
    try:
        size, needed = _vocabulary(path, model), _vocabulary(arr.model.path, arr.model)
        if size < needed and not teacher.get("own_tokenizer"):
            raise UserError(f"model_path={path}: its vocabulary has {size} tokens, the policy's {needed}")
        options: dict[str, Any] = {"model_cfg": model, "trainable": False, "role": role, "topk": topk}
        if unseen := unseen_tokens(config, teacher):
            options["barred"] = unseen
        return _engine(config, path, arr.ref, platform, placed=placed, **options)
    except UserError as error:
        raise UserError(f"{key}: {error}") from error


def unseen_tokens(config: Config, teacher: Any) -> list[int]:
    """The policy's tokens for images, of a teacher that is a text model; empty if it sees what the policy sees."""
    from verl.models.inputs import sees_images, special_token_ids
    from verl.models.pretrained import load_config

    model, path = config.actor_rollout_ref.model, teacher.get("model_path")
    policy = load_config(str(model.path), model)
    visible = path is None or not sees_images(policy) or sees_images(load_config(path, _frozen(model)))
    return [] if visible else special_token_ids(policy)


def _vocabulary(path: str | None, model_cfg: Mapping[str, Any]) -> int:
    from verl.models.pretrained import check_directory, load_config

    check_directory(str(path))
    return int(load_config(str(path), model_cfg).get_text_config().vocab_size)


def critic_engine(config: Config, total_steps: int, platform: Platform) -> TrainingEngine:
    """The engine of the value model, its schedule set, idle. UserError if its vocabulary is not the policy's."""
    critic = config.critic
    settings = {
        **critic,
        **{f"log_prob_{name}": critic[f"forward_{name}"] for name in _FORWARD_KEYS},
        "log_prob_use_dynamic_bsz": critic.use_dynamic_bsz,
    }
    policy = config.actor_rollout_ref.model
    path = critic.model.path or policy.path
    options: dict[str, Any] = {"model_cfg": critic.model, "head": "value", "role": "critic"}
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


def reward_engine(config: Config, platform: Platform) -> Any:
    """The engine of a sequence classifier that scores, sharded over all ranks; one that cannot be packed is a
    `PaddedClassifier`, whole on each. UserError if the model is no classifier with one label."""
    from verl.engine.training.padded_classifier import PaddedClassifier
    from verl.models.pretrained import NotPacked, check_directory

    cfg, path = config.reward_model, str(config.reward_model.model.path)
    settings = {
        "strategy": config.actor_rollout_ref.actor.strategy,
        "ppo_max_token_len_per_gpu": cfg.rollout.max_num_batched_tokens,
    }
    placed = Placement(dtype=cfg.rollout.dtype, param_offload="reward_model" not in own_pools(config))
    options: dict[str, Any] = {
        "model_cfg": cfg.model,
        "head": "score",
        "role": "reward_model",
        "trainable": False,
    }
    try:
        check_directory(path)
        try:
            return _engine(
                config,
                path,
                settings,
                platform,
                placed=placed,
                longest=cfg.rollout.max_model_len,
                **options,
            )
        except NotPacked:
            tokens = cfg.rollout.max_num_batched_tokens
            whole = PaddedClassifier(path, model_cfg=cfg.model, tokens=tokens, placement=placed, device=platform)
            whole.offload()
            return whole
    except UserError as error:
        raise UserError(f"reward_model.{error}") from error


def _engine(
    config: Config,
    path: str | None,
    role_cfg: Mapping[str, Any],
    platform: Platform,
    *,
    placed: Placement | None = None,
    **options: Any,
) -> TrainingEngine:
    """An engine of the strategy of a role, idle. placed: None for the role's own placement."""
    options = {
        "model_cfg": config.actor_rollout_ref.model,
        "seed": config.trainer.seed,
        "longest": longest(config),
        **options,
    }
    record = TRAINING_ENGINES.named(role_cfg["strategy"])
    placed = placed or record.placement(role_cfg)
    engine: TrainingEngine = record.build(str(path), role_cfg=role_cfg, placement=placed, device=platform, **options)
    engine.offload()
    engine.release_cached_memory()
    return engine


def own_sampler(config: Config, tokenizer: Any, platform: Platform) -> Any:
    """The configured sampling engine with weights of its own (`RolloutEngine` and `WeightReceiver`), to be filled by a
    weight transfer. UserError when it cannot be used, or not with these settings."""
    return ROLLOUT_ENGINES.named(config.actor_rollout_ref.rollout.name).build(config, tokenizer, platform)


def judge(config: Config, sampler: RolloutEngine | None = None) -> ServedJudge:
    """`reward_model.model`, sampled as `reward_model.rollout` says, at an address; in `sampler` or an engine of this
    process."""
    run = judge_config(config)
    model = run.actor_rollout_ref.model
    tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
    engine = own_sampler(run, tokenizer, detect(run.trainer.device)) if sampler is None else sampler
    processor = load_processor(model.path, tokenizer, {}, trust_remote_code=model.trust_remote_code)
    return ServedJudge(engine, tokenizer, config.reward_model, processor)


def judge_config(config: Config) -> Any:
    """The configuration of a run whose policy is the judge: what its engine is built from."""
    cfg, run = config.reward_model, copy.deepcopy(config)
    model = run.actor_rollout_ref.model = type(run.actor_rollout_ref.model)()
    model.path, model.trust_remote_code = cfg.model.path, cfg.model.trust_remote_code
    model.external_lib = config.actor_rollout_ref.model.external_lib  # may register the engine
    rollout = run.actor_rollout_ref.rollout = run.reward_model.rollout
    run.data.tokenizer = None
    run.actor_rollout_ref.actor.router_replay.mode = "disabled"
    if pool := own_pools(config).get("judge"):
        rollout.nnodes, rollout.n_gpus_per_node = pool.nodes, pool.per_node
    return run
