"""The suite of rollout engines for samplers in workers of their own: two replicas on a Ray cluster, behind one
engine."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.contract import test_rollout_engine_contract as suite
from tests.contract.conftest import Sampler
from tests.vllm_cases import vllm_model
from verl.config import load
from verl.tracking.hooks import SILENT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
globals().update({name: test for name, test in vars(suite).items() if name.startswith("test_")})


class Replicas(Sampler):
    """Two embedded samplers behind a `ReplicaPool`."""

    @functools.cached_property
    def engine(self) -> Any:
        from verl.workers.ray.build import start_on_cluster

        self._workers = start_on_cluster(
            load(
                [
                    f"actor_rollout_ref.model.path={self.path}",
                    "actor_rollout_ref.rollout.name=native",
                    "actor_rollout_ref.rollout.dtype=float32",
                    "actor_rollout_ref.rollout.max_model_len=256",
                    "actor_rollout_ref.rollout.max_num_seqs=8",
                    "trainer.device=cpu",
                    "trainer.nnodes=2",
                    "trainer.n_gpus_per_node=1",
                ]
            ),
            SILENT,
        )
        return self._workers.sampler

    def discard(self) -> None:
        if "engine" in vars(self):
            self._workers.release()
        super().discard()


@pytest.fixture(scope="module")
def sampler(ray_driver: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sampler]:
    made = Replicas("replicas", vllm_model(tmp_path_factory.mktemp("replicas") / "model"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", ray_driver)
        yield made
        made.discard()
