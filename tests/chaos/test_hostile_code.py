"""Code of a user's that attacks its process, in a reward function, a tool or an environment: it is contained there,
counted and shown. A response that could not be scored has no score, a trajectory whose process ended is sampled again,
and the run goes on."""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chaos.fork_server import ForkServer, until
from tests.chaos.hostile_acts import ENDS, GOES_ON, RAISES, STOPS
from tests.chaos.killing import processes_with
from tests.integration.test_agent_runs import WORDS
from tests.runs import TinyRun, records, weights
from tests.tiny import tiny_tokenizer
from tests.unit.reward.test_runner import trajectory_of
from tests.unit.rollout.test_agents import play
from tests.unit.rollout.test_session import _QWEN
from verl.engine.rollout.vllm.weights import AdapterFolder
from verl.reward.pool import FunctionSpec
from verl.reward.runner import RewardRunner
from verl.reward.settings import RewardSettings
from verl.rollout import loop_processes
from verl.trajectory import Trajectory
from verl.weight_sync.verify import FULL

REWARD = """
from pathlib import Path
from tests.chaos.hostile_acts import act

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 0.25, "said": act(solution_str, Path(__file__).parent)}

async def later(data_source, solution_str, ground_truth, extra_info=None):
    return compute_score(data_source, solution_str, ground_truth)
"""


def scored(path: Path, name: str, acts: list[str], events: list[dict[str, Any]]) -> list[Trajectory]:
    """A response for each act, scored at once with as many harmless ones, which come last."""
    settings = RewardSettings(function=FunctionSpec(path=str(path), name=name), num_workers=2, timeout=1.0)
    note = lambda kind, **fields: events.append({"event": kind, **fields})  # noqa: E731
    runner = RewardRunner(None, events=note, settings=settings)
    rows = [trajectory_of(act, number) for number, act in enumerate([*acts, *["nothing"] * len(acts)])]

    async def all_of_them() -> None:
        await asyncio.gather(*(runner.score(row) for row in rows))

    try:
        asyncio.run(all_of_them())
    finally:
        runner.close()
    return rows


@pytest.mark.parametrize("name", ["compute_score", "later"])
def test_a_hostile_reward_costs_its_own_score_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("HOSTILE", str(tmp_path))
    monkeypatch.setattr("verl.reward.pool.ASYNC_GRACE", 0.3)
    (tmp_path / "reward.py").write_text(REWARD)
    shared = [Path("/dev/shm") / f"verl-test-{tmp_path.name}-{name}-{number}" for number in range(2)]
    for path in shared:
        path.touch()
    (tmp_path / "unlink").write_text(" ".join(map(str, shared)))
    wrong = ENDS | RAISES | dict.fromkeys(STOPS, "took more than 1 s") | {"huge": "at most 16777216 are kept"}
    acts, events = [*wrong, *GOES_ON], list[dict[str, Any]]()
    rows = scored(tmp_path / "reward.py", name, acts, events)
    for act, row in zip(acts, rows, strict=False):
        if act in wrong:
            assert row.score is None and re.search(wrong[act], str(row.score_error)), (act, row.score_error)
        else:
            assert row.score == 0.25, (act, row.score_error)
    assert [row.score for row in rows[len(acts) :]] == [0.25] * len(acts)
    failed = {event["response"]: event for event in events if event["event"] == "reward_failed"}
    assert failed.keys() == wrong.keys() and all(event["error"] for event in failed.values())
    replaced = [event for event in events if event["event"] == "reward_worker_replaced"]
    assert len(replaced) >= len(ENDS) + len(STOPS)
    assert not any(path.exists() for path in shared) and processes_with("HOSTILE", str(tmp_path)) == []


