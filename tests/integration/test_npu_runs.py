"""Runs and contract suites on a pretend Ascend device (`tests.pretend_npu`), each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.fork_server import ENTRY, ForkServer
from tests.runs import TinyRun, environment, records

ROOT = Path(__file__).parents[2]
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


SUITES = {
    "platform": ("test_platform_contract.py", "npu or auto"),
    "sampler": ("test_rollout_engine_contract.py", "native"),
    "engine": ("test_training_engine_contract.py", "(one and process or two and ranks) and (gradient or outputs)"),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("suite", SUITES)
def test_it_keeps_the_contracts(suite: str) -> None:
    file, chosen = SUITES[suite]
    argv = ["pytest", "-p", "no:cacheprovider", f"tests/contract/{file}", "-k", chosen, "-m", "not slow"]
    command = [sys.executable, "-m", MODULE, *argv]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT, env=environment(), check=False)
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout[-4000:]
