"""Drafts by the layer that predicts a token further (`model.mtp`): they change no log-prob, and are the layer's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests import vllm_drafts
from tests.sampler_cases import PROMPTS, TEMPERATURE, difference, rows
from tests.tiny import LINEAR_ATTENTION
from tests.unit.engine.training.engine_cases import simple_loss
from tests.unit.engine.training.test_mtp import TRAINED, model_with_mtp
from tests.vllm_cases import allow_float32_linear_attention, require_vllm, sample, vllm_engine
from verl.engine.rollout.vllm import launch
from verl.engine.training.base import FURTHER
from verl.engine.training.fsdp.engine import FSDPEngine
from verl.trajectory import Batch, Prompt, Trajectory
from verl.weight_sync.sender import StreamedSync

require_vllm()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Qwen3.5, whose module in vLLM needs torchvision, is in test_vllm_vision.py.
MODELS = ["deepseek_v3", *(pytest.param(arch, marks=pytest.mark.long) for arch in ("glm4_moe", "qwen3_next"))]


def trainer(path: Path) -> FSDPEngine:
    role = {"optim": {"lr": 0.05}, "fsdp_config": {"dtype": "float32"}, "ppo_max_token_len_per_gpu": 4096}
    model = {"mtp": TRAINED | {"mtp_loss_scaling_factor": 1.0}}
    engine = FSDPEngine(str(path), role_cfg=role, model_cfg=model, device="cpu")
    engine.schedule(10)
    return engine


@pytest.mark.parametrize("arch", MODELS)
def test_drafts_change_no_log_prob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    """Before and after updates, from random weights on: all that vLLM has came by transfers. With the tests' mend of
    what vLLM's CPU build lacks (`vllm_drafts`, `vllm_linear_attention`)."""
    monkeypatch.setattr(launch, "check_cpu_drafts", lambda settings: None)
    monkeypatch.setenv(vllm_drafts.RECORD, str(drafts := tmp_path / "drafts"))
    allow_float32_linear_attention(monkeypatch)
    path = model_with_mtp(tmp_path / "model", arch)
    actor, prompts = trainer(path), PROMPTS[:2] if arch in LINEAR_ATTENTION else PROMPTS
    sampler = vllm_engine(path, load_format="dummy", skip_tokenizer_init=True, draft_tokens=1)
    try:
        sync = StreamedSync(actor, sampler)
        for version in (0, 1):
            sync.push(version, verify=True)
            responses = sample(sampler, prompts, 2, temperature=TEMPERATURE, ignore_eos=True)
            assert all(len(done.token_ids) == 24 for done in responses)
            assert difference(actor, responses, 2) <= 1e-4
            segments = Batch(rows(responses, 2)).segments
            assert not actor.step(segments, simple_loss(len(responses) * 24), temperature=TEMPERATURE).refused
        if len(prompts) < len(PROMPTS):
            with pytest.raises(ValueError, match="needs 2 tokens of a prompt"):
                sample(sampler, PROMPTS[2:])
        # One alone, so that each draft is of one row.
        sync.push(2, verify=True)
        drafts.mkdir()
        prompt = [9, 4, 77, 30, 5]
        (done,) = sample(sampler, [prompt], temperature=TEMPERATURE, ignore_eos=True, max_tokens=200)
    finally:
        sampler.close()
    row = Trajectory(Prompt("0", np.asarray(prompt), None), 0, done.token_ids, np.ones(len(done.token_ids), bool))
    ours = actor.forward(Batch([row]).segments, ("log_probs", FURTHER), temperature=TEMPERATURE)
    np.testing.assert_allclose(ours["log_probs"], done.log_probs, atol=1e-4)
    kept = assert_the_layers_own(ours[FURTHER], len(prompt), done.token_ids, drafts)
    assert kept or arch not in LINEAR_ATTENTION, "states were taken back, and states after drafts went on"


def assert_the_layers_own(ours: np.ndarray, start: int, response: np.ndarray, drafts: Path) -> int:
    """Log-probs that vLLM's layer gives the tokens two after the states it read are the trainer's, `ours`. Returns how
    many drafts were kept."""
    found = [torch.load(file) for file in sorted(drafts.iterdir())]
    compared = 0
    for draft in found:
        at = int(draft["positions"]) + 2 - start
        if at < len(response):
            np.testing.assert_allclose(ours[at], draft["logits"].log_softmax(-1)[0, response[at]], atol=1e-4)
            compared += 1
    assert compared > len(response) / 2
    return len(response) - 1 - len(found)
