"""The asynchronous entry points of the public system in terms of the one loop.

Both of its generations are read: `async_training.*` with `rollout.*`, and `trainer.v1.*`. What they ask for is told by
`trainer.weight_sync_every`, `max_staleness` and `max_steps_per_version`, and is said once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from verl.config.schema.base import put

if TYPE_CHECKING:
    from verl.config.resolve import Resolver

MODE, LIMIT = "trainer.v1.trainer_mode", "trainer.v1.sampler.max_off_policy_threshold"
V1_EVERY = "trainer.v1.separate_async.parameter_sync_step"
THRESHOLD, EVERY = "async_training.staleness_threshold", "async_training.trigger_parameter_sync_step"
BATCHES = "async_training.require_batches"
PROMPTS, TEST = "rollout.total_rollout_steps", "rollout.test_freq"
KEYS = (MODE, LIMIT, V1_EVERY, THRESHOLD, EVERY, BATCHES, PROMPTS, TEST)
"""Keys that stand for others by a computation."""
_MODES = ("sync", "colocate_async", "separate_async")


def settle(resolver: Resolver) -> None:
    """Give the loop's keys the values that the asynchronous ones mean."""
    settings = {key: resolver.old[key].data for key in KEYS if key in resolver.old}
    if any(key in settings for key in (THRESHOLD, EVERY, BATCHES, PROMPTS)):
        _fully_async(resolver, settings)
    _modes(resolver, settings)


def _fully_async(resolver: Resolver, settings: dict[str, Any]) -> None:
    """s, t and the batches of `async_training`, and the number of prompts."""
    root: Any = resolver.root
    share = _number(resolver, settings, THRESHOLD, 0, whole=False)
    every, batches = (int(_number(resolver, settings, key, 1)) for key in (EVERY, BATCHES))
    meant: dict[str, Any] = {"trainer.weight_sync_every": every, "trainer.max_staleness": math.ceil(share)}
    if share != math.ceil(share):
        meant["trainer.max_steps_per_version"] = math.ceil((1 + share) * every)
    if not (root.was_set("data.train_batch_size") and root.data.train_batch_size):
        size = root.data.train_batch_size = batches * root.actor_rollout_ref.actor.ppo_mini_batch_size
        resolver.notice(f"data.train_batch_size={size}: {BATCHES} × ppo_mini_batch_size")
    if PROMPTS in settings:
        prompts = int(_number(resolver, settings, PROMPTS, 1))
        meant["trainer.total_training_steps"] = max(1, prompts // max(1, root.data.train_batch_size))
    if TEST in settings and settings[TEST] is not None:
        meant["trainer.test_freq"] = int(_number(resolver, settings, TEST, -1)) * every
    _mean(resolver, "async_training", meant)


def _modes(resolver: Resolver, settings: dict[str, Any]) -> None:
    """`trainer.v1`: its threshold counts from 1."""
    mode, threshold = settings.get(MODE), settings.get(LIMIT)
    if mode is None:
        if threshold is not None:
            resolver.notice(f"no effect: {LIMIT}={threshold} without {MODE}; set trainer.max_staleness")
    elif threshold is not None and not (type(threshold) is int and threshold > 0):
        resolver.refuse(LIMIT, f"{threshold!r} is no whole number above 0")
    elif mode not in _MODES:
        resolver.refuse(MODE, f"{mode!r} is none of {', '.join(_MODES)}")
    else:
        meant = {"trainer.max_staleness": 0 if mode == "sync" else (threshold or 2) - 1}
        if mode == "separate_async":
            meant["trainer.weight_sync_every"] = int(_number(resolver, {V1_EVERY: 4} | settings, V1_EVERY, 1))
        _mean(resolver, f"{MODE}={mode}", meant)


def _number(resolver: Resolver, settings: dict[str, Any], key: str, least: int, whole: bool = True) -> float:
    """The value of a key, its default where it is not given; one that cannot be is a problem."""
    value = settings.get(key, {THRESHOLD: 0.1, EVERY: 4}.get(key, 1))
    if (type(value) is int or (type(value) is float and not whole)) and least <= value < math.inf:
        return float(value)
    resolver.refuse(key, f"{value!r} is no {'whole ' if whole else ''}number of at least {least}")
    return max(least, 1)


def _mean(resolver: Resolver, source: str, meant: dict[str, Any]) -> None:
    """Set these keys where the user did not, and say it."""
    root, set_here = resolver.root, []
    for key, value in meant.items():
        if not root.was_set(key):
            put(root, key, value)
            root._set[key] = 0
            set_here.append(f"{key}={value}")
        elif root.select(key) != value:
            resolver.notice(f"{source} means {key}={value}; {key}={root.select(key)} is kept")
    if set_here:
        resolver.notice(f"{source} is now called {', '.join(set_here)}")
