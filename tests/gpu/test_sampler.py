"""The embedded sampler on a device: with and without graphs, against the trainer, asleep."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from verl.engine.rollout.base import Completion, SamplingParams

PROMPTS = [torch.randint(0, 250, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (9, 140, 33)]
# A pretend device is slow: the longest responses then go just beyond one block of the cache.
LENGTHS = [n // int(os.environ.get("VERL_TEST_SHORTER", "1")) for n in (150, 60, 200, 44, 60, 9, 60, 200, 130)]


def load(path: str, platform: Any) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return model.to(platform.device()).requires_grad_(False)


def engine_of(model: Any, dtype: str = "float32", **options: Any) -> Any:
    from verl.engine.rollout.native.engine import NativeEngine

    options = {"eos_token_ids": [], "max_model_len": 400, "max_num_seqs": 16} | options
    return NativeEngine(model, dtype=dtype, **options)


def sample(engine: Any, lengths: Sequence[int] = LENGTHS) -> list[Completion]:
    """Responses of these lengths, then the second turn of a session that waited meanwhile."""

    async def go() -> list[Completion]:
        calls = [
            engine.generate(PROMPTS[i % 3], SamplingParams(max_tokens=n, seed=i), request_id=f"{i}", group=f"{i % 3}")
            for i, n in enumerate(lengths)
        ]
        turn = SamplingParams(max_tokens=8, seed=1)
        first = await engine.generate(PROMPTS[0], turn, request_id="turn 1", session="waits for a tool")
        done = await asyncio.gather(*calls)
        later = [*PROMPTS[0], *first.token_ids.tolist(), 5, 6]
        second = await engine.generate(later, turn, request_id="turn 2", session="waits for a tool")
        return [*done, second]

    return asyncio.run(go())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_change_nothing(platform: Any, model_path: str, dtype: str, record_property: Any) -> None:
    model = load(model_path, platform)
    eager, captured = (engine_of(model, dtype, enforce_eager=e) for e in (True, False))
    plain, replayed = sample(eager), sample(captured)
    captured.weights_updated(0)  # prompts are computed as they were the first time
    again = sample(captured)
    if platform.name == "cuda":
        assert eager._runner.device_decode.graphs is None and captured._runner.device_decode.graphs.replays > 50
        record_property("replays", captured._runner.device_decode.graphs.replays)
    same = sum(a.token_ids.tolist() == b.token_ids.tolist() for a, b in zip(plain, replayed, strict=True))
    record_property("responses_that_are_the_same", f"{same} of {len(plain)}")
    assert [c.token_ids.tolist() for c in replayed] == [c.token_ids.tolist() for c in again]
    # A near tie may fall the other way; most responses of float32 must be the same all the same.
    assert same >= (len(plain) - 1 if dtype == "float32" else 1)
    for a, b in zip(plain, replayed, strict=True):
        shared = int((np.cumprod(a.token_ids[: len(b.token_ids)] == b.token_ids[: len(a.token_ids)])).sum())
        difference = np.abs(a.log_probs[:shared] - b.log_probs[:shared]).max(initial=0.0)
        assert difference <= (1e-4 if dtype == "float32" else 0.1)


@pytest.mark.needs_cuda
def test_kernels_give_what_torch_gives(platform: Any, model_path: str, monkeypatch: Any, record_property: Any) -> None:
    """The decode step by kernels over block tables, and the one of a machine without Triton."""
    model = load(model_path, platform)
    by_kernels = sample(engine_of(model, enforce_eager=True))
    monkeypatch.setattr(type(platform), "has_triton", lambda self: False)
    with pytest.warns(UserWarning, match="Triton does not compile"):
        by_torch = sample(engine_of(model))
    same = sum(a.token_ids.tolist() == b.token_ids.tolist() for a, b in zip(by_kernels, by_torch, strict=True))
    record_property("responses_that_are_the_same", f"{same} of {len(by_torch)}")
    assert same >= len(by_torch) - 1


@pytest.mark.needs_cuda
def test_a_step_that_cannot_be_captured_costs_no_response(platform: Any, model_path: str) -> None:
    """A module that looks at a number of its input; the device is as it was after the attempt."""
    model = load(model_path, platform)
    hook = model.model.norm.register_forward_pre_hook(lambda _, given: (float(given[0].sum()), None)[1])
    plain = sample(engine_of(model, enforce_eager=True))
    engine = engine_of(model)
    with pytest.warns(RuntimeWarning, match="cannot be captured"):
        found = sample(engine)
    assert engine._runner.device_decode.graphs.replays == 0
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    same = sum(a.token_ids.tolist() == b.token_ids.tolist() for a, b in zip(plain, found, strict=True))
    assert same >= len(plain) - 1
    # Memory and random numbers are to be had, and what can be captured is captured.
    assert torch.randn(1 << 20, device=platform.device()).isfinite().all()
    hook.remove()
    other = engine_of(model)
    sample(other)
    assert other._runner.device_decode.graphs.replays > 50


def test_sampling_in_deterministic_mode(platform: Any, model_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    model = load(model_path, platform)
    found = []
    torch.use_deterministic_algorithms(True)
    try:
        for lengths in (LENGTHS, LENGTHS, LENGTHS[:1], LENGTHS[:1]):
            found.append([c.token_ids.tolist() for c in sample(engine_of(model), lengths)])
    finally:
        torch.use_deterministic_algorithms(False)
    assert found[0] == found[1] and found[2] == found[3]


@pytest.mark.parametrize(("dtype", "most", "mean"), [("float32", 1e-4, 1e-5), ("bfloat16", 0.3, 0.04)])
def test_sampler_and_trainer_agree(
    platform: Any, model_path: str, dtype: str, most: float, mean: float, record_property: Any
) -> None:
    from verl.engine.training.fsdp.engine import FSDPEngine
    from verl.trajectory import Prompt, Trajectory

    responses = sample(engine_of(load(model_path, platform), dtype))[: len(LENGTHS)]
    prompts = [Prompt(uid=f"0:{g}@0", ids=np.array(ids), messages=None) for g, ids in enumerate(PROMPTS)]
    rows = [
        Trajectory(prompts[i % 3], i // 3, c.token_ids, np.ones(len(c.token_ids), bool))
        for i, c in enumerate(responses)
    ]
    rows.sort(key=lambda row: row.prompt.uid)
    sampled = np.concatenate([responses[prompts.index(r.prompt) + 3 * r.index].log_probs for r in rows])
    role = {"fsdp_config": {"dtype": dtype}, "optim": {"lr": 0.0}}
    trainer = FSDPEngine(model_path, role_cfg=role, device=platform)
    difference = np.abs(trainer.forward(rows, temperature=1.0)["log_probs"] - sampled)
    record_property("max", float(difference.max()))
    record_property("mean", float(difference.mean()))
    assert difference.max() <= most and difference.mean() <= mean


def taken(platform: Any) -> int:
    """Bytes in use by this process now, as far as the device counts them."""
    platform.synchronize()
    if not platform.on_host:
        torch._C._cuda_clearCublasWorkspaces()  # 32 MiB for each thread that multiplied
    platform.empty_cache()
    if not platform.on_host:
        platform.module.reset_peak_memory_stats()
    return int(platform.peak_memory())


@pytest.mark.parametrize("owns", [False, True])
def test_a_sleeping_sampler_gives_its_memory_back(
    platform: Any, model_path: str, owns: bool, record_property: Any
) -> None:
    model = load(model_path, platform)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    before = taken(platform)
    engine = engine_of(model, "bfloat16", cache_tokens=400 * 1024, max_num_seqs=1024, owns_weights=owns)
    first = sample(engine)
    awake = taken(platform)
    engine.sleep()
    asleep = taken(platform)
    engine.wake()
    assert [c.token_ids.tolist() for c in sample(engine)] == [c.token_ids.tolist() for c in first]
    for name, value in (("before", before), ("awake", awake), ("asleep", asleep), ("weights", weights)):
        record_property(f"{name}_mib", round(value / 2**20, 1))
    if platform.name != "cpu":  # there the most memory is counted, not what is in use
        assert awake > before
        assert asleep - before < 0.1 * (awake - before) + (8 << 20) - (weights if owns else 0)
