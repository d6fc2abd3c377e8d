"""Sampling requests and completions as JSON and flat arrays, for the way between the driver and a sampler host."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

import numpy as np

from verl.engine.rollout.base import Completion, SamplingParams
from verl.workers.codec import Payload

_NO_TEXT = -1
# A tokenizer written in Python may give text that is not valid Unicode: it arrives as it was.
_ANY_TEXT = "surrogatepass"
_SAMPLING = tuple(field.name for field in fields(SamplingParams))


@dataclass(slots=True)
class GenerateRequest:
    """One request. prompt_ids int64 [P]; `group` as in `RolloutEngine.generate`."""

    id: str
    prompt_ids: np.ndarray
    sampling: SamplingParams
    group: str | None = None

    @property
    def tokens(self) -> int:
        """Most tokens the request can hold: what it weighs when hosts are chosen."""
        return len(self.prompt_ids) + self.sampling.max_tokens


@dataclass(slots=True)
class GenerateResult:
    """What a host says of a request: a completion, or the error's type and text."""

    id: str
    completion: Completion | None = None
    error: tuple[str, str] | None = None


def encode_requests(asks: Sequence[GenerateRequest]) -> Payload:
    """A prompt goes once for all requests that follow each other with the same ids."""
    prompts: list[np.ndarray] = []
    entries: list[dict[str, Any]] = []
    last: np.ndarray | None = None
    for ask in asks:
        if last is None or not (ask.prompt_ids is last or np.array_equal(ask.prompt_ids, last)):
            prompts.append(ask.prompt_ids)
            last = ask.prompt_ids
        sampling = {name: getattr(ask.sampling, name) for name in _SAMPLING}
        entries.append({"id": ask.id, "group": ask.group, "prompt": len(prompts) - 1, "sampling": sampling})
    return {
        "header": _header(entries),
        "lengths": np.array([len(p) for p in prompts], np.int32),
        "prompt_ids": np.concatenate([np.zeros(0, np.int32), *prompts]).astype(np.int32),
    }


def decode_requests(payload: Mapping[str, np.ndarray]) -> list[GenerateRequest]:
    """Inverse of `encode_requests`."""
    ends = np.cumsum(payload["lengths"])[:-1]
    prompts = np.split(payload["prompt_ids"].astype(np.int64), ends)
    return [
        GenerateRequest(e["id"], prompts[e["prompt"]], _sampling(e["sampling"]), e["group"])
        for e in json.loads(payload["header"].tobytes())
    ]


def _sampling(given: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})


def encode_results(responses: Sequence[GenerateResult]) -> Payload:
    """Token ids, log-probs and texts (UTF-8) joined; everything else as JSON."""
    done = [a.completion for a in responses if a.completion is not None]
    entries = [
        {
            "id": a.id,
            "error": a.error,
            "fields": None
            if a.completion is None
            else {
                "finish_reason": a.completion.finish_reason,
                "versions": list(a.completion.versions),
                "num_preempted": a.completion.num_preempted,
            },
        }
        for a in responses
    ]
    texts = [None if c.text is None else c.text.encode("utf-8", _ANY_TEXT) for c in done]
    return {
        "header": _header(entries),
        "lengths": np.array([len(c.token_ids) for c in done], np.int32),
        "token_ids": np.concatenate([np.zeros(0, np.int32), *(c.token_ids for c in done)]).astype(np.int32),
        "log_probs": np.concatenate([np.zeros(0, np.float32), *(c.log_probs for c in done)]).astype(
            np.float32
        ),
        "text_lengths": np.array([_NO_TEXT if t is None else len(t) for t in texts], np.int32),
        "texts": np.frombuffer(b"".join(t or b"" for t in texts), np.uint8),
    }


def decode_results(payload: Mapping[str, np.ndarray]) -> list[GenerateResult]:
    """Inverse of `encode_results`; times are not carried over, clocks of hosts differ."""
    lengths = payload["lengths"].tolist()
    ids = iter(_cut(payload["token_ids"].astype(np.int64), lengths))
    log_probs = iter(_cut(np.array(payload["log_probs"]), lengths))
    texts = iter(_texts(payload["texts"].tobytes(), payload["text_lengths"].tolist()))
    out = []
    for entry in json.loads(payload["header"].tobytes()):
        if entry["error"] is not None:
            out.append(GenerateResult(entry["id"], error=tuple(entry["error"])))
            continue
        given = dict(entry["fields"])
        given["versions"] = tuple(given["versions"])
        out.append(
            GenerateResult(entry["id"], Completion(next(ids), next(log_probs), **given, text=next(texts)))
        )
    return out


def _cut(flat: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    """Views of the consecutive parts."""
    ends = list(accumulate(lengths))
    return [flat[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _texts(joined: bytes, lengths: Sequence[int]) -> list[str | None]:
    out: list[str | None] = []
    start = 0
    for length in lengths:
        if length == _NO_TEXT:
            out.append(None)
            continue
        out.append(joined[start : start + length].decode("utf-8", _ANY_TEXT))
        start += length
    return out


def _header(entries: list[dict[str, Any]]) -> np.ndarray:
    return np.frombuffer(json.dumps(entries).encode(), np.uint8)
