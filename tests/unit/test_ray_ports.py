"""A Ray that a run starts for itself listens on the loopback and nowhere else."""

from __future__ import annotations

import ipaddress
import subprocess
import sys
import textwrap

import pytest

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
    import json

    code = SCRIPT.format(override=override)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_ports_of_our_own_ray_are_on_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    sockets, nodes = listening()
    assert len(sockets) >= 4 and nodes == ["127.0.0.1"]
    outside = [s for s in sockets if not ipaddress.ip_address(s[1].removeprefix("::ffff:")).is_loopback]
    assert not outside, outside
