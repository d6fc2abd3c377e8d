"""Prompts drawn ahead of their step, and the position in the data that a checkpoint must hold.

Weights are pushed every t steps (`trainer.weight_sync_every`): version v is in the sampler for the steps v·t + 1 …
(v + 1)·t. A group that is begun under v is trained at step (v + 1 + max_staleness)·t at the latest: so `due` draws no
further, and a response never lags by more than `max_staleness` versions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl.errors import UserError
from verl.trajectory import Prompt, Trajectory

if TYPE_CHECKING:
    from verl.data.stream import PromptStream
    from verl.rollout.manager import RolloutManager
    from verl.trajectory import Batch


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
    def of(cls, trainer: Any) -> Versions:
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


def check_learning(stream: PromptStream, versions: Versions) -> None:
    """UserError for a sampler that learns from the batches trained where prompts are drawn before those."""
    if versions.last(1) > 1 and stream.learns:
        raise UserError(
            f"trainer.max_staleness={versions.staleness}, weight_sync_every={versions.every}: "
            "data.sampler has an update() that learns from each step's batch, and prompts are drawn "
            "before the steps ahead of them are trained; set trainer.max_staleness=0 trainer.weight_sync_every=1, "
            "or use a sampler without update()"
        )


@dataclass(frozen=True, slots=True)
class _Drawn:
    before: dict[str, Any]
    epoch: int
    prompts: int


class PromptSchedule:
    """Draws whole steps in order. `last_step`: none is drawn for a later one."""

    def __init__(self, stream: PromptStream, versions: Versions, *, last_step: int):
        check_learning(stream, versions)
        self._stream = stream
        self.versions = versions
        self._last = last_step
        self._drawn: dict[int, _Drawn] = {}
        self.metrics: dict[str, float] = {}

    async def take(
        self, rollouts: RolloutManager, step: int, on_progress: Callable[[int], None] | None = None
    ) -> Batch:
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
