"""Several reward functions together, and comparisons within a group."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.reward.http_service import serving
from verl.reward import ensemble, tournament
from verl.reward.pool import FunctionSpec
from verl.reward.runner import RewardRunner
from verl.reward.settings import RewardSettings
from verl.trajectory import Prompt, Trajectory

MEMBERS = """
def number(data_source, solution_str, ground_truth, extra_info=None, *, value=0.0): return {"score": value, "x": 1}
async def silent(data_source, solution_str, ground_truth, extra_info=None): return {"abstain": "no idea"}
def longer(data_source, solution_str, ground_truth, extra_info=None):
    first, second = (part.strip() for part in solution_str.removeprefix("[Response A]").split("[Response B]"))
    if "fails" in (first, second): raise KeyError("broken")
    return 1.0 if len(first) >= len(second) else 0.0  # with a preference for the first place
"""


@pytest.fixture()
def path(tmp_path: Path) -> str:
    (tmp_path / "members.py").write_text(MEMBERS)
    return str(tmp_path / "members.py")


@pytest.mark.parametrize(
    ("combine", "values", "expected"),
    [
        ("mean", [1.0, 0.0, 0.5], (3 * 1.0 + 0.5) / 5),
        ("majority", [1.0, 0.0, 0.0], 1.0),
        ("majority", [0.0, 1.0, 1.0], 0.0),
        ("min", [1.0, 0.2, 0.5], 0.2),
        ("max", [0.1, 0.2, 0.5], 0.5),
    ],
)
def test_members_together(path: str, combine: str, values: list[float], expected: float) -> None:
    """The first one weighs 3, one more abstains."""
    members: dict[str, Any] = {
        f"m{i}": {"path": path, "name": "number", "weight": 3 if i == 0 else 1, "reward_kwargs": {"value": v}}
        for i, v in enumerate(values)
    }
    members["silent"] = {"path": path, "name": "silent"}
    a, b, c = values
    agreement = 1 - (abs(a - b) + abs(a - c) + abs(b - c)) / 3
    scores = {f"m{i}": v for i, v in enumerate(values)}
    found = asyncio.run(ensemble.compute_score("s", "r", "t", members=members, combine=combine))
    assert found == pytest.approx({"score": expected, "agreement": agreement} | scores)
    found = asyncio.run(ensemble.compute_score("s", "r", "t", members=members, min_agreement=agreement + 0.01))
    assert f"agreement is {agreement:.2f}" in found["abstain"] and found["agreement"] == pytest.approx(agreement)
    one = {"silent": members["silent"]}
    assert "no idea" in asyncio.run(ensemble.compute_score("s", "r", "t", members=one))["abstain"]
    with pytest.raises(ValueError, match="there are: mean, majority, min, max"):
        asyncio.run(ensemble.compute_score("s", "r", "t", members=one, combine="sum"))


def test_pairs_of_a_ring() -> None:
    def pairs(size: int, opponents: int | None) -> list[frozenset[int]]:
        found = [frozenset(pair) for pair in tournament._pairs(range(size), opponents)]
        assert len(set(found)) == len(found)
        return found

    assert [len(pairs(size, None)) for size in range(1, 7)] == [0, 1, 3, 6, 10, 15]
    assert set(pairs(6, 1)) == {frozenset((i, (i + 1) % 6)) for i in range(6)}
    assert len(pairs(3, 9)) == 3


def test_a_tournament_in_the_runner(path: str) -> None:
    """Two groups and a response that is alone; one whose comparison fails takes its opponents along."""
    spec = {"path": "pkg://verl.reward.tournament", "kwargs": {"compare": {"path": path, "name": "longer"}}}
    runner = RewardRunner(None, settings=RewardSettings(function=FunctionSpec(batch=True, **spec), num_workers=1))
    texts = [("a", "xxx"), ("b", "y"), ("a", "x"), ("a", "zz"), ("b", "y"), ("c", "alone"), ("d", "fails"), ("d", "y")]
    rows = []
    for i, (uid, text) in enumerate(texts):
        prompt = Prompt(uid, np.zeros(1, np.int64), [{"role": "user", "content": "q?"}], "mine")
        rows.append(Trajectory(prompt, i, np.zeros(1, np.int64), np.ones(1, bool), text=text))
    asyncio.run(runner.score_batch(rows))
    runner.close()
    assert [t.score for t in rows] == [1.0, 0.5, 0.0, 0.5, 0.5, None, None, None]
    assert [t.score_parts.get("consistency") for t in rows[:5]] == [1.0, 0.0, 1.0, 1.0, 0.0]
    assert "no other response" in rows[5].score_error and "broken" in rows[6].score_error


def test_the_judge_compares_by_its_template() -> None:
    def judge(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        content = body["messages"][0]["content"]
        assert "q?" in content and body["model"] == "m"
        first, second = (int(n) for n in re.findall(r"number (\d)", content))
        best = "A" if first > second else "B" if second > first else "tie"
        return 200, {"choices": [{"message": {"content": f"Well.\n**Better:** {best}"}, "finish_reason": "stop"}]}

    with serving(judge) as url:
        texts = [f"number {n}" for n in (3, 1, 3)]
        infos = [{"uid": "a", "question": "q?"}] * 3
        kwargs = {"reward_router_address": url, "model": "m", "request_seconds": 5.0}
        found = asyncio.run(tournament.compute_score(["s"] * 3, texts, [None] * 3, infos, **kwargs))
    assert [result["score"] for result in found] == [0.75, 0.0, 0.75]
