"""Runs and contract suites on a pretend Ascend device (`tests.pretend_npu`), each in a process of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.chaos.fork_server import ENTRY, ForkServer
from tests.device_tensors import run_tests
from tests.runs import TinyRun, records
from tests.unit.trainer.test_sft_trainer import arguments as sft_arguments
from tests.unit.trainer.test_sft_trainer import data, model  # noqa: F401
from tests.unit.trainer.test_sft_trainer import records as sft_records
from verl.trainer import sft_trainer

MODULE = "tests.pretend_npu"


def test_a_step_has_the_numbers_of_the_processor(fork_server: ForkServer, tiny: TinyRun, tmp_path: Path) -> None:
    """Sampler, trainer, reference and checkpoint; validation truncates by top-k and top-p."""
    found = {}
    for device, module in (("cpu", ENTRY), ("npu", MODULE)):
        words = [f"trainer.device={device}", "trainer.total_training_steps=1"]
        words += ["actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.rollout.val_kwargs.do_sample=True"]
        words += ["actor_rollout_ref.rollout.val_kwargs.temperature=1.0"]
        words += ["actor_rollout_ref.rollout.val_kwargs.top_p=0.8", "actor_rollout_ref.rollout.val_kwargs.top_k=50"]
        argv = tiny.overrides(tmp_path / device, *words)
        run = fork_server.run([ENTRY, *argv] if module == MODULE else argv, module=module)
        assert run.status == 0, run.stderr[-3000:]
        found[device] = records(tmp_path / device)
    assert len(found["cpu"]) == 2
    for step, expected in found["cpu"].items():
        same = {name: value for name, value in expected.items() if not name.startswith("training/rollout_")}
        ours = {name: found["npu"][step].get(name) for name in same}
        assert ours == pytest.approx(same, rel=1e-4, abs=1e-5)
        assert found["npu"][step].get("training/rollout_logprob_abs_diff/max", 0) < 1e-4


@pytest.mark.slow
@pytest.mark.long
def test_two_ranks_over_ray_agree_with_their_samplers(
    fork_server: ForkServer, tiny: TinyRun, ray_address: str, tmp_path: Path
) -> None:
    words = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1", "trainer.verify_weight_sync=True", "trainer.device=npu"]
    words += ["actor_rollout_ref.model.external_lib=tests.pretend_npu_plugin", "trainer.total_training_steps=2"]
    argv = tiny.overrides(tmp_path, "actor_rollout_ref.actor.use_kl_loss=True", *words)
    run = fork_server.run(argv, timeout=240, RAY_ADDRESS=ray_address)
    assert run.status == 0, run.stderr[-3000:]
    assert all(records(tmp_path)[step]["training/rollout_logprob_abs_diff/max"] < 1e-4 for step in (1, 2))
    taken = re.search(r'"perf/max_memory_allocated_gb": ([\d.e-]+)', (tmp_path / "metrics.jsonl").read_text())
    assert taken is not None and 0 < float(taken[1]) < 1, "what the tensors on the pretend device take"


def test_supervised_training_has_the_numbers_of_the_processor(
    fork_server: ForkServer,
    model: Path,  # noqa: F811
    data: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    short = ("trainer.total_training_steps=2", "trainer.test_freq=2")
    assert sft_trainer.main(sft_arguments(model, data, tmp_path / "cpu", *short)) == 0
    argv = sft_arguments(model, data, tmp_path / "npu", *short, "trainer.device=npu")
    run = fork_server.run(["verl.trainer.sft_trainer", *argv], module=MODULE)
    assert run.status == 0, run.stderr[-3000:]
    cpu, npu = sft_records(tmp_path / "cpu"), sft_records(tmp_path / "npu")
    assert len(cpu) == len(npu) > 2
    for ours, expected in zip(npu, cpu, strict=True):
        assert ours == pytest.approx(expected, rel=1e-4, abs=1e-6)


CONTRACT = "tests/contract/test_{}_contract.py"
SUITES = {
    "platform": (["platform"], "npu or auto or groups"),
    "sampler": (["rollout_engine"], "native"),
    "engine, receiver": (
        ["training_engine", "weight_receiver"],
        "(one and process or two and ranks) and (gradient or outputs or moving or hugging) "
        "or receiver and native and (whole or under_way)",
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "suite", ["platform", *(pytest.param(one, marks=pytest.mark.long) for one in ("sampler", "engine, receiver"))]
)
def test_it_keeps_the_contracts(suite: str) -> None:
    files, chosen = SUITES[suite]
    run_tests(MODULE, *map(CONTRACT.format, files), "-k", chosen, "-m", "not slow")
