"""What travels between the driver and a worker, as flat arrays and JSON-like values.

    segments  ──encode──▶ {"context_ids": int32 [ΣP], "lengths": int32 [N], "columns": {…}} ──decode──▶ segments
    segments ◀──fill──── {"old_log_probs": float32 [ΣL], …} ◀──collect── segments
    requests  ──encode_requests──▶ decode_requests      results ──encode_results──▶ decode_results

Only the columns that a call needs travel, each as one array: the cost is that of copying memory, not of visiting
tokens. A context goes once for all segments that share it. The inputs of images go beside a payload, in the order of
`distinct_media`, so that the sender can send them once for several payloads. `verl.trajectory.COLUMNS` defines the
columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from operator import attrgetter
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from verl.engine.rollout.base import Completion, SamplingParams
from verl.trajectory import COLUMNS, Media, Segment

Payload = dict[str, Any]
"""What travels. Values are arrays of numbers, mappings of such arrays, and JSON-like values."""

_ALWAYS = ("response_ids", "response_mask")
_OF_ROWS = ("context", "index", "shared")
_ON_THE_WAY = {"response_ids": np.int32}
_SAMPLING = attrgetter(*(field.name for field in fields(SamplingParams)))
_PRESENT, _CONTEXTS, _PLACES, _BYTES = "has.", "contexts.", "context.", "bytes."
_MEDIA: WeakValueDictionary[str, Media] = WeakValueDictionary()


# -- segments ----------------------------------------------------------------------------------------------------


def encode(rows: Sequence[Segment], columns: Sequence[str] = ()) -> Payload:
    """Contexts, response ids, `response_mask`, and of `columns` what the rows have.

    ValueError for an unknown column, and for a column whose length is not the row's.
    """
    places: dict[tuple[str, int, int], int] = {}
    distinct: list[Segment] = []
    place_of = np.empty(len(rows), np.int32)
    for i, row in enumerate(rows):
        key = row.uid, id(row.context_ids), id(row.media)
        if key not in places:
            places[key] = len(distinct)
            distinct.append(row)
        place_of[i] = places[key]
    return {
        "uids": [row.uid for row in distinct],
        "context": place_of,
        "context_lengths": _lengths(row.context_ids for row in distinct),
        "context_ids": _join([row.context_ids for row in distinct], np.int32),
        "index": np.fromiter((row.index for row in rows), np.int32, len(rows)),
        "shared": np.fromiter((row.shared for row in rows), np.int32, len(rows)),
        "lengths": np.fromiter((row.length for row in rows), np.int32, len(rows)),
        "columns": collect(rows, [*_ALWAYS, *columns]),
        **_encode_media([row.media for row in distinct]),
    }


def decode(payload: Mapping[str, Any], inputs: Sequence[Mapping[str, np.ndarray]] = ()) -> list[Segment]:
    """The segments again; those with the same context share its array. Float columns and masks are views of the
    payload. inputs: those of `distinct_media(rows)`.

    Only what `encode` was given comes back: texts, scores and timings stay with the driver.
    """
    contexts = _cut(payload["context_ids"].astype(np.int64), payload["context_lengths"].tolist())
    columns = dict(payload["columns"])
    lengths = payload["lengths"].tolist()
    ids = _cut(columns.pop("response_ids").astype(np.int64), lengths)
    masks = _cut(columns.pop("response_mask"), lengths)
    uids, media = payload["uids"], _decode_media(payload, len(contexts), inputs)
    rows = [
        Segment(contexts[place], own_ids, mask, media=media[place], shared=shared, uid=uids[place], index=index)
        for place, index, shared, own_ids, mask in zip(
            *(payload[n].tolist() for n in _OF_ROWS), ids, masks, strict=True
        )
    ]
    fill(rows, columns)
    return rows


def distinct_media(media: Iterable[Media | None]) -> list[Media]:
    """Each image once, in the order of their first use."""
    return list({leaf.key: leaf for item in media if item is not None for leaf in item.leaves}.values())


def _encode_media(media: Sequence[Media | None]) -> Payload:
    """Of contexts or prompts: their images, each once, and whose each is; {} where none has any."""
    distinct = [(item.key, item.tokens) for item in distinct_media(media)]
    if not distinct:
        return {}
    whose = [None if item is None else [item.key, *(leaf.key for leaf in item.parts)] for item in media]
    return {"media": distinct, "media_of": whose}


def _decode_media(
    payload: Mapping[str, Any], count: int, inputs: Sequence[Mapping[str, np.ndarray]]
) -> list[Media | None]:
    """Inverse of `_encode_media`. Equal keys give the same object, also one of an earlier payload still in use."""
    if "media" not in payload:
        return [None] * count
    by_key = {}
    for (key, tokens), values in zip(payload["media"], inputs, strict=True):
        by_key[key] = _MEDIA.get(key) or Media(dict(values), tokens, key=key)
    for key, *parts in filter(None, payload["media_of"]):
        if key not in by_key:
            by_key[key] = _MEDIA.get(key) or Media.joined([by_key[part] for part in parts], key=key)
    _MEDIA.update(by_key)
    return [None if keys is None else by_key[keys[0]] for keys in payload["media_of"]]


def collect(rows: Sequence[Segment], columns: Iterable[str]) -> Payload:
    """Columns alone, in the order of the rows. A column that no row has is left out; where only some have it, an array
    under "has.{name}" says which; where contexts have values too, "contexts.{name}" are their arrays, each once, and
    "context.{name}" says whose is which. Of a column of bytes there are the lengths, and "bytes.{name}" holds all of
    them. ValueError for an unknown column or a wrong length."""
    out: Payload = {}
    for name in columns:
        if name not in COLUMNS:
            raise ValueError(f"{name!r} is not a column; known: {', '.join(COLUMNS)}")
        have = [row for row in rows if name in row.columns]
        if not have and name not in _ALWAYS:
            continue
        joined = _join([row.columns[name] for row in have], _ON_THE_WAY.get(name, COLUMNS[name].dtype))
        expected = sum(row.length for row in have)
        if len(joined) != expected:
            raise ValueError(f"column {name}: {len(joined)} values for {expected} response tokens")
        if COLUMNS[name].dtype is object:
            out[_BYTES + name] = np.frombuffer(b"".join(joined), np.uint8)
            joined = _lengths(joined)
        out[name] = joined
        if len(have) < len(rows):
            out[_PRESENT + name] = np.fromiter((name in row.columns for row in rows), bool, len(rows))
        if COLUMNS[name].context:
            contexts = {id(row.context_columns[name]): row.context_columns[name] for row in have}
            places = {key: place for place, key in enumerate(contexts)}
            out[_CONTEXTS + name] = _join(list(contexts.values()), COLUMNS[name].dtype)
            out[_PLACES + name] = np.array([places[id(row.context_columns[name])] for row in have], np.int32)
    return out


def fill(rows: Sequence[Segment], columns: Mapping[str, np.ndarray]) -> None:
    """Inverse of `collect`, on the same rows in the same order. ValueError if the number of tokens differs."""
    for name, values in columns.items():
        if name not in COLUMNS:
            continue
        present = columns.get(_PRESENT + name)
        have = rows if present is None else [row for row, has in zip(rows, present, strict=True) if has]
        lengths = [row.length for row in have]
        if COLUMNS[name].dtype is object:
            joined = _cut(columns[_BYTES + name], values.tolist())
            values = np.array([part.tobytes() for part in joined], object)
        if len(values) != sum(lengths):
            raise ValueError(f"column {name}: {len(values)} values for {sum(lengths)} response tokens")
        for row, part in zip(have, _cut(values, lengths), strict=True):
            row.put(name, part)
        if COLUMNS[name].context:
            places = columns[_PLACES + name].tolist()
            sizes = {place: len(row.context_ids) for place, row in zip(places, have, strict=True)}
            contexts = _cut(columns[_CONTEXTS + name], [sizes[place] for place in range(len(sizes))])
            for row, place in zip(have, places, strict=True):
                row.context_columns[name] = contexts[place]


# -- sampling ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class GenerateRequest:
    """One request. prompt_ids int64 [P]; `group`, `session` and `media` as in `RolloutEngine.generate`."""

    id: str
    prompt_ids: np.ndarray
    sampling: SamplingParams
    group: str | None = None
    media: Media | None = None
    session: str | None = None

    @property
    def tokens(self) -> int:
        """Most tokens the request can hold: what it weighs when replicas are chosen."""
        return len(self.prompt_ids) + self.sampling.max_tokens


@dataclass(slots=True)
class GenerateResult:
    """What a worker says of a request: a completion, or the error's type and text."""

    id: str
    completion: Completion | None = None
    error: tuple[str, str] | None = None


