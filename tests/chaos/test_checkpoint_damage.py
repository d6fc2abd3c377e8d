"""Every file of a sealed checkpoint damaged in every way: it is passed over with the reason, or what is loaded is what
was saved.

Of one process here, of two ranks in test_checkpoint_damage_ranks.py. CHAOS_DAMAGES: how many of a kind's damages the
command is given as well, where the others are only looked at.
"""

from __future__ import annotations

import pytest

from tests.chaos import damage
from tests.chaos.damage import Saved
from tests.integration.test_vision_runs import VisionRun

LATER = [pytest.param(kind, marks=pytest.mark.long) for kind in damage.KINDS if kind != "text"]


@pytest.fixture(scope="module")
def tiny_vision(tmp_path_factory) -> VisionRun:
    return VisionRun(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module", params=["text", *LATER])
def saved(request, tmp_path_factory, fork_server) -> Saved:
    of = request.getfixturevalue("tiny_vision" if request.param == "vision" else "tiny")
    out = tmp_path_factory.mktemp("saved") / "run"
    return damage.saved(fork_server, of, out, damage.KINDS[request.param])


def test_a_damaged_file_is_found_and_the_one_before_is_taken(saved, record_property) -> None:
    found = damage.assert_found_or_the_one_before(saved)
    assert found["loaded exactly"] == len(saved.names()) > 10 and found["passed over"] > 50
    record_property("damages", dict(found))


@pytest.mark.long
@pytest.mark.timeout(3600)
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
@pytest.mark.timeout(3600)
def test_a_wrong_file_under_a_right_seal_ends_the_run_with_what_to_do(
    saved, tmp_path, record_property, how, names
) -> None:
    """Or it is not read, and the run is the same."""
    names = names or saved.names(1)[:-1]
    found = damage.assert_a_wrong_file_under_a_right_seal_is_explained(saved, tmp_path, how, names)
    assert found["explained"] + found["passed over"] > 1
    record_property("damages", dict(found))
