"""Groups on their way from a prompt to the batch: waiting → in flight → done → taken.

Pure bookkeeping, no engine and no clock: it decides which groups may start, which are complete, and which
ones make up the next batch, always in draw order, so that a batch does not depend on who finishes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from verl.trajectory import Prompt, Trajectory


@dataclass(slots=True, eq=False)
class PromptGroup:
    """The responses to one prompt. `responses[i]` is None until response i is back."""

    prompt: Prompt
    size: int
    draw: int
    responses: list[Trajectory | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.responses = [None] * self.size

    @property
    def done(self) -> bool:
        """True once every response is back."""
        return all(response is not None for response in self.responses)

    @property
    def trajectories(self) -> list[Trajectory]:
        """The responses that are back, by number."""
        return [response for response in self.responses if response is not None]


class GroupBuffer:
    """Groups by state. `draw` numbers grow for the whole run, so order survives refills and resumes."""

    def __init__(self, size: int):
        if size < 1:
            raise ValueError(f"a group needs at least one response, got rollout.n={size}")
        self._size = size
        self._draws = 0
        self._waiting: OrderedDict[int, PromptGroup] = OrderedDict()
        self._in_flight: OrderedDict[int, PromptGroup] = OrderedDict()
        self._done: OrderedDict[int, PromptGroup] = OrderedDict()

    def add(self, prompts: Iterable[Prompt]) -> list[PromptGroup]:
        """Queue prompts in draw order; returns their groups."""
        groups = []
        for prompt in prompts:
            group = PromptGroup(prompt, self._size, self._draws)
            self._waiting[self._draws] = group
            self._draws += 1
            groups.append(group)
        return groups

    def start(self, limit: int | None = None) -> list[PromptGroup]:
        """Move up to `limit` waiting groups (None: all) to in flight, oldest draw first."""
        started: list[PromptGroup] = []
        while self._waiting and (limit is None or len(started) < limit):
            draw, group = self._waiting.popitem(last=False)
            self._in_flight[draw] = group
            started.append(group)
        return started

    def finish(self, group: PromptGroup, trajectory: Trajectory) -> bool:
        """Record one response; True if it completed the group. ValueError if that response is already there."""
        if group.responses[trajectory.index] is not None:
            raise ValueError(f"response {trajectory.index} of {group.prompt.uid} came back twice")
        group.responses[trajectory.index] = trajectory
        if not group.done:
            return False
        self._done[group.draw] = self._in_flight.pop(group.draw)
        return True

    def oldest(self, count: int) -> list[PromptGroup]:
        """The first `count` groups in draw order, whatever their state. ValueError if there are fewer."""
        known = self._waiting | self._in_flight | self._done
        if len(known) < count:
            raise ValueError(f"asked for {count} groups, {len(known)} are drawn")
        return [known[draw] for draw in sorted(known)[:count]]

    def take(self, count: int) -> list[PromptGroup]:
        """Remove and return the first `count` groups in draw order.

        ValueError while an older group is still waiting or in flight, or fewer than `count` are done.
        """
        draws = sorted(self._done)[:count]
        older = [d for d in (*self._waiting, *self._in_flight) if draws and d < draws[-1]]
        if len(draws) < count or older:
            raise ValueError(
                f"asked for {count} groups, {len(draws)} done, {len(older)} older ones unfinished"
            )
        return [self._done.pop(draw) for draw in draws]

    @property
    def counts(self) -> dict[str, int]:
        """Groups per state, for the watchdog's report."""
        return {"waiting": len(self._waiting), "in_flight": len(self._in_flight), "done": len(self._done)}
