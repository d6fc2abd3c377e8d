"""`ray job submit --runtime-env=verl/trainer/runtime_env.yaml --working-dir .`: the code travels, and the run finishes.

Its cluster is its own: it takes jobs, and unpacks code that no other test wants. It has one node: simulated nodes share
one folder of Ray's, and one that unpacks a package there removes what another one unpacked, with a driver in it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import free_port
from tests.ray_cluster import cluster_of
from tests.runs import TinyRun, environment, records

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
ROOT = Path(__file__).parents[2]
WITNESS = """
import os
from pathlib import Path
import verl
Path(os.environ["VERL_WITNESS"], str(os.getpid())).write_text(verl.__file__)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with the code, as a user has it, and a plug-in that is nowhere else."""
    folder = tmp_path / "source"
    shutil.copytree(ROOT / "verl", folder / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "witness.py").write_text(WITNESS)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints/large").write_bytes(bytes(1 << 20))
    return folder


def submitted(line: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """`line` in `folder`, once a node of the cluster takes jobs: Ray itself waits ten seconds for that, and its message
    is to try again later."""
    for _ in range(6):
        done = subprocess.run(line, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300)
        if "No available agent" not in done.stdout + done.stderr:
            break
    return done


@pytest.mark.long
def test_a_submitted_job_trains_with_the_code_it_brought(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray.dashboard.optional_deps", reason="ray[default] is not installed", exc_type=ImportError)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    tiny, out, seen = TinyRun(tmp_path / "tiny"), tmp_path / "out", tmp_path / "seen"
    seen.mkdir()
    words = tiny.overrides(out, "trainer.n_gpus_per_node=1", "trainer.total_training_steps=2", "trainer.test_freq=-1")
    variables = f"OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 VERL_USE_EXTERNAL_MODULES=witness VERL_WITNESS={seen}"
    port = free_port()
    line = ["ray", "job", "submit", "--address", f"http://127.0.0.1:{port}"]
    line += ["--runtime-env", "verl/trainer/runtime_env.yaml", "--working-dir", ".", "--"]
    line += ["env", *variables.split(), "python3", "-m", "verl.trainer.main_ppo", *words]
    # An agent that finds its usual port taken, by another test's cluster, serves no jobs.
    head = {"include_dashboard": True, "dashboard_port": port, "dashboard_agent_listen_port": free_port()}
    with cluster_of(1, head=head):
        done = submitted(line, source)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert sorted(records(out))[-1] == 2 and (out / "global_step_2").is_dir()
    used = {Path(file.read_text()) for file in seen.iterdir()}
    assert len(list(seen.iterdir())) == 3, "the driver, a rank and a sampler"
    for file in used:
        assert "working_dir_files" in file.parts, f"{file} is not what was sent along"
        assert not (file.parents[1] / "checkpoints").exists(), "runs and models stay at home"
    names = {
        w["name"]
        for e in map(json.loads, (out / "events.jsonl").open())
        if e["event"] == "workers"
        for w in e["workers"]
    }
    assert len(names) == 2
