"""Weights of turns and of the roles that spoke between them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.tiny import tiny_tokenizer
from verl.data.loss_weights import LossWeights
from verl.data.rows import ChatRenderer
from verl.trajectory import Batch, Prompt, Segment, Trajectory

MESSAGES = [("user", "Hi"), ("assistant", "a"), ("tool", "42"), ("assistant", "bb"), ("user", "no"), ("assistant", "c")]


@pytest.mark.parametrize("cut", [False, True])
def test_turns_and_roles(cut: bool) -> None:
    """What follows the first turn is a tool's message, what follows the second the user's."""
    tokenizer = tiny_tokenizer()
    renderer = ChatRenderer(tokenizer)
    dialogue = [{"role": role, "content": content} for role, content in MESSAGES]
    context = renderer.ids(renderer.text(dialogue[:1]))
    ids, mask = [context], [np.zeros(len(context), bool)]
    for number in (2, 4, 6):
        whole = renderer.ids(renderer.text(dialogue[:number], generation=False))
        written = len(tokenizer.encode(MESSAGES[number - 1][1] + "<|im_end|>", add_special_tokens=False))
        before = sum(map(len, ids))
        end = np.flatnonzero(whole == tokenizer.eos_token_id)[number - 1] + 1
        ids += [whole[before : end - written], whole[end - written : end]]
        mask += [np.zeros(len(ids[-2]), bool), np.ones(written, bool)]
    flat, policy = np.concatenate(ids), np.concatenate(mask)
    starts = [len(context), len(context) + 9] if cut else [len(context)]
    segments = [
        Segment(flat[:a], flat[a:b], policy[a:b], advantages=np.where(policy[a:b], 2.0, 0.0).astype(np.float32))
        for a, b in zip(starts, [*starts[1:], len(flat)], strict=True)
    ]
    row = Trajectory(Prompt("a", context, []), 0, segments=segments)
    batch = Batch([row])
    assert LossWeights([1.0, 0.5, 0.25], {"tool": 3.0, "user": 0.0}, renderer)(batch, 1) is batch
    turns = np.concatenate([np.repeat([0, 1, 2], [2, 3, 2])])
    assert row.advantages[row.response_mask].tolist() == [[2.0, 1.0, 0.5][turn] for turn in turns]
    observed = row.observation_weights[~row.response_mask]
    said = [len(part) for part, own in zip(ids[1:], mask[1:], strict=True) if not own.any()]
    wanted = np.repeat([1.0, 3.0, 0.0], said) if not cut else None
    if wanted is not None:
        assert observed.tolist() == wanted.tolist()
    assert not row.observation_weights[row.response_mask].any()
    plain = LossWeights([], {}, renderer)
    plain(batch, 1)
    assert set(row.observation_weights[~row.response_mask]) == {1.0}
