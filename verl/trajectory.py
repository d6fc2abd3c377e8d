"""The data types that travel between the parts: Prompt, Trajectory, Batch. Plain numpy, no torch.

Sequences are ragged: every trajectory owns one array per token-level column, of its own length L.
Padding exists only inside the math that wants a rectangle: `Batch.padded` makes one, `Batch.fill`
takes one apart again. The responses to one prompt form a group and stay together everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(slots=True, eq=False)
class Prompt:
    """One row of the data, rendered and tokenised once.

    `uid` is unique within a run: "{file number}:{row}@{epoch}". `ids` is int64 [P].
    `file` and `row` (0-based) are for error messages.
    """

    uid: str
    ids: np.ndarray
    messages: Any
    data_source: str = ""
    ground_truth: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    file: str = ""
    row: int = -1
    epoch: int = 0
    agent_name: str | None = None
    media: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Trajectory:
    """One sampled response. L counts all tokens after the prompt, tool and environment text included.

    response_ids        int64   [L]
    response_mask       bool    [L]  True where the policy wrote the token
    rollout_log_probs   float32 [L]  log-prob under the distribution sampled from; 0 where mask is False
    versions            weight versions that wrote tokens, oldest first, without repeats
    score               float, or None while unscored or when scoring failed (then `score_error` says why)
    score_parts         what else the reward function returned
    The remaining arrays are float32 [L] (loss_mask: bool [L]) and None until a phase fills them.
    """

    prompt: Prompt
    index: int
    response_ids: np.ndarray
    response_mask: np.ndarray
    rollout_log_probs: np.ndarray | None = None
    finish_reason: str = "stop"
    versions: tuple[int, ...] = (0,)
    text: str | None = None
    num_turns: int = 2
    score: float | None = None
    score_parts: dict[str, Any] = field(default_factory=dict)
    score_error: str | None = None
    timing: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    token_rewards: np.ndarray | None = None
    old_log_probs: np.ndarray | None = None
    ref_log_probs: np.ndarray | None = None
    entropy: np.ndarray | None = None
    values: np.ndarray | None = None
    advantages: np.ndarray | None = None
    returns: np.ndarray | None = None
    loss_mask: np.ndarray | None = None
    is_weights: np.ndarray | None = None

    @property
    def length(self) -> int:
        """Number of response tokens L."""
        return len(self.response_ids)

    @property
    def policy_tokens(self) -> int:
        """Number of tokens the policy wrote, K."""
        return int(np.count_nonzero(self.response_mask))

    @property
    def uid(self) -> str:
        """The group's key."""
        return self.prompt.uid

    @property
    def scored(self) -> bool:
        """True once a valid score is there; a failed score never becomes a number."""
        return self.score is not None


_FILL = {"response_mask": False, "loss_mask": False}


class Batch:
    """Trajectories of one step, members of a group adjacent, groups in draw order.

    `meta` holds scalars about the batch (temperature, step, weight version).
    """

    def __init__(self, trajectories: Iterable[Trajectory], meta: dict[str, Any] | None = None):
        self.trajectories: list[Trajectory] = list(trajectories)
        self.meta: dict[str, Any] = dict(meta or {})

    def __len__(self) -> int:
        return len(self.trajectories)

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    def __getitem__(self, i: int) -> Trajectory:
        return self.trajectories[i]

    @property
    def lengths(self) -> np.ndarray:
        """Response lengths, int64 [N]."""
        return np.fromiter((t.length for t in self.trajectories), np.int64, len(self))

    @property
    def prompt_lengths(self) -> np.ndarray:
        """Prompt lengths, int64 [N]."""
        return np.fromiter((len(t.prompt.ids) for t in self.trajectories), np.int64, len(self))

    @property
    def uids(self) -> np.ndarray:
        """Group keys, object [N]."""
        return np.array([t.uid for t in self.trajectories], dtype=object)

    def groups(self) -> list[list[Trajectory]]:
        """Trajectories by group, in order. A uid that comes back later joins its first group."""
        found: dict[str, list[Trajectory]] = {}
        for t in self.trajectories:
            found.setdefault(t.uid, []).append(t)
        return list(found.values())

    def has(self, column: str) -> bool:
        """True if every trajectory carries the token-level column."""
        return all(getattr(t, column) is not None for t in self.trajectories)

    def flat(self, column: str, dtype: Any = None) -> np.ndarray:
        """All tokens of a column, concatenated: [ΣL]. Raises ValueError if a trajectory lacks it."""
        parts = []
        for t in self.trajectories:
            value = getattr(t, column)
            if value is None:
                raise ValueError(f"column {column!r} is missing on response {t.index} of {t.uid}")
            parts.append(value)
        joined = np.concatenate(parts) if parts else np.zeros(0, np.float32)
        return joined.astype(dtype) if dtype is not None else joined

    def padded(self, column: str, dtype: Any = np.float32, width: int | None = None) -> np.ndarray:
        """[N, width or max L] with zeros on the right."""
        lengths = self.lengths
        columns = int(lengths.max()) if len(lengths) and width is None else int(width or 0)
        out = np.zeros((len(self), columns), dtype=dtype)
        for row, t in zip(out, self.trajectories, strict=True):
            row[: t.length] = getattr(t, column)
        return out

    def fill(self, column: str, padded: np.ndarray) -> None:
        """Take a rectangle [N, ≥ max L] apart into the ragged column; loss_mask becomes bool, others float32."""
        kind = bool if column in _FILL else np.float32
        for row, t in zip(padded, self.trajectories, strict=True):
            setattr(t, column, np.ascontiguousarray(row[: t.length], dtype=kind))

    def fill_flat(self, column: str, flat: np.ndarray) -> None:
        """Inverse of `flat`: split [ΣL] into the ragged column."""
        kind = bool if column in _FILL else np.float32
        ends = np.cumsum(self.lengths)
        if len(flat) != (ends[-1] if len(ends) else 0):
            raise ValueError(f"{column}: {len(flat)} values for {ends[-1] if len(ends) else 0} tokens")
        for part, t in zip(np.split(np.asarray(flat, dtype=kind), ends[:-1]), self.trajectories, strict=True):
            setattr(t, column, part)


def split_groups(groups: Sequence[list[Trajectory]], parts: int) -> list[list[list[Trajectory]]]:
    """Split groups, in order, into `parts` runs whose sizes differ by at most one group; none is cut."""
    parts = max(1, min(parts, len(groups)))
    size, extra = divmod(len(groups), parts)
    out, start = [], 0
    for i in range(parts):
        end = start + size + (1 if i < extra else 0)
        out.append(list(groups[start:end]))
        start = end
    return out
