"""A sampler host of a cluster with vLLM in it: configuration as plain data, weights from a channel, answers in lists."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.runs import TinyRun
from tests.vllm_cases import require_vllm, vllm_model
from verl.config import load
from verl.controller import wire
from verl.engine.rollout.base import SamplingParams
from verl.weight_sync.shared_memory import BucketSender
from verl.worker.sampler_host import SamplerHost

require_vllm()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_host_samples_with_the_weights_of_the_channel(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    tiny = TinyRun(tmp_path)
    tiny.model = vllm_model(tmp_path / "heads", "qwen2", tied=True)
    config = load(tiny.overrides(tmp_path / "out", "actor_rollout_ref.rollout.name=vllm"))
    model = AutoModelForCausalLM.from_pretrained(tiny.model, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    prompt = np.arange(3, 43)

    async def run() -> tuple[dict[str, str], Any]:
        host = SamplerHost(config.to_dict(), 0)
        await host.start()
        try:
            sender = BucketSender("verl-test-host", 1, 100_000)
            sending = asyncio.to_thread(sender.send, model.state_dict().items(), 4)
            receiving = host.receive_weights("verl-test-host", 0, 4, 120.0, True)
            _, sums = await asyncio.gather(sending, receiving)
            ask = wire.Ask("a", prompt, SamplingParams(max_tokens=10, seed=1, ignore_eos=True), None)
            await host.submit(wire.encode_asks([ask]))
            answers: list[Any] = []
            while not answers:
                answers = wire.decode_answers(await host.results(60.0))
            return sums, answers[0]
        finally:
            await host.close()

    sums, answer = asyncio.run(run())
    assert set(sums) == set(model.state_dict())
    done = answer.completion
    ids = done.token_ids.tolist()
    assert len(ids) == 10 and tuple(done.versions) == (4,)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt.tolist(), *ids]])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0].numpy()
    assert np.abs(expected - done.log_probs).max() <= 1e-4
