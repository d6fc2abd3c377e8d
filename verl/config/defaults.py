"""Automatic values: interpolations, keys that follow other keys, defaults that depend on choices."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from typing import Any

from verl.config import devices as machine
from verl.config.conversion import coerce, expand
from verl.config.grammar import GrammarError, Value
from verl.config.layout import policy_placement
from verl.config.release import built_in
from verl.config.resolve import Resolver
from verl.config.schema.actor import LOSS_AGG_MODES
from verl.config.schema.algorithm import ONLY_TEACHER
from verl.config.schema.base import Map, Root, put, select
from verl.config.schema.entries import Config
from verl.config.schema.fields import Field, leaves, locate
from verl.config.schema.rollout import RolloutConfig
from verl.engine.registry import ROLLOUT_ENGINES, TRAINING_ENGINES
from verl.errors import UserError
from verl.plugins import REGISTRIES, import_modules
from verl.plugins import VARIABLE as PLUG_INS


def fill(resolver: Resolver) -> None:
    """Resolve interpolations, then give every automatic key its value."""
    if resolver.interpolated:
        _interpolate(resolver)
    _plug_in_engines(resolver.root)
    _devices(resolver.root)
    _micro_batches(resolver)
    spellings = resolver.spellings
    computed = {key: resolver.old[key].data for key in spellings.computed if key in resolver.old}
    spellings.settle(resolver.root, computed, resolver.refuse, resolver.notice)
    complete(resolver.root, resolver.notice)


def _plug_in_engines(root: Root) -> None:
    """Import the plug-in modules where an engine is not one of ours; the check reports modules that fail to import."""
    names = (select(root, f"{group}.strategy") for group in ("actor_rollout_ref.actor", "critic", "engine"))
    rollouts = ("actor_rollout_ref.rollout", "rollout", "reward_model.rollout")
    samplers = {select(root, f"{group}.name") for group in rollouts}
    if set(names) - {None, *TRAINING_ENGINES} or samplers - {None, "auto", *ROLLOUT_ENGINES}:
        model = root.select("actor_rollout_ref.model") or root["model"]
        with contextlib.suppress(UserError):
            import_modules(model.external_lib)


def complete(root: Root, say: Callable[[str], None] = lambda text: None) -> None:
    """Give every automatic key its value."""
    _devices(root)
    _follow(root)
    _settle(root)
    model = root.select("actor_rollout_ref.model") or root.get("model")
    if model is not None:
        model.trust_remote_code |= root["data"].trust_remote_code
    for path in ("actor_rollout_ref.rollout", "reward_model.rollout", "rollout"):
        if (rollout := root.select(path)) is not None:
            _rollout(rollout, root["data"] if root.entry == "ppo" and path.startswith("actor") else {})
            if root.was_set(f"{path}.agent.default_agent_loop"):
                continue
            if rollout.agent.environment.name:
                rollout.agent.default_agent_loop = "environment_agent"
            elif rollout.multi_turn.enable:
                rollout.agent.default_agent_loop = "tool_agent"
    if isinstance(root, Config):
        _ppo(root, say)
    _records(root)


def _records(root: Root) -> None:
    """Name and folder of the records: of generation and evaluation after the file that they write or read."""
    trainer, kind = root["trainer"], {"eval": "evaluation", "generation": "generation"}.get(root.entry)
    file = ""
    if kind:
        file = root["data"]["path" if root.entry == "eval" else "output_path"] or kind
        trainer.experiment_name = trainer.experiment_name or os.path.splitext(os.path.basename(file))[0]
    folder = f"{os.path.splitext(file)[0]}_{kind}"
    if not file or "://" in file:
        folder = f"checkpoints/{trainer.project_name}/{trainer.experiment_name}"
    if trainer.default_local_dir is None:
        trainer.default_local_dir = folder


def _interpolate(resolver: Resolver) -> None:
    """`${a.b}` and `${oc.select:…}`, against the tree as it would be without them."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    preview = copy.deepcopy(resolver.root)
    complete(preview)
    tree = OmegaConf.create(preview.to_dict())
    broken: dict[str, OmegaConfBaseException] = {}
    for path, (_, data) in resolver.written.items():
        place = locate(type(preview), path)
        if isinstance(data, str) and place is not None and place.field.is_path:
            data = _environment(data, tree)
        try:
            OmegaConf.update(tree, path, data, merge=False, force_add=True)
        except OmegaConfBaseException as error:
            broken[path] = error
    for path, value in resolver.interpolated.items():
        place = locate(type(resolver.root), path)
        try:
            if path in broken:
                raise broken[path]
            node = OmegaConf.select(tree, path, throw_on_missing=True)
            plain = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
            if place is None:  # a key of the user's own
                resolver.store(path, Map.of(plain))
            else:
                resolver.set_leaf(place, path, Value.given(plain), value.text)
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            resolver.refuse(path, f"{value.text!r} cannot be resolved: {reason}")


