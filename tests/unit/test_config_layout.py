"""How many samplers share a machine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from verl.config.layout import samplers_per_node


@pytest.mark.parametrize(
    ("name", "ranks", "own", "expected"),
    [("vllm", None, 0, 8), ("vllm", 2, 0, 4), ("native", 2, 0, 8), ("vllm", 2, 1, 2), ("vllm", 16, 0, 1)],
)
def test_samplers_that_share_a_machine_are_counted(name, ranks, own, expected) -> None:
    rollout = SimpleNamespace(name=name, tensor_model_parallel_size=ranks, nnodes=own, n_gpus_per_node=4)
    config = SimpleNamespace(
        actor_rollout_ref=SimpleNamespace(rollout=rollout), trainer=SimpleNamespace(n_gpus_per_node=8)
    )
    assert samplers_per_node(config) == expected
