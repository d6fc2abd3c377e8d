"""Validation: responses to every validation prompt with settings of their own, scored and averaged by source."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from verl.data.dataset import PromptDataset
from verl.engine.rollout.base import SamplingParams
from verl.rollout.groups import RolloutManager
from verl.tracking.console import one_line, say
from verl.tracking.responses import prompt_text
from verl.tracking.tracker import Tracking
from verl.tracking.validation_metrics import validation_metrics
from verl.trajectory import Batch, Prompt, Trajectory


class ValidationPrompts:
    """The prompts of these rows. Text prompts are held; those of a model that sees images are made on demand, in parts
    of `size`."""

    def __init__(self, data: PromptDataset, rows: Iterable[int], size: int):
        self._data, self._rows, self._size = data, [int(row) for row in rows], size
        self._held = data.prompts(self._rows) if data.images is None else None

    def __len__(self) -> int:
        return len(self._rows if self._held is None else self._held)

    def parts(self) -> Iterator[list[Prompt]]:
        """All of them, what is sampled at a time together."""
        if self._held is not None:
            yield self._held
            return
        for start in range(0, len(self._rows), self._size):
            yield self._data.prompts(self._rows[start : start + self._size])


@dataclass(frozen=True)
class Validator:
    """Samples `n` responses to each prompt with `sampling`, in file order, and computes the validation metrics.

    `score_rest` scores what was not scored while sampling (a manager that wants the whole batch at once).
    """

    prompts: ValidationPrompts
    sampling: SamplingParams
    n: int
    rollouts: RolloutManager
    score_rest: Callable[[Batch], Awaitable[None]]
    tracking: Tracking

    async def run(self, step: int, *, first: bool = False) -> dict[str, Any]:
        """One validation; returns its metrics and dumps the responses."""
        progress = self.tracking.progress("validation", total=len(self.prompts) * self.n)
        trajectories: list[Trajectory] = []
        for prompts in self.prompts.parts():
            part = await self.rollouts.sample(prompts, self.sampling, self.n, progress)
            await self.rollouts.scored(part)
            trajectories += part
            used = [prompt.media for prompt in prompts] + [segment.media for segment in part.segments]
            for media in set(used):
                if media is not None:
                    media.drop_pixels()
        batch = Batch(trajectories)
        await self.score_rest(batch)
        metrics = validation_metrics(batch)
        if first:
            self._show(batch)
        self.tracking.validation(step, batch, metrics)
        return metrics

    def _show(self, batch: Batch) -> None:
        """The first response of each source, on stdout."""
        shown: dict[str, Trajectory] = {}
        for trajectory in batch:
            shown.setdefault(trajectory.prompt.data_source, trajectory)
        for t in shown.values():
            say(f"[prompt] {one_line(prompt_text(t))}")
            say(f"[response] {one_line(t.text)}")
            say(f"[ground_truth] {one_line(t.prompt.ground_truth)}")
            say(f"[score] {t.score if t.score is not None else one_line(t.score_error)}")
