"""The asynchronous entry points of the public system in terms of the one loop, and single keys that are computed.

Both of its generations are read: `async_training.*` with `rollout.*`, and `trainer.v1.*`. What they ask for is told by
`trainer.weight_sync_every`, `max_staleness` and `max_steps_per_version`, and is said once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from verl.config.schema.base import Root, put
from verl.config.schema.entries import Config

MODE, LIMIT = "trainer.v1.trainer_mode", "trainer.v1.sampler.max_off_policy_threshold"
V1_EVERY = "trainer.v1.separate_async.parameter_sync_step"
THRESHOLD, EVERY = "async_training.staleness_threshold", "async_training.trigger_parameter_sync_step"
BATCHES = "async_training.require_batches"
PROMPTS, TEST = "rollout.total_rollout_steps", "rollout.test_freq"
MEMORY = "actor_rollout_ref.rollout.standalone_gpu_memory_utilization"
MERGE = "actor_rollout_ref.model.lora.merge"
DYNAMIC = "async_training.use_dynamic_resource_scheduling"
KEYS = (MODE, LIMIT, V1_EVERY, THRESHOLD, EVERY, BATCHES, PROMPTS, TEST, MEMORY, MERGE, DYNAMIC)
"""Keys that stand for others by a computation."""
_MODES = ("sync", "colocate_async", "separate_async")


class _Settings(NamedTuple):
    """The values of the keys that were given, the configuration, and where problems and notices go."""

    root: Config
    given: Mapping[str, Any]
    refuse: Callable[[str, str], None]
    notice: Callable[[str], None]

    def number(self, key: str, least: int, default: float = 1, whole: bool = True) -> float:
        """The value of a key, `default` where it is not given; one that cannot be is a problem."""
        value = self.given.get(key, default)
        if (type(value) is int or (type(value) is float and not whole)) and least <= value < math.inf:
            return float(value)
        self.refuse(key, f"{value!r} is no {'whole ' if whole else ''}number of at least {least}")
        return max(least, 1)

    def mean(self, source: str, meant: dict[str, Any]) -> None:
        """Set these keys where the user did not, and say it."""
        set_here = []
        for key, value in meant.items():
            if not self.root.was_set(key):
                put(self.root, key, value)
                self.root._set[key] = 0
                set_here.append(f"{key}={value}")
            elif self.root.select(key) != value:
                self.notice(f"{source} means {key}={value}; {key}={self.root.select(key)} is kept")
        if set_here:
            self.notice(f"{source} is now called {', '.join(set_here)}")


def settle(
    root: Root, given: Mapping[str, Any], refuse: Callable[[str, str], None], notice: Callable[[str], None]
) -> None:
    """Give the loop's keys the values that the asynchronous ones mean."""
    if not isinstance(root, Config):
        return
    settings = _Settings(root, given, refuse, notice)
    if any(key in given for key in (THRESHOLD, EVERY, BATCHES, PROMPTS)):
        _fully_async(settings)
    _modes(settings)
    if given.get(DYNAMIC):
        rollout = root.actor_rollout_ref.rollout
        if rollout.nnodes > 0:
            share = {"actor_rollout_ref.rollout.trainer_memory_utilization": rollout.gpu_memory_utilization}
            settings.mean(DYNAMIC, share)
        else:
            notice(
                f"no effect: {DYNAMIC}: without rollout.nnodes the samplers are on the trainers' devices, and wait "
                f"for them"
            )
    if given.get(MEMORY) is not None:
        _memory(settings)
    if given.get(MERGE):
        # The other samplers merge the adapter in any case.
        settings.mean(MERGE, {"actor_rollout_ref.rollout.engine_kwargs.vllm.enable_lora": False})


def _memory(settings: _Settings) -> None:
    """The share of memory of samplers on devices of their own, which all are or none."""
    rollout, share = settings.root.actor_rollout_ref.rollout, settings.given[MEMORY]
    if not (isinstance(share, int | float) and 0 < share <= 1):
        settings.refuse(MEMORY, f"{share!r} is no number above 0 and at most 1")
    elif rollout.nnodes > 0:
        rollout.gpu_memory_utilization = float(share)
        settings.notice(f"{MEMORY} is now called actor_rollout_ref.rollout.gpu_memory_utilization={share}")
    else:
        settings.notice(f"no effect: {MEMORY}: the samplers have no devices of their own (rollout.nnodes=0)")


def _fully_async(settings: _Settings) -> None:
    """s, t and the batches of `async_training`, and the number of prompts."""
    root, given = settings.root, settings.given
    share = settings.number(THRESHOLD, 0, 0.1, whole=False)
    every, batches = int(settings.number(EVERY, 1, 4)), int(settings.number(BATCHES, 1))
    meant: dict[str, Any] = {"trainer.weight_sync_every": every, "trainer.max_staleness": math.ceil(share)}
    if share != math.ceil(share):
        meant["trainer.max_steps_per_version"] = math.ceil((1 + share) * every)
    if not (root.was_set("data.train_batch_size") and root.data.train_batch_size):
        size = root.data.train_batch_size = batches * root.actor_rollout_ref.actor.ppo_mini_batch_size
        settings.notice(f"data.train_batch_size={size}: {BATCHES} × ppo_mini_batch_size")
    if PROMPTS in given:
        prompts = int(settings.number(PROMPTS, 1))
        meant["trainer.total_training_steps"] = max(1, prompts // max(1, root.data.train_batch_size))
    if given.get(TEST) is not None:
        meant["trainer.test_freq"] = int(settings.number(TEST, -1)) * every
    settings.mean("async_training", meant)


def _modes(settings: _Settings) -> None:
    """`trainer.v1`: its threshold counts from 1."""
    mode, threshold = settings.given.get(MODE), settings.given.get(LIMIT)
    if mode is None:
        if threshold is not None:
            settings.notice(f"no effect: {LIMIT}={threshold} without {MODE}; set trainer.max_staleness")
    elif threshold is not None and not (type(threshold) is int and threshold > 0):
        settings.refuse(LIMIT, f"{threshold!r} is no whole number above 0")
    elif mode not in _MODES:
        settings.refuse(MODE, f"{mode!r} is none of {', '.join(_MODES)}")
    else:
        meant = {"trainer.max_staleness": 0 if mode == "sync" else (threshold or 2) - 1}
        if mode == "separate_async":
            meant["trainer.weight_sync_every"] = int(settings.number(V1_EVERY, 1, 4))
        settings.mean(f"{MODE}={mode}", meant)
