"""What every weight receiver does: new weights take effect whole or not at all, from a stream or a channel, proven."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

from tests.contract.conftest import Sampler
from tests.vllm_cases import sample
from tests.weight_sync_processes import channel_name
from verl.engine.rollout.base import Completion, SamplingParams
from verl.weight_sync.channel import BucketSender, offer
from verl.weight_sync.receiver import WeightReceiver
from verl.weight_sync.verify import FULL, SAMPLED, WeightSyncError, checksums, compare

PROMPT = list(range(3, 103))  # three full blocks of a cache: an old one would be found again


def change(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Move every weight of the reference; returns them under their names in a checkpoint."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return list(model.state_dict().items())


def test_new_weights_take_effect_and_old_ones_are_forgotten(sampler: Sampler) -> None:
    engine = sampler.engine
    assert isinstance(engine, WeightReceiver)
    before = sample(engine, [PROMPT], ignore_eos=True)[0]
    for version, verify in ((1, FULL), (2, SAMPLED), (3, "")):
        weights = change(sampler.reference)
        held = engine.load_weights(iter(weights), version, verify=verify)
        if verify:
            compare(checksums(weights, verify, dtype=engine.weights_dtype), held)
        done = sample(engine, [PROMPT], ignore_eos=True)[0]
        assert engine.version == version and done.versions == (version,)
        assert sampler.difference(PROMPT, done) <= 1e-4
    assert sampler.difference(PROMPT, before) > 1e-2, "the change is large enough to be seen"


def test_weights_come_through_a_channel(sampler: Sampler) -> None:
    engine, name = sampler.engine, channel_name("contract")
    places = [(name, number) for number in range(len(engine.readers))]
    trial: list[str] = []
    trying = threading.Thread(target=lambda: trial.extend(engine.try_channel(places, 30.0)))
    trying.start()
    assert offer(name, len(places), None, 30.0) == ""
    trying.join(30)
    assert trial == [""] * len(places)

    weights = change(sampler.reference)
    sender = BucketSender(name, len(places), 100_000, dtype=engine.weights_dtype, timeout=60)
    sending = threading.Thread(target=sender.send, args=(weights, 4))
    sending.start()
    held = engine.receive_weights(places, 4, timeout=60.0, verify=SAMPLED)
    sending.join(60)
    compare(checksums(weights, SAMPLED, dtype=engine.weights_dtype), held)
    done = sample(engine, [PROMPT], ignore_eos=True)[0]
    assert done.versions == (4,) and sampler.difference(PROMPT, done) <= 1e-4


def test_requests_under_way_go_on_with_new_weights(sampler: Sampler) -> None:
    """Twice the same values: every token agrees with them, and both versions are recorded."""
    engine, old = sampler.engine, sampler.engine.version

    def request(name: str) -> Any:
        sampling = SamplingParams(max_tokens=150, ignore_eos=True, seed=len(name))
        return engine.generate(PROMPT, sampling, request_id=name)

    async def run() -> list[Completion]:
        calls = [asyncio.create_task(request("l" * i)) for i in range(1, 9)]
        await asyncio.sleep(0.1)
        engine.load_weights(list(sampler.reference.state_dict().items()), old + 1)
        return [*await asyncio.gather(*calls), await request("after")]

    *first, after = asyncio.run(run())
    assert {c.versions for c in first} <= {(old,), (old, old + 1)} and after.versions == (old + 1,)
    assert all(len(c.token_ids) == 150 and c.finish_reason == "length" for c in first)
    assert max(sampler.difference(PROMPT, c) for c in first) < 1e-4


def test_a_load_that_is_not_whole_leaves_a_sampler_that_refuses(sampler: Sampler) -> None:
    """An engine of its own processes is of no use after it."""
    some = [(n, t) for n, t in sampler.reference.state_dict().items() if "layers.1.self_attn.k_proj" not in n]
    with pytest.raises((ValueError, WeightSyncError), match=r"no value came for .*layers\.1\.self_attn"):
        sampler.engine.load_weights(some, 9)
    with pytest.raises(RuntimeError, match="no value came for"):
        sample(sampler.engine, [PROMPT])
    sampler.discard()
