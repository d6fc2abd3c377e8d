"""Who holds the memory of devices that trainer and sampler share: the one place that says when the sampler sleeps and wakes.

    sampling ──to_training──▶ passes, update, weight sync ──to_sampling──▶ sampling

What a role itself moves to host memory while it is idle (`fsdp_config.param_offload`, `optimizer_offload`) brackets its own calls,
inside its worker (`TrainingEngine.on_device`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl.config import Config
    from verl.engine.rollout.base import RolloutEngine


class Colocation:
    """The sampler lends its memory where it has nothing to do while the trainer works on the same devices.

    It has something to do with trainer.max_staleness > 0, and it has devices of its own with rollout.nnodes > 0;
    rollout.free_cache_engine=False keeps its memory.
    """

    def __init__(self, config: Config, sampler: RolloutEngine):
        rollout, lag = config.actor_rollout_ref.rollout, config.trainer.max_staleness
        self.sampler_lends = rollout.free_cache_engine and not rollout.nnodes and not lag
        self._sampler = sampler

    def to_training(self) -> None:
        """Sampling is over: the trainer is about to compute."""
        if self.sampler_lends:
            self._sampler.sleep()

    def to_sampling(self) -> None:
        """The new weights are pushed: the sampler is about to sample."""
        if self.sampler_lends:
            self._sampler.wake()
