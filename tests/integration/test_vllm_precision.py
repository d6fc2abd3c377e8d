"""vLLM in lower precision, and with drafts by the model's own further layer: it follows the trainer's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sampler_cases import PROMPTS, TEMPERATURE, difference, rows
from tests.unit.engine.training.engine_cases import simple_loss
from tests.unit.engine.training.test_mtp import TRAINED, glm_with_mtp
from tests.vllm_cases import require_vllm, sample, vllm_engine
from verl.engine.training.fsdp.engine import FSDPEngine
from verl.trajectory import Batch
from verl.weight_sync.sender import StreamedSync

require_vllm()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def trainer(path: Path, **mtp: Any) -> FSDPEngine:
    role = {"optim": {"lr": 0.05}, "fsdp_config": {"dtype": "float32"}, "ppo_max_token_len_per_gpu": 4096}
    engine = FSDPEngine(str(path), role_cfg=role, model_cfg={"mtp": mtp}, device="cpu")
    engine.schedule(10)
    return engine


def test_drafts_change_no_log_prob(tmp_path: Path) -> None:
    """Before and after an update, from random weights on: all that vLLM has came by transfers."""
    path = glm_with_mtp(tmp_path / "model")
    actor = trainer(path, **TRAINED)
    sampler = vllm_engine(path, load_format="dummy", skip_tokenizer_init=True, draft_tokens=1)
    try:
        sync = StreamedSync(actor, sampler)
        for version in (0, 1):
            sync.push(version, verify=True)
            responses = sample(sampler, PROMPTS, 2, temperature=TEMPERATURE, ignore_eos=True)
            assert all(len(done.token_ids) == 24 for done in responses)
            assert difference(actor, responses, 2) <= 1e-4
            segments = Batch(rows(responses, 2)).segments
            assert not actor.step(segments, simple_loss(len(responses) * 24), temperature=TEMPERATURE).refused
    finally:
        sampler.close()
