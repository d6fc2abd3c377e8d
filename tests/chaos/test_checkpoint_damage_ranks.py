"""Checkpoints of two ranks, damaged as those of one process are in test_checkpoint_damage.py: each rank has files of
its own, and what one cannot read ends all of them."""

from __future__ import annotations

import pytest

from tests.chaos import damage
from tests.chaos.damage import Saved
from tests.integration.test_vision_runs import VisionRun

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(3600)]
TWO = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1"]


@pytest.fixture(scope="module", params=damage.KINDS)
def saved(request, tmp_path_factory, fork_server, tiny, ray_address) -> Saved:
    folder = tmp_path_factory.mktemp("saved")
    of = VisionRun(folder / "vision") if request.param == "vision" else tiny
    words = [*damage.KINDS[request.param], *TWO]
    return damage.saved(fork_server, of, folder / "run", words, RAY_ADDRESS=ray_address)


def test_a_damaged_file_is_found_and_the_one_before_is_taken(saved, record_property) -> None:
    found = damage.assert_found_or_the_one_before(saved)
    assert found["loaded exactly"] == len(saved.names()) > 10 and found["passed over"] > 50
    record_property("damages", dict(found))


def test_the_command_goes_on_from_what_is_whole(saved, tmp_path, record_property) -> None:
    record_property("damages", dict(damage.assert_the_command_goes_on(saved, tmp_path)))


@pytest.mark.parametrize("how", damage.RESEALED)
def test_a_wrong_file_under_a_right_seal_ends_the_run_with_what_to_do(
    saved, tmp_path, record_property, how
) -> None:
    """On whichever rank it is read: no rank waits for another. Or it is not read, and the run is the same."""
    found = damage.assert_a_wrong_file_under_a_right_seal_is_explained(
        saved, tmp_path, how, saved.names(1)[:-1]
    )
    assert found["explained"] > 1
    record_property("damages", dict(found))
