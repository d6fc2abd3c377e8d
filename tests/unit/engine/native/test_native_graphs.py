"""Decode steps on a device, by plain references of its kernels: replayed from graphs, settled while the next one
runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests import operator_references
from tests.tiny import tiny_model
from verl.engine.rollout.base import Completion, SamplingParams
from verl.engine.rollout.native.engine import NativeEngine
from verl.engine.rollout.native.graphs import DecodeGraphs
from verl.engine.rollout.native.runner import FastLinears
from verl.platform.cpu import CpuPlatform
from verl.platform.cuda_fused import FUSED


class StandIn:
    """Captures by running the step once more, and replays by running it again."""

    forgotten = 0

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        step()
        return step

    def forget(self) -> None:
        self.forgotten += 1


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The processor as a device that Triton compiles for. Call it with a recorder of graphs."""
    operator_references.install()

    def use(recorder: Any = None) -> None:
        monkeypatch.setattr(CpuPlatform, "has_triton", lambda self: True)
        monkeypatch.setattr(CpuPlatform, "graph_recorder", lambda self: recorder)
        monkeypatch.setattr(CpuPlatform, "fused_operators", lambda self: FUSED)

    return use


VARIED = [60, 60, 50, 44, 60, 9, 60, 58, 60, 60]
TURN = SamplingParams(max_tokens=8, seed=1)
EMPTIED = [5] * 16 + [40] * 20
DRAWS = [{}, {"top_p": 0.6}, {"temperature": 0.0}, {"top_k": 7, "temperature": 0.8}, {"min_p": 0.1}]
STOPS = {"eos_token_ids": range(0, 200, 9)}


@pytest.mark.parametrize(
    ("arch", "config", "lengths", "options", "draws"),
    [
        ("qwen3", {}, VARIED, {}, DRAWS[:1]),
        ("qwen3", {}, VARIED, STOPS, DRAWS),
        ("gemma3_text", {"sliding_window": 16}, VARIED, {}, DRAWS[:1]),
        ("qwen3", {}, EMPTIED, {"max_num_seqs": 40}, DRAWS),
        ("qwen3", {}, VARIED, {"cache_tokens": 416}, DRAWS[:2]),  # somebody loses its place
        ("qwen3", {}, VARIED, {}, [{"repetition_penalty": 1.3}, {}, {"repetition_penalty": 0.9, "top_p": 0.8}]),
        ("qwen3_moe", {}, VARIED, {"cache_tokens": 416, "record_routes": True}, DRAWS[:1]),
        ("qwen3", {}, VARIED[:6], {}, [{"top_p": 0.6, "record_mask": True}, {}, {"top_k": 3, "record_mask": True}]),
    ],
)
def test_steps_on_a_device_give_the_same_responses(
    tmp_path: Path, device: Any, arch: str, config: Any, lengths: list[int], options: Any, draws: list[Any]
) -> None:
    model = made(tmp_path, arch, **config).eval()
    prompts = [torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (9, 40, 3)]
    options = {"eos_token_ids": [], "max_model_len": 120, "max_num_seqs": 8} | options

    def responses() -> tuple[list[Completion], NativeEngine]:
        engine = NativeEngine(model, **options)

        def generate(i: int, n: int) -> Any:
            sampling = SamplingParams(max_tokens=n, seed=i, **draws[i % len(draws)])
            return engine.generate(prompts[i % 3], sampling, request_id=str(i), group=str(i % 3))

        async def go() -> list[Completion]:
            calls = [asyncio.create_task(generate(i, n)) for i, n in enumerate(lengths)]
            first = await engine.generate([7, 8, 9], TURN, request_id="turn 1", session="waits for a tool")
            done = await asyncio.gather(*calls)
            later = [7, 8, 9, *first.token_ids.tolist(), 5, 6]
            done.append(await engine.generate(later, TURN, request_id="turn 2", session="waits for a tool"))
            assert done[-1].prefilled < 4 or "cache_tokens" in options, "the first turn's tokens are in the cache"
            return done

        return asyncio.run(go()), engine

    plain, _ = responses()
    device(StandIn())
    found, engine = responses()
    decode = engine._runner.device_decode
    assert decode is not None
    assert options.get("record_routes") or decode.graphs.replays > 20
    for a, b in zip(plain, found, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist() and a.finish_reason == b.finish_reason
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-4)
        np.testing.assert_array_equal(a.routed_experts, b.routed_experts)
        np.testing.assert_array_equal(a.sampling_mask, b.sampling_mask)
    if "cache_tokens" in options:
        assert any(c.num_preempted for c in found)


