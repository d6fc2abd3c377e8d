"""Proof at every push of weights that the sampler computes with them: its log-probs must move as the trainer's do.

A few rows of the first step are kept: the start of a response, and the tokens that the sampler draws after it. Around
each push both sides give the log-probs of these tokens:

    sample (version v) ── trainer: before the first update of v
                       └─ trainer: before each push of a later version w; sampler: after it
    moves = log-probs under w − log-probs under v;  slope = Σ sampler's·trainer's moves / Σ trainer's moves²

A sampler that follows has a slope of 1, one that never got the weights, reverts to old ones or does not apply an
adapter has 0. What differs between the two sides by design (precision, kernels) cancels in the moves. A verdict waits
until the trainer's moves are so much larger than the noise of the precision that the slope is certain. An adapter
begins with B = 0: before the first update both sides are compared with another B, too. Checksums of a
transfer (`verl.weight_sync.verify`) say what arrived; this says what is computed.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from verl.algorithms.agreement import BOUNDS, precision_of_run
from verl.config import Config
from verl.config.layout import reference_is_base
from verl.engine.rollout.base import Completion, SamplingParams
from verl.trainer.parts import Parts
from verl.trajectory import Batch, Media, Prompt, Segment, Trajectory
from verl.weight_sync.verify import WeightSyncError

ROWS, PREFIX, DRAWN = 8, 32, 2
"""Rows of the probe, the most tokens of a response that a row begins with, and tokens drawn after them."""
PROMPTS = 2
"""Prompts that the rows are taken of, where their responses are different: each is computed once."""
UNSURE = -0.7
"""A row ends where the token that was drawn had about this log-prob: where every token is certain nothing moves."""
SHARE = 0.01
"""Of the run's time for the probe: a push that comes too soon after the last probe is left out."""
CERTAIN = 16
"""The moves are judged when their norm is so many times the noise: the slope is then known to 0.1. Tokens may move
apart by as many times the noise."""
FOLLOWS = 0.3
FEWEST = ROWS * DRAWN // 4
"""Comparable tokens below which the probe starts anew, with rows of the next step."""

Drawn = tuple[np.ndarray, np.ndarray]
"""Tokens int64 and their log-probs float32, both shorter where the sampler gave fewer."""
_NONE = np.zeros(0, np.int64)


class SamplerDoesNotFollow(RuntimeError):
    """The trainer's log-probs have moved and the sampler's have not moved with them."""

    explained = True


@dataclass(slots=True)
class ProbeRow:
    """A start of a response and what the sampler drew after it.

    prompt: its name; count: tokens to draw; drawn int64 [count]; sampler, trainer: float32 [count], their log-probs
    under the first weights; None before
    """

    ids: np.ndarray
    media: Media | None
    seed: int
    count: int
    prompt: str = ""
    drawn: np.ndarray = field(default_factory=lambda: _NONE)
    sampler: np.ndarray = field(default_factory=lambda: _NONE)
    trainer: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Moves:
    """Moves of the comparable tokens since the probe's first weights, float64 [N], and the noise of one of them.

    A token whose experts change by rounding moves by any amount, on one side alone: moves count up to twice the median,
    and of what remains between the sides the largest fifth does not count.
    """

    trainer: np.ndarray
    sampler: np.ndarray
    noise: float

    def _limited(self) -> tuple[np.ndarray, np.ndarray]:
        limit = 2 * float(np.median(np.abs(self.trainer))) if len(self.trainer) else 0.0
        return np.clip(self.trainer, -limit, limit), np.clip(self.sampler, -limit, limit)

    @property
    def certain(self) -> bool:
        """True when the trainer has moved enough for a verdict."""
        return float(np.linalg.norm(self._limited()[0])) >= CERTAIN * self.noise

    @property
    def slope(self) -> float:
        """How much of the trainer's moves the sampler made; nan where there is none."""
        trainer, sampler = self._limited()
        total = float(trainer @ trainer)
        return float(trainer @ sampler) / total if total else float("nan")

    @property
    def apart(self) -> float:
        """The largest difference of a token's moves on both sides."""
        return float(np.abs(self.sampler - self.trainer).max(initial=0.0))

    @property
    def follows(self) -> bool:
        """False when it is certain that the sampler has not followed, or when a fifth of its tokens have moved
        apart."""
        if len(self.trainer) < FEWEST:
            return True
        apart = float(np.quantile(np.abs(self.sampler - self.trainer), 0.8))
        # Log-probs that are not finite are another error, which names itself.
        return (not self.certain or self.slope >= FOLLOWS) and not apart >= CERTAIN * self.noise

    def metrics(self) -> dict[str, float]:
        """training/sync_proof/*."""
        moved = float(np.sqrt(np.mean(self.trainer**2))) if len(self.trainer) else 0.0
        named = {"tokens": len(self.trainer), "moved": moved, "apart": self.apart}
        if self.certain:
            named["slope"] = self.slope
        return {f"training/sync_proof/{name}": value for name, value in named.items()}


