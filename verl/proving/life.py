"""One life of a run under proof: the loop's own phases, called one by one, and log-probs of a batch at any moment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from verl.algorithms.agreement import BOUNDS, precision_of_run
from verl.algorithms.batch_advantages import copied
from verl.config import Config
from verl.tracking.tracker import Tracking
from verl.trainer.parts import Parts
from verl.trainer.ppo_trainer import PPOTrainer
from verl.trainer.run import running
from verl.trajectory import Batch, Segment, Trajectory

STEPS = 2


class Life:
    """Of `config`, whose parts are open. trainer: its loop, which this drives."""

    def __init__(self, config: Config, parts: Parts):
        self.config, self.parts = config, parts
        self.trainer = PPOTrainer(config, parts, STEPS)
        dtype = parts.workers.policy.compute_dtype
        self.precision = precision_of_run(config.actor_rollout_ref.rollout, dtype)

    @classmethod
    @contextmanager
    def open(cls, config: Config, tracking: Tracking) -> Iterator[Life]:
        """Build the parts; they are given back at the end."""
        with running(config, tracking) as (parts, _):
            yield cls(config, parts)

    def log_probs(self, batch: Batch) -> list[np.ndarray]:
        """The trainer's log-probs of each trajectory's response tokens under the weights of this moment."""
        bare = Batch(_bare(t) for t in batch)
        policy = self.parts.workers.policy
        with self.parts.colocation.computing(policy):
            policy.forward(bare, "prove", {"log_probs": "old_log_probs"})
        return [np.array(t.old_log_probs) for t in bare]

    def sampled(self, step: int) -> Batch:
        """The step's batch, sampled and scored; the trainer may compute afterwards."""
        batch = self.trainer.sample(step)
        self.trainer.score(step, batch)
        return batch

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        """Update every trained role on a copy of a batch whose advantages are known; returns the updates' metrics."""
        rows, metrics = Batch([copied(t) for t in batch]), dict[str, float]()
        for role in self.parts.workers.trained(policy=True):
            with self.parts.colocation.computing(role, optimizer=True):
                metrics |= role.update(rows, step=step).metrics
        return metrics

    def apart(self, ours: list[np.ndarray], theirs: list[np.ndarray], masks: list[np.ndarray]) -> tuple[float, float]:
        """(difference of log-probs where the masks are set, as `Bounds.far` takes it for this precision; its bound)."""
        pairs = zip(ours, theirs, masks, strict=True)
        differences = np.abs(np.concatenate([np.zeros(0), *((a - b)[mask] for a, b, mask in pairs)], dtype=np.float64))
        kind, bound = BOUNDS[self.precision].far
        if not len(differences):
            return float("nan"), bound
        return float(differences.max() if kind == "max" else differences.mean()), bound


def _bare(t: Trajectory) -> Trajectory:
    segments = [
        Segment(s.context_ids, s.response_ids, s.response_mask, media=s.media, routed_experts=s.routed_experts)
        for s in t.segments
    ]
    for segment, original in zip(segments, t.segments, strict=True):
        segment.context_columns = dict(original.context_columns)
    return Trajectory(t.prompt, t.index, segments=segments)


def relative(metrics: Mapping[str, Any], others: Mapping[str, Any]) -> tuple[float, str]:
    """The largest relative difference of two updates' norms and losses, and the metric that has it."""
    names = ("actor/grad_norm", "actor/loss", "actor/entropy_loss", "critic/grad_norm", "critic/vf_loss")
    worst = {
        name: abs(metrics[name] - others[name]) / max(abs(metrics[name]), abs(others[name]), 1e-12)
        for name in names
        if name in metrics and name in others and (name != "actor/loss" or abs(metrics[name]) > 1e-3)
    }
    name = max(worst, key=worst.__getitem__)
    return worst[name], name
