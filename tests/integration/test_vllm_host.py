"""A sampler host of a cluster with vLLM in it: configuration as plain data, weights from a channel, responses in lists."""

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
from verl.engine.rollout.base import SamplingParams
from verl.weight_sync.shared_memory import BucketSender
from verl.weight_sync.verify import checksums
from verl.workers import codec
from verl.workers.rollout_worker import RolloutWorker

require_vllm()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(("devices", "dtype"), [(1, "float32"), (2, "bfloat16")])
def test_a_host_samples_with_the_weights_of_the_channel(tmp_path: Path, devices: int, dtype: str) -> None:
    """The engine's own processes read the channel, each for itself; half precision is made where it is sent from."""
    from transformers import AutoModelForCausalLM

    tiny = TinyRun(tmp_path)
    tiny.model = vllm_model(tmp_path / "heads", "qwen2", tied=True)
    rollout = "actor_rollout_ref.rollout"
    words = [
        f"{rollout}.name=vllm",
        f"{rollout}.tensor_model_parallel_size={devices}",
        f"{rollout}.dtype={dtype}",
        f"trainer.n_gpus_per_node={devices}",
    ]
    config = load(tiny.overrides(tmp_path / "out", *words))
    model = AutoModelForCausalLM.from_pretrained(tiny.model, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    prompt = np.arange(3, 43)

    shared: list[str] = []

    async def run() -> tuple[dict[str, str], Any]:
        host = RolloutWorker(config.to_dict(), 0)
        facts = await host.start()
        try:
            shared.append(host.engine._shared)
            readers = facts["readers"]
            assert len(readers) == devices and facts["dtype"] == (None if dtype == "float32" else dtype)
            kind = None if facts["dtype"] is None else torch.bfloat16
            sender = BucketSender("verl-test-host", len(readers), 100_000, dtype=kind, expected=readers)
            sending = asyncio.to_thread(sender.send, model.state_dict().items(), 4)
            places = [("verl-test-host", reader) for reader in range(devices)]
            receiving = host.receive_weights(places, 4, 120.0, "full")
            _, sums = await asyncio.gather(sending, receiving)
            ask = codec.GenerateRequest(
                "a", prompt, SamplingParams(max_tokens=10, seed=1, ignore_eos=True), None
            )
            await host.submit(codec.encode_requests([ask]))
            responses: list[Any] = []
            while not responses:
                responses = codec.decode_results(await host.results(60.0))
            return sums, responses[0]
        finally:
            await host.close()

    sums, response = asyncio.run(run())
    if devices > 1:
        assert shared[0] and not list(Path("/dev/shm").glob(f"{shared[0]}*")), "vLLM leaves it; we must not"
    sent = checksums(model.state_dict().items(), dtype=None if dtype == "float32" else torch.bfloat16)
    assert sums == sent
    done = response.completion
    ids = done.token_ids.tolist()
    assert len(ids) == 10 and tuple(done.versions) == (4,)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt.tolist(), *ids]])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0].numpy()
    assert np.abs(expected - done.log_probs).max() <= (1e-4 if dtype == "float32" else 0.1)
