"""Weights of turns and of roles in the loss: of what the policy wrote, and of what its environment said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from verl.data.rows import BadRow, ChatRenderer
from verl.trajectory import Batch, Segment

_MARK = "\u00a7b\u00a7"
"""A content that no template writes."""


class LossWeights:
    """The advantages of a response's n-th turn, a run of policy tokens, × turns[n] (the last one for all later turns);
    the column `observation_weights` of what was said after it is that × roles[role], 1 for a role without a weight.

    The role is that of the first message in the run, known by what the chat template writes before its content.
    """

    def __init__(self, turns: Sequence[float], roles: Mapping[str, float], renderer: ChatRenderer):
        self._turns, self._roles = tuple(turns) or (1.0,), roles
        self._tokenizer = renderer.tokenizer
        headers = {role: _header(renderer, role) for role in roles}
        # The longest first: a tool's message may be one of the user that begins in its own way.
        self._headers = sorted(((h, role) for role, h in headers.items() if h), key=lambda entry: -len(entry[0]))

    def __call__(self, batch: Batch, step: int) -> Batch:
        """The batch, its columns weighed."""
        for t in batch:
            turn = -1
            for segment in t.segments:
                turn = self._weigh(segment, turn)
        return batch

    def _weigh(self, segment: Segment, turn: int) -> int:
        """Weigh a segment whose response follows turn `turn`; returns the last turn in it."""
        mask = np.asarray(segment.response_mask, bool)
        weights = np.ones(len(mask), np.float32)
        for run in np.split(np.arange(len(mask)), np.flatnonzero(mask[1:] != mask[:-1]) + 1):
            if not len(run):
                continue
            turn += bool(mask[run[0]])
            weights[run] = self._turns[min(max(turn, 0), len(self._turns) - 1)]
            if self._roles and not mask[run[0]]:
                weights[run] *= self._role(segment.response_ids[run])
        if segment.column("advantages") is not None:
            segment.put("advantages", np.where(mask, segment.advantages * weights, segment.advantages))
        segment.put("observation_weights", np.where(mask, np.float32(0), weights))
        return turn

    def _role(self, ids: np.ndarray) -> float:
        text = self._tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False).lstrip()
        return float(next((self._roles[role] for header, role in self._headers if text.startswith(header)), 1.0))


def _header(renderer: ChatRenderer, role: str) -> str:
    """What the template writes between a turn's end token and the content of a message of this role; "" if nothing, or
    where it has no such role."""
    if not renderer.has_template:
        return ""
    before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}]
    try:
        one, two = (
            renderer.text([*before, {"role": role, "content": content}], generation=False).split(_MARK)[-1]
            for content in ("1", "2")
        )
    except BadRow:
        return ""
    common = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False)))
    return common.lstrip().removeprefix(renderer.tokenizer.eos_token or "").lstrip()


def loss_weights(actor: Any, tokenizer: Any, kwargs: Mapping[str, Any]) -> LossWeights | None:
    """Those of the group `actor_rollout_ref.actor`; None where it has none."""
    if not actor.turn_weights and not actor.observation_loss_roles:
        return None
    return LossWeights(actor.turn_weights or (), actor.observation_loss_roles, ChatRenderer(tokenizer, kwargs))