def encode_requests(requests: Sequence[GenerateRequest]) -> Payload:
    """A prompt goes once for all requests that follow each other with the same ids."""
    prompts: list[np.ndarray] = []
    media: list[Media | None] = []
    entries: list[tuple[Any, ...]] = []
    last: np.ndarray | None = None
    for request in requests:
        ids = request.prompt_ids
        same = last is not None and (ids is last or np.array_equal(ids, last))
        if not same or request.media is not media[-1]:
            prompts.append(ids)
            media.append(request.media)
            last = ids
        place = len(prompts) - 1
        entries.append((request.id, request.group, request.session, place, _SAMPLING(request.sampling)))
    ids_of = {"lengths": _lengths(prompts), "prompt_ids": _join(prompts, np.int32)}
    return {"entries": entries, **ids_of, **_encode_media(media)}


def decode_requests(
    payload: Mapping[str, Any], inputs: Sequence[Mapping[str, np.ndarray]] = ()
) -> list[GenerateRequest]:
    """Inverse of `encode_requests`. inputs: those of `distinct_media` of the requests."""
    prompts = _cut(payload["prompt_ids"].astype(np.int64), payload["lengths"].tolist())
    media = _decode_media(payload, len(prompts), inputs)
    return [
        GenerateRequest(name, prompts[place], SamplingParams(*sampling), group, media[place], session)
        for name, group, session, place, sampling in payload["entries"]
    ]


