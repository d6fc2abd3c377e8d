"""Parts of the vLLM engine that need no vLLM: responses that go on, batch calls that fail, transfers that take long."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from verl.engine.rollout.base import Completion
from verl.engine.rollout.hosted import Live, LoopThread, ended_at_seam
from verl.engine.rollout.vllm import weights
from verl.engine.rollout.vllm.batch import BatchCall
from verl.engine.rollout.vllm.requests import completion


@pytest.fixture
def host() -> Iterator[LoopThread]:
    made = LoopThread("test-vllm")
    yield made
    made.stop()


@pytest.mark.parametrize(
    ("begun", "written", "left", "reason"),
    [
        ("so </ans", "wer> and on", "wer>", "stop"),
        ("so </ans", "wers> and on", "wers> and on", "length"),
        ("so ", "</answer", "</answer", "length"),
        ("x" * 200 + "</answer", ">>", ">", "stop"),
        ("</answer", "", "", "length"),
    ],
)
def test_a_stop_string_may_begin_before_the_response_went_on(begun, written, left, reason) -> None:
    ids = np.array([ord(c) for c in written], np.int64)
    sets = np.array([b"set"] * len(ids), object)
    part = Completion(ids, np.arange(len(ids), dtype=np.float32), "length", sampling_mask=sets)
    done = ended_at_seam(part, [ord(c) for c in begun], ("</answer>", "zz"), lambda ids: "".join(map(chr, ids)))
    assert "".join(map(chr, done.token_ids)) == left and done.finish_reason == reason
    assert done.log_probs.tolist() == list(range(len(left))) and len(done.sampling_mask) == len(left)


def test_a_batch_call_that_fails_leaves_nothing_running(host: LoopThread) -> None:
    ended: list[str] = []

    async def sample(ids: list[int], sampling: Any, *, request_id: str) -> Completion:
        if len(ids) > 2:
            raise ValueError("leaves no room")
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(request_id)
        raise AssertionError

    call = BatchCall(None, 0)
    with pytest.raises(ValueError, match="no room"):
        host.call(call.run(sample, [[1], [1, 2, 3], [2]], {"max_tokens": 4}), 20)
    assert len(ended) == 2


def test_a_transfer_may_take_longer_than_a_call(host: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its limit is on standing still: all of a large model takes what it takes."""

    async def rpc(method: str, args: tuple[Any, ...]) -> list[Any]:
        await asyncio.sleep(0.3)
        return [{}]

    monkeypatch.setattr(weights, "RPC_TIMEOUT", 0.05)
    weights.WorkerChannel(host, rpc, [""], 4096, print).receive([("c", 0)], 1, 10.0, "")


@pytest.mark.parametrize("tokens", [3, 4, 5])
def test_routes_are_those_of_layers_with_experts_and_of_every_token(tokens: int) -> None:
    """As vLLM 0.32 gives them: small unsigned numbers of all tokens but the last, layers without experts too."""
    routes = np.arange(tokens * 3 * 2, dtype=np.uint8).reshape(tokens, 3, 2)
    rows = SimpleNamespace(logprobs=[-1.0, -2.0, -3.0])
    response = SimpleNamespace(token_ids=[5, 9, 5], logprobs=rows, finish_reason="stop", routed_experts=routes)
    live, output = Live("a", [1, 2], [0]), SimpleNamespace(outputs=[response])
    assert completion(live, output).routed_experts is None
    if tokens == 4:
        recorded = completion(live, output, [0, 2]).routed_experts
        assert recorded.dtype == np.int16 and recorded.tolist() == routes[:, [0, 2]].tolist()
    else:
        with pytest.raises(RuntimeError, match=r"vLLM returned routes \(., 3, 2\) of 2 \+ 3 tokens"):
            completion(live, output, [0, 2])


@pytest.mark.parametrize("log_probs", [None, [-1.0], [-1.0, -2.0, -3.0]])
def test_log_probs_are_the_sampled_tokens_and_not_fewer(log_probs: list[float] | None) -> None:
    rows = SimpleNamespace(logprobs=log_probs or [])
    response = SimpleNamespace(token_ids=[5, 9, 5], logprobs=rows, finish_reason="length")
    output = SimpleNamespace(outputs=[response])
    if log_probs is not None and len(log_probs) == 3:
        assert completion(Live("a", [1], [0]), output).log_probs.tolist() == log_probs
    else:
        with pytest.raises(RuntimeError, match="log-probs for 3 tokens"):
            completion(Live("a", [1], [0]), output)