def test_new_weights_and_aborts_find_all_tokens_settled(tmp_path: Path, device: Any) -> None:
    device(StandIn())
    engine = NativeEngine(made(tmp_path, "qwen3").eval(), eos_token_ids=[], max_model_len=120, max_num_seqs=8)

    async def go() -> list[Completion]:
        calls = [
            asyncio.create_task(engine.generate([1, 2, i], SamplingParams(max_tokens=30, seed=i), request_id=str(i)))
            for i in range(4)
        ]
        for version in (0, 0, 0, 0, 0, 1):
            await asyncio.sleep(0)
            if version:
                engine.weights_updated(version)
                engine.abort(["0"])
        return await asyncio.gather(*calls)

    first, *others = asyncio.run(go())
    assert first.finish_reason == "abort" and 0 < len(first.token_ids) == len(first.log_probs) < 30
    assert all(len(c.token_ids) == 30 and c.versions == (0, 1) for c in others)
    plain = asyncio.run(engine.generate([1, 2, 3], SamplingParams(max_tokens=30, seed=3), request_id="3 again"))
    assert others[2].token_ids.tolist() == plain.token_ids.tolist()


class Refusing(TorchDispatchMode):
    """Operations that wait for a CUDA device, or copy to it from the host, end a capture."""

    WAITING = frozenset(
        {"_local_scalar_dense", "nonzero", "_unique2", "masked_select", "equal", "bincount", "lift_fresh"}
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::") in self.WAITING:
            raise RuntimeError(f"operation not permitted when stream is capturing ({func})")
        return func(*args, **(kwargs or {}))


class Strict(StandIn):
    """Captures as a device would: nothing may wait for it."""

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        with pytest.MonkeyPatch.context() as patch, Refusing():
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            return super().__call__(step)


DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}


def short_responses(model: Any) -> tuple[list[list[int]], Any]:
    engine = NativeEngine(model.eval(), eos_token_ids=[], max_model_len=120, max_num_seqs=8)

    async def go() -> list[Completion]:
        calls = [
            engine.generate([1, 2, 3, i], SamplingParams(max_tokens=12, seed=i), request_id=str(i)) for i in range(4)
        ]
        return await asyncio.gather(*calls)

    decode = engine._runner.device_decode
    return [c.token_ids.tolist() for c in asyncio.run(go())], decode and decode.graphs


def made(path: Path, arch: str, **config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model(path, arch, scale=8.0, **config)).float()


@pytest.mark.parametrize(
    ("arch", "config"),
    [("qwen3", {}), ("qwen2", {}), ("gemma2", {"sliding_window": 16}), ("llama", DYNAMIC), ("gpt2", {})],
)
def test_a_captured_step_does_not_wait_for_the_device(
    tmp_path: Path, device: Any, arch: str, config: dict[str, Any]
) -> None:
    model = made(tmp_path, arch, **config)
    plain = short_responses(model)[0]
    device(Strict())
    found, graphs = short_responses(model)
    assert graphs.replays > 5 and found == plain


def test_what_waits_for_the_device_is_not_tried(tmp_path: Path, device: Any) -> None:
    model = made(tmp_path, "qwen3_moe")
    plain = short_responses(model)[0]
    device(Strict())
    with pytest.warns(RuntimeWarning, match="Experts"):
        found, graphs = short_responses(model)
    assert graphs is None and found == plain


def test_a_capture_that_fails_costs_no_response(tmp_path: Path, device: Any) -> None:
    """A module that looks at a number of its input."""
    model = made(tmp_path, "qwen3")
    model.model.norm.register_forward_pre_hook(lambda _, given: (float(given[0].sum()), None)[1])
    plain = short_responses(model)[0]
    strict = Strict()
    device(strict)
    with pytest.warns(RuntimeWarning, match="not permitted"):
        found, graphs = short_responses(model)
    assert found == plain and graphs.replays == 0 and strict.forgotten == 1


def test_a_batch_that_shrinks_goes_on_in_a_larger_size() -> None:
    ran: list[int] = []
    captured = StandIn()
    graphs = DecodeGraphs(lambda rows, kind: ran.append(rows), captured)  # type: ignore[arg-type]

    def sizes(rows: Sequence[int]) -> list[int]:
        return [graphs.size_for(count, None) for count in rows]

    first = sizes([256, 224, 192, 128, 127, 96, 63])
    assert first == [256, 256, 256, 256, 127, 127, 63]
    # A size that stays is worth a graph, after as many steps as one costs.
    assert sizes([200] * 70) == [256] * 64 + [200] * 6
    for rows in (256, 256, 200, 200):
        graphs.run(rows, None)
    assert ran == [256, 256, 256, 200, 200, 200] and graphs.replays == 2  # launched, captured, replayed
    # A round has the sizes of a run that begins with it, whatever graphs are there.
    graphs.begin_round()
    assert sizes([256, 224, 192, 128, 127, 96, 63]) == first
    graphs.run(200, None)
    assert graphs.replays == 3


