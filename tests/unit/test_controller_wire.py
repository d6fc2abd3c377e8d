"""Requests and responses between the driver and sampler hosts: what is sent arrives, at a price that no token adds to."""

import numpy as np
import pytest

from tests.counting import instructions
from verl.engine.rollout.base import Completion, SamplingParams
from verl.workers import codec


def _completion(length: int, text: str | None, **fields) -> Completion:
    return Completion(
        np.arange(length), np.linspace(-1, 0, length, dtype=np.float32), "stop", text=text, **fields
    )


def test_answers_arrive_as_they_were_sent() -> None:
    sent = [
        codec.GenerateResult("a", _completion(3, "é漢🙂 \ufffd\x00\n", versions=(1, 2), num_preempted=4)),
        codec.GenerateResult("b", error=("ValueError", "too long")),
        codec.GenerateResult("c", _completion(2, None)),
        codec.GenerateResult("d", _completion(0, "")),
        codec.GenerateResult("e", _completion(1, "half \ud83d")),
    ]
    came = codec.decode_results(codec.encode_results(sent))
    assert [a.id for a in came] == list("abcde") and came[1].error == ("ValueError", "too long")
    for mine, theirs in zip(came, sent, strict=True):
        if theirs.completion is None:
            assert mine.completion is None
            continue
        one, other = mine.completion, theirs.completion
        assert one.token_ids.dtype == np.int64 and one.token_ids.tolist() == other.token_ids.tolist()
        assert one.log_probs.dtype == np.float32 and one.log_probs.tolist() == other.log_probs.tolist()
        for name in ("finish_reason", "versions", "num_preempted", "text"):
            assert getattr(one, name) == getattr(other, name)
    assert codec.decode_results(codec.encode_results([])) == []


def test_requests_arrive_as_they_were_sent() -> None:
    every = SamplingParams(9, 0.5, 0.9, 7, 0.1, 1.2, ("</a>", "\n"), (5, 6), True, 2**62, 4)
    prompt = np.arange(4)
    sent = [
        codec.GenerateRequest("a", prompt, every, "g"),
        codec.GenerateRequest("b", prompt.copy(), every, "g"),
        codec.GenerateRequest("c", np.arange(2), SamplingParams(max_tokens=1)),
    ]
    payload = codec.encode_requests(sent)
    assert payload["lengths"].tolist() == [4, 2], "a group's prompt goes once"
    came = codec.decode_requests(payload)
    assert [(a.id, a.group, a.prompt_ids.tolist(), a.sampling) for a in came] == [
        (a.id, a.group, a.prompt_ids.tolist(), a.sampling) for a in sent
    ]


@pytest.mark.parametrize("text", [None, "x"])
def test_an_answer_costs_the_same_however_long_it_is(text: str | None) -> None:
    def cost(length: int) -> int:
        done = _completion(length, text and text * length)
        payload = codec.encode_results([codec.GenerateResult("a", done), codec.GenerateResult("b", done)])
        return instructions(lambda: codec.decode_results(payload))

    assert 0 < cost(4096) == cost(2)