CODE = """
import os
from pathlib import Path
from tests.chaos.hostile_acts import act
from verl.rollout.environments import Observation, StepResult
from verl.tools.function_tool import function_tool

SCHEMA = {"type": "function", "function": {"name": "hostile"}}

def next_act():
    path = Path(__file__).parent / "acts"
    name, _, rest = path.read_text().partition(" ")
    path.write_text(rest)
    return act(name, Path(__file__).parent)

@function_tool("in_thread", schema=SCHEMA)
def in_thread():
    return next_act()

@function_tool("in_loop", schema=SCHEMA)
async def in_loop():
    return next_act()

class InThread:
    def reset(self, row):
        return Observation()

    def step(self, message):
        return StepResult([{"role": "user", "content": next_act()}], done="Well" in message["content"])

class InLoop(InThread):
    async def reset(self, row):
        return Observation()

    async def step(self, message):
        return InThread.step(self, message)
"""


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOSTILE", str(tmp_path))
    monkeypatch.setattr(loop_processes, "_PING_SECONDS", 0.2)
    monkeypatch.setattr(loop_processes, "_GRACE_SECONDS", 1.0)
    tiny_tokenizer(tmp_path / "model", template=_QWEN.replace("%THINK%", ""))
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "unlink").touch()
    return tmp_path


# Without streams first: the process in which they are closed is ended by what follows.
EVERY = ["streams", *ENDS, *STOPS, "exit", "cancel", *GOES_ON, "huge"]
SOME = ["stop", "cancel", "exit", "fork", "flood", "huge"]


def wheres(one: str, other: str) -> list[Any]:
    """Some acts in one of the two, all of them in both."""
    whole = [pytest.param(where, EVERY, marks=pytest.mark.long, id=f"{where}-all") for where in (one, other)]
    return [pytest.param(one, SOME, id=f"{one}-some"), *whole]


def assert_sampled_again(t: Trajectory, events: list[Any], acts: list[str], folder: Path) -> None:
    """Each of these acts cost an attempt at the trajectory, which was sampled again, and was said."""
    failed = [fields for kind, fields in events if kind == "trajectory_failed"]
    assert t.extra["resamples"] == len(acts) == len(failed), [fields["error"] for fields in failed]
    assert {fields["status"] for fields in failed} == {"environment_error"}
    said = ENDS | RAISES | {"stop": "answered nothing for 3 s", "block": "answered nothing for 3 s|no answer"}
    for act, fields in zip(acts, failed, strict=True):
        assert re.search(said[act], fields["error"]), (act, fields["error"])
    until(lambda: processes_with("HOSTILE", str(folder)) == [])


@pytest.mark.slow
@pytest.mark.parametrize(("where", "acts"), wheres("in_loop", "in_thread"))
def test_a_hostile_tool_is_contained_in_its_process(hostile: Path, acts: list[str], where: str) -> None:
    (hostile / "acts").write_text(" ".join(acts))
    call = f'<tool_call>{{"name": "{where}", "arguments": {{}}}}</tool_call>'
    words = [
        f"multi_turn.function_tool_path={hostile / 'code.py'}", "multi_turn.enable=True",
        "multi_turn.max_tool_response_length=60", "agent.tool_timeout=2", "agent.max_resamples=20",
    ]  # fmt: skip
    lost = [act for act in acts if act in ENDS or act == "stop" or (act, where) == ("block", "in_loop")]
    rest = acts[acts.index(lost[-1]) + 1 :]
    events: list[Any] = []
    more: dict[str, Any] = {"model": hostile / "model", "processes": 1, "events": events, "room": 8000}
    (t,), _ = play([call] * len(rest) + ["Well."], *words, **more)
    assert_sampled_again(t, events, lost, hostile)
    told = [m["content"] for m in t.fields["messages"] if m["role"] == "tool"]
    said = RAISES | {"block": "no answer within 2 s", "huge": r"\(truncated\)"} | dict.fromkeys(GOES_ON, "done")
    assert t.status == "completed" and len(told) == len(rest), (t.status, told)
    for act, text in zip(rest, told, strict=True):
        assert re.search(said[act], text), (act, text)


@pytest.mark.slow
@pytest.mark.parametrize(("where", "acts"), wheres("InThread", "InLoop"))
def test_a_hostile_environment_is_contained_in_its_process(hostile: Path, acts: list[str], where: str) -> None:
    acts = [act for act in acts if act != "huge"]
    (hostile / "acts").write_text(" ".join(acts))
    words = [
        "agent.environment.name=custom", f"agent.environment.path={hostile / 'code.py'}:{where}",
        "agent.tool_timeout=2", "agent.max_resamples=20",
    ]  # fmt: skip
    lost = [act for act in acts if act not in GOES_ON]
    row, events = {"agent_name": "environment_agent"}, list[Any]()
    texts = ["Go on."] * (len(acts) - len(lost)) + ["Well."]
    more: dict[str, Any] = {"model": hostile / "model", "processes": 1, "events": events, "room": 3000}
    (t,), _ = play(texts, *words, **more, row=row)
    assert_sampled_again(t, events, lost, hostile)
    said = [m["content"] for m in t.fields["messages"] if m["role"] == "user"]
    assert t.status == "completed" and said == ["3*4?", *["done"] * (len(acts) - len(lost))]