def test_layers_with_the_same_input_have_one_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuPlatform, "has_packed_products", lambda self, dtype: False)
    model = made(tmp_path, "qwen2")
    linears = FastLinears(model, torch.bfloat16)
    attention, x, other = model.model.layers[0].self_attn, torch.randn(1, 3, 32), torch.randn(1, 2, 32)
    calls = [(attention.q_proj, x), (attention.v_proj, other), (attention.k_proj, x), (attention.v_proj, x)]
    for _ in range(2):
        with linears.active():
            found = [layer(given) for layer, given in calls]
        for (layer, given), result in zip(calls, found, strict=True):
            expected = torch.nn.functional.linear(given.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16())
            torch.testing.assert_close(result, expected, rtol=0.02, atol=0.02)
        linears.check()
        model.model.layers[0].self_attn.k_proj.weight.data.mul_(-1)
        linears.invalidate()
    assert linears._copies[attention.q_proj][0].untyped_storage().data_ptr() == (
        linears._copies[attention.v_proj][0].untyped_storage().data_ptr()
    )


def test_a_kernel_that_gives_something_else_is_not_used(
    tmp_path: Path, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(tmp_path, "qwen3")
    plain = short_responses(model)[0]
    device(StandIn())
    monkeypatch.setattr("verl.engine.rollout.native.device_decode._agrees", lambda *_: False)
    with pytest.warns(UserWarning, match="without graphs: its kernels give other results"):
        assert short_responses(model) == (plain, None)


class Cuda:
    """The parts of torch.cuda that a capture takes, in words. `ends`: this version ends a failed capture by itself."""

    def __init__(self, patch: pytest.MonkeyPatch, ends: bool):
        self.said: list[str] = []
        self.stream, self.pools, self.broken, self.ends = "default", 0, False, ends
        self.random = SimpleNamespace(clone_state=lambda: "before", graphsafe_set_state=self.drawn)
        names = ("synchronize", "current_stream", "set_stream", "Stream", "CUDAGraph", "graph_pool_handle")
        for name in names:
            patch.setattr(torch.cuda, name, getattr(self, name))
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "default_generators", (self.random,))
        patch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_pool, raising=False)
        patch.setattr(torch._C, "_cuda_releasePool", lambda place, pool: self.said.append("release"), raising=False)
        patch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)

    def drawn(self, state: str) -> None:
        self.said.append(f"random {state}")

    def end_pool(self, place: int, pool: int) -> None:
        if self.ends:
            raise RuntimeError("not currently recording to mempool_id")
        self.said.append("end pool")

    def synchronize(self) -> None:
        assert self.stream == "default"

    def current_stream(self) -> str:
        return self.stream

    def set_stream(self, stream: str) -> None:
        self.stream = stream

    def Stream(self) -> str:
        return "side"

    def graph_pool_handle(self) -> int:
        self.pools += 1
        return self.pools

    def CUDAGraph(self) -> Any:
        return SimpleNamespace(capture_begin=self.begin, capture_end=self.end, replay=lambda: None)

    def begin(self, pool: int, capture_error_mode: str) -> None:
        assert self.stream == "side" and capture_error_mode == "thread_local"
        self.said.append(f"pool {pool}")

    def end(self) -> None:
        assert self.stream == "side"
        self.said.append("end")
        if self.broken:
            raise RuntimeError("capture was invalidated")


@pytest.mark.parametrize("ends", [False, True])
def test_a_failed_capture_leaves_the_device_as_it_was(monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    from verl.platform.cuda_graphs import GraphRecorder

    cuda, record = Cuda(monkeypatch, ends), GraphRecorder()

    def fails() -> None:
        cuda.broken = True
        raise RuntimeError("waits")

    record(lambda: None)
    with pytest.raises(RuntimeError, match="waits"):
        record(fails)
    assert cuda.stream == "default"
    cuda.broken = False
    record.forget()
    record(lambda: None)
    left = [] if ends else ["end pool", "release"]
    assert cuda.said == ["pool 1", "end", "pool 1", "end", *left, "random before", "pool 2", "end"]
