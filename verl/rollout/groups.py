"""The store of groups: prompts in, scored-as-they-finish trajectories out.

`RolloutManager.begin` starts one attempt per response and hands every finished response to `on_finished` at once (that
is where scoring starts), so rewards overlap with sampling. `take` waits for the oldest groups. What is begun before it
is taken goes on while the trainer updates, and across `pause` and `resume` with new weights.

    begin ─→ open ─→ finished ─→ take, or completed ─→ collect (handed out) or release (filtered)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from verl import interrupt
from verl.config.schema.base import Map
from verl.config.schema.entries import Config
from verl.engine.rollout.base import RolloutEngine, SamplingParams
from verl.rollout import loops
from verl.rollout.attempt import Attempts, RolloutSettings
from verl.rollout.event_loop import spawn
from verl.rollout.loop_processes import LoopProcesses
from verl.rollout.resumable import ResumableGeneration
from verl.rollout.session import LoopSetup
from verl.trajectory import Batch, Prompt, Segment, Trajectory

GREEDY = -1
"""The number of a group's greedy response: none of the n that are trained on."""

OnFinished = Callable[[Trajectory], Awaitable[None]]
OnProgress = Callable[[int], None]


class RolloutError(RuntimeError):
    """Too many responses were lost by the sampler to go on."""

    explained = True


@dataclass(slots=True, eq=False)
class PromptGroup:
    """A prompt and the responses to it. `responses[i]` is None until response i is back; `baseline` is the greedy one.

    sampling, whole: the tasks that sample the responses, and the one that waits until all are scored, if asked for."""

    prompt: Prompt
    size: int
    responses: list[Trajectory | None] = field(init=False)
    baseline: Trajectory | None = None
    sampling: list[asyncio.Task[None]] = field(default_factory=list)
    whole: asyncio.Task[None] | None = None
    _contexts: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.responses = [None] * self.size

    @property
    def rows(self) -> list[Trajectory]:
        """The responses that are back, the greedy one last."""
        return [row for row in (*self.responses, self.baseline) if row is not None]

    def finish(self, trajectory: Trajectory) -> None:
        """Record one response."""
        if trajectory.index == GREEDY:
            self.baseline = trajectory
            return
        self.responses[trajectory.index] = trajectory
        for segment in trajectory.segments:
            self._share_context(segment)

    def _share_context(self, segment: Segment) -> None:
        """Columns of a context that came with another response already are kept once."""
        shared = self._contexts.setdefault(id(segment.context_ids), segment.context_columns)
        for name, values in segment.context_columns.items():
            if name in shared and np.array_equal(shared[name], values):
                segment.context_columns[name] = shared[name]


async def _all_back(tasks: Iterable[asyncio.Task[None]], on_progress: OnProgress | None = None) -> None:
    """Wait for all of these. Raises the first error; a signal that was noted is obeyed once another is back."""
    for task in asyncio.as_completed(tasks):
        await task
        if on_progress is not None:
            on_progress(1)
        if interrupt.noted():
            raise asyncio.CancelledError


