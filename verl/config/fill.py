"""Automatic values: interpolations, keys that follow other keys, defaults that depend on choices."""

from __future__ import annotations

import copy
import math
import os
import re
from typing import Any

from verl.config import devices as machine
from verl.config.build import Builder
from verl.config.coerce import CoerceError, expand
from verl.config.fields import fields_of, locate
from verl.config.grammar import Value
from verl.config.problems import Problem
from verl.config.rollout_engines import RELEASED
from verl.config.schema.base import Group, Root, select

_MISSING = object()


def fill(builder: Builder) -> None:
    """Resolve interpolations, then give every automatic key its value."""
    if builder.deferred:
        _interpolate(builder)
    _old_spellings(builder)
    complete(builder.root, builder)


def complete(root: Root, builder: Builder | None = None) -> None:
    """Give every automatic key its value."""
    _devices(root)
    _follow(root, root, "")
    _token_budgets(root)
    _expand_defaults(root)
    for path in ("actor_rollout_ref.rollout", "reward_model.rollout", "rollout"):
        if (rollout := root.select(path)) is not None:
            _rollout(rollout)
    if root.entry == "ppo":
        _ppo(root, builder)
    if root.entry in ("ppo", "sft") and root.select("trainer.default_local_dir") is None:
        trainer = root["trainer"]
        trainer.default_local_dir = f"checkpoints/{trainer.project_name}/{trainer.experiment_name}"


def _interpolate(builder: Builder) -> None:
    """`${a.b}` and `${oc.select:…}`, against the tree as it would be without them."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    preview = copy.deepcopy(builder.root)
    complete(preview)
    tree = preview.to_dict()
    for path, data in {**builder.written, **{p: v.data for p, v in builder.deferred.items()}}.items():
        _plant(tree, path, data)
    node = OmegaConf.create(tree)
    for path, value in list(builder.deferred.items()):
        place = locate(builder.root, path)
        assert place is not None
        try:
            if place.field.is_path and isinstance(value.data, str):
                OmegaConf.update(node, path, _environment(value.data, tree))
            found = OmegaConf.select(node, path, throw_on_missing=True)
            plain = OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            builder.problems.append(Problem(path, f"{value.text!r} cannot be resolved: {reason}"))
            continue
        builder.set_leaf(place, path, Value(plain, str(plain), quoted=isinstance(plain, str)), value.text)


def _environment(text: str, tree: dict[str, Any]) -> str:
    """`${HOME}` in a path means the environment, unless a key has that name."""

    def replace(found: re.Match[str]) -> str:
        name = found[1]
        return os.environ[name] if name in os.environ and name not in tree else found[0]

    return re.sub(r"\$\{(\w+)\}", replace, text)


def _plant(tree: dict[str, Any], path: str, data: Any) -> None:
    *parents, last = path.split(".")
    for part in parents:
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    tree[last] = data


def _old_spellings(builder: Builder) -> None:
    """Deprecated global micro-batch sizes and the public system's modes of staleness."""
    root = builder.root
    for path, (old, size) in builder.micro.items():
        place = locate(root, path)
        if place is None or size is None:
            continue
        given = getattr(place.owner, place.field.name)
        if root.was_set(path) and given is not None and given != size:
            message = f"both are set, to {size} and {given}; keep {path}"
            builder.problems.append(Problem(f"{old}, {path}", message))
            continue
        ranks = data_parallel(root)
        setattr(place.owner, place.field.name, math.ceil(size / ranks))
        builder.notice(
            f"{old} is deprecated; {path}={math.ceil(size / ranks)} ({size} over {ranks} data-parallel ranks)"
        )
    _staleness(builder)


def _staleness(builder: Builder) -> None:
    """`trainer.v1.trainer_mode` and the public system's threshold, which counts from 1, as `trainer.max_staleness`."""
    mode_key, threshold_key = "trainer.v1.trainer_mode", "trainer.v1.sampler.max_off_policy_threshold"
    mode, threshold = builder.v1.get(mode_key), builder.v1.get(threshold_key)
    if mode is None:
        if threshold is not None:
            builder.notice(
                f"no effect: {threshold_key}={threshold} without {mode_key}; set trainer.max_staleness"
            )
        return
    if threshold is not None and (
        isinstance(threshold, bool) or not isinstance(threshold, int) or threshold < 1
    ):
        message = f"{threshold!r} is no whole number above 0; trainer.max_staleness is one less"
        builder.problems.append(Problem(threshold_key, message))
        return
    if mode == "sync":
        lag = 0
    elif mode in ("colocate_async", "separate_async"):
        lag = 1 if threshold is None else threshold - 1
    else:
        message = f"{mode!r} is none of sync, colocate_async, separate_async; or set trainer.max_staleness"
        builder.problems.append(Problem(mode_key, message))
        return
    given = builder.root["trainer"].max_staleness
    if not builder.root.was_set("trainer.max_staleness"):
        builder.root["trainer"].max_staleness = lag
        builder.root._set["trainer.max_staleness"] = 0
        builder.notice(f"{mode_key}={mode} is now called trainer.max_staleness={lag}")
    elif given != lag:
        builder.notice(
            f"{mode_key}={mode} means trainer.max_staleness={lag}; trainer.max_staleness={given} is kept"
        )


