"""After a transfer vLLM samples what the trainer computes, before and after an update."""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests import vllm_processes
from tests.chaos.fork_server import ForkServer, until
from tests.sampler_cases import PROMPTS, TEMPERATURE, difference, rows, trainer
from tests.tiny import LINEAR_ATTENTION
from tests.unit.engine.training.engine_cases import simple_loss
from tests.vllm_cases import allow_float32_linear_attention, require_vllm, sample, vllm_engine, vllm_model
from verl.engine.rollout.vllm import launch
from verl.platform.processes import process_start_time as start_time
from verl.weight_sync.sender import StreamedSync

require_vllm()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HERE = "tests.integration.test_vllm_weights"
OTHERS = (("gpt2", True), ("qwen3_moe", False), ("deepseek_v3", False), ("llama", False), ("gemma2", True))
MODELS = [("qwen3_next", False), *(pytest.param(*model, marks=pytest.mark.long) for model in OTHERS)]
"""Qwen3-Next with the tests' own computation of its linear attention, for vLLM's has bfloat16 alone. Qwen3 is below
over two devices, Qwen2 in the runs of test_vllm_train.py, Llama and experts in test_vllm_lora.py, Qwen3.5 in
test_vllm_vision.py."""


@pytest.mark.parametrize(("arch", "tied"), MODELS)
def test_sampler_and_trainer_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, tied: bool) -> None:
    if arch in LINEAR_ATTENTION:
        allow_float32_linear_attention(monkeypatch)
    path = vllm_model(tmp_path / "model", arch, tied=tied)
    actor = trainer(path)
    sampler = vllm_engine(path, load_format="dummy", skip_tokenizer_init=True, bucket_bytes=100_000)
    try:
        with pytest.raises(RuntimeError, match="no weights yet"):
            sample(sampler, PROMPTS)
        sync = StreamedSync(actor, sampler)
        result = sync.push(0, verify=True)
        assert result.verified and result.bytes > 100_000, "more than one bucket"
        before = sample(sampler, PROMPTS, 2, temperature=TEMPERATURE, ignore_eos=True)
        assert difference(actor, before, 2) <= 1e-4
        assert {c.versions for c in before} == {(0,)}

        stepped = actor.step(rows(before, 2), simple_loss(len(before) * 24), temperature=TEMPERATURE)
        assert not stepped.refused
        stale = difference(actor, before, 2)
        assert stale > 1e-2, "the update moved the distribution far enough to be seen"
        sync.push(1, verify=True)
        after = sample(sampler, PROMPTS, 2, temperature=TEMPERATURE, ignore_eos=True)
        assert difference(actor, after, 2) <= 1e-4
        assert {c.versions for c in after} == {(1,)}
        assert any(a.token_ids.tolist() != b.token_ids.tolist() for a, b in zip(before, after, strict=True))
        processes = {p for p in sampler._processes if p[0] != os.getpid()}
        folder = Path(sampler._folder.name)
        assert any(path.is_socket() for path in folder.iterdir()), "vLLM's sockets are there"
        assert processes and all(start_time(pid) == started for pid, started in processes)
    finally:
        sampler.close()
    assert not [pid for pid, started in processes if start_time(pid) == started], "close ends them"
    assert not folder.exists()