def _environment(text: str, tree: Any) -> str:
    """`${HOME}` in a path means the environment, unless a key has that name."""

    def replace(match: re.Match[str]) -> str:
        return match[0] if match[1] in tree else os.environ.get(match[1], match[0])

    return re.sub(r"\$\{(\w+)\}", replace, text)


def _micro_batches(resolver: Resolver) -> None:
    """Deprecated: sizes of micro-batches over all devices."""
    root = resolver.root
    ranks = max(1, machine.ranks(root) // max(1, policy_placement(root).ranks_per_row))
    for old, value in resolver.old.items():
        path = f"{old}_per_gpu"
        if path not in leaves(type(root)):
            continue
        try:
            size = coerce(value, leaves(type(root))[path])
        except GrammarError as error:
            resolver.refuse(old, str(error))
            continue
        current = root.select(path)
        if size is not None and root.was_set(path) and current not in (None, size):
            resolver.refuse(f"{old}, {path}", f"both are set, to {size} and {current}; keep {path}")
        elif size is not None:
            share = math.ceil(size / ranks)
            resolver.store(path, share)
            resolver.notice(f"{old} is deprecated; {path}={share} ({size} over {ranks} data-parallel ranks)")


def _devices(root: Root) -> None:
    """`trainer.n_gpus_per_node=null` is every device of this machine, for a trainer that uses more than one."""
    trainer = root.get("trainer")
    if trainer is None or trainer.get("n_gpus_per_node", 1) is not None:
        return
    trainer.n_gpus_per_node = 1
    if root.entry in ("ppo", "generation") and trainer.device != "cpu":
        devices = machine.find()
        kind = devices.best if trainer.device == "auto" else trainer.device
        trainer.n_gpus_per_node = max(1, devices.count(kind)) if kind != "cpu" else 1


def _follow(root: Root) -> None:
    """Null keys, and empty mappings, that follow another one get its value."""
    for path, field in leaves(type(root)).items():
        if "same_as" in field.about and select(root, path) in (None, {}):
            put(root, path, copy.copy(_leaders(root, path, field)))


def _settle(root: Root) -> None:
    """A null `use_dynamic_bsz` means: by token budget only if no micro-batch size is given. `~` in default paths is
    expanded; what the user wrote was when it was read."""
    for path, field in leaves(type(root)).items():
        value = select(root, path)
        if value is None and path.endswith("use_dynamic_bsz"):
            group = select(root, path.rpartition(".")[0])
            put(root, path, not any(group[k] for k in group if k.endswith("micro_batch_size_per_gpu")))
        elif value is not None and field.is_path:
            with contextlib.suppress(GrammarError):  # reported when the user's value was read
                put(root, path, [expand(v) for v in value] if isinstance(value, list) else expand(value))


def _leaders(root: Root, path: str, field: Field) -> Any:
    """The value of the key that this one follows, which may follow another itself."""
    target = field.about["same_as"]
    name = target.lstrip(".")
    up = len(target) - len(name)
    leader = ".".join([*path.split(".")[:-up], name]) if up else name
    value, next_one = select(root, leader), leaves(type(root)).get(leader)
    if value is None and next_one is not None and "same_as" in next_one.about:
        value = _leaders(root, leader, next_one)
    return float(value) if field.type is float and isinstance(value, int) else value


def _ppo(root: Config, say: Callable[[str], None]) -> None:
    """Defaults of `main_ppo` that depend on other choices."""
    actor, rollout = root.actor_rollout_ref.actor, root.actor_rollout_ref.rollout
    mode = actor.policy_loss.loss_mode
    if mode == "bypass_mode":
        mode = actor.policy_loss.loss_mode = "vanilla"
        root.algorithm.rollout_correction.bypass_mode = True
        key = "actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode"
        say(f"{key} is now called algorithm.rollout_correction.bypass_mode=True")
    if mode in LOSS_AGG_MODES and not root.was_set("actor_rollout_ref.actor.loss_agg_mode"):
        actor.loss_agg_mode = LOSS_AGG_MODES[mode]
        if not root.was_set("critic.loss_agg_mode"):
            root.critic.loss_agg_mode = LOSS_AGG_MODES[mode]
        say(f"loss_mode={mode}: actor.loss_agg_mode={actor.loss_agg_mode}, as in its paper")
    if not root.was_set("actor_rollout_ref.actor.clip_ratio_c"):
        actor.clip_ratio_c = _cap(mode)
    _losses_of_sources(root)
    _teachers(root.distillation.teacher_models, say)
    if root.critic.enable is None:
        root.critic.enable = bool(reader_of_values(root))
    if "optimal_token_baseline" in root.algorithm.adv_estimator:
        actor.calculate_sum_pi_squared = True
    if root.reward_manager.source == "register":
        _reward_manager(root)
    environment = root.select("ray_kwargs.ray_init.runtime_env") or {}
    if str(environment.get("py_executable")).startswith("uv ") and not shutil.which("uv"):
        say(f"no effect: py_executable={environment.pop('py_executable')!r}: uv is not installed here")
    trainer, every = root.trainer, root.trainer.weight_sync_every
    variables = environment.get("env_vars")
    if isinstance(variables, dict):  # with one process there is no Ray to set them
        trainer.worker_env = Map({**variables, **trainer.worker_env})
    for name in ("save_freq", "test_freq"):
        if trainer[name] > 0 and trainer[name] % every:
            trainer[name] += every - trainer[name] % every
            say(f"trainer.{name}={trainer[name]}: weights are pushed every {every} steps")
    key, longest = "max_num_batched_tokens", rollout.max_model_len
    chunked = rollout.enable_chunked_prefill or root.was_set(f"actor_rollout_ref.rollout.{key}")
    if rollout[key] < longest and not chunked:
        rollout[key] = longest
        say(f"rollout.{key}={longest}: a prompt is not cut (enable_chunked_prefill=False)")


def _losses_of_sources(root: Config) -> None:
    """A policy loss of `algorithm.by_source` has the aggregation and the cap that the actor's would have by itself."""
    for settings in root.algorithm.by_source.values():
        loss = settings.get("policy_loss") if isinstance(settings, dict) else None
        if isinstance(loss, dict) and "loss_mode" in loss:
            mode = str(loss["loss_mode"])
            if not root.was_set("actor_rollout_ref.actor.loss_agg_mode"):
                loss.setdefault("loss_agg_mode", LOSS_AGG_MODES.get(mode, "token-mean"))
            if not root.was_set("actor_rollout_ref.actor.clip_ratio_c"):
                loss.setdefault("clip_ratio_c", _cap(mode))


def _cap(mode: str) -> float:
    """`clip_ratio_c` of a policy loss, unless it is set."""
    return 20.0 if mode.startswith("dppo_") else 3.0


def reader_of_values(root: Config) -> str:
    """The key=name of the estimator or the loss that needs a critic's values, or "".

    A name that is not built in is looked up in the plug-in modules, which are imported for that; the check reports
    modules that fail to import.
    """
    arr, name = root.actor_rollout_ref, root.algorithm.adv_estimator
    mode = arr.actor.policy_loss.loss_mode
    if name == "gae":
        return "algorithm.adv_estimator=gae"
    is_built_in = name in built_in("ESTIMATORS") and mode in built_in("LOSSES")
    if is_built_in or not (arr.model.external_lib or os.environ.get(PLUG_INS)):
        return ""
    loss_key = "actor_rollout_ref.actor.policy_loss.loss_mode"
    with contextlib.suppress(UserError):
        import_modules(arr.model.external_lib)
        for kind, key, chosen in (
            ("ESTIMATORS", "algorithm.adv_estimator", name),
            ("LOSSES", loss_key, mode),
        ):
            if kind in REGISTRIES and "values" in REGISTRIES[kind].declared(chosen).needs:
                return f"{key}={chosen}"
    return ""


def _teachers(models: Map, say: Callable[[str], None]) -> None:
    """Beside teachers of other names the entry that is there from the start goes, unless it names a model."""
    only = models.get(ONLY_TEACHER)
    if len(models) > 1 and isinstance(only, dict) and not (only.get("model_path") or only.get("prompt")):
        del models[ONLY_TEACHER]
        say(f"distillation.teacher_models.{ONLY_TEACHER} has no model_path and is left out: there are others")


def _rollout(rollout: RolloutConfig, data: Mapping[str, Any]) -> None:
    """The engine of this release, and the longest sequence: a response ends at the smaller one of its two limits."""
    if rollout.name == "auto":
        rollout.name = next(iter(ROLLOUT_ENGINES))
    if rollout.max_model_len is None:
        response = min(rollout.response_length, data.get("max_response_length", rollout.response_length))
        rollout.max_model_len = rollout.prompt_length + response


def _reward_manager(root: Config) -> None:
    """Two places name the manager: the later one counts, both show it."""
    if root.set_order("reward_manager.name") > root.set_order("reward_model.reward_manager"):
        name = root.reward_manager.name
        root.reward_model.reward_manager = "rate_limited" if name == "limited" else name
    root.reward_manager.name = root.reward_model.reward_manager
