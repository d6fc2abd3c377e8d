"""Tests that run on the pretend device (`test_pretend.py` starts them): counts of the device path, and whole steps."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu.test_sampler import engine_of, load
from tests.integration.test_vision_runs import VisionRun
from tests.pretend.counts import BOUNDS, COUNTS, Counts, counting
from tests.runs import TinyRun
from tests.tiny import tiny_model
from tests.unit.engine.training.engine_cases import rows_of, simple_loss
from verl.engine.rollout.base import SamplingParams
from verl.engine.training.fsdp.engine import FSDPEngine
from verl.platform import detect
from verl.trainer.main_ppo import main

RANDOM = np.random.default_rng(0)
LENGTHS = np.minimum(160, RANDOM.lognormal(3.5, 0.8, 128)).astype(int) + 2


def check(name: str, count: float) -> None:
    assert count <= BOUNDS[name], f"{name}: {count:.4g}, at most {BOUNDS[name]}"


def sample(layers: int, folder: Path, lengths: Any, *, top_p: float = 1.0, **options: Any) -> list[Counts]:
    """The counts of each decode step of responses of these lengths, eight to a prompt."""
    model = load(str(tiny_model(folder / f"{layers}", "qwen3", num_hidden_layers=layers)), detect("cuda"))
    engine, steps = engine_of(model, "bfloat16", **options), []
    prompts, step = [[3 + i] * (40 + 9 * i) for i in range(-(-len(lengths) // 8))], engine.step

    def counted() -> None:
        decodes = not engine._scheduler.waiting
        with counting() as counts:
            step()
        steps.extend([counts] if decodes else [])

    async def go() -> None:
        calls = []
        for i, length in enumerate(lengths):
            params = SamplingParams(max_tokens=int(length), seed=i, top_p=top_p)
            calls.append(engine.generate(prompts[i // 8], params, request_id=f"{i}", group=f"{i // 8}"))
        await asyncio.gather(*calls)

    engine.step = counted
    asyncio.run(go())
    return steps


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_launches_and_waits_of_a_decode_step(tmp_path: Path, top_p: float) -> None:
    one, two = (sample(n, tmp_path, [6] * 32, top_p=top_p, enforce_eager=True)[-2] for n in (1, 2))
    if top_p < 1:
        check("decode: launches on one layer, top_p", one.launches.total())
        return check("decode: waits a step, top_p", one.waits.total())
    layer = two.launches.total() - one.launches.total()
    check("decode: launches a layer", layer)
    check("decode: launches outside the layers", one.launches.total() - layer)
    check("decode: waits a step", one.waits.total())
    check("decode: uploads a step", one.uploads)


def test_share_of_decode_steps_that_replay(tmp_path: Path) -> None:
    steps = sample(1, tmp_path, LENGTHS, max_num_seqs=32)
    share = sum(counts.replays for counts in steps) / len(steps)
    name = "decode: share of steps that replay, 128 responses through 32 slots"
    assert share >= BOUNDS[name], f"{name}: {share:.3f}, at least {BOUNDS[name]}"


def trained(folder: Path, layers: int, sizes: list[int], *, step: bool) -> Counts:
    """Counts of one update after the first (or of a forward pass) with layers of Qwen3-0.6B's shape."""
    shape = {"hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128, "num_attention_heads": 16}
    path = str(tiny_model(folder / f"{layers}", "qwen3", num_hidden_layers=layers, num_key_value_heads=8, **shape))
    role = {"fsdp_config": {"dtype": "bfloat16"}, "optim": {"lr": 1e-6}, "ppo_max_token_len_per_gpu": 100000}
    engine, rows = FSDPEngine(path, role_cfg=role, device="cuda"), rows_of([(64, sizes)])
    for _ in range(2):  # the first step makes the optimizer's state
        with counting() as counts:
            if step:
                engine.step(rows, simple_loss(sum(sizes)), ("log_probs",), temperature=1.0)
            else:
                engine.forward(rows, temperature=1.0)
    return counts


def test_launches_and_bytes_of_training(tmp_path: Path) -> None:
    few, many = [50] * 2, [50] * 6
    for step in (False, True):
        one, two = (trained(tmp_path, n, many, step=step) for n in (1, 2))
        layer, kind = two.launches.total() - one.launches.total(), "step" if step else "forward"
        check(f"training: launches a layer, {kind}", layer)
        check(f"training: launches outside the layers, {kind}", one.launches.total() - layer)
    less = [trained(tmp_path, n, few, step=True).bytes for n in (1, 2)]
    grown = (two.bytes - one.bytes - (less[1] - less[0])) / (49 * 4)
    check("training: KB a token and layer, step", grown / 1000)


FEATURES = {
    "reference, offload, top-p": [
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.fsdp_config.param_offload=True",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
        "actor_rollout_ref.ref.fsdp_config.param_offload=True",
        "actor_rollout_ref.rollout.top_p=0.9",
    ],
    "critic": ["algorithm.adv_estimator=gae", "critic.model.path={model}", "critic.optim.lr=1e-3"],
    "LoRA": ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=8"],
    "images": [],
    "determinism": ["actor_rollout_ref.actor.fsdp_config.full_determinism=True"],
}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_step_of(feature: str, tiny: TinyRun, tmp_path: Path) -> None:
    tiny = VisionRun(tmp_path / "vision") if feature == "images" else tiny
    words = [word.format(model=tiny.model) for word in FEATURES[feature]]
    words += ["trainer.device=cuda", "actor_rollout_ref.actor.fsdp_config.dtype=bfloat16", "trainer.test_freq=-1"]
    try:
        assert main(tiny.overrides(tmp_path / "out", "trainer.total_training_steps=1", *words)) == 0
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(COUNTS) == 1
