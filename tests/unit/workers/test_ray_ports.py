"""A Ray that a run starts for itself listens on the loopback and nowhere else."""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.chaos.fork_server import ForkServer, until
from tests.ray_cluster import forking
from tests.runs import TinyRun
from verl.errors import UserError

pytest.importorskip("ray", reason="Ray is not installed")


def outside(sockets: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [s for s in sockets if not ipaddress.ip_address(s[1].removeprefix("::ffff:")).is_loopback]


@pytest.mark.slow
def test_all_ports_of_a_run_of_two_ranks_are_on_the_loopback(tmp_path: Path, fork_server: ForkServer) -> None:
    more = ["trainer.n_gpus_per_node=2", "trainer.save_freq=-1", "trainer.test_freq=-1"]
    words = TinyRun(tmp_path / "tiny").overrides(tmp_path / "out", *more, "trainer.total_training_steps=2")
    plugged = {"VERL_USE_EXTERNAL_MODULES": "tests.ray_own", **forking(fork_server)}
    run, seen = fork_server.start(words, RAY_ADDRESS=None, RAY_AUTH_MODE=None, **plugged), set()
    while not run.ended:
        for one in children_of(psutil.Process(fork_server.pid)):  # the run and, among others, its workers
            try:
                found = [c.laddr.ip for c in one.net_connections("inet") if c.status == psutil.CONN_LISTEN]
                seen |= {(one.name(), ip) for ip in found}
            except psutil.Error:
                continue  # it has ended
        time.sleep(0.2)
    assert run.status == 0, (run.stdout + run.stderr)[-3000:]
    assert any("Worker" in name for name, _ in seen) and any("RolloutWorker" in name for name, _ in seen)
    assert len(seen) >= 4 and not outside(sorted(seen))
    (started,) = [e for e in map(json.loads, (tmp_path / "out/events.jsonl").open()) if e["event"] == "workers"]
    assert {worker["node"] for worker in started["workers"]} == {"127.0.0.1"}


def children_of(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


@pytest.mark.slow
@pytest.mark.long
def test_options_of_ray_init_and_the_timeline_have_their_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    from verl.config import load
    from verl.workers.ray.cluster import Cluster

    def work_of_a_test() -> None: ...

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE")
    # A socket's path has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as short:
        options = {"num_cpus": 3, "object_store_memory": 100 << 20, "_temp_dir": short}
        words = [f"+ray_kwargs.ray_init.{name}={value}" for name, value in options.items()]
        cluster = Cluster(load([*words, f"ray_kwargs.timeline_json_file={tmp_path}/timeline.json"]), "cpu")
        try:
            ray.get(ray.remote(num_cpus=0)(work_of_a_test).remote())
            resources = ray.cluster_resources()
            assert resources["CPU"] == 3 and resources["object_store_memory"] == 100 << 20
            session = Path(ray._private.worker._global_node.get_session_dir_path())
            assert session.is_relative_to(short) and session.is_dir()
            until(lambda: "work_of_a_test" in json.dumps(ray.timeline()))  # Ray reports it once a second
        finally:
            cluster.close()
        assert not ray.is_initialized()
        assert not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys(), (
            "a cluster joined next may have no tokens"
        )
    timeline = json.loads((tmp_path / "timeline.json").read_text())
    assert any("work_of_a_test" in str(entry["name"]) for entry in timeline)


def environs_under(folder: Path) -> list[str]:
    """The environments of Ray's processes."""
    ours = [p for p in psutil.process_iter(["cmdline"]) if f"{folder}/" in " ".join(p.info["cmdline"] or [])]
    return [f"{name}={value}" for process in ours for name, value in process.environ().items()]


KILLED = """
import os, signal, ray
from verl.config import load
from verl.workers.ray.cluster import Cluster
cluster = Cluster(load([]), "cpu")
print(ray._private.worker._global_node.get_session_dir_path(), os.environ["RAY_AUTH_TOKEN_PATH"], flush=True)
input()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_rays_folder_is_private_and_nothing_of_it_outlives_a_killed_driver(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", KILLED], **pipes) as driver:
        session, token = map(Path, driver.stdout.readline().split())
        folder = session.parents[1]
        assert folder.stat().st_mode & 0o077 == 0 and token.parent == folder
        assert token.stat().st_mode & 0o077 == 0 and not (tmp_path / ".ray").exists()
        assert sum(f"RAY_AUTH_TOKEN_PATH={token}" in environ for environ in environs_under(folder)) > 1

        def left() -> list[str]:
            found = (one.info["cmdline"] or [] for one in psutil.process_iter(["cmdline"]))
            return [words[0] for words in found if any(f"{folder}/" in word for word in words)]

        assert any("raylet" in name for name in left())
        driver.communicate("\n")
    until(lambda: not folder.exists() and not left(), timeout=15)


def test_rays_cores_are_enough_for_the_ranks_of_every_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.config import load
    from verl.workers.ray import cluster

    class Asked(Exception): ...

    def init(num_cpus: int, **_: object) -> None:
        raise Asked(num_cpus)

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.setattr(cluster, "usable", lambda: 1)
    monkeypatch.setattr(cluster.ray, "init", init)
    rollout, teachers = "actor_rollout_ref.rollout", "distillation"
    words = ["trainer.n_gpus_per_node=2", f"{rollout}.nnodes=1", "critic.enable=True", "critic.nnodes=1"]
    words += [f"{teachers}.enabled=True", f"{teachers}.nnodes=1", f"{teachers}.n_gpus_per_node=3"]
    with pytest.raises(UserError) as failed:
        cluster.Cluster(load(words), "cpu")
    assert failed.value.__cause__.args == (2 + 2 + 2 + 3,)


def test_an_option_that_ray_does_not_have_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.config import load
    from verl.workers.ray.cluster import Cluster

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UserError, match=r"ray\.init failed .*\(port=6379\): .*port"):
        Cluster(load(["+ray_kwargs.ray_init.port=6379"]), "cpu")
