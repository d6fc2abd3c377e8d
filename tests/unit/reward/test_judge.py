"""A judge behind an OpenAI-compatible endpoint: what it is asked, what its answers are worth, what its failures do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.reward.http_service import serving
from tests.unit.reward.test_parts import settings
from tests.unit.reward.test_runner import trajectory_of
from verl.reward import json_service, judge
from verl.reward.outcome import JudgeFailed, ServiceFailed
from verl.reward.runner import RewardRunner

SAYS = {
    "ten": "All right.\nScore: 10",
    "five": "Score: 9? No.\n**Score:** 5",
    "half": "Score: 2.5",
    "above": "Score: 11",
    "nothing": "I will not say.",
    "empty": "",
    "yes": "Verdict: Yes",
    "maybe": "Verdict: maybe",
}


class Judge:
    """Says what the last word of a response names; other words are failures of the service."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    def __call__(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.bodies.append(body | {"path": path})
        content = body["messages"][0]["content"]
        what = next((w for w in [*SAYS, "busy", "denied", "other"] if f"says {w}" in content), "ten")
        if what in SAYS:
            choice = {"message": {"content": SAYS[what]}, "finish_reason": "length"}
            return 200, {"choices": [choice]}
        return {"busy": (429, "too many"), "denied": (401, "no key"), "other": (200, {"error": "x"})}[what]


@pytest.fixture()
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Judge, str]]:
    monkeypatch.setattr(json_service, "PAUSES", (0.0, 0.0))
    asked = Judge()
    with serving(asked) as url:
        yield asked, url


def score(url: str, response: str, truth: Any = "72", info: Any = None, **kwargs: Any) -> dict[str, Any]:
    given = {"extra_info": {"question": "How many?"} if info is None else info, "model": "m", **kwargs}
    return asyncio.run(judge.compute_score("mine", response, truth, reward_router_address=url, **given))


@pytest.mark.parametrize(("says", "expected"), [("ten", 1.0), ("five", 0.5), ("half", 0.25)])
def test_a_verdict(served: tuple[Judge, str], says: str, expected: float) -> None:
    assert score(served[1], f"says {says}") == {"score": expected, "judgement": SAYS[says]}


def test_a_judge_gets_the_images_before_its_prompt(served: tuple[Judge, str]) -> None:
    uris = ["data:image/jpeg;base64,AA==", "data:image/jpeg;base64,AQ=="]
    score(served[1], "forty", info={"question": "<image><image>How many?", "images": uris})
    *images, text = served[0].bodies[-1]["messages"][0]["content"]
    assert images == [{"type": "image_url", "image_url": {"url": uri}} for uri in uris]
    assert text["type"] == "text" and "\nHow many?\n" in text["text"] and "forty" in text["text"]


def test_labels(served: tuple[Judge, str]) -> None:
    options = {"pattern": r"Verdict: (\w+)", "labels": {"yes": 1, "no": -1}}
    assert score(served[1], "says yes", **options)["score"] == 1.0
    with pytest.raises(JudgeFailed, match="'maybe' is none of yes, no"):
        score(served[1], "says maybe", **options)


@pytest.mark.parametrize(
    ("says", "error", "message", "tries"),
    [
        ("above", JudgeFailed, "11 is not between 0 and 10", 1),
        ("nothing", JudgeFailed, "no verdict, and is cut at max_tokens.*I will not say", 1),
        ("empty", ServiceFailed, "the judge wrote nothing", 3),
        ("busy", ServiceFailed, "in 3 tries: status 429: too many", 3),
        ("denied", ServiceFailed, "refuses: status 401", 1),
        ("other", ServiceFailed, "no chat completion", 3),
    ],
)
def test_no_verdict_is_no_zero(served, says, error, message, tries) -> None:
    with pytest.raises(error, match=message):
        score(served[1], f"says {says}")
    assert len(served[0].bodies) == tries


def test_the_judge_is_asked(served, monkeypatch, tmp_path) -> None:
    asked, url = served
    monkeypatch.setenv("KEY", "k")
    file = tmp_path / "template.txt"
    file.write_text("Q={question} A={response} T={ground_truth} {other}")
    parts = [{"type": "text", "text": "u"}]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]
    options = {"template_path": str(file), "api_key_variable": "KEY", "max_tokens": 5}
    score(f"{url}/v1", "{ground_truth} \\boxed{1}", None, {"messages": messages}, **options)
    (body,) = asked.bodies
    content = "Q=system: s\n\nuser: u A={ground_truth} \\boxed{1} T=none is given {other}"
    assert (body["path"], body["authorization"]) == ("/v1/chat/completions", "Bearer k")
    assert body["messages"] == [{"role": "user", "content": content}]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("m", 5, 0.0)
    with pytest.raises(ValueError, match=r"no \{response\}"):
        score(url, "x", template="?")
    with pytest.raises(ValueError, match=r"neither .* nor messages"):
        score(url, "x", info={"a": 1})


def test_a_run_asks_the_judge(served: tuple[Judge, str]) -> None:
    asked, url = served
    kwargs = "custom_reward_function.reward_kwargs."
    words = ["custom_reward_function.path=pkg://verl.reward.judge", "reward_model.reward_manager=limited"]
    words += [f"{kwargs}reward_router_address='{url}'", f"{kwargs}model=m", "reward_model.max_concurrent=4"]
    runner = RewardRunner(None, settings=settings(*words))
    try:
        rows = [trajectory_of(text, i) for i, text in enumerate(["says five", "says nothing", "says ten", "says half"])]
        turn = {"role": "assistant", "content": "says five"}
        rows[2].fields["messages"] = [
            *rows[2].prompt.messages,
            turn,
        ]  # a dialogue: what was said is no question
        rows[3].fields["messages"] = [
            {"role": "user", "content": "The room?"},
            turn,
        ]  # an environment's own beginning
        asyncio.run(runner.score_batch(rows))
    finally:
        runner.close()
    assert [t.score for t in rows] == [0.5, None, 1.0, 0.25]
    asked_for = [body["messages"][0]["content"] for body in asked.bodies]  # in no certain order
    assert sum("[Question]\nThe room?\n" in content for content in asked_for) == 1
    assert "JudgeFailed: the judge's answer holds no verdict" in str(rows[1].score_error)
    assert sum("[Question]\nq?\n" in content for content in asked_for) >= 3
    assert rows[0].score_parts == {"judgement": SAYS["five"]}