class SyncProbe:
    """Of one run. Calls come in the order begin, before_update, before_push, after_push of each step."""

    def __init__(self, config: Config, parts: Parts):
        rollout = config.actor_rollout_ref.rollout
        self._parts, self._mode = parts, config.trainer.sync_proof
        # Greedy tokens stay the same for longest; their log-probs are those at temperature 1.
        self._temperature = 0.0 if rollout.temperature == 1 else float(rollout.temperature)
        self._bounds = BOUNDS[precision_of_run(rollout, parts.workers.policy.compute_dtype)]
        self._adapted, self._ahead = reference_is_base(config), config.trainer.max_staleness > 0
        # Log-probs before temperature move otherwise than the trainer's.
        other = rollout.logprobs_mode != "processed_logprobs" and rollout.temperature != 1
        self._on = self._mode != "off" and not other
        model = config.actor_rollout_ref.model
        self._fresh_adapter = self._adapted and not model.lora_adapter_path and not self._ahead
        self._rows: list[ProbeRow] = []
        self._level = True  # both sides have the same weights
        self._now: list[np.ndarray] | None = None
        self._problem = ""
        self._seconds, self._ended = 0.0, -math.inf

    def begin(self, batch: Batch) -> None:
        """Take rows of the step's batch, unless there are some; the sampler is awake."""
        if not self._on or self._rows or not self._level:
            return
        rows = rows_of(batch.segments)
        with self._parts.phases("sync_proof"):
            # All of them have the same weights: what one draws stands for the others.
            for row, (drawn, log_probs) in zip(rows, self._sample(rows)[0], strict=True):
                row.drawn, row.sampler = drawn, log_probs
        self._rows = [row for row in rows if len(row.drawn)]

    def before_update(self, version: int) -> None:
        """The trainer's log-probs under the probe's first weights, of which the sampler has this version."""
        if self._rows and self._level and self._rows[0].trainer is None:
            for row, values in zip(self._rows, self._score(), strict=True):
                row.trainer = values
            if version == 0 and self._fresh_adapter:
                self._prove_adapter(version)
        self._level = False

    def before_push(self) -> None:
        """The trainer's log-probs under the weights that are about to be pushed."""
        if self._rows and time.monotonic() - self._ended >= self._seconds / SHARE:
            self._seconds = time.monotonic()
            self._now = self._score()
            self._seconds = time.monotonic() - self._seconds

    def after_push(self, version: int) -> dict[str, float]:
        """Compare; the sampler is awake and has no other request. Returns metrics; `check` raises later."""
        self._level = True
        now, self._now = self._now, None
        if now is None:
            return {}
        begun = time.monotonic()
        with self._parts.phases("sync_proof"):
            number, moves = self._worst(now)
        self._ended = time.monotonic()
        self._seconds += self._ended - begun
        if not moves.follows:
            self._problem = self._report(version, number, moves)
        if len(moves.trainer) < FEWEST:
            self._rows = []
        return moves.metrics()

    def check(self) -> None:
        """SamplerDoesNotFollow if the last push shows it; with trainer.sync_proof=warn an event and a notice."""
        problem, self._problem = self._problem, ""
        if problem and self._mode == "error":
            raise SamplerDoesNotFollow(problem)
        if problem:
            self._parts.tracking.event("sampler_does_not_follow", message=problem)

    def _prove_adapter(self, version: int) -> None:
        """Before the first step B is 0, and a sampler that applies no adapter agrees: a known one goes in, is seen, and
        goes out. The sampler is asleep before and afterwards."""
        parts = self._parts
        assert parts.workers.weight_sync is not None
        try:
            layers, moves = self._with_adapter(version)
            unapplied = self._unapplied(version, layers) if layers and not _applied(moves) else ""
        finally:
            with parts.colocation.computing(parts.workers.policy):
                parts.workers.policy.fill_adapter(0.0)
        if layers:
            parts.workers.weight_sync.push(version)
        if unapplied:
            self._problem = (
                f"before the first step: a known adapter moves the trainer's log-probs of {len(moves.trainer)} "
                f"tokens, and the sampler's by {max(0.0, moves.slope):.0%} of that: the adapter is not applied as it "
                f"should be in {unapplied}: report it, and try rollout.name=native; trainer.sync_proof=warn goes on"
            )
            self.check()

    def _with_adapter(self, version: int, layers: Collection[str] | None = None) -> tuple[list[str], Moves]:
        """All layers with an adapter, and the moves while it is known in `layers` (None: all) and 0 in others."""
        parts = self._parts
        with parts.colocation.computing(parts.workers.policy):
            names = parts.workers.policy.fill_adapter(self._bounds.known, layers)
        if not names:
            return [], Moves(np.zeros(0), np.zeros(0), 0.0)
        now = self._score()
        assert parts.workers.weight_sync is not None
        parts.workers.weight_sync.push(version)
        parts.colocation.to_sampling()
        _, moves = self._worst(now)
        parts.colocation.to_training()
        return names, moves

    def _unapplied(self, version: int, layers: Sequence[str]) -> str:
        """Which kinds of layers, and which of the numbered ones, the sampler does not apply the adapter in: found by
        sending it in halves of them."""

        def failing(groups: Mapping[str, list[str]]) -> list[str]:
            sent = [name for names in groups.values() for name in names]
            if _applied(self._with_adapter(version, sent)[1]):
                return []
            if len(groups) == 1:
                return list(groups)
            halves = [
                dict([*groups.items()][part]) for part in (slice(len(groups) // 2), slice(len(groups) // 2, None))
            ]
            return [name for half in halves for name in failing(half)]

        parts = []
        for label, key in (("", _kind_of), ("layers ", _number_of)):
            groups: dict[str, list[str]] = {}
            for name in layers:
                groups.setdefault(key(name), []).append(name)
            wrong = failing(groups)
            everywhere = label and len(wrong) == len(groups)
            parts.append(f"all {label}".strip() if everywhere else label + ", ".join(wrong) if wrong else "")
        return " of ".join(part for part in parts if part) or "layers that cannot be told apart"

    def _worst(self, now: list[np.ndarray]) -> tuple[int, Moves]:
        """The number and the moves of the engine that follows least, of all of the sampler's."""
        moves = [self._moves(now, drawn) for drawn in self._sample(self._rows)]
        return max(enumerate(moves), key=lambda pair: (not pair[1].follows, pair[1].apart))

    def _moves(self, now: list[np.ndarray], sampled: list[Drawn]) -> Moves:
        """Of the tokens that the sampler draws again, up to the first other one of each row."""
        trainer, sampler, apart = [], [], []
        for row, values, (drawn, log_probs) in zip(self._rows, now, sampled, strict=True):
            assert row.trainer is not None
            most = min(len(row.drawn), len(drawn))
            same = int(np.cumprod(row.drawn[:most] == drawn[:most]).sum())
            trainer.append(values[:same].astype(np.float64) - row.trainer[:same])
            sampler.append(log_probs[:same].astype(np.float64) - row.sampler[:same])
            apart.append(row.sampler[:same] - row.trainer[:same])
        rounding = np.abs(np.concatenate(apart))
        noise = 1.5 * float(np.median(rounding)) if len(rounding) else 0.0
        return Moves(np.concatenate(trainer), np.concatenate(sampler), float(np.clip(noise, *self._bounds.noise)))

    def _report(self, version: int, number: int, moves: Moves) -> str:
        """What is wrong with the sampler's engine of this number, found by a second push of which every byte is
        compared."""
        facts = f"the trainer's log-probs of {len(moves.trainer)} tokens have moved, and the sampler's by"
        count = len(self._parts.workers.sampler.each_generate)
        where = f" in sampler {number} (of 0 to {count - 1})" if count > 1 else ""
        facts = f"weights of version {version}{where}: {facts} {max(0.0, moves.slope):.0%} of that"
        colocation = self._parts.colocation
        colocation.to_training()
        try:
            assert self._parts.workers.weight_sync is not None
            self._parts.workers.weight_sync.push(version, verify=True)
            again = self._score()
        except WeightSyncError as error:
            return f"{facts}. Not all of them reached it: {error}"
        finally:
            colocation.to_sampling()
        if self._worst(again)[1].follows:
            return (
                f"{facts}. A second push reached it, so the first was lost or undone when the sampler woke: report it"
            )
        if self._agrees_uncached(number):
            return (
                f"{facts}. All weights arrived, and it computes with them where it has nothing cached: it reuses keys "
                "and values of earlier weights: report it, and set rollout.enable_prefix_caching=False"
            )
        adapter = "the adapter is not applied, or " if self._adapted else ""
        return (
            f"{facts}. All weights arrived and it does not compute with them ({adapter}a copy or a cache made from "
            "earlier weights is in use): report it, and try rollout.name=native; trainer.sync_proof=warn goes on"
        )

    def _agrees_uncached(self, number: int) -> bool:
        """Whether both sides agree on rows that were never asked for: those of the probe without their first token."""
        rows = [replace(row, ids=row.ids[1:]) for row in self._rows if len(row.ids) > 1 and row.media is None]
        if not rows:
            return False
        for row, (drawn, log_probs) in zip(rows, self._sample(rows)[number], strict=True):
            row.drawn, row.sampler = drawn, log_probs
        rows = [row for row in rows if len(row.drawn)]
        self._parts.colocation.to_training()
        trainer = self._score(rows)
        self._parts.colocation.to_sampling()
        apart = [np.abs(values - row.sampler) for values, row in zip(trainer, rows, strict=True)]
        return bool(apart) and float(np.median(np.concatenate(apart))) < CERTAIN * self._bounds.noise[0]

    def _score(self, rows: Sequence[ProbeRow] | None = None) -> list[np.ndarray]:
        """The trainer's log-probs of the drawn tokens, row by row; rows: others than the probe's."""
        batch = Batch(
            Trajectory(
                Prompt(f"sync_proof:{row.prompt}", row.ids, None),
                number,
                segments=[Segment(row.ids, row.drawn, np.ones(len(row.drawn), bool), media=row.media)],
            )
            for number, row in enumerate(self._rows if rows is None else rows)
        )
        policy = self._parts.workers.policy
        with self._parts.phases("sync_proof"), self._parts.colocation.computing(policy):
            policy.forward(batch, "sync_proof", {"log_probs": "old_log_probs"})
        return [np.array(trajectory.old_log_probs) for trajectory in batch]

    def _sample(self, rows: list[ProbeRow]) -> list[list[Drawn]]:
        """What each of the sampler's engines draws after each row, of the same random numbers every time; nothing where
        it fails."""
        sampler = self._parts.workers.sampler

        async def ask(number: int, generate: Callable[..., Awaitable[Completion]], row: ProbeRow) -> Completion:
            name = f"sync_proof:{number}:{row.seed}"
            sampling = SamplingParams(row.count, temperature=self._temperature, seed=row.seed, ignore_eos=True)
            return await generate(row.ids, sampling, request_id=name, group=name, media=row.media)

        async def together() -> list[Completion | BaseException]:
            calls = [ask(n, generate, row) for n, generate in enumerate(sampler.each_generate) for row in rows]
            return await asyncio.gather(*calls, return_exceptions=True)

        results = self._parts.loop.run(together())
        if not self._ahead:
            sampler.stats()  # what the probe took is no part of the next step's
        drawn = [(r.token_ids, r.log_probs) if isinstance(r, Completion) else (_NONE, _NONE) for r in results]
        return [drawn[number * len(rows) :][: len(rows)] for number in range(len(sampler.each_generate))]


def _applied(moves: Moves) -> bool:
    return moves.follows and not (moves.certain and abs(moves.slope - 1) > FOLLOWS)


def _kind_of(layer: str) -> str:
    """What a layer is, by its name in a Hugging Face model: q_proj."""
    return layer.rpartition(".")[2]


def _number_of(layer: str) -> str:
    """The number of the decoder layer that it is in."""
    return next((part for part in layer.split(".") if part.isdecimal()), layer)


def rows_of(segments: Iterable[Segment]) -> list[ProbeRow]:
    """Starts of different responses to the shortest prompts, `ROWS` of them or as many as there are; those of a prompt
    are neighbours."""
    usable = (s for s in segments if s.rollout_log_probs is not None and s.response_mask[:PREFIX].any())
    by_prompt: dict[str, list[Segment]] = {}
    for segment in sorted(usable, key=lambda s: len(s.context_ids)):
        by_prompt.setdefault(segment.uid, []).append(segment)
    few = ROWS // PROMPTS
    # Then more of the same prompts, where there are no others.
    chosen = [s for group in by_prompt.values() for s in group[:few]]
    chosen += [s for group in by_prompt.values() for s in group[few:]]
    rows: dict[tuple[bytes, int], ProbeRow] = {}
    for segment in chosen:
        start, own = _start_of(segment), segment.media
        ids = np.concatenate([segment.context_ids, segment.response_ids[:start]]).astype(np.int64)
        count = min(DRAWN, segment.length - start)
        # An image is seen once for each context: a copy for each says so to what counts them.
        row = ProbeRow(ids, None if own is None else _copied(own), len(rows), count, segment.uid)
        rows.setdefault((ids.tobytes(), id(own)), row)
        if len(rows) == ROWS:
            break
    return sorted(rows.values(), key=lambda row: row.prompt)


def _start_of(segment: Segment) -> int:
    """The token that the policy was least sure of; never behind the response."""
    unsure = np.abs(segment.rollout_log_probs[:PREFIX] - UNSURE)
    return int(np.argmin(np.where(segment.response_mask[:PREFIX], unsure, np.inf)))


def _copied(media: Media) -> Media:
    """The same images, kept when the step's are dropped."""
    parts = tuple(_copied(part) for part in media.parts)
    return Media(media.inputs, media.tokens, small=media.small, token=media.token, parts=parts)