@pytest.mark.long
def test_what_an_environment_says_that_is_huge_costs_its_own_trajectory_at_most(hostile: Path) -> None:
    """It has no room in a context, or its process is busy with it for longer than it may be."""
    (hostile / "acts").write_text("huge")
    words = ["agent.environment.name=custom", f"agent.environment.path={hostile / 'code.py'}:InLoop"]
    row, events = {"agent_name": "environment_agent"}, list[Any]()
    words += ["agent.tool_timeout=2", "agent.max_resamples=1"]
    (t,), _ = play(["Go on.", "Well."], *words, model=hostile / "model", processes=1, events=events, row=row)
    failed = [fields for kind, fields in events if kind == "trajectory_failed"]
    assert t.status == "length" or t.extra["resamples"] == 1 == len(failed), (t.status, events)
    until(lambda: processes_with("HOSTILE", str(hostile)) == [])


DELETES = """
import os, shutil
from pathlib import Path
from verl.rollout.environments import Observation, StepResult

def delete():
    named = Path(__file__).parent / "delete"
    folder = Path(named.read_text()) if named.exists() else None
    if folder and (folder / "metrics.jsonl").is_file() and (folder / "metrics.jsonl").stat().st_size:
        named.unlink()
        shutil.rmtree(folder)

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    delete()
    return float(len(solution_str))

class Deletes:
    def reset(self, row):
        return Observation()

    def step(self, message):
        delete()
        return StepResult(reward=float(len(message["content"])), done=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("who", ["reward", "environment"])
def test_the_run_whose_folder_is_deleted_goes_on_and_says_so(fork_server: ForkServer, tmp_path: Path, who: str) -> None:
    tiny, out = TinyRun(tmp_path / "tiny"), tmp_path / "run"
    (tmp_path / "code.py").write_text(DELETES)
    (tmp_path / "delete").write_text(str(out))
    words = [f"custom_reward_function.path={tmp_path / 'code.py'}"]
    if who == "environment":
        tiny_tokenizer(template=_QWEN.replace("%THINK%", "")).save_pretrained(tiny.model)
        environment = "actor_rollout_ref.rollout.agent.environment"
        words = [*WORDS, f"{environment}.name=custom", f"{environment}.path={tmp_path / 'code.py'}:Deletes"]
        words += ["actor_rollout_ref.rollout.agent.default_agent_loop=environment_agent"]
    done = fork_server.run(tiny.overrides(out, *words, "trainer.total_training_steps=3"))
    assert done.status == 0 and not (tmp_path / "delete").exists(), done.stderr[-3000:]
    for name in ("metrics.jsonl", "events.jsonl"):
        assert done.stderr.count(f"{out / name} is gone") == 1, done.stderr
    assert max(records(out)) == 3 and weights(out, 3)


def test_an_adapter_is_written_anew_where_its_folder_was_deleted() -> None:
    folder = AdapterFolder({"r": 1})
    for version in (1, 2):
        path = folder.write([("layer.lora_A.weight", torch.ones(1, 2))], version, None)
        assert folder.checksums(path, FULL)
        shutil.rmtree(path.parent)
    folder.remove()


def test_a_program_that_floods_and_leaves_a_process_behind(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(
        "import json, os, subprocess, sys, urllib.request\n"
        "subprocess.Popen(['sleep', '3'], start_new_session=True)\n"
        "body = json.dumps({'messages': [{'role': 'user', 'content': 'Well?'}]}).encode()\n"
        "kind = {'Content-Type': 'application/json'}\n"
        "url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
        "urllib.request.urlopen(urllib.request.Request(url, body, kind)).read()\n"
        "for _ in range(3000): print('x' * 10_000)\n"
        "print(json.dumps({'reward': 0.5}))\n"
    )
    words = [
        "agent.environment.name=command",
        f"agent.environment.path='{sys.executable} {tmp_path}/agent.py'",
    ]
    (t,), _ = play(["12"], *words)
    assert (t.status, t.score) == ("completed", 0.5)
