"""vLLM in lower precision: it follows the trainer's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.chaos.fork_server import ForkServer
from tests.integration.test_sync_probe import run as probed
from tests.runs import TinyRun
from tests.sampler_cases import PROMPTS, TEMPERATURE, rows
from tests.unit.engine.training.engine_cases import simple_loss
from tests.vllm_cases import require_vllm, sample, vllm_engine, vllm_model
from verl.engine.training.fsdp.engine import FSDPEngine
from verl.platform.host_resources import processor
from verl.weight_sync.sender import StreamedSync

require_vllm()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NO_FP8_CACHE = pytest.mark.skipif("avx512f" not in processor()[1], reason="this processor has no AVX512")


def trainer(path: Path) -> FSDPEngine:
    role = {"optim": {"lr": 0.05}, "fsdp_config": {"dtype": "float32"}, "ppo_max_token_len_per_gpu": 4096}
    engine = FSDPEngine(str(path), role_cfg=role, model_cfg={}, device="cpu")
    engine.schedule(10)
    return engine


@pytest.mark.parametrize(
    "lower",
    [
        pytest.param(
            {"quantization": "fp8_per_block"},
            marks=pytest.mark.skipif("amx_tile" not in processor()[1], reason="this processor has no AMX"),
        ),
        pytest.param({"engine_kwargs": {"kv_cache_dtype": "fp8_e5m2"}}, marks=NO_FP8_CACHE),
    ],
)
def test_a_sampler_in_fp8_follows_the_weights(tmp_path: Path, lower: dict[str, Any]) -> None:
    """It is then another policy than the trainer's, but one near to it, and not to the trainer of before."""
    path = vllm_model(tmp_path / "model", "qwen3")
    actor, before = trainer(path), trainer(path)
    sampler = vllm_engine(path, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", **lower)
    try:
        sync = StreamedSync(actor, sampler)
        sync.push(0)
        responses = sample(sampler, PROMPTS, 2, temperature=TEMPERATURE, ignore_eos=True)
        assert 8e-3 < apart(actor, responses) < 0.15, "0.003 in bfloat16 alone"
        for _ in range(3):
            actor.step(rows(responses, 2), simple_loss(len(responses) * 24), temperature=TEMPERATURE)
        sync.push(1)
        responses = sample(sampler, PROMPTS, 2, temperature=TEMPERATURE, ignore_eos=True)
        assert apart(actor, responses) < 0.15 < apart(before, responses)
    finally:
        sampler.close()


@pytest.mark.long
@NO_FP8_CACHE
def test_a_run_probes_a_sampler_with_a_cache_in_fp8(fork_server: ForkServer, tmp_path: Path) -> None:
    """It follows, and nothing is said of it; the first batch is held to its own bound."""
    tiny = TinyRun(tmp_path / "tiny")
    tiny.model = vllm_model(tmp_path / "heads", "qwen3")
    words = (
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.dtype=bfloat16",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype=fp8_e5m2",
    )
    status, stderr, steps = probed(fork_server, tiny, tmp_path, "", *words)
    assert status == 0, stderr[-3000:]
    assert len(steps) == 3 and all(5e-3 < step["apart"] < 0.5 for step in steps if step["tokens"])
    assert sum(step["tokens"] for step in steps) > 8


def apart(engine: FSDPEngine, responses: list[Any]) -> float:
    """Mean difference of log-probs."""
    ours = engine.forward(rows(responses, 2), temperature=TEMPERATURE)["log_probs"]
    return float(np.abs(ours - np.concatenate([done.log_probs for done in responses])).mean())
