"""Responses carried on with new weights by the embedded sampler, which holds a model of its own."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny import tiny_model
from verl.engine.rollout.base import SamplingParams
from verl.engine.rollout.native.engine import NativeEngine
from verl.rollout.attempt import RolloutSettings
from verl.rollout.event_loop import BackgroundLoop
from verl.rollout.groups import RolloutManager
from verl.rollout.resumable import ResumableGeneration
from verl.trajectory import Prompt

DRAWN = SamplingParams(max_tokens=48, ignore_eos=True, temperature=0.8, repetition_penalty=1.1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from transformers import AutoModelForCausalLM

    path = tiny_model(tmp_path_factory.mktemp("model"), "qwen3", scale=8.0)
    yield AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def engine_of(model: Any, version: int = 0) -> NativeEngine:
    engine = NativeEngine(copy.deepcopy(model), eos_token_ids=[258], max_model_len=128, max_num_seqs=16)
    engine.load_weights(model.state_dict().items(), version)
    return engine


def changed(model: Any, seed: int) -> Any:
    """A copy with every weight moved a little."""
    other = copy.deepcopy(model)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in other.parameters():
            weight += 0.02 * weight.abs().mean() * torch.randn(weight.shape, generator=noise)
    return other


def prompt(number: int) -> list[int]:
    return torch.randint(0, 256, (9 + number,), generator=torch.Generator().manual_seed(number)).tolist()


async def responses(requests: ResumableGeneration, count: int) -> list[Any]:
    calls = [
        requests.generate(prompt(i // 2), DRAWN if i else DRAWN_PLAIN, request_id=f"r{i}", group=f"g{i // 2}")
        for i in range(count)
    ]
    return await asyncio.gather(*calls)


DRAWN_PLAIN = SamplingParams(max_tokens=48, ignore_eos=True, seed=11)


def interrupted(engine: NativeEngine, weights: list[Any], count: int = 4) -> list[Any]:
    """Sample `count` responses, with a pause and new weights each time some tokens more are there."""

    async def go() -> list[Any]:
        requests = ResumableGeneration(engine)
        work = asyncio.ensure_future(responses(requests, count))
        for number, model in enumerate(weights, 1):
            for _ in range(13):
                await asyncio.sleep(0)
            assert await requests.pause() == count
            if model is not None:
                engine.load_weights(model.state_dict().items(), number)
            await requests.resume()
        return await work

    return asyncio.run(go())


def test_with_the_same_weights_a_pause_changes_nothing(trained: Any) -> None:
    whole = asyncio.run(responses(ResumableGeneration(engine_of(trained)), 4))
    parts = interrupted(engine_of(trained), [None, None])
    for one, other in zip(whole, parts, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist() and other.parts == 3
        assert np.abs(one.log_probs - other.log_probs).max() < 1e-4
        assert other.finish_reason == one.finish_reason == "length" and other.versions == (0,)


def test_each_part_is_sampled_from_the_weights_of_its_time(trained: Any) -> None:
    """Teacher-forced log-probs under each version: every token's recorded one is that of its own version."""
    models = [trained, changed(trained, 1), changed(trained, 2)]
    done = interrupted(engine_of(trained), models[1:])
    ids, logs = done[0].token_ids, done[0].log_probs  # the response without repetition penalty, temperature 1
    under = []
    for model in models:
        with torch.no_grad():
            whole = torch.tensor([[*prompt(0), *ids.tolist()]])
            table = torch.log_softmax(model(whole).logits[0, len(prompt(0)) - 1 : -1].float(), -1)
        under.append(table[torch.arange(len(ids)), torch.from_numpy(ids)].numpy())
    apart = np.abs(np.stack(under) - logs)
    written_by = apart.argmin(0)
    assert apart.min(0).max() < 1e-4, "kept as sampled"
    assert sorted(set(written_by.tolist())) == [0, 1, 2] and (np.diff(written_by) >= 0).all()
    assert done[0].versions == (0, 1, 2) and len(ids) == 48
    assert np.abs(under[2] - logs)[written_by == 0].max() > 1e-3, "or the test could not fail"


def test_the_sampler_works_while_this_thread_does_something_else(trained: Any) -> None:
    engine = engine_of(trained)
    settings = RolloutSettings(SamplingParams(max_tokens=24, ignore_eos=True), n=2, seed=3)

    async def score(trajectory: Any) -> None:
        trajectory.score = 1.0

    prompts = [Prompt(uid=f"0:{i}@0", ids=np.array(prompt(i)), messages="q", row=i) for i in range(4)]
    with BackgroundLoop() as loop:
        rollouts = RolloutManager(engine, settings, decode=str, on_finished=score)
        loop.run(rollouts.begin(prompts[:2]))
        deadline = time.monotonic() + 30
        while sum(None not in g.responses for g in rollouts.groups) < 2 and time.monotonic() < deadline:
            torch.randn(64, 64) @ torch.randn(64, 64)
            time.sleep(0.001)
        assert sum(None not in g.responses for g in rollouts.groups) == 2, "sampled without anybody waiting"
        loop.run(rollouts.begin(prompts[2:]))
        loop.run(rollouts.requests.pause())
        engine.load_weights(changed(trained, 3).state_dict().items(), 1)
        loop.run(rollouts.requests.resume())
        first = loop.run(rollouts.take([], count=2))
        second = loop.run(rollouts.take([], count=2))
        loop.run(rollouts.scored())
    assert [t.uid for t in (*first, *second) if t.index == 0] == [p.uid for p in prompts]
    assert {t.versions for t in first} == {(0,)} and {v for t in second for v in t.versions} <= {0, 1}
    assert all(t.score == 1.0 and t.length == 24 for t in (*first, *second))
