"""The actor role: mini-batches, what is skipped, what is counted."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from verl.workers.actor import Actor

from tests.unit.engine_cases import rows_of
from verl.engine.training.base import StepResult
from verl.engine.training.packing import MicroBatching, pack, split_rows
from verl.trajectory import Batch


class Counting:
    """An engine that packs and counts, and computes nothing."""

    def __init__(self, share: bool):
        self.how = MicroBatching(share_prompt=share)

    def step(self, rows, loss, *, temperature, entropy=False):
        size = sum(pack(chunk, self.how).size for chunk in split_rows(rows, self.how))
        return StepResult({}, 1.0, "", size)

    def advance(self):
        return 0.1

    def on_device(self, *, optimizer=False):
        return nullcontext()


def update(groups, share, unusable=()):
    rows = rows_of(groups)
    for i, row in enumerate(rows):
        row.loss_mask = np.full(row.length, i not in unusable)
    actor = SimpleNamespace(ppo_mini_batch_size=1, ppo_epochs=1, shuffle=False)
    role = Actor(Counting(share), actor, temperature=1.0, max_response_length=8, batch_prompts=len(groups))
    return role.update(Batch(rows), step=1)


@pytest.mark.parametrize("unusable", [(), (0, 4)])
def test_without_shared_prompts_nothing_counts_as_saved(unusable):
    out = update([(5, [3, 1, 4]), (7, [2, 6])], share=False, unusable=unusable)
    assert out.tokens == out.computed > 0


def test_shared_prompts_are_the_tokens_saved():
    out = update([(5, [3, 1, 4]), (7, [2, 6, 0])], share=True)
    assert out.tokens - out.computed == 2 * 5 + 7


def test_a_mini_batch_without_a_token_is_skipped():
    out = update([(5, [3, 1]), (7, [2, 6])], share=True, unusable=(0, 1))
    assert (out.updates, out.skipped) == (1, 1)
