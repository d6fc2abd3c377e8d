"""Rows as flat arrays, for the way between the driver and a worker, and back again.

    rows ──encode──▶ {"header": JSON as bytes, "response_ids": int32 [ΣL], "advantages": float32 [ΣL], …} ──decode──▶ rows
    rows ◀──fill── {"old_log_probs": float32 [ΣL], …} ◀──collect── rows

Only arrays and JSON travel, and of the columns only those a call needs. A prompt goes once per group. Each column is
one array, so that the cost is that of copying memory and not of visiting tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verl.trajectory import Prompt, Trajectory

Payload = dict[str, np.ndarray]
"""What travels. Every value is a flat array of numbers; "header" is UTF-8 JSON."""

MASKS = ("response_mask", "loss_mask")
FLOATS = (
    "rollout_log_probs",
    "token_rewards",
    "old_log_probs",
    "ref_log_probs",
    "entropy",
    "values",
    "advantages",
    "returns",
    "is_weights",
)
OPTIONAL = ("loss_mask", *FLOATS)
"""Columns that a row may be without."""


def encode(rows: Sequence[Trajectory], columns: Sequence[str] = ()) -> Payload:
    """Prompt ids, response ids, `response_mask`, and of `columns` (names of `OPTIONAL`) what the rows have.

    ValueError for an unknown column, for a column whose length is not the row's, and for a prompt with images or
    videos, whose arrays have no place here yet.
    """
    prompts: dict[int, int] = {}
    distinct: list[Prompt] = []
    places = np.empty(len(rows), np.int32)
    for i, row in enumerate(rows):
        key = id(row.prompt)
        if key not in prompts:
            prompts[key] = len(distinct)
            distinct.append(row.prompt)
        places[i] = prompts[key]
    for prompt in distinct:
        if prompt.media:
            raise ValueError(f"prompt {prompt.uid} has media, which cannot be sent to another process yet")
    out: Payload = {
        "lengths": np.fromiter((row.length for row in rows), np.int32, len(rows)),
        "index": np.fromiter((row.index for row in rows), np.int32, len(rows)),
        "prompt": places,
        "prompt_lengths": np.fromiter((len(p.ids) for p in distinct), np.int32, len(distinct)),
        "prompt_ids": _join([p.ids for p in distinct], np.int32),
        "response_ids": _join([row.response_ids for row in rows], np.int32),
        "response_mask": _join([row.response_mask for row in rows], bool),
    }
    held = {name: _add_column(out, rows, name) for name in columns}
    header = {
        "uids": [p.uid for p in distinct],
        "partial": [n for n, whole in held.items() if whole is False],
    }
    out["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    return out


def _add_column(out: Payload, rows: Sequence[Trajectory], name: str) -> bool | None:
    """Put a column in; True if all rows have it, False if some, None (and nothing put) if none."""
    if name not in OPTIONAL:
        raise ValueError(f"{name!r} is no column that travels; known: {', '.join(OPTIONAL)}")
    present = np.fromiter((getattr(row, name) is not None for row in rows), bool, len(rows))
    if not present.any():
        return None
    have = [row for row, there in zip(rows, present, strict=True) if there]
    joined = _join([getattr(row, name) for row in have], bool if name in MASKS else np.float32)
    expected = sum(row.length for row in have)
    if len(joined) != expected:
        raise ValueError(f"column {name}: {len(joined)} values for {expected} response tokens")
    out[name] = joined
    whole = bool(present.all())
    if not whole:
        out[f"has.{name}"] = present
    return whole


def decode(payload: Mapping[str, np.ndarray]) -> list[Trajectory]:
    """The rows again; rows of a prompt share one Prompt. Float columns and masks are views of the payload.

    Only what `encode` was given comes back: texts, scores and timings stay with the driver.
    """
    header: dict[str, Any] = json.loads(payload["header"].tobytes())
    prompts = [
        Prompt(uid, ids, messages=None)
        for uid, ids in zip(
            header["uids"],
            _cut(payload["prompt_ids"].astype(np.int64), payload["prompt_lengths"]),
            strict=True,
        )
    ]
    lengths = payload["lengths"]
    ids = _cut(payload["response_ids"].astype(np.int64), lengths)
    masks = _cut(payload["response_mask"], lengths)
    rows = [
        Trajectory(prompts[place], index, response_ids=i, response_mask=mask)
        for place, index, i, mask in zip(
            payload["prompt"].tolist(), payload["index"].tolist(), ids, masks, strict=True
        )
    ]
    for name in OPTIONAL:
        if name in payload:
            fill(rows, {name: payload[name], **_presence(payload, name)})
    return rows


def collect(rows: Sequence[Trajectory], columns: Sequence[str]) -> Payload:
    """Columns alone, in the order of the rows: the response to a call. A column that no row has is left out."""
    out: Payload = {}
    for name in columns:
        _add_column(out, rows, name)
    return out


def fill(rows: Sequence[Trajectory], columns: Mapping[str, np.ndarray]) -> None:
    """Inverse of `collect`, on the same rows in the same order. ValueError if the number of tokens differs."""
    for name, flat in columns.items():
        if name.startswith("has."):
            continue
        present = columns.get(f"has.{name}")
        have = rows if present is None else [row for row, there in zip(rows, present, strict=True) if there]
        lengths = np.fromiter((row.length for row in have), np.int64, len(have))
        if len(flat) != lengths.sum():
            raise ValueError(f"column {name}: {len(flat)} values for {lengths.sum()} response tokens")
        for row, part in zip(have, _cut(flat, lengths), strict=True):
            setattr(row, name, part)


def nbytes(payload: Mapping[str, np.ndarray]) -> int:
    """Bytes that travel."""
    return sum(array.nbytes for array in payload.values())


def _presence(payload: Mapping[str, np.ndarray], name: str) -> Payload:
    key = f"has.{name}"
    return {key: payload[key]} if key in payload else {}


def _join(parts: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    """Concatenate and convert in one pass."""
    total = sum(len(part) for part in parts)
    out = np.empty(total, dtype)
    if total:
        np.concatenate(parts, out=out, casting="unsafe")
    return out


def _cut(flat: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Views of the consecutive parts."""
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    return [flat[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]