@pytest.mark.parametrize("sizes", [{"data_parallel_size": 2}, {"tensor_parallel_size": 2}], ids=str)
@pytest.mark.long
def test_experts_spread_over_two_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int]
) -> None:
    """Each device has half of the experts (`vllm_processes` adds what vLLM lacks for that on a CPU); new weights arrive
    at both, while both have requests."""
    monkeypatch.setattr(launch, "check_cpu_experts", lambda settings: None)
    path = vllm_model(tmp_path / "model", "qwen3_moe")
    actor = trainer(path)
    sampler = vllm_engine(path, load_format="dummy", skip_tokenizer_init=True, expert_parallel=True, **sizes)
    try:
        assert len(sampler.readers) == 2
        sync, drawn = StreamedSync(actor, sampler), {"temperature": TEMPERATURE, "ignore_eos": True}
        sync.push(0, verify=True)
        before = sample(sampler, PROMPTS, 2, **drawn)
        assert difference(actor, before, 2) <= 1e-4
        actor.step(rows(before, 2), simple_loss(len(before) * 24), temperature=TEMPERATURE)
        with ThreadPoolExecutor() as thread:
            running = thread.submit(sample, sampler, PROMPTS, 2, max_tokens=150, **drawn)
            until(lambda: len(sampler._live) == 6)
            sync.push(1, verify=True)
            assert {done.versions for done in running.result()} == {(0, 1)}
        after = sample(sampler, PROMPTS, 2, **drawn)
        assert difference(actor, after, 2) <= 1e-4 < difference(actor, before, 2)
    finally:
        sampler.close()


@pytest.mark.long
def test_a_model_that_would_keep_old_weights_is_refused(tmp_path: Path) -> None:
    from verl.weight_sync.verify import WeightSyncError

    path = vllm_model(tmp_path / "model", "gpt_oss")
    sampler = vllm_engine(path, load_format="dummy", skip_tokenizer_init=True)
    try:
        with pytest.raises(WeightSyncError, match="copies 10 weights by itself"):
            sampler.load_weights(trainer(path).named_weights(), 0)
        with pytest.raises(RuntimeError, match="started anew"):
            sample(sampler, PROMPTS)
    finally:
        sampler.close()


def main() -> None:
    """A driver of two devices; it says what it found and stays."""
    path = vllm_model(Path(sys.argv[1]) / "model", "qwen3", tied=True)
    actor = trainer(path)
    sampler = vllm_engine(
        path, load_format="dummy", skip_tokenizer_init=True, tensor_parallel_size=2, bucket_bytes=100_000
    )
    sync, found = StreamedSync(actor, sampler), []
    for version in range(2):
        sync.push(version, verify=True)
        done = sample(sampler, PROMPTS, 2, temperature=TEMPERATURE, ignore_eos=True)
        found.append(difference(actor, done, 2))
        actor.step(rows(done, 2), simple_loss(len(done) * 24), temperature=TEMPERATURE)
    shared = [str(path) for path in Path("/dev/shm").glob(f"{sampler._shared}*")]
    facts = {"differences": found, "processes": sorted(sampler._processes), "shared": shared}
    facts["folder"] = sampler._folder.name
    Path(sys.argv[1], "facts").write_text(json.dumps(facts))
    Path(sys.argv[1], "ready").touch()
    time.sleep(600)


@pytest.mark.skipif(
    torch.cpu._is_avx512_supported() and os.environ.get("ATEN_CPU_CAPABILITY") == "avx2",
    reason="vLLM's kernels go by the processor, torch's by the variable: mixed, two ranks "
    "sample ids beyond the vocabulary",
)
def test_two_devices_agree_and_no_process_outlives_a_killed_driver(tmp_path: Path, fork_server: ForkServer) -> None:
    """Tensor parallel 2; then the driver is killed without a chance to close anything."""
    run = fork_server.start([str(tmp_path)], module=HERE, **vllm_processes.variables())
    until(lambda: run.ended or (tmp_path / "ready").exists(), timeout=200, pause=0.1)
    assert not run.ended, run.stderr[-3000:]
    run.kill()
    run.wait()
    found = json.loads((tmp_path / "facts").read_text())
    assert max(found["differences"]) <= 1e-4
    processes = {(pid, started) for pid, started in found["processes"] if pid != run.pid}
    assert len(processes) == 3, "the engine and two workers"
    until(lambda: not [pid for pid, started in processes if start_time(pid) == started], timeout=20)
    if torch.cpu._is_avx512_supported():
        assert found["shared"], "vLLM's build for AVX512 shares memory between its processes"
    assert not [path for path in [*found["shared"], found["folder"]] if Path(path).exists()]
