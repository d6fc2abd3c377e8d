"""The suite of worker groups through Ray: the same tests, on four actors of the shared cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.contract import test_worker_group_contract as suite

ray = pytest.importorskip("ray", reason="Ray is not installed")
from verl.workers.ray.calls import RayCalls, WorkerHandle  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
# The others look into this process, or are about what travels.
_HERE = {
    "test_a_batch_travels_once_and_then_only_what_is_new",
    "test_a_transfer_that_fails_gathers_to_the_end",
}
_HERE |= {
    "test_a_mini_batch_counts_tokens_and_trajectories_of_all_ranks",
    "test_shared_prompts_are_the_tokens_saved",
}
globals().update({n: test for n, test in vars(suite).items() if n.startswith("test_") and n not in _HERE})


@pytest.fixture(scope="module")
def actors(ray_driver: str) -> Iterator[list[Any]]:
    made = [ray.remote(suite.CountingWorker).options(num_cpus=0).remote() for _ in range(4)]
    yield made
    for actor in made:
        ray.kill(actor)


@pytest.fixture(autouse=True)
def through_ray(actors: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are not of this process are actors."""

    def far(count: int) -> RayCalls:
        return RayCalls([WorkerHandle(a, f"rank {i}", "here") for i, a in enumerate(actors[:count])])

    monkeypatch.setattr(suite, "FarCalls", far)
