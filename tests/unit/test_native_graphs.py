"""Captured decode steps: the bookkeeping, with a capture that re-runs the step on the tensors it was captured with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny import tiny_model
from verl.engine.rollout.base import Completion, SamplingParams
from verl.engine.rollout.native import NativeEngine


def stand_in(
    engine: NativeEngine,
) -> Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]:
    plan = engine._runner._decode

    def capture(step: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        captured, output = plan.tensors, step()

        def replay() -> None:
            now, plan.tensors = plan.tensors, captured
            known = set(captured)
            output.copy_(step())
            assert set(captured) == known, "a replay needed a tensor that the capture did not have"
            plan.tensors = now

        return replay, output

    return capture


@pytest.mark.parametrize(("arch", "config"), [("qwen3", {}), ("gemma3_text", {"sliding_window": 16})])
def test_replayed_steps_give_the_same_answers(tmp_path: Path, arch: str, config: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    path = tiny_model(tmp_path, arch, scale=8.0, **config)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    lengths = [60, 60, 50, 44, 60, 9, 60, 58, 60, 60]
    prompts = [
        torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (9, 40, 3)
    ]

    def answers(graphs: bool) -> tuple[list[Completion], NativeEngine]:
        engine = NativeEngine(model, eos_token_ids=[], max_model_len=120, max_num_seqs=8)
        if graphs:
            engine._runner.capture_with(stand_in(engine))

        async def go() -> list[Completion]:
            calls = [
                engine.generate(
                    prompts[i % 3], SamplingParams(max_tokens=n, seed=i), request_id=str(i), group=str(i % 3)
                )
                for i, n in enumerate(lengths)
            ]
            return await asyncio.gather(*calls)

        return asyncio.run(go()), engine

    plain, _ = answers(False)
    replayed, engine = answers(True)
    assert engine._runner._graphs is not None and engine._runner._graphs.replays > 50
    for a, b in zip(plain, replayed, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-4)


def test_a_bank_whose_answers_are_all_finished_is_left_out(tmp_path: Path) -> None:
    """Sixteen short answers fill a bank and leave it empty below those that go on."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path, "qwen3", scale=8.0)).float().eval()
    lengths = [5] * 16 + [40] * 20
    prompts = [
        torch.randint(0, 256, (9,), generator=torch.Generator().manual_seed(n)).tolist() for n in (1, 2)
    ]

    def answers(graphs: bool) -> list[Completion]:
        engine = NativeEngine(model, eos_token_ids=[], max_model_len=120, max_num_seqs=40)
        assert engine._pool.geometry.rows == 16
        if graphs:
            engine._runner.capture_with(stand_in(engine))

        async def go() -> list[Completion]:
            calls = [
                engine.generate(prompts[i % 2], SamplingParams(max_tokens=n, seed=i), request_id=str(i))
                for i, n in enumerate(lengths)
            ]
            return await asyncio.gather(*calls)

        return asyncio.run(go())

    for a, b in zip(answers(False), answers(True), strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-4)
