"""Simulated Ray clusters: several nodes of this machine.

One serves the whole test run: the fixture `ray_address` starts it on first need, `shared` is behind it. It is a process
of its own (`python -m tests.ray_cluster FILE PID`), because the worker of pytest-xdist that needed it first may not be
the last one; it ends with the test run. A test that takes nodes away, or needs another kind of node, has a cluster of
its own (`cluster_of`) and says why.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
from filelock import FileLock

from tests import ray_setup_worker
from tests.chaos.fork_server import ForkServer
from tests.runs import environment

STORE = 80 << 20
"""Ray wants at least 75 MiB a node."""
NODE = {"num_cpus": 1, "resources": {"NPU": 2}}
"""Of the shared cluster's four. One core: no two roles that ask for a device each share a node."""
START_S = 360
CALM = {"RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0"}
"""Ray's log monitor then lists the folder of logs twice a second, not all the time: that takes a third of a core."""


def node_options(server: ForkServer | None) -> dict[str, Any]:
    """Those of a node of one core."""
    options: dict[str, Any] = {"num_cpus": 1, "object_store_memory": STORE}
    if server is not None:
        shim = ray_setup_worker.__file__
        options |= {"setup_worker_path": shim, "worker_path": shim, "env_vars": forking(server)}
    return options


def forking(server: ForkServer) -> dict[str, str]:
    """Environment of a node whose workers `server` forks; with the plug-in tests.ray_own, of a run that starts a Ray of
    its own. Waits until it forks: `ray.init` never returns where the first worker of a node cannot start."""
    from ray._private.workers import default_worker

    server.ready()
    return {ray_setup_worker.SERVER: str(server.address), ray_setup_worker.WORKER: default_worker.__file__}


@contextmanager
def cluster_of(
    nodes: int, server: ForkServer | None = None, head: dict[str, Any] | None = None, **each: Any
) -> Iterator[Any]:
    """A running `ray.cluster_utils.Cluster`; its `address` is for RAY_ADDRESS. `server` forks its workers, None: they
    are started afresh, with code of their own. `head`: what only its head has."""
    from ray.cluster_utils import Cluster

    options = node_options(server) | each
    of_head = {"include_dashboard": False, **options, **(head or {})}
    with plain_ray() if not of_head["include_dashboard"] else nullcontext():
        cluster = Cluster(initialize_head=True, head_node_args=of_head, connect=False)
        try:
            for _ in range(nodes - 1):
                cluster.add_node(**options)
            yield cluster
        finally:
            cluster.shutdown()


def plain_ray() -> Any:
    """Nodes are started as those of `ray` without `ray[default]`: their agents gather no statistics for a dashboard,
    which takes a tenth of a core, and start sooner."""
    absent = ImportError("left out by the tests")
    return mock.patch("ray._private.utils.get_dashboard_dependency_error", return_value=absent)


@contextmanager
def shared(folder: Path) -> Iterator[str]:
    """The address of the run's cluster, which nobody else uses within the block.

    `folder` is one that all processes of the test run have in common.
    """
    address = folder / "ray_cluster.address"
    with FileLock(folder / "ray_cluster.lock"):
        if not address.exists():
            _start(address)
        yield address.read_text()


def _start(address: Path) -> None:
    run = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    log = address.with_suffix(".log")
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.ray_cluster", str(address), str(run)],
            cwd=Path(__file__).parents[1],
            env=environment(**CALM),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    end = time.monotonic() + START_S
    while not address.exists():
        assert process.poll() is None and time.monotonic() < end, log.read_text()
        time.sleep(0.1)


def serve(address: Path, run: int) -> None:
    """Keep the cluster until the process `run` has ended."""
    with ForkServer(address.parent) as server, cluster_of(4, server, **NODE) as cluster:
        address.with_suffix(".new").write_text(cluster.address)
        address.with_suffix(".new").rename(address)
        while _lives(run):
            time.sleep(0.5)


def _lives(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
