"""A Ray that a run starts for itself listens on the loopback and nowhere else."""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from tests.runs import TinyRun

pytest.importorskip("ray", reason="Ray is not installed")

SCRIPT = textwrap.dedent(
    """
    import json, psutil
    from verl.config import load
    from verl.workers.ray.cluster import Cluster, worker_environment
    cluster = Cluster(load([{override}]), "cpu")
    import ray
    @ray.remote(num_cpus=0)
    def work():
        return 1
    ray.get(work.options(runtime_env={{"env_vars": worker_environment(1)}}).remote())
    me = psutil.Process()
    found = [
        (p.name(), c.laddr.ip)
        for p in [me, *me.children(recursive=True)]
        for c in p.net_connections(kind="inet")
        if c.status == psutil.CONN_LISTEN
    ]
    print(json.dumps([found, [n.address for n in cluster.nodes()]]))
    cluster.close()
    """
)


def listening(override: str = "") -> tuple[list[tuple[str, str]], list[str]]:
    code = SCRIPT.format(override=override)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_ports_of_our_own_ray_are_on_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    sockets, nodes = listening()
    assert len(sockets) >= 4 and nodes == ["127.0.0.1"]
    assert not outside(sockets)


def outside(sockets: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [s for s in sockets if not ipaddress.ip_address(s[1].removeprefix("::ffff:")).is_loopback]


@pytest.mark.slow
def test_so_are_all_ports_of_a_run_of_two_ranks(tmp_path: Path) -> None:
    tiny = TinyRun(tmp_path / "tiny")
    more = ["trainer.n_gpus_per_node=2", "trainer.save_freq=-1", "trainer.test_freq=-1"]
    words = tiny.overrides(tmp_path / "out", *more, "trainer.total_training_steps=1")
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {"OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(
            [sys.executable, "-m", "verl.trainer.main_ppo", *words], env=environment, stdout=log, stderr=log
        )
        process, seen = psutil.Process(run.pid), set()
        while run.poll() is None:
            for one in [process, *process.children(recursive=True)]:
                try:
                    found = [
                        c.laddr.ip for c in one.net_connections("inet") if c.status == psutil.CONN_LISTEN
                    ]
                    seen |= {(one.name(), ip) for ip in found}
                except psutil.Error:
                    continue  # it has ended
            time.sleep(0.5)
    assert run.returncode == 0, (tmp_path / "log").read_text()[-3000:]
    assert any("Worker" in name for name, _ in seen) and any("RolloutWorker" in name for name, _ in seen)
    assert not outside(sorted(seen))


OPTIONS = textwrap.dedent(
    """
    import json, sys
    from verl.config import load
    from verl.workers.ray.cluster import Cluster, worker_environment
    cluster = Cluster(load(sys.argv[1:]), "cpu")
    import ray
    @ray.remote(num_cpus=0)
    def work_of_a_test():
        return 1
    ray.get(work_of_a_test.remote())
    found = [ray.cluster_resources(), ray._private.worker._global_node.get_session_dir_path()]
    import time
    time.sleep(2)  # Ray reports what was done once a second
    cluster.close()
    print(json.dumps(found))
    """
)


@pytest.mark.slow
def test_options_of_ray_init_and_the_timeline_have_their_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    # A socket's path has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as short:
        options = {"num_cpus": 3, "object_store_memory": 100 << 20, "_temp_dir": short}
        words = [f"+ray_kwargs.ray_init.{name}={value}" for name, value in options.items()]
        words.append(f"ray_kwargs.timeline_json_file={tmp_path}/timeline.json")
        done = subprocess.run(
            [sys.executable, "-c", OPTIONS, *words], capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr[-2000:]
        resources, session = json.loads(done.stdout.splitlines()[-1])
        assert resources["CPU"] == 3 and resources["object_store_memory"] == 100 << 20
        assert Path(session).is_relative_to(short) and Path(session).is_dir()
    timeline = json.loads((tmp_path / "timeline.json").read_text())
    assert any("work_of_a_test" in str(entry["name"]) for entry in timeline)


def test_an_option_that_ray_does_not_have_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.config import load
    from verl.errors import UserError
    from verl.workers.ray.cluster import Cluster

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UserError, match=r"ray\.init refused .*\(port=6379\): .*port"):
        Cluster(load(["+ray_kwargs.ray_init.port=6379"]), "cpu")


@pytest.mark.slow
def test_a_meeting_port_that_was_taken_meanwhile_is_named_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank waits for the first one for ten minutes; the user does not."""
    import socket

    import ray

    from tests.ray_cluster import cluster_of
    from verl.config import load
    from verl.errors import UserError
    from verl.workers.ray.actors import WorkerActor
    from verl.workers.ray.calls import RayCalls, WorkerHandle

    plain = json.loads(json.dumps(load(["trainer.device=cpu"]).to_dict(), default=str))
    with cluster_of(1) as cluster, socket.create_server(("127.0.0.1", 0)) as taken:
        ray.init(address=cluster.address, namespace="verl", logging_level="ERROR", log_to_driver=False)
        try:
            handles = [WorkerActor.options(num_cpus=0).remote(plain, rank, 2) for rank in range(2)]
            group = RayCalls([WorkerHandle(h, f"training worker {i}", "here") for i, h in enumerate(handles)])
            group.call("prepare")
            port, before = taken.getsockname()[1], time.monotonic()
            with pytest.raises(UserError, match=rf"rank 0 of 2 cannot meet .* 127\.0\.0\.1:{port}: .*in use"):
                group.call("join", "127.0.0.1", port, doing="joining the training ranks")
            assert time.monotonic() - before < 60
            group.kill()
        finally:
            ray.shutdown()
