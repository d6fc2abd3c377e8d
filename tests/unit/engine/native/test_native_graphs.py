"""Captured decode steps: the bookkeeping, with a capture that re-runs the step on the tensors it was captured with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tiny import tiny_model
from verl.engine.rollout.base import Completion, SamplingParams
from verl.engine.rollout.native.engine import NativeEngine


class StandIn:
    """Captures by keeping the step and the tensors it read, and runs it again on these."""

    def __init__(self, engine: NativeEngine):
        self._plan = engine._runner._decode
        self.forgotten = 0

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        plan, captured = self._plan, self._plan.tensors
        step()

        def replay() -> None:
            now, plan.tensors = plan.tensors, captured
            known = set(captured)
            step()
            assert set(captured) == known, "a replay needed a tensor that the capture did not have"
            plan.tensors = now

        return replay

    def forget(self) -> None:
        self.forgotten += 1


VARIED = [60, 60, 50, 44, 60, 9, 60, 58, 60, 60]
TURN = SamplingParams(max_tokens=8, seed=1)
EMPTIED = [5] * 16 + [40] * 20
"""Sixteen short responses fill a row of blocks and leave it empty below those that go on."""


@pytest.mark.parametrize(
    ("arch", "config", "lengths", "slots"),
    [
        ("qwen3", {}, VARIED, 8),
        ("gemma3_text", {"sliding_window": 16}, VARIED, 8),
        ("qwen3", {}, EMPTIED, 40),
    ],
)
def test_replayed_steps_give_the_same_responses(
    tmp_path: Path, arch: str, config: dict[str, Any], lengths: list[int], slots: int
) -> None:
    model = made(tmp_path, arch, **config).eval()
    prompts = [torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (9, 40, 3)]

    def responses(graphs: bool) -> tuple[list[Completion], NativeEngine]:
        engine = NativeEngine(model, eos_token_ids=[], max_model_len=120, max_num_seqs=slots)
        assert slots == 8 or engine._pool.layout.rows == 16
        if graphs:
            engine._runner.capture_with(StandIn(engine))

        async def go() -> list[Completion]:
            calls = [
                engine.generate(
                    prompts[i % 3], SamplingParams(max_tokens=n, seed=i), request_id=str(i), group=str(i % 3)
                )
                for i, n in enumerate(lengths)
            ]
            first = await engine.generate([7, 8, 9], TURN, request_id="turn 1", session="waits for a tool")
            done = await asyncio.gather(*calls)
            later = [7, 8, 9, *first.token_ids.tolist(), 5, 6]
            done.append(await engine.generate(later, TURN, request_id="turn 2", session="waits for a tool"))
            assert done[-1].prefilled < 4, "the first turn's tokens are in the cache"
            return done

        return asyncio.run(go()), engine

    plain, _ = responses(False)
    replayed, engine = responses(True)
    assert engine._runner._graphs is not None and engine._runner._graphs.replays > 20
    for a, b in zip(plain, replayed, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-4)


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
AnswersAndEngine = tuple[list[list[int]], NativeEngine, Strict]


def short_responses(model: Any, graphs: bool) -> AnswersAndEngine:
    engine = NativeEngine(model.eval(), eos_token_ids=[], max_model_len=120, max_num_seqs=8)
    strict = Strict(engine)
    if graphs:
        engine._runner.capture_with(strict)

    async def go() -> list[Completion]:
        calls = [
            engine.generate([1, 2, 3, i], SamplingParams(max_tokens=12, seed=i), request_id=str(i)) for i in range(4)
        ]
        return await asyncio.gather(*calls)

    return [c.token_ids.tolist() for c in asyncio.run(go())], engine, strict


def made(path: Path, arch: str, **config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model(path, arch, scale=8.0, **config)).float()


@pytest.mark.parametrize(
    ("arch", "config"),
    [("qwen3", {}), ("qwen2", {}), ("gemma2", {"sliding_window": 16}), ("llama", DYNAMIC), ("gpt2", {})],
)
def test_a_captured_step_does_not_wait_for_the_device(tmp_path: Path, arch: str, config: dict[str, Any]) -> None:
    engine = short_responses(made(tmp_path, arch, **config), True)[1]
    assert engine._runner._graphs is not None and engine._runner._graphs.replays > 5


def test_what_waits_for_the_device_is_not_tried(tmp_path: Path) -> None:
    model = made(tmp_path, "qwen3_moe")
    with pytest.warns(RuntimeWarning, match="Experts"):
        found, engine, _ = short_responses(model, True)
    assert engine._runner._graphs is None
    assert found == short_responses(model, False)[0]


def test_a_capture_that_fails_costs_no_response(tmp_path: Path) -> None:
    """A module that looks at a number of its input."""
    model = made(tmp_path, "qwen3")
    model.model.norm.register_forward_pre_hook(lambda _, given: (float(given[0].sum()), None)[1])
    plain = short_responses(model, False)[0]
    with pytest.warns(RuntimeWarning, match="not permitted"):
        found, engine, strict = short_responses(model, True)
    assert found == plain
    assert engine._runner._graphs is not None and engine._runner._graphs.replays == 0
    assert strict.forgotten == 1


def test_logits_of_all_graphs_lie_in_one_place() -> None:
    from verl.engine.rollout.native.graphs import DecodeGraphs

    plan = SimpleNamespace(tensors={}, refill=lambda tensors: None, now=None)
    plan.signature = lambda: plan.now

    class Plain:
        def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
            return step

        def forget(self) -> None:
            pass

    graphs: Any = DecodeGraphs(lambda ids, _: torch.arange(7.0) + ids[:, None], plan, Plain())  # type: ignore[arg-type]
    places = set()
    for plan.now in (48, 16, 32):
        for number in range(4):
            ids = torch.arange(plan.now) + number
            found = graphs.run(ids, ids)
            assert torch.equal(found, torch.arange(7.0) + ids[:, None])
        places.add(found.untyped_storage().data_ptr())
    assert graphs.replays == 6 and len(places) == 1


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
