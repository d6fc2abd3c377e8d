"""timeline.jsonl: when the sampler had requests and what the trainer did, step by step, on one clock.

One object per step: {"step", "begin", "end", "sampler": [[from, to], …], "trainer": [[phase, from, to], …]}, in unix
seconds. `gen` and `reward` among the phases are times in which the trainer waited.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl.tracking.jsonl import JsonLines

WAITING = ("gen", "reward")
"""Phases in which the trainer has nothing to compute."""
_WHOLE = "step"

Span = tuple[float, float]
PhaseSpan = tuple[str, float, float]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A step on the clock: its sampler's spans with requests, and its phases."""

    begin: float
    end: float
    sampler: Sequence[Span]
    trainer: Sequence[PhaseSpan]

    @property
    def sampler_idle_ratio(self) -> float:
        """Share of the step in which the sampler had no request."""
        busy = sum(min(b, self.end) - max(a, self.begin) for a, b in self.sampler if b > self.begin)
        return self._share(self.end - self.begin - busy)

    @property
    def trainer_idle_ratio(self) -> float:
        """Share of the step in which the trainer waited for responses or scores."""
        return self._share(sum(b - a for name, a, b in self.trainer if name in WAITING))

    def metrics(self, samplers: int, trainers: int) -> dict[str, float]:
        """perf/{sampler,trainer}_idle_ratio; with `samplers` devices of their own perf/device_busy_ratio over both."""
        out = {
            "perf/sampler_idle_ratio": self.sampler_idle_ratio,
            "perf/trainer_idle_ratio": self.trainer_idle_ratio,
        }
        if samplers:
            idle = samplers * self.sampler_idle_ratio + trainers * self.trainer_idle_ratio
            out["perf/device_busy_ratio"] = 1 - idle / (samplers + trainers)
        return out

    def _share(self, seconds: float) -> float:
        whole = self.end - self.begin
        return min(1.0, max(0.0, seconds / whole)) if whole > 0 else float("nan")


def step_times(phases: Sequence[PhaseSpan], sampler: Sequence[Span]) -> StepTimes:
    """From the spans of `Phases.spans` (the whole "step" among them) and of `RolloutManager.busy`."""
    whole = [(a, b) for name, a, b in phases if name == _WHOLE]
    if len(whole) != 1:
        raise ValueError(f"one span named {_WHOLE!r} is needed, there are {len(whole)}")
    (begin, end) = whole[0]
    return StepTimes(begin, end, list(sampler), [span for span in phases if span[0] != _WHOLE])


class Timeline:
    """Appends to `path`; a write that fails is told once through `notice`, and the lines are kept and tried again."""

    def __init__(self, path: Path, notice: Callable[[str], None]):
        self._offset = time.time() - time.monotonic()
        self._lines = JsonLines(path, lambda error: notice(f"{path}: {error.strerror}; the run goes on"))

    def write(self, step: int, times: StepTimes) -> None:
        """One line."""

        def at(clock: float) -> float:
            return round(clock + self._offset, 4)

        self._lines.append(
            {
                "step": step,
                "begin": at(times.begin),
                "end": at(times.end),
                "sampler": [[at(a), at(b)] for a, b in times.sampler],
                "trainer": [[name, at(a), at(b)] for name, a, b in times.trainer],
            }
        )
