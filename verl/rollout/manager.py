"""Prompts in, scored-as-they-finish trajectories out: the coroutine side of the loop.

`RolloutManager.begin` starts one agent loop per response and hands every finished response to `on_finished` at once
(that is where scoring starts), so rewards overlap with sampling. `take` waits for the oldest groups. What is begun
before it is taken goes on while the trainer updates, and across `pause` and `resume` with new weights.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from verl import interrupt
from verl.engine.rollout.base import RolloutEngine, SamplingParams
from verl.rollout import loops
from verl.rollout.loop_processes import LoopEnded, LoopFailed, LoopProcesses
from verl.rollout.loop_runner import LoopRunner
from verl.rollout.record import Outcome
from verl.rollout.requests import ResumableGeneration, TrajectoryRecord
from verl.trajectory import SINGLE_TURN, Batch, Prompt, Segment, Trajectory

GREEDY = -1
"""The number of a group's greedy response: none of the n that are trained on."""
_SHOWN = 3
"""So many different failures are shown on the console."""

OnFinished = Callable[[Trajectory], Awaitable[None]]


class RolloutError(RuntimeError):
    """Too many responses were lost by the sampler to go on."""

    explained = True


def response_seed(seed: int, uid: str, index: int | str) -> int:
    """63-bit seed of one response, from the run's seed, the prompt's uid and the response's number (and attempt)."""
    digest = hashlib.blake2b(f"{seed}/{uid}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """What the sampling side needs to know of the configuration. `greedy_baseline`: one greedy response a group beside
    the n. `on_status`: what becomes of a trajectory by its status (score, mask, drop, resample), score where it is not
    named."""

    sampling: SamplingParams
    n: int
    seed: int
    default_loop: str = SINGLE_TURN
    max_lost_ratio: float = 0.1
    greedy_baseline: bool = False
    on_status: Mapping[str, str] = field(default_factory=dict)
    max_resamples: int = 0

    @property
    def per_prompt(self) -> int:
        """Responses that are sampled to a prompt of a training step."""
        return self.n + self.greedy_baseline


@dataclass(slots=True, eq=False)
class PromptGroup:
    """A prompt and the responses to it. `responses[i]` is None until response i is back; `baseline` is the greedy
    one."""

    prompt: Prompt
    size: int
    responses: list[Trajectory | None] = field(init=False)
    baseline: Trajectory | None = None
    _contexts: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.responses = [None] * self.size

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


async def _all_back(
    tasks: Iterable[asyncio.Task[None]], on_progress: Callable[[int], None] | None = None
) -> None:
    """Wait for all of these. Raises the first error; a signal that was noted is obeyed once another is back."""
    for task in asyncio.as_completed(tasks):
        await task
        if on_progress is not None:
            on_progress(1)
        if interrupt.noted():
            raise asyncio.CancelledError


class RolloutManager:
    """Runs agent loops over one engine; `requests` are those that are under way in it.

    `decode` turns response ids, int64 [L], into text, for responses whose text did not come with them. `processes`
    makes those that run users' agent loops, when the first is needed (None: they run here).
    """

    def __init__(
        self,
        engine: RolloutEngine,
        settings: RolloutSettings,
        *,
        decode: Callable[[np.ndarray], str],
        on_finished: OnFinished,
        tokenizer: Any = None,
        config: Any = None,
        event: Callable[..., None] | None = None,
        processes: Callable[[], LoopProcesses] | None = None,
    ):
        self.engine = engine
        self.settings = settings
        self.requests = ResumableGeneration(engine)
        self._decode = decode
        self._on_finished = on_finished
        self._runner = LoopRunner(tokenizer, config)
        self._open_processes = processes
        self._processes: LoopProcesses | None = None
        self._event = event or (lambda kind, **fields: None)
        self._shown: set[str] = set()
        self._groups: list[PromptGroup] = []  # begun and not taken, in draw order
        self._responses: dict[PromptGroup, list[asyncio.Task[None]]] = {}
        self._whole: dict[PromptGroup, asyncio.Task[None]] = {}
        self._scoring: dict[Trajectory, asyncio.Task[None]] = {}

    async def take(
        self,
        prompts: Sequence[Prompt],
        on_progress: Callable[[int], None] | None = None,
        *,
        count: int | None = None,
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
        groups = self._groups[:count]
        await self._finish(groups, on_progress)
        del self._groups[:count]
        return self._collect(groups)

    @property
    def groups(self) -> tuple[PromptGroup, ...]:
        """What was begun and not taken, in draw order."""
        return tuple(self._groups)

    async def completed(self, groups: Iterable[PromptGroup]) -> list[PromptGroup]:
        """Wait until one of these groups has all its responses, scored as they finished; returns those that have, in
        order."""
        groups = list(groups)
        for group in groups:
            if group not in self._whole:
                self._whole[group] = asyncio.ensure_future(self._completion(group))
        try:
            await asyncio.wait([self._whole[group] for group in groups], return_when=asyncio.FIRST_COMPLETED)
            finished = [group for group in groups if self._whole[group].done()]
            for group in finished:
                self._whole[group].result()
            if interrupt.noted():
                raise asyncio.CancelledError
        except BaseException:
            await self.release(self.groups)
            raise
        return finished

    async def _completion(self, group: PromptGroup) -> None:
        await asyncio.gather(*self._responses[group])
        await self.scored(row for row in (*group.responses, group.baseline) if row is not None)

    async def collect(self, groups: Sequence[PromptGroup]) -> Batch:
        """Take these groups, whose responses are all back. RolloutError when too many responses were lost."""
        await self.release(groups)
        return self._collect(groups)

    async def release(self, groups: Iterable[PromptGroup]) -> None:
        """Forget these groups; what of them is under way ends."""
        tasks: list[asyncio.Task[None]] = []
        for group in groups:
            self._groups.remove(group)
            tasks += self._responses.pop(group, [])
            if group in self._whole:
                tasks.append(self._whole.pop(group))
            rows = [row for row in (*group.responses, group.baseline) if row in self._scoring]
            tasks += [self._scoring.pop(row) for row in rows if row is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def begin(self, prompts: Sequence[Prompt]) -> None:
        """Start `n` responses to each prompt, for a later `take`."""
        groups = [PromptGroup(prompt, self.settings.n) for prompt in prompts]
        self._groups += groups
        self._spawn(groups, self.settings.sampling, baseline=self.settings.greedy_baseline)

    async def sample(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        n: int,
        on_progress: Callable[[int], None] | None = None,
    ) -> Batch:
        """The same apart from the training groups, with other settings: validation and generation."""
        groups = [PromptGroup(prompt, n) for prompt in prompts]
        self._spawn(groups, sampling, prefix="aside/")
        await self._finish(groups, on_progress)
        return self._collect(groups)

    async def scored(self, batch: Iterable[Trajectory] | None = None) -> None:
        """Wait for the scoring of these responses (None: of all). Errors of scoring itself are raised."""
        rows = list(self._scoring) if batch is None else [*batch]
        rows += [t.baseline for t in rows if t.baseline is not None]
        await asyncio.gather(*(self._scoring.pop(row) for row in rows if row in self._scoring))

    async def drain(self) -> None:
        """Wait until every response that is under way is back."""
        await _all_back(self._under_way())

    async def stop(self) -> None:
        """End everything that is under way, scoring too; nothing of it is handed over."""
        tasks = [*self._under_way(), *self._scoring.values(), *self._whole.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._processes is not None:
            await self._processes.close()

    def _spawn(
        self,
        groups: Sequence[PromptGroup],
        sampling: SamplingParams,
        prefix: str = "",
        *,
        baseline: bool = False,
    ) -> None:
        """Start every response. `prefix` keeps requests apart whose prompts come from different files."""

        async def one(group: PromptGroup, index: int) -> None:
            params = replace(sampling, temperature=0.0) if index == GREEDY else sampling
            trajectory = await self._response(group.prompt, index, params, prefix)
            group.finish(trajectory)
            if trajectory.score_error is None and trajectory.score is None:
                self._scoring[trajectory] = asyncio.ensure_future(self._on_finished(trajectory))

        for group in groups:
            numbers = [*range(group.size), *([GREEDY] if baseline else [])]
            self._responses[group] = begun = [asyncio.ensure_future(one(group, i)) for i in numbers]
            for (
                task
            ) in begun:  # the first error is raised; asyncio would complain of those that failed with it
                task.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _finish(self, groups: Sequence[PromptGroup], on_progress: Callable[[int], None] | None) -> None:
        """Wait for every response of the groups. An error, or a signal that was noted, ends all that is under way."""
        try:
            await _all_back([task for group in groups for task in self._responses[group]], on_progress)
        except BaseException:
            for task in self._under_way():
                task.cancel()
            raise
        finally:
            for group in groups:
                del self._responses[group]

    def _under_way(self) -> list[asyncio.Task[None]]:
        return [task for begun in self._responses.values() for task in begun]

    async def _response(
        self, prompt: Prompt, index: int, sampling: SamplingParams, prefix: str
    ) -> Trajectory:
        """One trajectory, sampled again while its status asks for it, and what its status makes of it."""
        for attempt in range(self.settings.max_resamples + 1):
            trajectory = await self._attempt(prompt, index, sampling, prefix, attempt)
            if attempt:
                trajectory.extra["resamples"] = attempt
            policy = self.settings.on_status.get(trajectory.status, "score")
            lost = trajectory.finish_reason == "lost"
            if policy != "resample" or (lost and trajectory.status == "completed"):
                break
            why = trajectory.fields.get("failure") or trajectory.score_error
            about = {"index": index, "status": trajectory.status, "attempt": attempt}
            self._failed("trajectory_failed", prompt, why, **about)
        if lost:  # without tokens there is nothing to score: left out
            return trajectory
        failed = trajectory.status in ("timeout", "environment_error")
        if policy in ("drop", "resample") or (failed and not trajectory.length):
            why = trajectory.fields.get("failure") or f"rollout.agent.on_status.{trajectory.status}={policy}"
            trajectory.score, trajectory.finish_reason = None, "lost"
            trajectory.score_error = f"left out, status {trajectory.status}: {why}"
        elif policy == "mask":
            trajectory.extra["without_gradient"] = True
        return trajectory

    async def _attempt(
        self, prompt: Prompt, index: int, sampling: SamplingParams, prefix: str, attempt: int
    ) -> Trajectory:
        settings = self.settings
        name = prompt.agent_name or settings.default_loop
        number = f"{index}r{attempt}" if attempt else index
        record = TrajectoryRecord(self.requests, prompt, number, prefix, more_follow=name != SINGLE_TURN)
        params = replace(sampling, seed=response_seed(settings.seed, prompt.uid, number))
        row = {
            "prompt_ids": prompt.ids,
            "raw_prompt": prompt.messages,
            "data_source": prompt.data_source,
            "extra_info": prompt.extra_info,
            "uid": prompt.uid,
            "sample_index": index,
            "columns": prompt.columns,
        }
        started = time.monotonic()
        try:
            if self._open_processes is not None and loops.runs_apart(name):
                self._processes = self._processes or self._open_processes()
                outcome = await self._processes.run(name, record, params, row)
            else:
                outcome = await self._runner.run(name, record, params, row)
            segments = record.sequences(outcome.excerpts)
        except Exception as error:
            if getattr(error, "ends_the_run", False):
                raise
            lost = self._lost(prompt, index, error)
            if isinstance(error, LoopEnded):
                lost.status, lost.extra["agent_loop"] = "environment_error", name
            return lost
        finally:
            record.end()
        seconds = time.monotonic() - started
        trajectory = self._trajectory(prompt, index, outcome, segments, record, seconds)
        if name != SINGLE_TURN:
            trajectory.extra["agent_loop"] = name
        if record.prefill[1]:
            trajectory.extra["prefill"] = record.prefill.tolist()
        trajectory.extra["sampler_calls"] = record.calls
        return trajectory

    def _failed(self, kind: str, prompt: Prompt, error: str | None, **fields: Any) -> None:
        """An event; the first few, each with another error, are shown on the console too."""
        if error and error not in self._shown and len(self._shown) < _SHOWN:
            self._shown.add(error)
            fields["message"] = f"a response to {prompt.uid} failed: {error} (see events.jsonl)"
        self._event(kind, uid=prompt.uid, error=error, **fields)

    def _lost(self, prompt: Prompt, index: int, error: Exception) -> Trajectory:
        """A response the sampler could not give: empty, never scored, out of every statistic."""
        problem = str(error) if isinstance(error, LoopFailed) else f"{type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))
        self._failed("rollout_failure", prompt, problem, file=prompt.file, row=prompt.row, traceback=trace)
        return Trajectory(
            prompt,
            index,
            response_ids=np.zeros(0, np.int64),
            response_mask=np.zeros(0, bool),
            rollout_log_probs=np.zeros(0, np.float32),
            finish_reason="lost",
            versions=(self.engine.version,),
            text="",
            score_error=f"lost by the sampler: {problem}",
        )

    def _trajectory(
        self,
        prompt: Prompt,
        index: int,
        outcome: Outcome,
        segments: Sequence[Segment],
        record: TrajectoryRecord,
        seconds: float,
    ) -> Trajectory:
        """Of a loop's outcome and the segments that were recorded."""
        versions = record.versions or (self.engine.version,)
        for segment in segments:
            segment.versions = versions if len(segments) == 1 else segment.versions or versions
        parts = [segment.response_ids for segment in segments]
        ids = np.concatenate(parts) if len(parts) > 1 else parts[0]
        metrics, fields, last = outcome.metrics, outcome.fields, record.last
        # The text that came with the response, if it is one completion as it was sampled, nothing cut or added.
        as_sampled = record.calls == 1 and last is not None and np.array_equal(last.token_ids, ids)
        text = last.text if last is not None and as_sampled else None
        if numbers := _plain_values(metrics):
            fields.setdefault("agent_metrics", numbers)
        if record.interruptions:
            metrics["interruptions"] = record.interruptions
        if record.replaced:
            metrics.setdefault("session_counts", {})["repeated_requests"] = record.replaced
        return Trajectory(
            prompt,
            index,
            segments=segments,
            status=outcome.status,
            finish_reason=last.finish_reason if last is not None else "stop",
            text=self._decode(ids) if text is None else text,
            num_turns=outcome.num_turns,
            score=outcome.reward,
            fields=fields,
            timing={
                "generate_sequences": seconds,
                "num_preempted": float(record.num_preempted),
                **({"tool_calls": metrics["tool_calls"]} if "tool_calls" in metrics else {}),
            },
            extra=metrics,
        )

    def _collect(self, groups: Sequence[PromptGroup]) -> Batch:
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


def _plain_values(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers and texts of a loop's metrics, which a reward function in another process and a line of JSON can
    hold."""
    values = {k: v.item() if isinstance(v, np.generic) else v for k, v in metrics.items()}
    return {k: v for k, v in values.items() if isinstance(v, bool | int | float | str)}
