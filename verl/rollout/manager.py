"""Prompts in, scored-as-they-finish trajectories out: the coroutine side of the loop.

`RolloutManager.begin` starts one agent loop per response and hands every finished response to `on_finished` at once (that
is where scoring starts), so rewards overlap with sampling. `take` waits for the oldest groups. What is begun
before it is taken goes on while the trainer updates, and across `pause` and `resume` with new weights.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from verl import interrupt
from verl.engine.rollout.base import Completion, RolloutEngine, SamplingParams
from verl.rollout import agent_loop
from verl.rollout.groups import GroupBuffer, PromptGroup
from verl.rollout.resumable import ResumableGeneration
from verl.rollout.session import Session
from verl.trajectory import AGENT_LOOP_ARGUMENTS, Batch, Prompt, Segment, Trajectory

OnFinished = Callable[[Trajectory], Awaitable[None]]


class RolloutError(RuntimeError):
    """Too many responses were lost by the sampler to go on."""

    explained = True


def response_seed(seed: int, uid: str, index: int) -> int:
    """63-bit seed of one response, from the run's seed, the prompt's uid and the response's number."""
    digest = hashlib.blake2b(f"{seed}/{uid}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """What the sampling side needs to know of the configuration."""

    sampling: SamplingParams
    n: int
    seed: int
    default_loop: str = "single_turn_agent"
    max_lost_ratio: float = 0.1


class RolloutManager:
    """Runs agent loops over one engine.

    `decode` turns response ids, int64 [L], into text, for responses whose text did not come with them.
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
    ):
        self.engine = engine
        self.settings = settings
        self.buffer = GroupBuffer(settings.n)
        self.requests = ResumableGeneration(engine)
        self._decode = decode
        self._on_finished = on_finished
        self._tokenizer = tokenizer
        self._config = config
        self._event = event or (lambda kind, **fields: None)
        self._responses: dict[PromptGroup, list[asyncio.Task[None]]] = {}
        self._scoring: dict[Trajectory, asyncio.Task[None]] = {}

    async def take(
        self,
        prompts: Sequence[Prompt],
        on_progress: Callable[[int], None] | None = None,
        *,
        count: int | None = None,
    ) -> Batch:
        """Begin `prompts`; returns the oldest `count` groups (default: as many as prompts) once all are back.

        Groups come in draw order. Scoring of the last responses may still be running: `scored` waits for it. Raises
        RolloutError when more than `max_lost_ratio` of the responses were lost.
        """
        self._begin(prompts)
        groups = self.buffer.oldest(len(prompts) if count is None else count)
        await self._finish(groups, on_progress)
        return self._collect(self.buffer.take(len(groups)))

    async def begin(self, prompts: Sequence[Prompt]) -> None:
        """Start `n` responses to each prompt, for a later `take`."""
        self._begin(prompts)

    async def sample(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        n: int,
        on_progress: Callable[[int], None] | None = None,
    ) -> Batch:
        """The same outside of the training buffer, with other settings: validation and generation."""
        buffer = GroupBuffer(n)
        groups = buffer.add(prompts)
        buffer.start()
        self._spawn(groups, sampling, buffer, prefix="aside/")
        await self._finish(groups, on_progress)
        return self._collect(buffer.take(len(groups)))

    async def scored(self, batch: Iterable[Trajectory] | None = None) -> None:
        """Wait for the scoring of these responses (None: of all). Errors of the scorer itself are raised."""
        rows = list(self._scoring) if batch is None else batch
        await asyncio.gather(*(self._scoring.pop(row) for row in rows if row in self._scoring))

    async def pause(self) -> int:
        """Before new weights: stop every request, partial output kept; returns how many there were."""
        return await self.requests.pause()

    async def resume(self) -> None:
        """After new weights: what `pause` stopped goes on with them."""
        self.requests.resume()

    async def busy(self) -> list[tuple[float, float]]:
        """Spans of time.monotonic() in which the engine had requests, since the last call."""
        return self.requests.busy()

    async def stop(self) -> None:
        """End everything that is under way, scoring too; nothing of it is handed over."""
        tasks = [task for begun in self._responses.values() for task in begun] + list(self._scoring.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, prompts: Sequence[Prompt]) -> None:
        groups = self.buffer.add(prompts)
        self.buffer.start()
        self._spawn(groups, self.settings.sampling, self.buffer)

    def _spawn(
        self, groups: Sequence[PromptGroup], sampling: SamplingParams, buffer: GroupBuffer, prefix: str = ""
    ) -> None:
        """Start every response. `prefix` keeps requests apart whose prompts come from different files."""

        async def one(group: PromptGroup, index: int) -> None:
            trajectory = await self._response(group.prompt, index, sampling, prefix)
            buffer.finish(group, trajectory)
            if trajectory.score_error is None and trajectory.score is None:
                self._scoring[trajectory] = asyncio.ensure_future(self._on_finished(trajectory))

        for group in groups:
            self._responses[group] = [asyncio.ensure_future(one(group, i)) for i in range(group.size)]

    async def _finish(self, groups: Sequence[PromptGroup], on_progress: Callable[[int], None] | None) -> None:
        """Wait for every response of the groups. An error, or a signal that was noted, ends all that is under way."""
        waiter = asyncio.current_task()
        assert waiter is not None

        def back(_: asyncio.Task[None]) -> None:
            if on_progress is not None:
                on_progress(1)
            if interrupt.noted():
                waiter.cancel()

        tasks = [task for group in groups for task in self._responses[group]]
        for task in tasks:
            task.add_done_callback(back)
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in (task for begun in self._responses.values() for task in begun):
                task.cancel()
            raise
        finally:
            for task in tasks:
                task.remove_done_callback(back)
            for group in groups:
                del self._responses[group]

    async def _response(
        self, prompt: Prompt, index: int, sampling: SamplingParams, prefix: str
    ) -> Trajectory:
        settings = self.settings
        session = Session(self.requests, prompt, index, prefix)
        params = replace(sampling, seed=response_seed(settings.seed, prompt.uid, index))
        row = {
            **{name: value for name, value in prompt.columns.items() if name not in AGENT_LOOP_ARGUMENTS},
            "columns": prompt.columns,
            "prompt_ids": prompt.ids,
            "raw_prompt": prompt.messages,
            "data_source": prompt.data_source,
            "extra_info": prompt.extra_info,
            "uid": prompt.uid,
            "sample_index": index,
        }
        started = time.monotonic()
        try:
            loop = agent_loop.get(prompt.agent_name or settings.default_loop)(
                session.generate, self._tokenizer, self._config
            )
            output = await loop.run(params, **row)
        except Exception as error:
            if getattr(error, "ends_the_run", False):
                raise
            return self._lost(prompt, index, error)
        outputs = output if isinstance(output, list) else [output]
        return self._trajectory(prompt, index, outputs, session.completions, time.monotonic() - started)

    def _lost(self, prompt: Prompt, index: int, error: Exception) -> Trajectory:
        """A response the sampler could not give: empty, never scored, out of every statistic."""
        self._event(
            "rollout_failure",
            uid=prompt.uid,
            file=prompt.file,
            row=prompt.row,
            error=f"{type(error).__name__}: {error}",
            traceback="".join(traceback.format_exception(error)),
        )
        return Trajectory(
            prompt,
            index,
            response_ids=np.zeros(0, np.int64),
            response_mask=np.zeros(0, bool),
            rollout_log_probs=np.zeros(0, np.float32),
            finish_reason="lost",
            versions=(self.engine.version,),
            text="",
            score_error=f"lost by the sampler: {type(error).__name__}: {error}",
        )

    def _trajectory(
        self,
        prompt: Prompt,
        index: int,
        outputs: Sequence[agent_loop.AgentLoopOutput],
        completions: list[Completion],
        seconds: float,
    ) -> Trajectory:
        """One segment for each output; reward, fields and metrics of later outputs win."""
        if not outputs:
            raise ValueError(f"the agent loop returned no output ({prompt.uid})")
        versions = tuple(sorted({v for c in completions for v in c.versions})) or (self.engine.version,)
        segments = [_segment(prompt, output, versions) for output in outputs]
        ids = np.concatenate([segment.response_ids for segment in segments])
        text = _text(completions, ids)
        rewards = [output.reward_score for output in outputs if output.reward_score is not None]
        merged: dict[str, dict[str, Any]] = {"metrics": {}, "extra_fields": {}}
        for output in outputs:
            for name, found in merged.items():
                found |= getattr(output, name)
        return Trajectory(
            prompt,
            index,
            segments=segments,
            finish_reason=completions[-1].finish_reason if completions else "stop",
            text=self._decode(ids) if text is None else text,
            num_turns=max(output.num_turns for output in outputs),
            score=rewards[-1] if rewards else None,
            fields=merged["extra_fields"],
            timing={
                "generate_sequences": seconds,
                "num_preempted": float(sum(c.num_preempted for c in completions)),
            },
            extra=merged["metrics"] | _interruptions(completions),
        )

    def _collect(self, groups: Sequence[PromptGroup]) -> Batch:
        batch = Batch(t for group in groups for t in group.trajectories)
        lost = [t for t in batch if t.finish_reason == "lost"]
        if lost and len(lost) > self.settings.max_lost_ratio * len(batch):
            raise RolloutError(
                f"the sampler lost {len(lost)} of {len(batch)} responses; the first: {lost[0].score_error}"
            )
        batch.meta["lost"] = len(lost)
        return batch