def encode_results(results: Sequence[GenerateResult]) -> Payload:
    """Token ids and log-probs joined; everything else as it is."""
    completions = [r.completion for r in results if r.completion is not None]
    return {
        "entries": [(r.id, r.error, None if r.completion is None else _facts(r.completion)) for r in results],
        "lengths": _lengths(c.token_ids for c in completions),
        "token_ids": _join([c.token_ids for c in completions], np.int32),
        "log_probs": _join([c.log_probs for c in completions], np.float32),
    }


def decode_results(payload: Mapping[str, Any]) -> list[GenerateResult]:
    """Inverse of `encode_results`; times are not carried over, clocks of nodes differ."""
    lengths = payload["lengths"].tolist()
    ids = iter(_cut(payload["token_ids"].astype(np.int64), lengths))
    log_probs = iter(_cut(np.array(payload["log_probs"]), lengths))
    return [
        GenerateResult(name, None if facts is None else Completion(next(ids), next(log_probs), **facts), error)
        for name, error, facts in payload["entries"]
    ]


def _facts(completion: Completion) -> dict[str, Any]:
    names = ("finish_reason", "versions", "num_preempted", "prefilled", "text", "routed_experts", "sampling_mask")
    return {name: getattr(completion, name) for name in names}


# -- arrays ------------------------------------------------------------------------------------------------------


def _lengths(parts: Iterable[np.ndarray]) -> np.ndarray:
    return np.array([len(part) for part in parts], np.int32)


def _join(parts: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    """Concatenate and convert in one pass."""
    total = sum(len(part) for part in parts)
    trailing = parts[0].shape[1:] if parts else ()
    out = np.empty((total, *trailing), dtype)
    if total:
        np.concatenate(parts, out=out, casting="unsafe")
    return out


def _cut(values: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    """Views of the consecutive parts."""
    ends = list(accumulate(lengths))
    return [values[end - length : end] for end, length in zip(ends, lengths, strict=True)]
