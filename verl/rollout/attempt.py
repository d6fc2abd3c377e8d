"""One try at a trajectory, and the rules of trying: what is sampled again, left out or masked by its status.

    Attempts.trajectory ─→ Attempt: the record that is trained on ── call ─→ ResumableGeneration ─→ engine
                       └→ loops.run, here or in one of LoopProcesses: the agent loop that writes it through a session

An attempt numbers the calls of its session, names the group whose prefill they share, and records what comes back.
"""

from __future__ import annotations

import hashlib
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from verl.engine.rollout.base import Completion, OnTokens, SamplingParams
from verl.rollout import loops
from verl.rollout.loop_processes import LoopEnded, LoopFailed, LoopProcesses
from verl.rollout.record import (
    NO_IDS,
    Excerpt,
    Outcome,
    Place,
    Record,
    SegmentRecord,
    merged_routes,
)
from verl.rollout.resumable import ResumableGeneration
from verl.rollout.session import LoopSetup
from verl.trajectory import SINGLE_TURN, Media, Prompt, Segment, Trajectory, common_prefix

_SHOWN = 3
"""So many different failures are shown on the console."""


def response_seed(seed: int, uid: str, index: int | str) -> int:
    """63-bit seed of one response, from the run's seed, the prompt's uid and the response's number (and attempt)."""
    digest = hashlib.blake2b(f"{seed}/{uid}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """What the sampling side needs to know of the configuration. `greedy_baseline`: one greedy response a group beside
    the n. `on_status`: what becomes of a trajectory by its status (score, mask, drop, resample), score where it is not
    named. `count_shared`: `once`, or `every_segment`."""

    sampling: SamplingParams
    n: int
    seed: int
    default_loop: str = SINGLE_TURN
    max_lost_ratio: float = 0.1
    greedy_baseline: bool = False
    on_status: Mapping[str, str] = field(default_factory=dict)
    max_resamples: int = 0
    count_shared: str = "once"

    @property
    def per_prompt(self) -> int:
        """Responses that are sampled to a prompt of a training step."""
        return self.n + self.greedy_baseline


class Attempt(Record):
    """The record of one attempt at a trajectory, with its way to the sampler. Calls are numbered, so that no two of
    them draw from the same random stream.

    The first calls of a group's trajectories share the prefill of the prompt; later ones go on from what the sampler
    holds of the trajectory. `_prefill`: of later calls, how many tokens were prefilled, and how many the sampler had
    not seen.

    number: of the trajectory in its group, and of the attempt where it is sampled again; prefix: keeps requests apart
    whose prompts come from different files; more_follow: there may be more than one call.
    """

    def __init__(
        self, requests: ResumableGeneration, prompt: Prompt, number: int | str, prefix: str, more_follow: bool
    ):
        super().__init__(0 if prompt.media is None else prompt.media.images)
        self._prefill = np.zeros(2, np.int64)
        self._num_preempted = self._interruptions = 0
        self._last: Completion | None = None
        self._versions: set[int] = set()
        self._several: dict[tuple[Media, ...], Media] = {}
        self._requests, self._prompt = requests, prompt
        self._group = f"{prefix}{prompt.uid}"
        self.id = f"{self._group}#{number}"
        self._session = self.id if more_follow else None
        self._asked = 0

    async def call(
        self, place: Place, sampling: SamplingParams, on_tokens: OnTokens | None = None
    ) -> tuple[Completion, SegmentRecord]:
        """Sample what follows a place; returns it with the segment that holds it. Call k of a trajectory draws by
        (seed, k, position in the call)."""
        self.begin(place)
        ids, number = place.ids(), self._asked
        self._asked += 1
        segment = place.segment
        streamed = on_tokens is not None and self._requests.engine.streams
        media = segment.media if segment is not None and place.extends else self.media_of(ids, place.shown)
        completion = await self._requests.generate(
            ids,
            sampling if sampling.call == number else replace(sampling, call=number),
            request_id=f"{self.id}.{number}" if number else self.id,
            group=None if number or place.shown else self._group_of(ids),
            session=self._session,
            media=media,
            **({"on_tokens": on_tokens} if streamed else {}),
        )
        if number:  # an earlier call has computed all of its tokens but the last one it sampled
            computed = min(place.length, segment.length - 1) if segment is not None else 0
            self._prefill += completion.prefilled, max(1, place.total - computed)
        self._last = completion
        self._versions.update(completion.versions)
        self._num_preempted += completion.num_preempted
        self._interruptions += completion.parts - 1
        holder = self.add(place, completion)
        holder.media = media
        return completion, holder

    def _group_of(self, ids: np.ndarray) -> str:
        """Whose prefill a first call shares: that of the trajectories of its group that begin with the same tokens."""
        if np.array_equal(ids, self._prompt.ids):
            return self._group
        return f"{self._group}/{hashlib.blake2b(ids.tobytes(), digest_size=8).hexdigest()}"

    def media_of(self, ids: np.ndarray, shown: Sequence[Media] = ()) -> Media | None:
        """The row's images, unless these tokens hold none for them, and the shown ones as one; the same object for
        every context that holds the same."""
        row, shown_tokens = self._prompt.media, sum(media.tokens for media in shown)
        absent = row is not None and row.inputs and np.count_nonzero(np.equal(ids, row.token)) == shown_tokens
        parts = tuple(media for media in (None if absent else row, *shown) if media is not None)
        if len(parts) > 1 and parts not in self._several:
            self._several[parts] = Media.joined(parts)
        return self._several.get(parts, parts[0] if parts else None)

    def end(self) -> None:
        """No more calls come."""
        if self._session is not None:
            self._requests.engine.end_session(self._session)

    def trajectory(
        self,
        index: int,
        outcome: Outcome,
        segments: Sequence[Segment],
        seconds: float,
        decode: Callable[[np.ndarray], str],
    ) -> Trajectory:
        """The trajectory of a loop's outcome and these segments, which took so many seconds."""
        versions = tuple(sorted(self._versions)) or (self._requests.engine.version,)
        for segment in segments:
            segment.versions = versions if len(segments) == 1 else segment.versions or versions
        parts = [segment.response_ids for segment in segments]
        ids = np.concatenate(parts) if len(parts) > 1 else parts[0]
        metrics, fields, last = outcome.metrics, outcome.fields, self._last
        # The text that came with the response, if it is one completion as it was sampled, nothing cut or added.
        as_sampled = self.calls == 1 and last is not None and np.array_equal(last.token_ids, ids)
        text = last.text if last is not None and as_sampled else None
        if numbers := _plain_values(metrics):
            fields.setdefault("agent_metrics", numbers)
        if self._interruptions:
            metrics["interruptions"] = self._interruptions
        if self.replaced:
            metrics.setdefault("session_counts", {})["repeated_requests"] = self.replaced
        if self._prefill[1]:
            metrics["prefill"] = self._prefill.tolist()
        metrics["sampler_calls"] = self.calls
        timing = {"generate_sequences": seconds, "num_preempted": float(self._num_preempted)}
        if "tool_calls" in metrics:
            timing["tool_calls"] = metrics["tool_calls"]
        return Trajectory(
            self._prompt,
            index,
            segments=segments,
            status=outcome.status,
            finish_reason=last.finish_reason if last is not None else "stop",
            text=decode(ids) if text is None else text,
            num_turns=outcome.num_turns,
            score=outcome.reward,
            fields=fields,
            timing=timing,
            extra=metrics,
        )

    def sequences(self, excerpts: Sequence[Excerpt] | None) -> list[Segment]:
        """The segments of the trajectory: what was written, or what its loop made of it."""
        records = self.written
        if excerpts is not None or not records:
            return [self._of_excerpt(Excerpt(*excerpt)) for excerpt in excerpts or [Excerpt(NO_IDS)]]
        segments = [self._segment(record, record.media, record.routes(record.length)) for record in records]
        for segment, record in zip(segments, records, strict=True):
            segment.parent, segment.shared = _parent_among(records, record)
        return segments

    def count_in_every_segment(self, trajectory: Trajectory) -> None:
        """Make what a segment shares with those that it goes on from a part of its response, where it was sampled: it
        is in the loss in each of them. A reward that its turn earned (`token_scores`) stays in the first."""
        scores, at = trajectory.extra.get("token_scores"), 0
        for number, (segment, record) in enumerate(zip(trajectory.segments, self.written, strict=True)):
            longer = self._segment(record.with_shared_spans(), record.media, record.routes(record.length))
            if repeated := longer.length - segment.length:
                longer.parent, longer.shared, longer.versions = segment.parent, segment.shared, segment.versions
                longer.uid, longer.index, longer.trajectory = segment.uid, segment.index, trajectory
                trajectory.segments[number] = longer
                scores = None if scores is None else np.insert(scores, at, np.zeros(repeated))
            at += longer.length
        if scores is not None:
            trajectory.extra["token_scores"] = scores

    def _segment(self, written: SegmentRecord, media: Media | None, routes: np.ndarray | None) -> Segment:
        """routes: experts of the tokens of context and response, int16 [P + L, layers, k]."""
        context = written.context
        if written.start != len(context):
            context = written.ids(written.start).copy()
        if np.array_equal(context, self._prompt.ids):
            context = self._prompt.ids  # the prompt's own array, so that it is computed once for a group
        ids, mask, log_probs = written.response()
        versions = written.versions()
        segment = Segment(context, ids, mask, media=media, versions=versions, rollout_log_probs=log_probs)
        segment.put("sampling_mask", written.sampling_mask())
        if routes is not None:
            # Copies: the context's part is shared by a group, and must not keep the rest.
            of_context, of_response = np.split(routes, [len(context)])
            segment.put("routed_experts", of_response.copy())
            segment.context_columns["routed_experts"] = of_context.copy()
        return segment

    def _of_excerpt(self, excerpt: Excerpt) -> Segment:
        written = SegmentRecord(-1, excerpt.context)
        for part in excerpt.parts:
            if isinstance(part, tuple):
                number, place, size = part
                span = self.segments[number].spans[place]
                assert span.log_probs is not None
                sets = None if span.sets is None else span.sets[:size]
                written.append(span.ids[:size], log_probs=span.log_probs[:size], versions=span.versions, sets=sets)
            else:
                written.append(part)
        whole, context = written.ids(), excerpt.context
        near = max(self.segments, key=lambda s: common_prefix(whole, s.ids()), default=None)
        within = near is not None and common_prefix(context, near.context) == len(near.context)
        media = near.media if near is not None and within else self.media_of(context)
        routes = [s.routes(common_prefix(whole, s.ids())) for s in self.segments]
        parts = [excerpt.routes] if excerpt.routes is not None else [r for r in routes if r is not None]
        return self._segment(written, media, merged_routes([(0, part) for part in parts], len(whole)))


def _parent_among(written: list[SegmentRecord], segment: SegmentRecord) -> tuple[int | None, int]:
    """Number of the written segment with whose tokens this one begins, and how many; (None, 0) if there is none."""
    parent, shared = segment.parent, segment.shared
    while parent is not None and parent not in written:
        shared = min(shared, parent.shared)
        parent = parent.parent
    return (None, 0) if parent is None else (written.index(parent), shared)


def _lost(prompt: Prompt, index: int, version: int, problem: str) -> Trajectory:
    """A response the sampler could not give: empty, never scored, out of every statistic."""
    return Trajectory(
        prompt,
        index,
        response_ids=NO_IDS,
        response_mask=np.zeros(0, bool),
        rollout_log_probs=np.zeros(0, np.float32),
        finish_reason="lost",
        versions=(version,),
        text="",
        score_error=f"lost by the sampler: {problem}",
    )


def _plain_values(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers and texts of a loop's metrics, which a reward function in another process and a line of JSON can
    hold."""
    values = {k: v.item() if isinstance(v, np.generic) else v for k, v in metrics.items()}
    return {k: v for k, v in values.items() if isinstance(v, bool | int | float | str)}


class Attempts:
    """Makes trajectories: an attempt by an agent loop, another where its status asks for one, and what its status makes
    of it.

    decode: response ids, int64 [L], to text, for responses whose text did not come with them. processes: makes those
    that run users' agent loops, when the first is needed (None: they run here).
    """

    def __init__(
        self,
        requests: ResumableGeneration,
        settings: RolloutSettings,
        setup: LoopSetup,
        *,
        decode: Callable[[np.ndarray], str],
        event: Callable[..., None] | None,
        processes: Callable[[], LoopProcesses] | None,
    ):
        self._requests, self._settings, self._setup = requests, settings, setup
        self._decode, self._event = decode, event or (lambda kind, **fields: None)
        self._open_processes = processes
        self._processes: LoopProcesses | None = None
        self._shown: set[str] = set()

    async def close(self) -> None:
        """End the processes of agent loops."""
        if self._processes is not None:
            await self._processes.close()

    async def trajectory(self, prompt: Prompt, index: int, sampling: SamplingParams, prefix: str) -> Trajectory:
        """One trajectory. `prefix` keeps requests apart whose prompts come from different files."""
        for number in range(self._settings.max_resamples + 1):
            trajectory = await self._attempt(prompt, index, sampling, prefix, number)
            if number:
                trajectory.extra["resamples"] = number
            policy = self._settings.on_status.get(trajectory.status, "score")
            lost = trajectory.finish_reason == "lost"
            if policy != "resample" or (lost and trajectory.status == "completed"):
                break
            why = trajectory.fields.get("failure") or trajectory.score_error
            about = {"index": index, "status": trajectory.status, "attempt": number}
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
        self, prompt: Prompt, index: int, sampling: SamplingParams, prefix: str, number: int
    ) -> Trajectory:
        name = prompt.agent_name or self._settings.default_loop
        key = f"{index}r{number}" if number else index
        attempt = Attempt(self._requests, prompt, key, prefix, more_follow=name != SINGLE_TURN)
        params = replace(sampling, seed=response_seed(self._settings.seed, prompt.uid, key))
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
                outcome = await self._processes.run(name, attempt, params, row)
            else:
                outcome = await loops.run(self._setup, name, attempt, params, row)
            segments = attempt.sequences(outcome.excerpts)
        except Exception as error:
            if getattr(error, "ends_the_run", False):
                raise
            problem = str(error) if isinstance(error, LoopFailed) else f"{type(error).__name__}: {error}"
            trace = "".join(traceback.format_exception(error))
            self._failed("rollout_failure", prompt, problem, file=prompt.file, row=prompt.row, traceback=trace)
            lost = _lost(prompt, index, self._requests.engine.version, problem)
            if isinstance(error, LoopEnded):
                lost.status, lost.extra["agent_loop"] = "environment_error", name
            return lost
        finally:
            attempt.end()
        seconds = time.monotonic() - started
        trajectory = attempt.trajectory(index, outcome, segments, seconds, self._decode)
        if self._settings.count_shared == "every_segment" and outcome.excerpts is None and len(segments) > 1:
            attempt.count_in_every_segment(trajectory)
        if name != SINGLE_TURN:
            trajectory.extra["agent_loop"] = name
        return trajectory

    def _failed(self, kind: str, prompt: Prompt, error: str | None, **fields: Any) -> None:
        """An event; the first few, each with another error, are shown on the console too."""
        if error and error not in self._shown and len(self._shown) < _SHOWN:
            self._shown.add(error)
            fields["message"] = f"a response to {prompt.uid} failed: {error} (see events.jsonl)"
        self._event(kind, uid=prompt.uid, error=error, **fields)
