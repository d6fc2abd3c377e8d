"""The group buffer: draw order, completeness, no answer twice."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.rollout.groups import GroupBuffer
from verl.trajectory import Prompt, Trajectory


def _prompt(number: int) -> Prompt:
    return Prompt(uid=f"0:{number}@0", ids=np.arange(3), messages="q")


def _response(prompt: Prompt, index: int) -> Trajectory:
    return Trajectory(prompt, index, np.arange(2), np.ones(2, bool))


@given(st.integers(1, 6), st.integers(1, 4), st.randoms(use_true_random=False))
def test_batch_is_in_draw_order_whatever_finishes_first(prompts: int, n: int, rng: random.Random) -> None:
    buffer = GroupBuffer(n)
    groups = buffer.add(_prompt(i) for i in range(prompts))
    assert buffer.start() == groups
    responses = [(g, i) for g in groups for i in range(n)]
    rng.shuffle(responses)
    completed = [buffer.finish(g, _response(g.prompt, i)) for g, i in responses]
    assert sum(completed) == prompts
    taken = buffer.take(prompts)
    assert [g.prompt.uid for g in taken] == [f"0:{i}@0" for i in range(prompts)]
    assert [[t.index for t in g.trajectories] for g in taken] == [list(range(n))] * prompts
    assert buffer.counts == {"waiting": 0, "in_flight": 0, "done": 0}


def test_take_refuses_while_an_older_group_is_unfinished() -> None:
    buffer = GroupBuffer(1)
    first, second = buffer.add([_prompt(0), _prompt(1)])
    buffer.start()
    buffer.finish(second, _response(second.prompt, 0))
    with pytest.raises(ValueError, match="older ones unfinished"):
        buffer.take(1)
    buffer.finish(first, _response(first.prompt, 0))
    assert [g.draw for g in buffer.take(2)] == [0, 1]


def test_the_same_answer_twice_is_an_error() -> None:
    buffer = GroupBuffer(2)
    (group,) = buffer.add([_prompt(0)])
    buffer.start()
    buffer.finish(group, _response(group.prompt, 0))
    with pytest.raises(ValueError, match="came back twice"):
        buffer.finish(group, _response(group.prompt, 0))
    assert buffer.counts["in_flight"] == 1


def test_start_honours_its_limit() -> None:
    buffer = GroupBuffer(1)
    buffer.add(_prompt(i) for i in range(5))
    assert [g.draw for g in buffer.start(2)] == [0, 1]
    assert buffer.counts == {"waiting": 3, "in_flight": 2, "done": 0}
    assert [g.draw for g in buffer.start()] == [2, 3, 4]
