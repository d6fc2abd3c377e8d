"""Counts of a decode step on the pretend device, where plain references stand for the sampler's kernels.

`tests/pretend` runs this file. The counts say how the work is shaped; they are no speed.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import operator_references
from tests.pretend.device import Counts, counting
from tests.tiny import tiny_model
from verl.engine.rollout.base import SamplingParams
from verl.engine.rollout.native.engine import NativeEngine
from verl.platform import detect

WIDE = {"hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8}


def engine_of(folder: Path, layers: int, shape: dict[str, int] | None = None, **options: Any) -> NativeEngine:
    from transformers import AutoModelForCausalLM

    path = tiny_model(folder / f"{layers}", "qwen3", num_hidden_layers=layers, **(shape or {}))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().to(detect("cuda").device())
    options = {"eos_token_ids": [], "max_model_len": 1024, "max_num_seqs": 256} | options
    engine = NativeEngine(model.requires_grad_(False), dtype="bfloat16", **options)
    assert engine._runner.device_decode is not None
    return engine


def decode_steps(
    engine: NativeEngine, lengths: Any, *, each: int = 8, last: Any = None, **settings: Any
) -> list[Counts]:
    """The counts of each decode step of responses of these lengths, `each` to a prompt; last: what to do before the
    last one."""
    prompts = [[3 + i % 200] * (100 + 37 * i % 120) for i in range(-(-len(lengths) // each))]
    steps, step, longest, device = [], engine.step, int(max(lengths)), engine._runner.device_decode
    assert device is not None
    decodes, decode = [0], device.decode

    def counting_decode(*arguments: Any) -> Any:
        decodes[0] += 1
        return decode(*arguments)

    def counted() -> None:
        if last is not None and any(r.written + r.in_flight == longest - 1 for r in engine._scheduler.running):
            last()
        before = decodes[0]
        with counting() as counts:
            step()
        if decodes[0] > before:
            steps.append(counts)

    async def go() -> None:
        calls = []
        for i, length in enumerate(lengths):
            params = SamplingParams(max_tokens=int(length), seed=i, **settings)
            calls.append(engine.generate(prompts[i // each], params, request_id=f"{i}", group=f"{i // each}"))
        await asyncio.gather(*calls)

    device.decode = counting_decode  # type: ignore[method-assign]
    engine.step = counted  # type: ignore[method-assign]
    asyncio.run(go())
    return steps


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9}, {"top_k": 20, "record_mask": True}])
def test_launches_and_waits_of_a_decode_step(tmp_path: Path, settings: dict[str, Any]) -> None:
    one, two = (
        decode_steps(engine_of(tmp_path, n, enforce_eager=True), [6] * 32, **settings)[-3] for n in (1, 2)
    )  # fmt: skip
    layer = two.launches.total() - one.launches.total()
    print("launches a layer", layer, "outside", one.launches.total() - layer, two.waits, two.uploads)
    assert layer <= 16 and one.launches.total() - layer <= 18 + 2 * ("record_mask" in settings)
    assert two.waits.total() <= 1 and two.uploads == 1


def test_attention_of_a_prefill_is_one_launch_a_layer(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, 2, WIDE, enforce_eager=True)
    prefill, passes = engine._runner.prefill, []

    def counted(work: Any) -> Any:
        with counting() as counts:
            logits = prefill(work)
        passes.append(counts)
        return logits

    engine._runner.prefill = counted  # type: ignore[method-assign]
    decode_steps(engine, [3] * 64)
    assert passes and all(counts.launches["aten._flash_attention_forward.default"] == 2 for counts in passes)
    print("prefill of 8 prompts, 2 layers: launches", [c.launches.total() for c in passes], passes[0].waits)
    assert passes[0].launches.total() <= 2 * 25 + 25


def without_model(engine: NativeEngine) -> None:
    """Passes give zeros as logits and touch no cache."""
    runner, decode = engine._runner, engine._runner.device_decode
    assert decode is not None
    runner._forward = lambda ids, _, plan, keep, media: torch.zeros(len(keep), 32, device=ids.device)  # type: ignore[method-assign]
    decode._forward = lambda ids, positions, plan: torch.zeros(len(ids), 32, device=ids.device)


def test_steps_replay_for_every_layout_of_the_cache(tmp_path: Path) -> None:
    """Four times as many responses as places, of lengths as different as a model's; prefills count as steps."""
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(192), 0.8, 512), 8, 768).astype(int)
    engine = engine_of(tmp_path, 1, max_num_seqs=128)
    without_model(engine)
    passes, prefill = [0], engine._runner.prefill

    def counting_prefill(work: Any) -> Any:
        passes[0] += 1
        return prefill(work)

    engine._runner.prefill = counting_prefill  # type: ignore[method-assign]
    steps = decode_steps(engine, lengths)
    replays = sum(counts.replays for counts in steps)
    print(
        f"{replays} of {len(steps)} decode steps and {passes[0]} prefills replay: {replays / (len(steps) + passes[0]):.3f}"
    )
    assert replays >= 0.97 * (len(steps) + passes[0])
    assert all(counts.uploads == 1 for counts in steps if counts.replays)
    # The step that captures a graph waits for it; there is one of each size in use.
    captures = sum(counts.waits.total() > 1 for counts in steps if counts.replays)
    print(f"{captures} captures")
    assert captures <= 8


def bytes_of(folder: Path, layers: int) -> tuple[int, int]:
    """Bytes that the last step of 64 responses of 256 tokens on 8 prompts moves, and those of its layers' weights,
    keys and values. The steps before it are made without the model."""
    engine = engine_of(folder, layers, WIDE | HEADS, enforce_eager=True, max_model_len=512, cache_tokens=22_000)
    runner, decode, forward = engine._runner, engine._runner.device_decode, engine._runner._forward
    assert decode is not None
    full = decode._forward

    def prefill(ids: Any, *rest: Any) -> Any:
        runner._forward = lambda ids, _, plan, keep, media: torch.zeros(len(keep), 264, device=ids.device)
        return forward(ids, *rest)

    def last() -> None:
        for tensor in engine._pool.tensors():
            tensor.zero_()
        decode._forward = full
        operator_references.MOVED.clear()

    runner._forward = prefill  # type: ignore[method-assign]
    decode._forward = lambda ids, positions, plan: torch.zeros(len(ids), 264, device=ids.device)
    counts = decode_steps(engine, [256] * 64, last=last)[-1]
    calls = sum(n for name, n in counts.launches.items() if "store" in name or "partial" in name)
    cache = sum(tensor.nbytes for tensor in engine._pool.tensors()) // layers
    attended = operator_references.MOVED.total()
    weights = sum(p.numel() for p in runner.model.model.layers.parameters()) * 2
    return counts.bytes - calls * cache + attended, attended + weights


def test_bytes_of_a_layer(tmp_path: Path) -> None:
    """Little more than its weights, keys and values."""
    (one, one_floor), (two, two_floor) = (bytes_of(tmp_path, layers) for layers in (1, 2))
    layer, floor = two - one, two_floor - one_floor
    print(f"a layer moves {layer / 1e6:.1f} MB, must {floor / 1e6:.1f} MB: {layer / floor:.2f}")
    assert layer <= 1.2 * floor