class RolloutManager:
    """The groups of a run over one engine; `requests` are those that are under way in it.

    decode, event, processes: see `Attempts`; tokenizer, config: see `LoopSetup`.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        settings: RolloutSettings,
        *,
        decode: Callable[[np.ndarray], str],
        on_finished: OnFinished,
        tokenizer: Any = None,
        config: Config | Map | None = None,
        event: Callable[..., None] | None = None,
        processes: Callable[[], LoopProcesses] | None = None,
        shown: Callable[[Trajectory], None] = lambda _: None,
    ):
        self.settings, self.requests = settings, ResumableGeneration(engine)
        setup = LoopSetup(tokenizer, config)
        loops.load_listed(setup.loops_file)
        self._attempts = Attempts(self.requests, settings, setup, decode=decode, event=event, processes=processes)
        self._on_finished, self._shown = on_finished, shown
        self._groups: list[PromptGroup] = []  # begun and not taken, in draw order
        self._open: list[PromptGroup] = []  # with responses to be waited for, those of `sample` too
        self._scoring: dict[Trajectory, asyncio.Task[None]] = {}

    @property
    def groups(self) -> tuple[PromptGroup, ...]:
        """What was begun and not taken, in draw order."""
        return tuple(self._groups)

    async def begin(self, prompts: Sequence[Prompt]) -> None:
        """Start `n` responses to each prompt, for a later `take`."""
        numbers = [*range(self.settings.n), *([GREEDY] if self.settings.greedy_baseline else [])]
        self._groups += self._spawn(prompts, self.settings.sampling, self.settings.n, numbers)

    async def take(
        self, prompts: Sequence[Prompt], on_progress: OnProgress | None = None, *, count: int | None = None
    ) -> Batch:
        """Begin `prompts`; returns the oldest `count` groups (default: as many as prompts) once all are back.

        Groups come in draw order, whichever finishes first. Scoring of the last responses may still be running:
        `scored` waits for it. RolloutError when more than `max_lost_ratio` of the responses were lost, ValueError if
        fewer groups are drawn.
        """
        await self.begin(prompts)
        count = len(prompts) if count is None else count
        if len(self._groups) < count:
            raise ValueError(f"asked for {count} groups, {len(self._groups)} are drawn")
        groups, self._groups = self._groups[:count], self._groups[count:]
        return await self._all_of(groups, on_progress)

    async def sample(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        n: int,
        on_progress: OnProgress | None = None,
    ) -> Batch:
        """The same apart from the training groups, with other settings: validation and generation."""
        return await self._all_of(self._spawn(prompts, sampling, n, range(n), prefix="aside/"), on_progress)

    async def completed(self, groups: Iterable[PromptGroup]) -> list[PromptGroup]:
        """Wait until one of these groups has all its responses, scored as they finished; returns those that have, in
        order."""
        waited = {group: group.whole or spawn(self._completion(group)) for group in groups}
        for group, task in waited.items():
            group.whole = task
        try:
            await asyncio.wait(waited.values(), return_when=asyncio.FIRST_COMPLETED)
            finished = [group for group, task in waited.items() if task.done()]
            for group in finished:
                waited[group].result()
            if interrupt.noted():
                raise asyncio.CancelledError
        except BaseException:
            await self.release(self.groups)
            raise
        return finished

    async def _completion(self, group: PromptGroup) -> None:
        await asyncio.gather(*group.sampling)
        await self.scored(group.rows)

    async def collect(self, groups: Sequence[PromptGroup]) -> Batch:
        """Take these groups, whose responses are all back. RolloutError when too many responses were lost."""
        await self.release(groups)
        return self._batch(groups)

    async def release(self, groups: Iterable[PromptGroup]) -> None:
        """Forget these groups; what of them is under way ends."""
        tasks: list[asyncio.Task[None] | None] = []
        released = dict.fromkeys(groups)
        self._groups = [group for group in self._groups if group not in released]
        self._open = [group for group in self._open if group not in released]
        for group in released:
            tasks += [*group.sampling, group.whole, *(self._scoring.pop(row, None) for row in group.rows)]
        await _ended(tasks)

    async def scored(self, batch: Iterable[Trajectory] | None = None) -> None:
        """Wait for the scoring of these responses (None: of all). Errors of scoring itself are raised."""
        rows = list(self._scoring) if batch is None else [*batch]
        rows += [t.baseline for t in rows if t.baseline is not None]
        await asyncio.gather(*(self._scoring.pop(row) for row in rows if row in self._scoring))

    async def drain(self) -> None:
        """Wait until every response that is under way is back."""
        await _all_back([task for group in self._open for task in group.sampling])

    async def stop(self) -> None:
        """End everything that is under way, scoring too; nothing of it is handed over."""
        sampling = (task for group in self._open for task in (*group.sampling, group.whole))
        await _ended([*sampling, *self._scoring.values()])
        await self._attempts.close()

    def _spawn(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        n: int,
        numbers: Sequence[int],
        prefix: str = "",
    ) -> list[PromptGroup]:
        """Groups of `n`, the responses of these numbers started. `prefix`: see `Attempts.trajectory`."""

        async def respond(group: PromptGroup, index: int) -> None:
            params = replace(sampling, temperature=0.0) if index == GREEDY else sampling
            trajectory = await self._attempts.trajectory(group.prompt, index, params, prefix)
            group.finish(trajectory)
            if trajectory.score_error is None and trajectory.score is None:
                self._scoring[trajectory] = asyncio.ensure_future(self._score(trajectory, show=not prefix))
            elif not prefix:
                self._shown(trajectory)

        groups = [PromptGroup(prompt, n) for prompt in prompts]
        for group in groups:
            group.sampling = [spawn(respond(group, number)) for number in numbers]
        self._open += groups
        return groups

    async def _score(self, trajectory: Trajectory, show: bool) -> None:
        await self._on_finished(trajectory)
        if show:
            self._shown(trajectory)

    async def _all_of(self, groups: Sequence[PromptGroup], on_progress: OnProgress | None) -> Batch:
        """The batch of these groups once all responses are back. An error, or a signal that was noted, ends all that is
        under way."""
        try:
            await _all_back([task for group in groups for task in group.sampling], on_progress)
        except BaseException:
            for group in self._open:
                for task in group.sampling:
                    task.cancel()
            raise
        finally:
            closed = set(groups)
            self._open = [group for group in self._open if group not in closed]
        return self._batch(groups)

    def _batch(self, groups: Sequence[PromptGroup]) -> Batch:
        batch = Batch(t for group in groups for t in group.responses if t is not None)
        baselines = {group.prompt.uid: group.baseline for group in groups}
        for trajectory in batch:
            trajectory.baseline = baselines[trajectory.uid]
        lost = [t for t in batch if t.finish_reason == "lost" and t.status == "completed"]
        left_out = [t for t in batch if t.finish_reason == "lost"]
        if left_out and len(left_out) == len(batch) > len(lost) and self.settings.max_lost_ratio < 1:
            raise RolloutError(f"no trajectory of this step is left; the first: {left_out[0].score_error}")
        if lost and len(lost) > self.settings.max_lost_ratio * len(batch):
            raise RolloutError(
                f"the sampler lost {len(lost)} of {len(batch)} responses; the first: {lost[0].score_error}"
            )
        batch.meta["lost"] = len(lost)
        return batch


async def _ended(tasks: Iterable[asyncio.Task[None] | None]) -> None:
    """Cancel these tasks and wait for their end."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
