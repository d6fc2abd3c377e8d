"""A node that is not like the driver's: the run is refused before a model loads, and every difference is named.

Its cluster is its own, because of that node.
"""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ray_cluster import cluster_of
from tests.runs import TinyRun, environment
from tests.tiny import tiny_model

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
HUB = "somebody/tiny"
FILES = 1000


def home(folder: Path, revision: str) -> Path:
    """A home with a hub model in its cache."""
    root = folder / ".cache/huggingface/hub/models--somebody--tiny"
    tiny_model(root / "snapshots" / revision, "qwen3")
    (root / "refs").mkdir()
    (root / "refs/main").write_text(revision)
    return folder


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """What the other node imports: this code with a line more, beside a transformers of another version."""
    folder = tmp_path / "other"
    shutil.copytree(ROOT / "verl", folder / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / "verl/errors.py").open("a") as file:
        file.write("\n# another version\n")
    info = folder / "transformers-4.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.0.0\n")
    return folder


@pytest.fixture
def address(tmp_path: Path, other: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    # What the driver has of these it gives to its workers, wherever they are.
    for name in ("PYTHONPATH", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with cluster_of(1) as cluster:
        env = {"PYTHONPATH": str(other), "HOME": str(home(tmp_path / "theirs", "b" * 40))}
        node = cluster.add_node(num_cpus=1, object_store_memory=100 << 20, env_vars=env)
        raylet = node.all_processes["raylet"][0].process.pid
        resource.prlimit(raylet, resource.RLIMIT_NOFILE, (FILES, FILES))
        yield cluster.address


def test_every_difference_is_in_the_message_and_nothing_starts(address: str, tmp_path: Path) -> None:
    tiny = TinyRun(tmp_path / "tiny")
    words = tiny.overrides(
        tmp_path / "out",
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=1",
        f"actor_rollout_ref.model.path={HUB}",
    )
    # Not by PYTHONPATH, and from another folder: Ray gives both to workers.
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from verl.trainer.main_ppo import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=tmp_path,
        env=environment(RAY_ADDRESS=address, HOME=str(home(tmp_path / "mine", "a" * 40))),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr[-3000:]
    (said,) = [line for line in done.stderr.splitlines() if "do not fit" in line]
    host = address.partition(":")[0]
    for text in (
        "this code: the driver has ",
        f"{host} has 4.0.0",
        f"{HUB}: this machine (driver) has revision {'a' * 40}; {host} has revision {'b' * 40}",
        f"open files {FILES} (may be raised to {FILES})",
        "the run needs 1280",
    ):
        assert text in said, said
    assert not list((tmp_path / "out").glob("global_step_*")) and not list((tmp_path / "out").glob(".seen*"))
