"""Curricula by pass rate: samplers that draw a row the more often, the more there is to learn from it now.

    data.sampler.class_path=pkg://verl.data.curriculum data.sampler.class_name=Frontier

A subclass of `PassRateSampler` with another `weight` is a curriculum of one's own.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np

from verl.data.plugins import AbstractCurriculumSampler
from verl.trajectory import Batch, Trajectory


class PassRateSampler(AbstractCurriculumSampler):
    """Draws a row with a probability ∝ `weight` of its pass rate, 1 for a row that was never sampled, and none twice
    before the next update as long as there are others. An epoch has as many draws as the data has rows.

    The pass rate is that of the row's last group: the mean `acc` of its scored responses, else of their scores limited
    to 0 … 1.
    """

    def __init__(self, data_source: Any, data_config: Any):
        self.rows = len(data_source)
        self.seed = int(getattr(data_config, "seed", None) or 0)
        self.rates: dict[int, float] = {}
        self.weights = np.ones(self.rows)
        self.drawn: set[int] = set()
        self.draws = self.offset = 0  # ever, and in this epoch
        self._loaded = False

    @abstractmethod
    def weight(self, rate: float) -> float:
        """How often a row of this pass rate is drawn, at least 0, where a row that was never sampled has 1."""

    def __len__(self) -> int:
        return self.rows

    def __iter__(self) -> Iterator[int]:
        """An epoch's draws; after `load_state_dict`, those that are left of it."""
        if not self._loaded:
            self.offset = 0
        self._loaded = False
        while self.offset < self.rows:
            self.offset += 1
            yield self._draw()

    def _draw(self) -> int:
        weights = self.weights.copy()
        weights[list(self.drawn)] = 0.0
        if not weights.any():
            self.drawn, weights = set(), self.weights
        total = weights.sum()
        chances = weights / total if total else None
        row = int(np.random.default_rng([self.seed, self.draws]).choice(self.rows, p=chances))
        self.drawn.add(row)
        self.draws += 1
        return row

    def update(self, batch: Batch) -> None:
        """Learn the pass rates of the groups that were just trained on."""
        for group in batch.groups():
            passed = [_accuracy(t) for t in group if t.scored]
            if passed:
                self.rates[group[0].prompt.number] = float(np.clip(passed, 0.0, 1.0).mean())
        self.drawn = set()
        self._weigh()

    def _weigh(self) -> None:
        for row, rate in self.rates.items():
            self.weights[row] = self.weight(rate)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, as JSON."""
        rates = {str(row): rate for row, rate in self.rates.items()}
        return {"rates": rates, "drawn": sorted(self.drawn), "draws": self.draws, "offset": self.offset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of `state_dict`."""
        self.rates = {int(row): float(rate) for row, rate in state["rates"].items()}
        self.drawn, self.draws = set(state["drawn"]), int(state["draws"])
        self.offset, self._loaded = int(state.get("offset", self.draws % self.rows)), True
        self._weigh()


class Frontier(PassRateSampler):
    """Rows that are solved about half of the time: 4p(1 − p), at least 0.05. Source: learnability, arXiv 2502.12272."""

    def weight(self, rate: float) -> float:
        return max(0.05, 4 * rate * (1 - rate))


class DifficultyPools(PassRateSampler):
    """Three pools: rows with a pass rate below `hard`, above `easy`, and between; the outer ones at `rest` the rate."""

    hard, easy, rest = 0.25, 0.75, 0.2

    def weight(self, rate: float) -> float:
        return 1.0 if self.hard <= rate <= self.easy else self.rest


class EasyToHard(PassRateSampler):
    """Rows near a pass rate that falls as the policy gets better: exp(−8(p − target)²), at least 0.05, with target = 1
    − the mean pass rate of all rows that were sampled."""

    target = 0.0

    def _weigh(self) -> None:
        self.target = 1 - sum(self.rates.values()) / max(1, len(self.rates))
        super()._weigh()

    def weight(self, rate: float) -> float:
        return max(0.05, math.exp(-8 * (rate - self.target) ** 2))


def _accuracy(trajectory: Trajectory) -> float:
    """`acc` where the reward function gave a finite one, else the score."""
    try:
        accuracy = float(trajectory.score_parts["acc"])
    except (KeyError, TypeError, ValueError):
        accuracy = math.nan
    return accuracy if math.isfinite(accuracy) else float(trajectory.score or 0.0)
