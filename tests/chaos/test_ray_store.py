"""An object store that is full, on a disk that is full too: the run ends with what to change.

Its cluster is its own: only a Ray that is started with the option takes the disk for full.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.ray_cluster import cluster_of
from verl.errors import UserError
from verl.trajectory import Batch, Prompt, Trajectory

ray = pytest.importorskip("ray")
from tests import ray_stubs  # noqa: E402
from verl.workers.group import WorkerGroup  # noqa: E402
from verl.workers.ray.calls import RayCalls, WorkerHandle  # noqa: E402
from verl.workers.roles import Role  # noqa: E402
from verl.workers.update_plan import UpdatePlan  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
NO_DISK = {"local_fs_capacity_threshold": 0.0001}
"""Ray takes a disk for full above this share."""


@pytest.fixture(scope="module")
def training(fork_server) -> Iterator[Any]:
    with cluster_of(1, fork_server, _system_config=NO_DISK) as running:
        ray.init(address=running.address, namespace="verl", logging_level="ERROR", log_to_driver=False)
        handles = [ray.remote(ray_stubs.Rank).options(num_cpus=0).remote() for _ in range(2)]
        calls = RayCalls([WorkerHandle(h, f"training worker {i}", "here") for i, h in enumerate(handles)])
        cfg = SimpleNamespace(ppo_mini_batch_size=20, ppo_epochs=1, shuffle=False)
        plan = UpdatePlan(cfg, max_response_length=1.0, batch_prompts=40)
        yield WorkerGroup(calls, [{"dp_rank": rank} for rank in range(2)], plan=plan)
        ray.shutdown()


def batch(megabytes: int) -> Batch:
    """40 responses of together about this many MB of token ids."""
    count = (megabytes << 20) // 40 // 4
    rows = [
        Trajectory(
            Prompt(f"0:{number}@0", np.arange(5), messages=None),
            0,
            response_ids=np.arange(count),
            response_mask=np.ones(count, bool),
        )
        for number in range(40)
    ]
    return Batch(rows)


@pytest.mark.long
def test_a_batch_that_fits_nowhere_ends_with_what_to_change(training: Any) -> None:
    with pytest.raises(UserError, match=r"object store is full.*object_store_memory.*train_batch_size"):
        training.place(batch(400), "old_log_prob")


@pytest.mark.long
def test_the_next_batch_that_fits_goes_through(training: Any) -> None:
    small = batch(8)
    Role("actor", training).forward(small, "old_log_prob", {"log_probs": "old_log_probs"})
    assert all(row.old_log_probs is not None for row in small)
