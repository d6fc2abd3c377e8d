"""Single values: bounds, lists of names (with registered ones), what this release does not have."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from verl.algorithms import registry
from verl.config import release
from verl.config.devices import ray_address
from verl.config.layout import quantized_sampling
from verl.config.matching import lookup, nearest
from verl.config.release import built_in
from verl.config.report import ACTOR, Report, beyond
from verl.config.schema.base import Root, put
from verl.config.schema.fields import Field, Limits, limits_of
from verl.engine.registry import (
    FLOATS,
    ROLLOUT_ENGINES,
    TRAINING_ENGINES,
    capabilities,
    float_name,
    not_quantized,
    not_sampled,
)
from verl.reward.user_function import REWARD_MANAGER_REGISTRY
from verl.rollout.tools.parsers import OWN_PARSERS
from verl.versions import names_in

REGISTRIES = {"algorithm.adv_estimator": "ESTIMATORS", f"{ACTOR}.policy_loss.loss_mode": "LOSSES"}
"""Key → the registry in verl.algorithms.registry that its names are of."""
_MODEL = ": a Hugging Face id or a directory, for example Qwen/Qwen3-0.6B"


def check(config: Root, report: Report) -> None:
    """Bounds and names of every key, then the features that are not in this release."""
    for path, field in report.keys.items():
        value = report.config.select(path)
        follows = "same_as" in field.about and not report.was_set(path)  # what it follows is looked at
        if not value and field.about.get("required"):
            report.refuse(path, f"is required{_MODEL if path.endswith('model.path') else ''}")
        elif value is not None and (not follows or path == f"{report.rollout_key}.dtype"):
            _value(report, path, value, field)
        if _outside(value, field):
            put(report.config, path, _inside(field))
            report.replaced.add(path)
    _unread(report)
    if report.rollout is not None and report.rollout.name in ROLLOUT_ENGINES:
        _quantization(report)
    for path in filter(report.config.select, report.keys):
        if (absent := lookup(release.FEATURES, path)) and not _unused(report, path):
            report.refuse(report.at(path), f"not in this release ({absent.what}); {absent.instead}")


def _value(report: Report, path: str, value: Any, field: Field) -> None:
    """A value that the user or the schema gives."""
    for item in value if isinstance(value, list) else [value]:
        if _outside(item, field):
            report.refuse(f"{path}={item}", f"out of range; {_said(limits_of(field, type(item)))}")
        if "options" in field.about:
            _name(report, path, str(item), field)
    if path.endswith("dtype"):
        _dtype(report, path, value)
    if path.endswith(".betas") and (len(value) != 2 or max(value) == 1):
        report.refuse(f"{path}={value}", "expected two numbers from 0 to below 1, as [0.9,0.999]")
    if path.endswith("optim.optimizer"):
        _optimizer(report, path, value)
    if path.endswith(".stop") and "" in value:
        report.refuse(f"{path}={value}", 'the empty text is in every response; remove ""')
    if path.endswith((".override_optimizer_config", ".override_config")):
        for at, number in beyond(value, 3e38, path):
            report.refuse(f"{at}={number}", "out of range; a number within ±3e38, as float32 holds")
    if path.endswith(".override_optimizer_config") and "lr" in value:
        report.refuse(f"{path}.lr", f"the schedule sets it in each step; set {path.rpartition('.')[0]}.lr")


def _optimizer(report: Report, path: str, name: str) -> None:
    """A name that its module binds, of a class that steps all weights by their gradients."""
    role = path.removesuffix("optim.optimizer")
    if name == "Muon" and "megatron" in (
        report.config.select(f"{role}strategy"),
        report.config.select("engine.strategy"),
    ):
        report.refuse(report.at(path), "Muon is not in this release with strategy=megatron; fsdp2 has it")
    user_set = report.was_set(path) or report.was_set(f"{path}_impl")
    module = report.config.select(f"{path}_impl")
    names_bound = names_in(module) if user_set and not _unused(report, path) else None
    if names_bound is not None and name not in (names_bound := names_bound - release.NO_STEP.get(module, set())):
        report.refuse(path, f"{path}_impl={module} has no optimizer of that name{nearest(name, names_bound)}")


def _unused(report: Report, path: str) -> bool:
    """True for a key of the critic in a run that has none: public commands set them all the same."""
    return path.startswith("critic.") and not report.config.critic.enable


def _dtype(report: Report, path: str, value: Any) -> None:
    name = float_name(value)
    if name is None and (report.was_set(path) or "same_as" not in report.keys[path].about):
        report.refuse(f"{path}={value}", f"none of {', '.join(FLOATS)}{nearest(value, FLOATS)}")
    elif name and path == f"{report.rollout_key}.dtype" and name not in capabilities(report.rollout.name).dtypes:
        trainer = report.config.select(f"{ACTOR}.fsdp_config.dtype")
        report.refuse(f"{path}={value}", not_sampled(report.rollout.name, path, trainer))


def _quantization(report: Report) -> None:
    """Samplers in lower precision than the trainer: what the engine lacks, and what corrects the difference."""
    rollout, key = report.rollout, f"{report.rollout_key}.quantization"
    if rollout.quantization and rollout.quantization not in capabilities(rollout.name).quantization:
        return report.refuse(f"{key}={rollout.quantization}", not_quantized(rollout.name))
    quantized = quantized_sampling(rollout)
    if quantized and report.ppo and not report.config.algorithm.rollout_correction.rollout_is:
        report.notice(
            f"{report.rollout_key}.{quantized}: the sampler is another policy than the trainer's; "
            "algorithm.rollout_correction.rollout_is=token corrects for it (docs/vllm.md, Lower precision)"
        )


def _unread(report: Report) -> None:
    """Say which of the user's keys nothing reads yet; hints to an engine of another name are that engine's."""
    engine = report.rollout.name if report.rollout is not None else next(iter(ROLLOUT_ENGINES))
    where = [""]
    if not (report.several or (report.ppo and ray_address(report.config))):
        where += ["one device", "one process"] if capabilities(engine).in_place_weights else ["one device"]
    unread = {glob: reason for when in where for glob, reason in release.UNREAD[when].items()}
    if engine in ROLLOUT_ENGINES:
        for listed, why in ROLLOUT_ENGINES[engine].unread.items():
            unread |= dict.fromkeys((f"{report.rollout_key}.{key}" for key in listed.split()), why)
    strategy = report.config.select(f"{ACTOR}.strategy") or report.config.select("engine.strategy")
    if strategy in TRAINING_ENGINES:
        unread |= TRAINING_ENGINES[strategy].unread
    cluster = ray_address(report.config) not in ("", "local")
    unread_keys: dict[str, list[str]] = {}
    for path, field in report.keys.items():
        value = report.config.select(path)
        if not report.was_set(path) or value == field.default():
            continue
        if path.startswith(report.rollout_key) and engine not in ROLLOUT_ENGINES:
            continue
        if path.endswith(".model_dtype") and value in ("float32", "torch.float32"):
            continue
        if path.endswith(".checkpoint_engine.backend") and report.ppo and report.rollout.nnodes > 0 and cluster:
            continue
        if reason := lookup(unread, path):
            unread_keys.setdefault(reason, []).append(report.at(path))
    for reason, keys in unread_keys.items():
        report.notice(f"no effect: {', '.join(keys)}: {reason}")


def _said(limits: Limits) -> str:
    least = f"above {limits.above}" if limits.above >= limits.low else f"at least {limits.low}"
    most = "" if limits.inf else f" and at most {limits.high}"
    return least + most + (f", or {limits.also}" if limits.also is not None else "")


def _outside(number: Any, field: Field) -> bool:
    if not isinstance(number, (int, float)) or isinstance(number, bool):
        return False
    return not limits_of(field, type(number)).hold(number)


def _inside(field: Field) -> Any:
    """A number in the key's range, with which the other rules can go on."""
    default = field.default()
    if default is not None and not _outside(default, field):
        return default
    about = field.about
    return about["above"] + 1 if "above" in about else about.get("low", about.get("high", 1))


