"""With adapters the sampler samples from base and adapter together, and its log-probs are exact."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.invariant.test_sampler_logprobs import make_prompts, sample
from tests.tiny import tiny_model
from tests.unit.engine.training.lora_cases import disturb, engine, lora, trained
from verl.engine.rollout.native.engine import NativeEngine
from verl.trajectory import Prompt, Trajectory
from verl.weight_sync.receiver import WeightReceiver
from verl.weight_sync.sender import InProcessSync, StreamedSync
from verl.weight_sync.verify import WeightSyncError, checksums, compare

pytest.importorskip("peft")

ARCHITECTURES = ("qwen3", "llama", "qwen3_moe")
LIMITS: dict[str, Any] = {"eos_token_ids": [258], "max_model_len": 256, "max_num_seqs": 32}
PROMPTS = make_prompts((5, 37, 1))


def rows(found: list[list[Any]]) -> list[Trajectory]:
    out = []
    for i, group in enumerate(found):
        prompt = Prompt(uid=f"0:{i}@0", ids=np.asarray(PROMPTS[i]), messages=None)
        for j, done in enumerate(group):
            advantages = np.full(len(done.token_ids), 1.0 if j % 2 else -1.0, np.float32)
            mask = np.ones(len(done.token_ids), bool)
            out.append(Trajectory(prompt, j, done.token_ids, mask, advantages=advantages))
    return out


def difference(actor: Any, found: list[list[Any]]) -> float:
    ours = actor.forward(rows(found), temperature=1.0)["log_probs"]
    return float(np.abs(ours - np.concatenate([d.log_probs for group in found for d in group])).max())


def update(actor: Any, found: list[list[Any]]) -> None:
    from tests.unit.engine.training.engine_cases import simple_loss

    given = rows(found)
    assert not actor.step(given, simple_loss(sum(r.length for r in given)), temperature=1.0).refused


@pytest.mark.parametrize("arch", ["qwen3", *(pytest.param(a, marks=pytest.mark.long) for a in ARCHITECTURES[1:])])
def test_a_sampler_on_the_very_tensors_agrees(tmp_path: Path, arch: str) -> None:
    actor = engine(str(tiny_model(tmp_path / "m", arch, scale=6.0)))
    sampler = NativeEngine(actor.module, **LIMITS)
    sync = InProcessSync(actor, sampler)
    for version in range(3):
        assert sync.push(version, verify=True).verified
        found = sample(sampler, PROMPTS, 4)
        assert difference(actor, found) <= 1e-4
        with actor.without_adapter():
            assert (difference(actor, found) > 1e-3) is (version > 0)
        update(actor, found)
        assert difference(actor, found) > 1e-3, "the update can be seen"
    disturb(actor)
    with pytest.raises(WeightSyncError, match="not its weight"):
        sampler.checksums()


def test_the_distribution_changes_with_an_update(tmp_path: Path) -> None:
    """Responses that were reinforced come more often: what is counted is drawn tokens, not the log-probs reported."""
    actor = engine(str(tiny_model(tmp_path / "m", "qwen3", scale=16.0)), trained(lr=0.05))
    sampler = NativeEngine(actor.module, **(LIMITS | {"max_num_seqs": 256}))
    wanted, prompt = 65, PROMPTS[:1]

    def share() -> float:
        found = sample(sampler, prompt, 256, max_tokens=2, top_k=-1)[0]
        counts = Counter(int(d.token_ids[0]) for d in found)
        return counts[wanted] / len(found)

    InProcessSync(actor, sampler).push(0)
    before = share()
    response = Trajectory(
        Prompt(uid="0:0@0", ids=np.asarray(prompt[0]), messages=None), 0, np.array([wanted]), np.ones(1, bool)
    )
    for _ in range(20):
        result = actor.step([response], lambda micro: (-micro.log_probs.sum(), {}), temperature=1.0)
        assert not result.refused
    InProcessSync(actor, sampler).push(1)
    after = share()
    assert before < 0.2 and after > before + 0.3, (before, after)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_bfloat16_samples_from_the_merged_weights(tmp_path: Path, arch: str) -> None:
    actor = engine(str(tiny_model(tmp_path / "m", arch, scale=2.0)), trained(fsdp={"dtype": "bfloat16"}))
    disturb(actor)
    sampler = NativeEngine(actor.module, dtype="bfloat16", **LIMITS)
    InProcessSync(actor, sampler).push(1, verify=True)
    found = sample(sampler, PROMPTS, 4)
    assert difference(actor, found) < 0.2
    with actor.without_adapter():
        assert difference(actor, found) > 0.3


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_sampler_elsewhere_gets_the_adapter_alone(tmp_path: Path, arch: str) -> None:
    """With the base of its own; and one without LoRA gets merged weights."""
    from verl.engine.training.lora import AdapterSource, LoraSettings, inject
    from verl.models.pretrained import load_model

    path = str(tiny_model(tmp_path / "m", arch, scale=6.0))
    actor = engine(path)
    disturb(actor)
    own, plain = load_model(path), load_model(path)
    settings = LoraSettings.of(lora(), path)
    assert settings is not None
    inject(own, settings).materialise(AdapterSource(own, settings, 7, None), torch.device("cpu"))
    for module, moved in ((own, actor.adapter_weights()), (plain, actor.named_weights())):
        sampler = NativeEngine(module, **LIMITS)
        sampler.load_weights(moved, 1)
        assert sampler.version == 1 and sampler.holds_adapter is (module is own)
        assert difference(actor, sample(sampler, PROMPTS, 2)) <= 1e-4
        sent = actor.adapter_weights() if module is own else actor.named_weights()
        compare(checksums(sent), sampler.checksums())
    sampler = NativeEngine(own, **LIMITS)
    with pytest.raises(ValueError, match="is no weight"):
        sampler.load_weights(actor.named_weights(), 2)
    with pytest.raises(ValueError, match="no value came for"):
        sampler.load_weights(list(actor.adapter_weights())[1:], 2)


def test_a_stream_carries_the_adapter_where_it_is_held(tmp_path: Path) -> None:
    actor = engine(str(tiny_model(tmp_path / "m", "qwen3")))

    class Recorder(WeightReceiver):
        def load_weights(self, weights: Any, version: int, *, verify: str = "") -> dict[str, str]:
            self.held = checksums(weights, verify)
            return self.held

    for holds, expected in ((True, actor.adapter_weights()), (False, actor.named_weights())):
        recorder = Recorder()
        assert StreamedSync(actor, recorder, adapter=holds).push(1).verified
        assert recorder.held.keys() == {name for name, _ in expected}
