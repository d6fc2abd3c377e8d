"""vLLM holds base and adapter apart: a sync is the adapter's alone, and both sides agree before and after an update."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests import vllm_processes
from tests.integration.test_sync_probe import run as probed
from tests.runs import TinyRun, records
from tests.sampler_cases import assert_only_the_adapter_moves
from tests.vllm_cases import require_vllm, vllm_engine, vllm_model

require_vllm()
pytest.importorskip("peft")
pytestmark = [pytest.mark.slow]


def test_only_the_adapter_moves(tmp_path: Path) -> None:
    path = vllm_model(tmp_path / "model", "llama", tied=True)
    assert_only_the_adapter_moves(path, lambda described: vllm_engine(path, lora=described, skip_tokenizer_init=True))
    mine = re.compile(rf"verl-vllm-adapter-.*-{os.getpid()}-")
    assert not any(map(mine.match, os.listdir("/dev/shm"))), "the adapter's folder goes with the engine"


@pytest.mark.timeout(900)
@pytest.mark.long
@pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe"])
def test_two_steps_as_a_user_starts_them(fork_server, tmp_path: Path, arch: str) -> None:
    """A dense model's adapter is held by vLLM, rank 4 in the room of 8; experts come merged."""
    tiny, out = TinyRun(tmp_path / "tiny"), tmp_path / "out"
    tiny.model = vllm_model(tmp_path / "heads", arch)
    words = (
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.model.lora_rank=4",
        "trainer.total_training_steps=2",
        "trainer.save_freq=2",
        "trainer.test_freq=-1",
        "trainer.verify_weight_sync=True",
        "trainer.logprob_diff_limit=1e-4",
    )
    done = fork_server.run(tiny.overrides(out, *words), timeout=600, **vllm_processes.variables())
    assert done.status == 0, done.stderr[-4000:]
    said = done.stdout + done.stderr
    assert ("room aside for rank 8" in said) is (arch == "qwen3")
    assert ("sends the merged weights" in said) is (arch == "qwen3_moe")
    found = records(out)
    assert {1, 2} <= found.keys()
    for step in (1, 2):
        assert found[step]["training/rollout_logprob_abs_diff/max"] < 1e-4
        assert found[step]["actor/grad_norm"] > 0


UNBOUND = """
from verl.engine.rollout.vllm.engine import VLLMEngine

VLLMEngine._adapter_request = property(lambda self: None, lambda self, value: None)
"""


@pytest.mark.timeout(600)
@pytest.mark.long
def test_an_adapter_that_is_not_applied_ends_the_run(fork_server, tmp_path: Path) -> None:
    """The first batch would agree all the same, because a new adapter adds nothing; a known adapter shows it before."""
    tiny = TinyRun(tmp_path)
    tiny.model = vllm_model(tmp_path / "heads", "qwen2", tied=True)
    words = ("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.actor.optim.lr=1e-3", "trainer.test_freq=-1")
    status, stderr, steps = probed(fork_server, tiny, tmp_path, UNBOUND, "actor_rollout_ref.model.lora_rank=4", *words)
    assert status == 1 and "the adapter is not applied" in stderr, stderr[-3000:]
    assert "before the first step" in stderr and not steps