def _name(report: Report, path: str, name: str, field: Field) -> None:
    """A name outside its list, or one of the list that this release does not have."""
    options, foreign = (
        field.about["options"],
        release.REFUSED_VALUES.get(path.rpartition(".")[2], {}).get(name),
    )
    here: Any = TRAINING_ENGINES if path.endswith("strategy") else options
    if path.endswith("rollout.name"):
        here = {*options, *ROLLOUT_ENGINES}  # `machine` refuses those that are not in this release
    elif path in REGISTRIES:
        here = built_in(REGISTRIES[path])
    if name in here:
        return
    if name in _registered(report, path):
        if path == "reward_model.reward_manager":
            _by_class(report, name)
    elif _unused(report, path):
        report.notice(f"no effect: {path}={name}: there is no critic (critic.enable)")
    elif name in options:
        default = "" if report.was_set(path) else " (it is the default)"
        use = f"set {path}={' or '.join(here)}"
        report.refuse(f"{path}={name}", f"{name} is not in this release{default}; {use}")
    elif foreign:
        report.refuse(f"{path}={name}", f"{foreign.what} is not in this release; closest: {foreign.instead}")
    else:
        decorator = field.about.get("registry")
        more = f"; register your own with {decorator}" if decorator else ""
        report.refuse(f"{path}={name}", f"none of {', '.join(options)}{nearest(name, options)}{more}")


def _registered(report: Report, path: str) -> Collection[str]:
    """Names that plug-in modules register for a key, beside ours."""
    if path in REGISTRIES and report.plugins:
        return tuple(getattr(registry, REGISTRIES[path]).functions)
    if path == "reward_model.reward_manager" and report.ppo and report.plugins:
        return REWARD_MANAGER_REGISTRY
    if path.endswith("multi_turn.format") and report.plugins:
        return OWN_PARSERS
    return ()


def _by_class(report: Report, name: str) -> None:
    """The run has a manager that a plug-in registers as it has a class of a module, `source=importlib`."""
    manager, cls = report.config.reward_manager, REWARD_MANAGER_REGISTRY[name]
    manager.source, manager.name, manager.module.path = "importlib", cls.__name__, f"pkg://{cls.__module__}"
