"""Single values: bounds, lists of names (with registered ones), what this release does not have."""

from __future__ import annotations

import importlib
import os
from typing import Any

from verl.config import release
from verl.config.devices import ray_address
from verl.config.dtypes import FLOATS, float_name, not_sampled
from verl.config.fields import Field, leaves
from verl.config.rollout_engines import CAPABILITIES
from verl.config.rules.context import Check, nearest
from verl.config.tables import REFUSED_VALUES

IMPLEMENTED = {
    "algorithm.adv_estimator": release.ESTIMATORS,
    "actor_rollout_ref.actor.policy_loss.loss_mode": release.POLICY_LOSSES,
}


def check(c: Check) -> None:
    """Bounds and names of every key, then the features that are not in this release."""
    mended: dict[str, Any] = {}
    for path, known in leaves(type(c.cfg)).items():
        value = c.cfg.select(path)
        if "same_as" in known.about and not c.was_set(path):
            if not isinstance(value, list) and _outside(value, known):
                mended[path] = _inside(known)
            continue
        if value is None:
            if known.about.get("required") and path != f"{c.model_key}.path":
                c.refuse(path, "is required")
            continue
        if _bounds(c, path, value, known):
            mended[path] = _inside(known)
        if "options" in known.about:
            _names(c, path, value, known)
        if path.endswith("dtype"):
            _dtype(c, path, value)
        if path.endswith(".override_optimizer_config") and "lr" in value:
            c.refuse(f"{path}.lr", f"the schedule sets it in each step; set {path.rpartition('.')[0]}.lr")
    if mended:
        c.mend(mended)
    _unread(c)
    for feature in release.FEATURES:
        value = c.cfg.select(feature.key)
        if feature.on(value) and not (feature.key == "critic.enable" and not c.was_set("critic.enable")):
            c.refuse(f"{feature.key}={value}", f"not in this release ({feature.what}); {feature.instead}")


def _dtype(c: Check, path: str, value: Any) -> None:
    name = float_name(value)
    if name is None:
        c.refuse(f"{path}={value}", f"none of {', '.join(FLOATS)}{nearest(str(value), list(FLOATS))}")
    elif path == f"{c.rollout_key}.dtype" and name not in CAPABILITIES[c.rollout.name].dtypes:
        c.refuse(f"{path}={value}", not_sampled(c.rollout.name))


def _unread(c: Check) -> None:
    """Say which of the user's keys nothing reads yet; hints to an engine of another name are that engine's."""
    found: dict[str, list[str]] = {}
    engine = c.rollout.name if c.rollout is not None else "native"
    rows = release.UNREAD
    if not _several(c):
        rows += release.UNREAD_ALONE + (
            release.UNREAD_TOGETHER if CAPABILITIES[engine].in_place_weights else ()
        )
    if engine in release.UNREAD_BY:
        rows = (release.UNREAD_BY[engine], *rows)
    for path, known in leaves(type(c.cfg)).items():
        if not c.was_set(path) or c.cfg.select(path) == known.default():
            continue
        if path.startswith(c.rollout_key) and not CAPABILITIES[engine].released:
            continue
        if path.endswith(".model_dtype") and c.cfg.select(path) in ("float32", "torch.float32"):
            continue
        if path.endswith(".checkpoint_engine.backend") and c.ppo and c.rollout.nnodes > 0:
            continue
        reason = next((text for pattern, text in rows if pattern.fullmatch(path)), None)
        if reason:
            found.setdefault(reason, []).append(f"{path}={c.cfg.select(path)}")
    for reason, keys in found.items():
        c.notice(f"no effect: {', '.join(keys)}: {reason}")


def _several(c: Check) -> bool:
    """More than one device, or a cluster: weights are sharded and sent."""
    if not c.ppo:
        return c.world > 1
    return c.world > 1 or c.rollout.nnodes > 0 or bool(ray_address(c.cfg))


def _bounds(c: Check, path: str, value: Any, known: Field) -> bool:
    """Rules 13 and 14, and every other range of a single number; True if a single number is out of range."""
    wrong = [number for number in (value if isinstance(value, list) else [value]) if _outside(number, known)]
    for number in wrong:
        c.refuse(f"{path}={number}", f"out of range; {_range(*_limits(known))}")
    return bool(wrong) and not isinstance(value, list)


def _limits(known: Field) -> tuple[Any, Any, Any]:
    return known.about.get("low"), known.about.get("high"), known.about.get("above")


def _outside(number: Any, known: Field) -> bool:
    if not isinstance(number, (int, float)) or isinstance(number, bool):
        return False
    low, high, above = _limits(known)
    beyond = (low is not None and number < low) or (high is not None and number > high)
    return beyond or (above is not None and number <= above)


def _inside(known: Field) -> Any:
    """A number in the key's range, with which the other rules can go on."""
    low, high, above = _limits(known)
    if low is not None:
        return low
    return high if high is not None else above + 1


def _range(low: Any, high: Any, above: Any) -> str:
    parts = [f"at least {low}" if low is not None else "", f"above {above}" if above is not None else ""]
    parts.append(f"at most {high}" if high is not None else "")
    return " and ".join(p for p in parts if p)


def _names(c: Check, path: str, value: Any, known: Field) -> None:
    """Rule 2: a name outside its list."""
    options: tuple[str, ...] = known.about["options"]
    for name in value if isinstance(value, list) else [value]:
        if path in IMPLEMENTED:
            _registered(c, path, str(name), options, known)
        elif name in options:
            if path.endswith("strategy") and name not in release.STRATEGIES:
                c.refuse(f"{path}={name}", f"not in this release; use {' or '.join(release.STRATEGIES)}")
        else:
            c.refuse(f"{path}={name}", _unknown(path, str(name), options, known))


def _unknown(path: str, name: str, options: tuple[str, ...], known: Field) -> str:
    foreign = REFUSED_VALUES.get(path.rpartition(".")[2], {}).get(name)
    if foreign:
        return f"{foreign[0]} is not in this release; closest: {foreign[1]}"
    if path in release.CLOSED_REGISTRIES:
        return f"none of {', '.join(options)}{nearest(name, options)}; your own are not in this release"
    more = f"; register your own with {known.about['registry']}" if known.about.get("registry") else ""
    return f"none of {', '.join(options)}{nearest(name, options)}{more}"


def _registered(c: Check, path: str, name: str, options: tuple[str, ...], known: Field) -> None:
    """Estimators and losses: this release's, or a plug-in's."""
    if name in IMPLEMENTED[path] or name in _plugins(c, path):
        return
    if name not in options:
        c.refuse(f"{path}={name}", _unknown(path, name, options, known))
        return
    here = " or ".join(IMPLEMENTED[path])
    default = "" if c.was_set(path) else " (it is the default)"
    needs = ", which needs a critic," if name == "gae" else ""
    c.refuse(f"{path}={name}", f"{name}{needs} is not in this release{default}; set {path}={here}")


def _plugins(c: Check, path: str) -> set[str]:
    """Names that plug-in modules register; they are imported only when a name is not one of ours."""
    modules = list(c.model.external_lib or ()) if c.model is not None else []
    modules += [m.strip() for m in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",") if m.strip()]
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            c.refuse(
                f"{c.model_key}.external_lib", f"importing {module} failed: {type(error).__name__}: {error}"
            )
    from verl.algorithms.registry import ESTIMATORS, LOSSES

    return set((ESTIMATORS if path.endswith("adv_estimator") else LOSSES).functions)
