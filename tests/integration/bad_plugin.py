"""A plug-in module that breaks what the environment variable BAD_PLUGIN names. Imported by runs, never by tests."""

from __future__ import annotations

import errno
import os
from typing import Any

from verl.trainer.ppo import core_algos


@core_algos.register_policy_loss("nan_at_times")
def nan_at_times(
    old_log_prob: Any,
    log_prob: Any,
    advantages: Any,
    response_mask: Any,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Any = None,
) -> tuple[Any, dict[str, float]]:
    """The plain policy gradient; not a number in the updates that BAD_UPDATES lists (counted from 1)."""
    nan_at_times.calls += 1  # type: ignore[attr-defined]
    loss = -(log_prob * advantages * response_mask).sum() / response_mask.sum()
    bad = os.environ.get("BAD_UPDATES", "").split(",")
    if "all" in bad or str(nan_at_times.calls) in bad:  # type: ignore[attr-defined]
        loss = loss * float("nan")
    return loss, {}


nan_at_times.calls = 0  # type: ignore[attr-defined]


def full_disk(at: set[int]) -> None:
    """The disk is full when the saves of these steps are synced."""
    from verl.checkpoint import manifest

    sync = manifest.sync_tree

    def sync_tree(directory: Any) -> None:
        if int(directory.name.split("_")[2].split(".")[0]) in at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))
        sync(directory)

    manifest.sync_tree = sync_tree


def small_files(limit: int) -> None:
    """The system lets no file grow beyond `limit` bytes: what a full disk or a quota does to a save."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def losing_sampler(every: int) -> None:
    """Every n-th training answer is lost by the engine."""
    from verl.engine.rollout.native.engine import NativeEngine

    generate, asked = NativeEngine.generate, 0

    async def losing(self: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked % every == 0:
            raise RuntimeError(f"the engine dropped request {options['request_id']}")
        return await generate(self, *arguments, **options)

    NativeEngine.generate = losing  # type: ignore[method-assign]


what, _, value = os.environ.get("BAD_PLUGIN", "").partition(":")
if what == "full_disk":
    full_disk({int(step) for step in value.split(",")})
elif what == "small_files":
    small_files(int(value))
elif what == "losing_sampler":
    losing_sampler(int(value))