def _segment(prompt: Prompt, output: agent_loop.AgentLoopOutput, versions: tuple[int, ...]) -> Segment:
    """One output of an agent loop. A context that is the prompt is its array, so that it is computed once for a group.

    ValueError for arrays of different lengths.
    """
    ids = np.asarray(output.response_ids, dtype=np.int64)
    mask = np.asarray(output.response_mask, dtype=bool)
    log_probs = None
    if output.response_logprobs is not None:
        log_probs = np.asarray(output.response_logprobs, dtype=np.float32)
    for name, array in (("response_mask", mask), ("response_logprobs", log_probs)):
        if array is not None and len(array) != len(ids):
            raise ValueError(
                f"agent loop gave {len(ids)} response_ids and {len(array)} of {name} ({prompt.uid})"
            )
    context = np.asarray(output.prompt_ids, dtype=np.int64)
    if np.array_equal(context, prompt.ids):
        context = prompt.ids
    media = prompt.media | output.multi_modal_data
    log_probs = None if log_probs is None else log_probs * mask
    return Segment(context, ids, mask, versions=versions, media=media, rollout_log_probs=log_probs)


def _text(completions: Sequence[Completion], ids: np.ndarray) -> str | None:
    """The text that came with the response, if the response is one completion as it was sampled, nothing cut or added."""
    if len(completions) != 1 or not np.array_equal(completions[0].token_ids, ids):
        return None
    return completions[0].text


def _interruptions(completions: Sequence[Completion]) -> dict[str, int]:
    """How often the weights changed while the response was written, if they did."""
    count = sum(c.parts - 1 for c in completions)
    return {"interruptions": count} if count else {}
