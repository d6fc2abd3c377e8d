"""A simulated Ray cluster for tests: several nodes of this machine, shared by a module's tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STORE = 150 << 20


@contextmanager
def cluster_of(nodes: int, head: dict[str, Any] | None = None, **each: Any) -> Iterator[Any]:
    """A running `ray.cluster_utils.Cluster`; its `address` is for RAY_ADDRESS. `head`: what only its head has."""
    from ray.cluster_utils import Cluster

    options = {"num_cpus": 2, "object_store_memory": STORE} | each
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"include_dashboard": False, **options, **(head or {})},
        connect=False,
    )
    try:
        for _ in range(nodes - 1):
            cluster.add_node(**options)
        yield cluster
    finally:
        cluster.shutdown()
