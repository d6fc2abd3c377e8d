"""Nodes that go: a bundle moves to another node, and a run that is cut off from its cluster ends with that said.

Its cluster is its own, because every test takes a part of it away.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.chaos import ray_plans
from tests.chaos.ray_runs import (
    LIMIT_S,
    events,
    last_word,
    log_of,
    nothing_lost,
    pid_of,
    replaced_once,
    slow_sampling,
    started,
    steps_logged,
    until,
)
from tests.ray_cluster import cluster_of, node_options
from verl.config import load

ray = pytest.importorskip("ray")
from tests import ray_stubs  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ALONE = "trainer.nnodes=1"


@pytest.fixture(scope="module")
def cluster(fork_server) -> Iterator[Any]:
    """A head without work and three nodes of one core. The last tests take the head away."""
    with cluster_of(4, fork_server, head={"num_cpus": 0}) as running:
        yield running


def node_of(cluster: Any, pid: int) -> str:
    """Id of the node that an actor's process is on."""
    actors = cluster.global_state.actor_table(None).values()
    return next(actor["Address"]["NodeID"] for actor in actors if actor["Pid"] == pid)


def remove(cluster: Any, node_id: str) -> None:
    """Kill a node at once, as a machine that loses its power."""
    node = next(n for n in cluster.worker_nodes if n.node_id == node_id)
    cluster.remove_node(node, allow_graceful=False)


@pytest.mark.long
def test_the_bundle_of_a_lost_node_moves_to_one_with_room(cluster) -> None:
    from verl.workers.ray.calls import RayCalls, WorkerDied, WorkerHandle
    from verl.workers.ray.cluster import Cluster
    from verl.workers.ray.placement import DevicePool

    ray.init(address=cluster.address, namespace="verl", logging_level="ERROR", log_to_driver=False)
    try:
        joined = Cluster(load(["actor_rollout_ref.model.path=none"]), "cpu")
        pool, other = (
            DevicePool(joined, "sampling", 2, 1, 4, print),
            DevicePool(joined, "training", 1, 1, 4, print),
        )
        old = pool.node_of(0)

        def start(_: str) -> int:
            handle = ray.remote(ray_stubs.Rank).options(**pool.owner_options(0, 1)).remote()
            return int(RayCalls([WorkerHandle(handle, "sampler 0", old)]).call("pid")[0])

        _, node = pool.again(0, start)
        assert node == old, "nothing moves while the node lives"
        remove(cluster, old)
        with pytest.raises(WorkerDied, match=r"sampling is lost and no other had 1 cpu devices free within 4 s"):
            pool.again(0, start)
        room = other.node_of(0)
        other.release()
        pid, node = pool.again(0, start)
        assert pid and node == room == pool.node_of(0)
        pool.release()
        with pytest.raises(WorkerDied, match="was released"):
            pool.again(0, start)
    finally:
        ray.shutdown()


@pytest.mark.long
def test_a_run_goes_on_when_a_node_that_only_samples_is_lost(cluster, fork_server, tiny, tmp_path) -> None:
    out, mark = tmp_path / "out", tmp_path / "sampling"
    own = ("actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=1")
    cluster.add_node(**node_options(fork_server))
    slow = slow_sampling(tmp_path, mark, 0.3)
    with started(fork_server, tiny, cluster.address, out, ALONE, *own, **slow) as run:
        until(lambda: steps_logged(out) >= 1, run, out)
        mark.unlink()
        until(mark.exists, run, out)
        time.sleep(0.5)  # step 2 is being sampled
        remove(cluster, node_of(cluster, pid_of(out, "sampler 0")))
        assert run.wait(200) == 0, log_of(out)[-3000:]
    assert replaced_once(out)["unfinished"] == 12
    nothing_lost(out, [2])


@pytest.mark.long
def test_a_lost_node_of_the_training_ends_the_run_with_that_said(cluster, fork_server, tiny, tmp_path) -> None:
    out, mark = tmp_path / "out", tmp_path / "sampling"
    slow = slow_sampling(tmp_path, mark)
    with started(fork_server, tiny, cluster.address, out, **slow) as run:
        until(mark.exists, run, out)
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        assert run.wait(LIMIT_S) == 1
    last = last_word(out)
    assert re.search(r"training worker [01] .* died in gen: its node is lost", last), last


@pytest.mark.parametrize(
    ("kill", "said"),
    [
        pytest.param(
            "kill_raylet",
            r"the Ray daemon of the driver's node \(.*; head {address}\) was lost in gen: its process ended",
            marks=pytest.mark.long,
        ),
        ("kill_gcs_server", r"the head of the Ray cluster \({address}\) was lost in \w+: no answer for 5 s"),
    ],
    ids=["daemon", "head"],
)
def test_a_run_that_is_cut_off_ends_with_that_said(cluster, fork_server, tiny, tmp_path, kill, said) -> None:
    """Ray would end the driver without a word. The last ones here: no run starts on this cluster afterwards."""
    out, mark, address = tmp_path / "out", tmp_path / "sampling", cluster.address
    slow = slow_sampling(tmp_path, mark, 0.6)
    patience = ray_plans.plan(tmp_path / "plug", "short_patience", ray_plans.SHORT_PATIENCE, seconds=5.0)
    plugins = ",".join(one["VERL_USE_EXTERNAL_MODULES"] for one in (slow, patience))
    words = (ALONE, "trainer.total_training_steps=9")
    more = slow | {"VERL_USE_EXTERNAL_MODULES": plugins}
    with started(fork_server, tiny, address, out, *words, **more) as run:
        until(lambda: steps_logged(out) >= 1, run, out)
        getattr(cluster.head_node, kill)(check_alive=False)
        assert run.wait(LIMIT_S) == 1
    last = last_word(out)
    assert re.search(said.format(address=re.escape(address)), last), log_of(out)[-3000:]
    assert "the same command goes on from the newest checkpoint" in last
    assert events(out, "cluster_lost")[0]["error"] in last
