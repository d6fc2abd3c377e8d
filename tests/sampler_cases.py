"""What samplers with weights of their own are tested with: after transfers they compute what the trainer does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.invariant import test_vision as vision
from tests.unit.engine.training import lora_cases
from tests.unit.engine.training.engine_cases import simple_loss
from tests.vllm_cases import sample
from verl.engine.training.fsdp.engine import FSDPEngine
from verl.engine.training.lora import LoraSettings
from verl.trajectory import Prompt, Trajectory
from verl.weight_sync.sender import StreamedSync

TEMPERATURE = 0.8
LONG = list(range(3, 103))  # three full blocks of the cache: an old one would be found again
PROMPTS = [LONG, LONG[:7], [250]]


def rows(completions: list[Any], n: int) -> list[Any]:
    """n responses to each of PROMPTS as trajectories."""
    out = []
    for k, done in enumerate(completions):
        prompt = Prompt(uid=str(k // n), ids=np.asarray(PROMPTS[k // n]), messages=None)
        length = len(done.token_ids)
        advantages = np.where(np.arange(length) % 2, 1.0, -1.0).astype(np.float32)
        mask = np.ones(length, bool)
        out.append(Trajectory(prompt, k % n, done.token_ids, mask, advantages=advantages))
    return out


def difference(engine: Any, completions: list[Any], n: int) -> float:
    """Largest difference of log-probs between a sampler's responses and a training engine."""
    ours = engine.forward(rows(completions, n), temperature=TEMPERATURE)["log_probs"]
    return float(np.abs(ours - np.concatenate([c.log_probs for c in completions])).max())


def assert_only_the_adapter_moves(path: Path, engine: Callable[[dict[str, Any]], Any]) -> None:
    """A sync is the adapter's alone, and both sides agree before and after an update. engine: from what
    adapter_config.json says."""
    actor = lora_cases.engine(str(path), lora_cases.trained())
    actor.schedule(10)
    lora_cases.disturb(actor)
    settings = LoraSettings.of(lora_cases.lora(), path)
    assert settings is not None
    sampler = engine(settings.described())
    try:
        with pytest.raises(RuntimeError, match="no weights yet"):
            sample(sampler, PROMPTS)
        sync = StreamedSync(actor, sampler, adapter=True)
        result = sync.push(0, verify=True)
        adapter = sum(t.numel() * 4 for _, t in actor.adapter_weights())
        assert result.bytes == adapter < sum(t.numel() * 4 for _, t in actor.named_weights()) / 4
        before = sample(sampler, PROMPTS, 2, temperature=TEMPERATURE, ignore_eos=True)
        assert difference(actor, before, 2) <= 1e-4
        with actor.without_adapter():
            assert difference(actor, before, 2) > 1e-2, "it is not the base that was sampled from"

        for _ in range(3):
            stepped = actor.step(rows(before, 2), simple_loss(len(before) * 24), temperature=TEMPERATURE)
            assert not stepped.refused
        assert difference(actor, before, 2) > 1e-2, "the update moved the distribution far enough to be seen"
        sync.push(1, verify=True)
        after = sample(sampler, PROMPTS, 2, temperature=TEMPERATURE, ignore_eos=True)
        assert difference(actor, after, 2) <= 1e-4 and {c.versions for c in after} == {(1,)}
    finally:
        sampler.close()


def assert_agreement(path: Path, engine: Callable[[Path], Any]) -> None:
    """Sampler and trainer agree from a checkpoint and after syncs: one image, none, several, and one of 64 tokens;
    first as the engine loads what the trainer saved. Prompts whose image tokens are not those of their images are
    refused."""
    saved, prompts = path.with_name("saved"), vision.make_prompts(path)
    actor = FSDPEngine(path, role_cfg=vision.trained(), device="cpu")
    actor.save_weights(saved)
    for file in path.glob("*.json*"):
        if not (saved / file.name).exists():
            (saved / file.name).write_bytes(file.read_bytes())
    sampler = engine(saved)
    try:
        for version in range(3):
            if version:
                assert StreamedSync(actor, sampler).push(version, verify=True).verified
            found = vision.sample(sampler, prompts)
            rows = vision.rows_of(prompts, found)
            ours = actor.forward(vision.segments(rows), temperature=1.0)["log_probs"]
            assert np.abs(ours - vision.sampled(found)).max() <= 1e-4
            assert not set(vision.marks_of(path)) & {int(t) for row in rows for t in row.response_ids}
            loss = simple_loss(sum(row.length for row in rows))
            assert not actor.step(vision.segments(rows), loss, temperature=1.0).refused
        swapped = Prompt("0:0@0", prompts[0].ids, None, media=prompts[2].media)
        for wrong, why in (
            (swapped, "image tokens for images"),
            (Prompt("0:0@0", prompts[0].ids, None), "holds"),
        ):
            with pytest.raises(ValueError, match=why):
                vision.sample(sampler, [wrong], 1)
    finally:
        sampler.close()


def trainer(path: Path) -> Any:
    """A float32 training engine of this model, with a learning rate that moves its distribution in one step."""
    from verl.config import Map
    from verl.engine.training.fsdp.engine import FSDPEngine

    role = {"optim": {"lr": 0.05}, "fsdp_config": {"dtype": "float32"}, "ppo_max_token_len_per_gpu": 4096}
    engine = FSDPEngine(str(path), role_cfg=Map.of(role), model_cfg=Map.of({}), device="cpu", seed=0)
    engine.schedule(10)
    return engine
