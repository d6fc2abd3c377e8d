"""Who holds the memory of the devices, and when: the one place that decides it.

sampling ──to_training──▶ passes, update, weight sync ──to_sampling──▶ sampling
the sampler holds its        each role in `computing` its weights,        the sampler
weights and cache            for an update its optimizer's state too      wakes
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from verl.algorithms.needs import teacher_path, teacher_roles
from verl.config import Config
from verl.config.layout import own_pools, reference_is_base
from verl.config.schema.base import Group
from verl.engine.registry import placement
from verl.engine.rollout.base import RolloutEngine
from verl.reward.judge_server import ServedJudge
from verl.workers.roles import Role


class Colocation:
    """The sampler lends its memory while it is idle and the trainer works on the same devices. It is not idle with
    trainer.max_staleness > 0, and has devices of its own with rollout.nnodes > 0; rollout.free_cache_engine=False keeps
    its memory. A judge on the same devices lends its memory with it. With rollout.trainer_memory_utilization a pool
    that has devices of its own has samplers on the trainers', too, and these lend theirs.

    A role whose engine offloads something (`Placement.leaves`) is in host memory except during its own passes and
    updates; so is a classifier that scores on the policy's devices.
    """

    def __init__(self, config: Config, sampler: RolloutEngine | None, judge: ServedJudge | None = None):
        arr, lag = config.actor_rollout_ref, config.trainer.max_staleness
        guests = bool(arr.rollout.nnodes and arr.rollout.trainer_memory_utilization)
        self.sampler_lends = guests or (arr.rollout.free_cache_engine and not arr.rollout.nnodes and not lag)
        self._lenders: list[RolloutEngine | ServedJudge] = [] if sampler is None else [sampler]
        if judge is not None and not guests and "judge" not in own_pools(config):
            self._lenders.append(judge)
        groups: dict[str, Group] = {
            "actor": arr.actor,
            "ref": arr.actor if reference_is_base(config) else arr.ref,
        }
        groups["critic"] = config.critic
        groups |= {
            name: arr.ref if teacher_path(cfg, config) else arr.actor for name, cfg in teacher_roles(config).items()
        }
        self._leave = {name for name, group in groups.items() if placement(group).leaves}
        if "reward_model" not in own_pools(config):
            self._leave.add("reward_model")

    def to_training(self) -> None:
        """Sampling is over: the trainer is about to compute."""
        if self.sampler_lends:
            for lender in self._lenders:
                lender.sleep()

    def to_sampling(self) -> None:
        """The new weights are pushed: the sampler is about to sample."""
        if self.sampler_lends:
            for lender in self._lenders:
                lender.wake()

    @contextmanager
    def computing(self, role: Role, *, optimizer: bool = False) -> Iterator[None]:
        """In this block a role computes; with `optimizer` it is updated."""
        if role.name not in self._leave:
            yield
            return
        role.onload(optimizer=optimizer)
        try:
            yield
        finally:
            role.offload()