def data_parallel(root: Root) -> int:
    """Ranks that hold different answers: devices over the sequence-parallel size."""
    devices = (root.select("trainer.nnodes") or 1) * (root.select("trainer.n_gpus_per_node") or 1)
    split = root.select("actor_rollout_ref.actor.ulysses_sequence_parallel_size")
    split = split or root.select("engine.ulysses_sequence_parallel_size") or 1
    return max(1, devices // split)


def _devices(root: Root) -> None:
    """`trainer.n_gpus_per_node=null` is every device of this machine, for a trainer that uses more than one."""
    trainer = root.get("trainer")
    if trainer is None or trainer.n_gpus_per_node is not None:
        return
    trainer.n_gpus_per_node = 1
    if root.entry == "ppo" and trainer.device != "cpu":
        found = machine.find()
        kind = found.best if trainer.device == "auto" else trainer.device
        trainer.n_gpus_per_node = max(1, found.count(kind)) if kind != "cpu" else 1


def _follow(root: Root, node: Group, prefix: str) -> None:
    """Give every null key that follows another one that one's value (chains included)."""
    for name, known in fields_of(type(node)).items():
        if known.group is not None:
            _follow(root, getattr(node, name), f"{prefix}{name}.")
        elif getattr(node, name) is None and "same_as" in known.about:
            found = _leader(root, prefix + name, 0)
            if found is not _MISSING:
                setattr(node, name, copy.copy(found))


def _leader(root: Root, path: str, depth: int) -> Any:
    """The value at a path, or of the key it follows."""
    value = select(root, path, _MISSING)
    place = locate(root, path)
    target = place.field.about.get("same_as") if place else None
    if value is not None or target is None or depth > 8:
        return float(value) if place and place.field.type is float and isinstance(value, int) else value
    found = _leader(root, _absolute(path, target), depth + 1)
    whole = place is not None and place.field.type is float and isinstance(found, int)
    return float(found) if whole else found


def _absolute(path: str, target: str) -> str:
    if not target.startswith("."):
        return target
    up = len(target) - len(target.lstrip("."))
    parts = path.split(".")[:-up]
    return ".".join([*parts, target.lstrip(".")])


def _token_budgets(root: Root) -> None:
    """A null `use_dynamic_bsz` means: by token budget only if no micro-batch size is given."""
    for path, flag, size in (
        ("actor_rollout_ref.ref", "log_prob_use_dynamic_bsz", "log_prob_micro_batch_size_per_gpu"),
        ("actor_rollout_ref.rollout", "log_prob_use_dynamic_bsz", "log_prob_micro_batch_size_per_gpu"),
        ("critic", "use_dynamic_bsz", "ppo_micro_batch_size_per_gpu"),
        ("actor_rollout_ref.actor", "use_dynamic_bsz", "ppo_micro_batch_size_per_gpu"),
        ("rollout", "log_prob_use_dynamic_bsz", "log_prob_micro_batch_size_per_gpu"),
        ("reward_model.rollout", "log_prob_use_dynamic_bsz", "log_prob_micro_batch_size_per_gpu"),
    ):
        node = root.select(path)
        if node is not None and node[flag] is None:
            node[flag] = node[size] is None


def _expand_defaults(node: Group) -> None:
    """`~` in defaults; what the user wrote was expanded when it was read."""
    for name, known in fields_of(type(node)).items():
        value = getattr(node, name)
        if known.group is not None:
            _expand_defaults(value)
        elif known.is_path and value is not None:
            try:
                setattr(node, name, [expand(v) for v in value] if isinstance(value, list) else expand(value))
            except CoerceError:
                continue  # a variable that is not set was reported when the user's value was read


def _ppo(root: Any, builder: Builder | None) -> None:
    """Defaults of `main_ppo` that depend on other choices."""
    actor, rollout = root.actor_rollout_ref.actor, root.actor_rollout_ref.rollout
    mode = actor.policy_loss.loss_mode
    if mode in ("gspo", "sapo") and not root.was_set("actor_rollout_ref.actor.loss_agg_mode"):
        actor.loss_agg_mode = "seq-mean-token-mean"
        if not root.was_set("critic.loss_agg_mode"):
            root.critic.loss_agg_mode = "seq-mean-token-mean"
        _say(builder, f"loss_mode={mode}: actor.loss_agg_mode=seq-mean-token-mean, as in its paper")
    if root.actor_rollout_ref.ref.fsdp_config.dtype is None:
        root.actor_rollout_ref.ref.fsdp_config.dtype = actor.fsdp_config.dtype
    if mode.startswith("dppo_") and not root.was_set("actor_rollout_ref.actor.clip_ratio_c"):
        actor.clip_ratio_c = 20.0
    if root.critic.enable is None:
        root.critic.enable = root.algorithm.adv_estimator == "gae"
    if "optimal_token_baseline" in root.algorithm.adv_estimator:
        actor.calculate_sum_pi_squared = True
    if root.reward_manager.source == "register":
        _reward_manager(root)
    short = rollout.max_num_batched_tokens < rollout.max_model_len
    if (
        short
        and not rollout.enable_chunked_prefill
        and not root.was_set("actor_rollout_ref.rollout.max_num_batched_tokens")
    ):
        rollout.max_num_batched_tokens = rollout.max_model_len
        text = f"rollout.max_num_batched_tokens={rollout.max_model_len}: a prompt is not cut (enable_chunked_prefill=False)"
        _say(builder, text)


def _rollout(rollout: Any) -> None:
    """The engine of this release, and the longest sequence."""
    if rollout.name == "auto":
        rollout.name = RELEASED[0]
    if rollout.max_model_len is None:
        rollout.max_model_len = rollout.prompt_length + rollout.response_length


def _reward_manager(root: Any) -> None:
    """Two places name the manager: the later one counts, both show it."""
    if root.set_order("reward_manager.name") > root.set_order("reward_model.reward_manager"):
        name = root.reward_manager.name
        root.reward_model.reward_manager = "rate_limited" if name == "limited" else name
    root.reward_manager.name = root.reward_model.reward_manager


def _say(builder: Builder | None, text: str) -> None:
    if builder is not None:
        builder.notice(text)
