"""Prompts drawn ahead of their step, and the position in the data that a checkpoint must hold.

Weights are pushed every t steps (`trainer.weight_sync_every`): version v is in the sampler for the steps v·t + 1 …
(v + 1)·t. A group that is begun under v is trained at step (v + 1 + max_staleness)·t at the latest: so `due` draws no
further, and a response never lags by more than `max_staleness` versions.

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups whose responses all score the same are replaced by
further prompts.

    live groups, in draw order:   keep  drop  keep  ?  keep  ?    the batch: the first `batch_size` that are kept, once
                                  └──────── judged as they finish  everything drawn before its last member is judged

So the batch does not depend on which group finishes first. While groups are judged, replacements are drawn for those
that were dropped, and for as many as are expected to be, at most `max_inflight` at a time. What was drawn beyond the
batch's last member goes back to the stream, or with max_staleness > 0 serves the next step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from verl.config.reward_weights import SCORES
from verl.config.schema.algorithm import FilterGroupsConfig
from verl.config.schema.entries import Config
from verl.config.schema.trainer import TrainerConfig
from verl.data.stream import PromptStream
from verl.errors import UserError
from verl.rollout.groups import OnProgress, PromptGroup, RolloutManager
from verl.trajectory import Batch, Prompt, Trajectory

_KEYS = "algorithm.filter_groups"
_WITHOUT_SIGNAL = 10  # batches without a single group that is kept before a run without a limit stops


def evict_stale(batch: Iterable[Trajectory], versions: Versions, step: int) -> dict[str, float]:
    """Take out of the step every response with a token that is older than the step's version by more than the bound.

    Such a response has no score any more and is counted as lost. `PromptSchedule` begins none that could become one:
    they come from a sampler that did not get the weights it should have. Returns
    training/off_policy/{evicted,continued}_samples; {} for a bound of 0.
    """
    if not versions.staleness:
        return {}
    rows, oldest, evicted = list(batch), versions.at(step) - versions.staleness, 0
    for row in rows:
        if row.length and row.versions and row.versions[0] < oldest:
            row.score, row.finish_reason = None, "lost"
            row.score_error = f"too stale: written with version {row.versions[0]}, the oldest is {oldest}"
            evicted += 1
    return {
        "training/off_policy/evicted_samples": evicted,
        "training/off_policy/continued_samples": sum("interruptions" in row.extra for row in rows),
    }


@dataclass(frozen=True, slots=True)
class Versions:
    """Which version of the weights the sampler has at a step, and for how many steps it may work ahead.

    every      steps between two pushes
    staleness  versions that a response may lag
    steps      steps whose groups may be begun under one version (None: all that `staleness` allows)
    """

    every: int = 1
    staleness: int = 0
    steps: int | None = None

    @classmethod
    def of(cls, trainer: TrainerConfig) -> Versions:
        """From the `trainer` group."""
        return cls(trainer.weight_sync_every, trainer.max_staleness, trainer.max_steps_per_version)

    def at(self, step: int) -> int:
        """The sampler's version while the groups of `step` are waited for; without late ones they are sampled with
        it."""
        return (step - 1) // self.every

    def last(self, step: int) -> int:
        """The last step whose groups may be begun at `step`."""
        return self.at(step) * self.every + (self.steps or (1 + self.staleness) * self.every)

    def outdated(self, begun: int, step: int) -> bool:
        """True for a group begun at a step whose version is too old for another step."""
        return self.at(step) - self.at(begun) > self.staleness

    def pushed(self, step: int, last_step: int) -> bool:
        """True if weights go to the sampler after `step`: every t steps, and at the end, for the last validation."""
        return step % self.every == 0 or step == last_step


@dataclass(frozen=True, slots=True)
class _Drawn:
    before: dict[str, Any]
    epoch: int
    prompts: int


class PromptSchedule:
    """Draws whole steps in order. `last_step`: none is drawn for a later one. UserError for a sampler that learns from
    the batches trained where prompts are drawn before those."""

    def __init__(self, stream: PromptStream, versions: Versions, *, last_step: int):
        if versions.last(1) > 1 and stream.learns:
            raise UserError(
                f"trainer.max_staleness={versions.staleness}, weight_sync_every={versions.every}: data.sampler has an "
                "update() that learns from each step's batch, and prompts are drawn before the steps ahead of them are "
                "trained; set trainer.max_staleness=0 trainer.weight_sync_every=1, or use a sampler without update()"
            )
        self._stream = stream
        self.versions = versions
        self._last = last_step
        self._drawn: dict[int, _Drawn] = {}
        self.metrics: dict[str, float] = {}

    async def take(self, rollouts: RolloutManager, step: int, on_progress: OnProgress | None = None) -> Batch:
        """The step's groups, oldest draws first; those of the steps that may follow are begun with them."""
        prompts = self.due(step)
        return await rollouts.take(prompts, on_progress, count=self.size(step))

    def due(self, step: int) -> list[Prompt]:
        """Prompts, in draw order, that may start once the weights for `step` are in the sampler."""
        # The step before may still be asked for: the sampler begins on the next one before the loop is done with it.
        self._drawn = {number: drawn for number, drawn in self._drawn.items() if number >= step - 1}
        out: list[Prompt] = []
        next_step = max(step, next(reversed(self._drawn), 0) + 1)
        for number in range(next_step, min(self.versions.last(step), self._last) + 1):
            before = deepcopy(self._stream.state())
            prompts = self._stream.take()
            self._drawn[number] = _Drawn(before, self._stream.epoch, len(prompts))
            out += prompts
        return out

    def size(self, step: int) -> int:
        """Prompts drawn for a step."""
        return self._drawn[step].prompts

    def epoch(self, step: int) -> int:
        """The epoch that a step's last prompt was drawn in."""
        return self._drawn[step].epoch

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint of `step` holds of the loop: the version of its weights, and the stream's position."""
        return {"weight_version": self.versions.at(step) + 1, "data_position": self.position(step)}

    def position(self, step: int) -> dict[str, Any]:
        """The stream's position after `step`: before the first draw that is not trained yet."""
        following = self._drawn.get(step + 1)
        return self._stream.state() if following is None else following.before


