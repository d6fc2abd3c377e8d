"""A rubric that several judges check: weights, faults, agreement, abstention, answers that leave a criterion out."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.unit.reward.http_service import serving
from verl.reward import rubric
from verl.reward.outcome import JudgeFailed
from verl.reward.pool import FunctionSpec
from verl.reward.runner import RewardRunner
from verl.reward.settings import RewardSettings
from verl.trajectory import Prompt, Trajectory

RUBRIC = [{"criterion": "It is right.", "weight": 3}, "It is short.", {"description": "It is rude.", "weight": -2}]
SAYS = {"strict": "1: yes\n2: no\n3. no", "kind": "**1.** Yes\n2: yes\n3: Yes, a little", "lazy": "1: yes\n3: no"}


def judge(path: str, body: dict[str, Any]) -> tuple[int, Any]:
    return 200, {"choices": [{"message": {"content": SAYS[body["model"]]}, "finish_reason": "stop"}]}


def score(*names: str, info: Any = None, **more: Any) -> dict[str, Any]:
    with serving(judge) as url:
        judges = {name: {"reward_router_address": url, "model": name} for name in names}
        row = {"question": "How many?", "rubric": RUBRIC} if info is None else info
        return asyncio.run(rubric.compute_score("mine", "Seven.", None, row, judges=judges, **more))


def test_the_score_is_the_weighted_share_of_what_judges_find_met() -> None:
    assert score("strict") == {"score": 3 / 4, "strict": 3 / 4, "agreement": 1.0}
    both = score("strict", "kind")
    assert both["strict"] == 3 / 4 and both["kind"] == 2 / 4 and both["agreement"] == pytest.approx(1 / 3)
    assert both["score"] == pytest.approx((3 + 0.5 - 2 * 0.5) / 4)
    assert (
        score(
            "kind",
            info={"question": "?", "rubric": [{"criterion": "a", "weight": 1}, "b", {"criterion": "c", "weight": -9}]},
        )["score"]
        == 0.0
    )


def test_it_abstains_where_judges_differ_too_much() -> None:
    assert "agreement is 0.33, below 0.5" in score("strict", "kind", min_agreement=0.5)["abstain"]


def test_criteria_of_the_run_and_what_is_missing() -> None:
    assert score("kind", info={"question": "?"}, criteria=["a", "b", "c"])["score"] == 1.0
    with pytest.raises(JudgeFailed, match="no verdict on criterion 2"):
        score("lazy")
    with pytest.raises(ValueError, match="a weight above 0"):
        score("kind", info={"question": "?"})


def test_in_a_run_the_judges_see_the_prompt() -> None:
    prompt = Prompt("uid", np.zeros(1, np.int64), [{"role": "user", "content": "How many?"}], "mine")
    response = Trajectory(prompt, 0, np.zeros(1, np.int64), np.ones(1, bool), text="Seven.")
    questions = []

    def kind(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        questions.append("[Question]\nHow many?\n" in body["messages"][0]["content"])
        return judge(path, body)

    with serving(kind) as url:
        judges = {"kind": {"reward_router_address": url, "model": "kind"}}
        kwargs = {"judges": judges, "criteria": ["a", "b", "c"]}
        spec = FunctionSpec(path="pkg://verl.reward.rubric", kwargs=kwargs)
        runner = RewardRunner(None, settings=RewardSettings(function=spec, num_workers=1))
        try:
            asyncio.run(runner.score_batch([response]))
        finally:
            runner.close()
    assert response.score == 1.0 and questions == [True], response.score_error
