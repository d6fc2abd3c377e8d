"""After a push every sampler holds the trainer's bytes, packed copies included,
and its log-probs are the trainer's; from one device or two ranks, to one or two samplers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests import ranks
from tests.tiny import tiny_model
from tests.weight_sync_processes import channel_name, check_clean, context, spawn
from verl.trajectory import Prompt, Trajectory

pytestmark = pytest.mark.timeout(150)
PROMPTS = ([3, 1, 4, 1, 5], [9], list(range(40, 80)))
VERSION = 7
context.set_forkserver_preload([*ranks.PRELOAD, "transformers.models.qwen3_moe.modeling_qwen3_moe"])


@pytest.fixture
def channel(request: pytest.FixtureRequest) -> Iterator[str]:
    name = channel_name(request.node.nodeid)
    yield name
    check_clean(name)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    tied = tiny_model(folder / "tied", "qwen3", tied=True, scale=4.0)
    experts = tiny_model(folder / "experts", "qwen3_moe", scale=4.0)
    return {"tied": str(tied), "experts": str(experts)}


def trains(
    path: str, sharded: bool, channel: str, readers: int, bucket: int, dtype: Any, responses: Any
) -> dict[str, Any]:
    """A training rank: one step, a push, then its log-probs of what the samplers wrote with the new weights."""
    import torch.distributed as dist

    from tests.unit.engine.training.fsdp_cases import role, rows, simple_loss, total
    from verl.engine.training.fsdp.engine import FSDPEngine
    from verl.weight_sync.channel import BucketSender
    from verl.weight_sync.verify import checksums

    first = not sharded or dist.get_rank() == 0
    engine: Any = FSDPEngine(path, role_cfg=role(optim={"lr": 0.02}), device="cpu")
    before = checksums(engine.named_weights(), dtype=dtype)
    engine.step(rows() if first else [], simple_loss(total()), temperature=1.0)
    if first:
        sender = BucketSender(channel, readers, bucket, dtype=dtype, timeout=60)
        sender.send(engine.named_weights(), VERSION)
    else:
        for _ in engine.named_weights():
            pass
    held = checksums(engine.named_weights(), dtype=dtype)
    written = [responses.get(timeout=60) for _ in range(readers)] if first else []
    mine = [
        Trajectory(Prompt(uid=f"{s}.{i}", ids=np.array(prompt), messages=None), 0, tokens, np.ones(len(tokens), bool))
        for s, sampler in enumerate(written)
        for i, (prompt, tokens) in enumerate(zip(PROMPTS, sampler["tokens"], strict=True))
    ]  # fmt: skip
    scored = engine.forward(mine, temperature=1.0)["log_probs"]
    return {"held": held, "changed": before != held, "samplers": written, "log_probs": scored}


def samples(path: str, channel: str, reader: int, dtype: Any, responses: Any) -> None:
    """A sampler: other weights of the same model, then the trainer's."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from verl.engine.rollout.base import SamplingParams
    from verl.engine.rollout.native.engine import NativeEngine
    from verl.weight_sync.channel import receive

    torch.set_num_threads(1)
    torch.manual_seed(reader + 1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=dtype or torch.float32)
    engine = NativeEngine(
        model.eval(), eos_token_ids=[258], max_model_len=96, max_num_seqs=8, dtype=dtype or torch.float32
    )

    async def write() -> list[Any]:
        params = SamplingParams(max_tokens=24, ignore_eos=True, seed=reader)
        return await asyncio.gather(*(engine.generate(p, params, request_id=str(i)) for i, p in enumerate(PROMPTS)))

    asyncio.run(write())  # packs copies and fills caches with the wrong weights
    engine.load_weights(receive(channel, reader, timeout=60, version=VERSION), VERSION)
    done = asyncio.run(write())
    responses.put(
        {
            "tokens": [c.token_ids for c in done],
            "log_probs": np.concatenate([c.log_probs for c in done]),
            "versions": {v for c in done for v in c.versions},
            "holds": engine.checksums(),
        }
    )


CASES = {
    "local to 1": ("tied", False, 1, 1 << 20, None),
    "local to 2, slices": ("tied", False, 2, 3000, None),
    "local to 1, bfloat16": ("tied", False, 1, 1 << 14, torch.bfloat16),
    "2 ranks to 1": ("tied", True, 1, 1 << 14, None),
    "2 ranks to 2": ("tied", True, 2, 1 << 16, None),
    "2 ranks to 1, experts": ("experts", True, 1, 1 << 15, None),
}


@pytest.mark.parametrize("case", list(CASES))
def test_a_sync_is_a_sync_and_sampler_and_trainer_agree(case: str, models: dict[str, str], channel: str) -> None:
    name, sharded, readers, bucket, dtype = CASES[case]
    path, responses = models[name], context.Queue()
    samplers = [spawn(samples, path, channel, reader, dtype, responses) for reader in range(readers)]
    arguments = (path, sharded, channel, readers, bucket, dtype, responses)
    if sharded:
        found = ranks.run(trains, 2, *arguments, timeout=100)
    else:
        found = [trains(*arguments)]
    assert all(one["held"] == found[0]["held"] and one["changed"] for one in found)
    seen = found[0]["samplers"]
    for sampler in seen:
        assert sampler["holds"] == found[0]["held"] and sampler["versions"] == {VERSION}
    theirs = np.concatenate([sampler["log_probs"] for sampler in seen])
    assert len(theirs) == readers * len(PROMPTS) * 24
    assert np.abs(theirs - found[0]["log_probs"]).max() <= (1e-4 if dtype is None else 0.2)
    if readers == 2:
        assert not np.array_equal(seen[0]["tokens"][0], seen[1]["tokens"][0])
    for process in samplers:
        process.join(20)


def test_a_push_moves_weights_while_it_gathers(models: dict[str, str], channel: str) -> None:
    """The reader has the first tensor before the last one is gathered."""
    from verl.weight_sync.channel import BucketSender, receive

    arrived = threading.Event()

    def read() -> None:
        for _ in receive(channel, 0, timeout=20):
            arrived.set()

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(8):
            yield f"w{number}", torch.ones(1000)
        assert arrived.wait(10)
        yield "last", torch.ones(1)

    reader = threading.Thread(target=read)
    reader.start()
    BucketSender(channel, 1, 8192, timeout=20).send(gather(), 0)
    reader.join(20)
