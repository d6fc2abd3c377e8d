"""How the cores of nodes are shared by the processes that pools put there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")
from verl.workers.ray.placement import share_cores


def pool(per_node: int, *nodes: str) -> Any:
    return SimpleNamespace(per_node=per_node, nodes=len(nodes), node_of=lambda b: nodes[b], threads=0)


@pytest.mark.parametrize(
    ("pools", "threads"),
    [
        ([pool(1, "a")], [8]),
        ([pool(2, "a")], [4]),
        ([pool(1, "a"), pool(1, "a")], [4, 4]),
        ([pool(1, "a"), pool(1, "b")], [8, 2]),
        ([pool(2, "a", "b"), pool(2, "a")], [1, 2]),
        ([pool(64, "a")], [1]),
    ],
)
def test_threads(pools: list[Any], threads: list[int]) -> None:
    """8 cores on node a, 2 on b: a pool's processes have as many threads as its poorest node allows."""
    cluster = SimpleNamespace(nodes=lambda: [SimpleNamespace(id="a", cpus=8.0), SimpleNamespace(id="b", cpus=2.0)])
    share_cores(cluster, pools)
    assert [one.threads for one in pools] == threads
