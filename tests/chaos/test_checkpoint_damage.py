"""Every file of a sealed checkpoint damaged in every way: it is passed over with the reason, or what is loaded is what
was saved.

Of two ranks, each has files of its own, and what one cannot read ends all of them. CHAOS_DAMAGES: how many of a kind's
damages the command is given as well, where the others are only looked at.
"""

from __future__ import annotations

import pytest

from tests.chaos import damage
from tests.chaos.damage import Saved
from tests.integration.test_vision_runs import VisionRun

TWO = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1"]
LATER = [pytest.param((kind, 1), marks=pytest.mark.long) for kind in damage.KINDS if kind != "text"]
RANKS = [pytest.param((kind, 2), marks=[pytest.mark.slow, pytest.mark.long]) for kind in damage.KINDS]
pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module", params=[("text", 1), *LATER, *RANKS], ids=lambda p: f"{p[0]}-{p[1]}")
def saved(request, tmp_path_factory, fork_server, tiny) -> Saved:
    (kind, ranks), folder = request.param, tmp_path_factory.mktemp("saved")
    of = VisionRun(folder / "vision") if kind == "vision" else tiny
    if ranks == 1:
        return damage.saved(fork_server, of, folder / "run", damage.KINDS[kind])
    pytest.importorskip("ray")
    address = request.getfixturevalue("ray_address")
    return damage.saved(fork_server, of, folder / "run", [*damage.KINDS[kind], *TWO], RAY_ADDRESS=address)


def test_a_damaged_file_is_found_and_the_one_before_is_taken(saved, record_property) -> None:
    found = damage.assert_found_or_the_one_before(saved)
    assert found["loaded exactly"] == len(saved.names()) > 10 and found["passed over"] > 50
    record_property("damages", dict(found))


@pytest.mark.long
def test_the_command_goes_on_from_what_is_whole(saved, tmp_path, record_property) -> None:
    record_property("damages", dict(damage.assert_the_command_goes_on(saved, tmp_path)))


@pytest.mark.parametrize(
    ("how", "names"),
    [
        ("emptied", ["state/rng/rng.json", "state/loop.json"]),
        *(pytest.param(how, None, marks=pytest.mark.long) for how in damage.RESEALED),
    ],
    ids=["two", *damage.RESEALED],
)
def test_a_wrong_file_under_a_right_seal_ends_the_run_with_what_to_do(
    saved, tmp_path, record_property, how, names
) -> None:
    """On whichever rank it is read: no rank waits for another. Or it is not read, and the run is the same."""
    names = names or saved.names(1)[:-1]
    found = damage.assert_a_wrong_file_under_a_right_seal_is_explained(saved, tmp_path, how, names)
    assert found["explained"] + found["passed over"] > 1
    record_property("damages", dict(found))
