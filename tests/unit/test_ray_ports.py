"""A Ray that a run starts for itself listens on the loopback and nowhere else."""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys
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
    from verl.controller.ray.cluster import Cluster, worker_environment
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
    assert any("TrainHost" in name for name, _ in seen) and any("SamplerHost" in name for name, _ in seen)
    assert not outside(sorted(seen))
