"""Environments of other packages: gymnasium, verifiers, OpenEnv, an openai client. Where a package is missing its test is skipped."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiny import tiny_tokenizer
from tests.unit.test_agents import play
from tests.unit.test_session import _QWEN
from verl.config import load
from verl.config.check import check
from verl.rollout.manager import RolloutError

HERE = Path(__file__).parent
VERIFIERS = os.environ.get("VERL_VERIFIERS_PYTHON")
ENV = {"agent_name": "environment_agent"}


def test_a_text_game_of_gymnasium() -> None:
    pytest.importorskip("gymnasium", reason="the package gymnasium is not installed")
    kwargs = {"id": "FrozenLake-v1", "is_slippery": False, "render_mode": "ansi"}
    own = {"environment": {"name": "gym", "path": "gymnasium:make", "kwargs": kwargs}}
    (t,), _ = play(["east", "Down: 1", "1", "2", "1", "2", "2"], row={"columns": own, **ENV})
    said = [m["content"] for m in t.fields["messages"]]
    assert (t.status, t.score) == ("completed", 1.0) and "[S]FFF" in said[0] and "(Down)" in said[4]
    assert said[2] == "Error: the action must be a number from 0 to 3"


FAKE = """
import json, sys, urllib.request
first = json.loads(sys.stdin.readline())
if "taskset" not in first["environment"]:
    print(json.dumps({"refused": "no taskset"}), flush=True)
    sys.exit()
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    message = json.loads(line)
    if message["task"] == "die":
        sys.exit(3)
    if message["task"] == "raise":
        print(json.dumps({"id": message["id"], "error": "TaskError: no game"}), flush=True)
        continue
    body = json.dumps({"messages": [{"role": "user", "content": "3*4?"}]}).encode()
    urllib.request.urlopen(message["url"] + "/chat/completions", body).read()
    print(json.dumps({"id": message["id"], "reward": 2.0, "metrics": {"turns": 1}, "stop": None, "messages": []}), flush=True)
"""


def server_words(python: str, **kwargs: str) -> list[str]:
    return [
        "agent.environment.name=verifiers", f"agent.environment.path={python}", "agent.max_resamples=1",
        *(f"agent.environment.kwargs.{name}={value}" for name, value in kwargs.items()),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("task", "message"), [("", ""), ("raise", "TaskError: no game"), ("die", "ended with status 3")]
)
def test_the_server_of_an_environment_is_started_watched_and_started_again(
    tmp_path: Path, task: str, message: str
) -> None:
    fake = tmp_path / "python"
    fake.write_text(f"#!{sys.executable}\n{FAKE}")
    fake.chmod(0o755)
    row, events = {"extra_info": {"task": task}}, []
    if not message:
        (t,), _ = play(["12"], *server_words(str(fake), taskset="a"), row=row)
        assert (t.status, t.score, t.fields["environment_metrics"]) == ("completed", 2.0, {"turns": 1})
        return
    with pytest.raises(RolloutError, match=message):
        play(["12"], *server_words(str(fake), taskset="a"), row=row, events=events)
    assert len(events) == 2
    words = [f"actor_rollout_ref.rollout.{word}" for word in server_words(str(fake))]
    problems = "\n".join(map(str, check(load(words)).problems))
    assert "cannot serve the verifiers environment of environment.kwargs: no taskset" in problems


@pytest.mark.skipif(not VERIFIERS, reason="VERL_VERIFIERS_PYTHON names no Python that has verifiers")
@pytest.mark.parametrize(
    ("fail", "message"), [("", ""), ("raise", "no game"), ("die", "ended with status 3")]
)
def test_an_environment_of_verifiers(tmp_path: Path, monkeypatch, fail: str, message: str) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    name = "verifiers_environment_of_a_user"
    words = server_words(str(VERIFIERS), **{"taskset.id": name, "agent.runtime.type": "subprocess"})
    row = {
        "extra_info": {"index": 1, "task": {"prompt": "3*4?", "answer": "12", "fail": fail} if fail else None}
    }
    tiny_tokenizer(tmp_path, template=_QWEN.replace("%THINK%", ""))
    if fail:
        with pytest.raises(RolloutError, match=message):
            play(["12"], *words, row=row, model=tmp_path)
        return
    (t,), _ = play(["16", "Yes, 16."], *words, row=row, model=tmp_path)
    assert (t.status, t.score, t.fields["environment_metrics"]["turns"]) == ("completed", 2.0, 2.0)
    assert [m["content"] for m in t.fields["messages"]] == ["4*4?", "16", "Sure?", "Yes, 16."]
    assert len(t.segments) == 1