def metric_values(metric: str, rows: Iterable[Trajectory]) -> list[float]:
    """A metric of the scored responses: "reward", or a key that the reward function returned. UserError naming the keys
    there are where it is missing."""
    scores = []
    for row in rows:
        if row.score is None:
            continue
        # What a function returns that returns a number is accuracy, too.
        parts = row.score_parts or {"acc": row.score}
        values = parts | dict.fromkeys(SCORES, row.score)
        if metric not in values:
            keys = ", ".join(sorted({"reward", *parts}))
            raise UserError(f"{_KEYS}.metric={metric}: the reward function did not return it; it returned: {keys}")
        scores.append(float(values[metric]))
    return scores


@dataclass(eq=False, slots=True)
class _Live:
    """A group that is drawn and not trained on: the stream's position before it, the step whose sampler began it, and
    once it is judged the metric of its responses."""

    before: dict[str, Any]
    epoch: int
    begun: int
    values: list[float] | None = None

    @property
    def kept(self) -> bool:
        return bool(self.values) and min(self.values or ()) != max(self.values or ())


class DynamicSchedule(PromptSchedule):
    """A schedule that filters groups. `score`: scores what is not scored yet of a group;
    `check`: raises where too many responses could not be scored; `metrics`: what the last `take` did."""

    def __init__(
        self,
        stream: PromptStream,
        rule: FilterGroupsConfig,
        versions: Versions,
        *,
        last_step: int,
        score: Callable[[Batch], Awaitable[None]],
        check: Callable[[Batch], None],
    ):
        super().__init__(stream, versions, last_step=last_step)
        self._rule, self._score, self._check = rule, score, check
        self._live: dict[str, _Live] = {}
        self._step = self._prompts = 0  # the last step that began, and the prompts drawn in it
        self._epoch = int(stream.epoch)

    def size(self, step: int) -> int:
        """Prompts that a step trains on."""
        return int(self._stream.batch_size)

    def epoch(self, step: int) -> int:
        """The epoch of the last prompt that was trained on."""
        return self._epoch

    def position(self, step: int) -> dict[str, Any]:
        """The stream's position before the first prompt that is not trained on yet."""
        first = next(iter(self._live.values()), None)
        return dict(self._stream.state() if first is None else first.before)

    def due(self, step: int) -> list[Prompt]:
        """Prompts that may start once the weights for `step` are in the sampler."""
        if step != self._step:
            self._step, self._prompts = step, 0
        batches = min(self.versions.last(step), self._last) - step + 1
        return self._draw(max(0, batches * self.size(step) - len(self._live)))

    def _draw(self, count: int) -> list[Prompt]:
        prompts = []
        for _ in range(count):
            before = deepcopy(self._stream.state())
            (prompt,) = self._stream.take(1, cross=True)
            self._live[prompt.uid] = _Live(before, self._stream.epoch, self._step)
            prompts.append(prompt)
        self._prompts += count
        return prompts

    async def take(self, rollouts: RolloutManager, step: int, on_progress: OnProgress | None = None) -> Batch:
        """The step's batch: the first groups in draw order whose responses do not all score the same.

        UserError when `limit` batches of prompts were drawn without filling one, or many without any signal at all.
        """
        await rollouts.begin(self.due(step))
        judged: list[PromptGroup] = []
        while (chosen := self._chosen(rollouts.groups)) is None:
            await rollouts.begin(self._draw(self._missing()))
            unjudged = [group for group in rollouts.groups if self._live[group.prompt.uid].values is None]
            for group in await rollouts.completed(unjudged):
                await self._judge(group)
                judged.append(group)
                if on_progress is not None and self._live[group.prompt.uid].kept:
                    on_progress(group.size)
            self._stop_without_signal(judged)
        return await self._take(rollouts, chosen)

    async def _judge(self, group: PromptGroup) -> None:
        rows = Batch([row for row in group.responses if row is not None])
        await self._score(rows)
        self._live[group.prompt.uid].values = metric_values(self._rule.metric, rows)

    def _chosen(self, groups: Sequence[PromptGroup]) -> list[PromptGroup] | None:
        """The groups of the batch, None while it is not known."""
        chosen: list[PromptGroup] = []
        for group in groups:
            live = self._live[group.prompt.uid]
            if live.values is None:
                return None
            if live.kept:
                chosen.append(group)
            if len(chosen) == self.size(self._step):
                return chosen
        return None

    def _missing(self) -> int:
        """Prompts to draw now: as many as will fill the batch if as large a share of them is kept as so far."""
        size = self.size(self._step)
        judged = [live for live in self._live.values() if live.values is not None]
        accepted = sum(live.kept for live in judged)
        under_way = len(self._live) - len(judged)
        share = (accepted + 1) / (len(judged) + 1)
        needed = math.ceil(max(0, size - accepted) / share) - under_way
        ahead = self.versions.last(self._step) - self._step
        room = (self._rule.max_inflight_gen_batches + ahead) * size - under_way
        most = self._rule.max_num_gen_batches * size
        budget = most - self._prompts if most else needed
        return max(0, min(needed, room, budget))

    def _stop_without_signal(self, judged: Sequence[PromptGroup]) -> None:
        size = self.size(self._step)
        if len(judged) >= size:
            self._check(Batch([row for group in judged for row in group.responses if row is not None]))
        lives = [live for live in self._live.values() if live.values is not None]
        accepted = sum(live.kept for live in lives)
        complete = len(lives) == len(self._live)
        most = self._rule.max_num_gen_batches * size
        exhausted = most and self._prompts >= most and accepted < size and complete
        hopeless = not accepted and len(lives) >= max(_WITHOUT_SIGNAL * size, self._stream.rows_per_epoch)
        if not (exhausted or hopeless):
            return
        shares = Counter(live.values[0] for live in lives if live.values and not live.kept)
        at = ", ".join(f"{n / len(lives):.0%} all at {value:g}" for value, n in sorted(shares.items()))
        raise UserError(
            f"dynamic sampling judged {len(lives)} groups in step {self._step} and kept {accepted} of the {size} "
            f"it needs ({at or 'no response was scored'}). All at the lowest value: the data is too hard for "
            f"the model; all at the highest: too easy. Use other data, a larger rollout.n, "
            f"or a higher {_KEYS}.max_num_gen_batches"
        )

    async def _take(self, rollouts: RolloutManager, chosen: list[PromptGroup]) -> Batch:
        """The chosen groups as a batch; what was drawn before their last is done with, what was drawn after it waits or
        goes back."""
        last = rollouts.groups.index(chosen[-1]) + 1
        used, surplus = rollouts.groups[:last], rollouts.groups[last:]
        self._count(used)
        self._epoch = self._live[chosen[-1].prompt.uid].epoch
        for group in used:
            del self._live[group.prompt.uid]
        if surplus and self.versions.outdated(self._live[surplus[0].prompt.uid].begun, self._step + 1):
            await self._return_to_stream(rollouts, surplus)
        await rollouts.release([group for group in used if group not in chosen])
        return await rollouts.collect(chosen)

    async def _return_to_stream(self, rollouts: RolloutManager, groups: Sequence[PromptGroup]) -> None:
        """These groups, which would be older than allowed in the next step, go back to the stream."""
        discarded = sum(self._live[group.prompt.uid].values is not None for group in groups)
        self.metrics["training/filter_groups/discarded_surplus_samples"] = discarded
        self._stream.load_state(self._live[groups[0].prompt.uid].before)
        await rollouts.release(groups)
        for group in groups:
            del self._live[group.prompt.uid]

    def _count(self, used: Sequence[PromptGroup]) -> None:
        lives = [self._live[group.prompt.uid] for group in used]
        every = [value for live in lives for value in live.values or ()]
        best, worst = max(every, default=0.0), min(every, default=0.0)
        same = [live.values[0] for live in lives if live.values and not live.kept]
        total = max(1, len(lives))
        self.metrics = {
            "training/filter_groups/evicted_samples": sum(not self._live[g.prompt.uid].kept for g in used),
            "training/filter_groups/discarded_surplus_samples": 0,
            "training/filter_groups/gen_prompts": self._prompts,
            "training/filter_groups/all_max_ratio": sum(value == best for value in same) / total,
            "training/filter_groups/all_min_ratio": sum(value == worst for value in same) / total,
        }


def open_schedule(config: Config, stream: PromptStream, rewards: Any, last_step: int) -> PromptSchedule:
    """What decides which groups a step trains on: those drawn for it, or with `algorithm.filter_groups` those with
    signal."""
    versions, groups = Versions.of(config.trainer), config.algorithm.filter_groups
    if not groups.enable:
        return PromptSchedule(stream, versions, last_step=last_step)
    return DynamicSchedule(
        stream,
        groups,
        versions,
        last_step=last_step,
        score=rewards.score_batch,
        check=rewards.check_errors,
    )
