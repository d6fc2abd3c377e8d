"""Code of a user's that attacks its process, in a tool or an environment: the trajectory ends as text or is sampled again, the run goes on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.chaos.killing import processes_with
from tests.tiny import tiny_tokenizer
from tests.unit.test_agents import play
from tests.unit.test_session import _QWEN
from verl.rollout import loop_processes

TOOLS = """
import asyncio, os, signal, sys, time
from pathlib import Path
from verl.tools.function_tool import function_tool

def once():
    try:
        (Path(__file__).parent / "hostile").unlink()
    except FileNotFoundError:
        return False
    return True

def attack(way):
    match way if once() else "":
        case "fork":
            os.fork()
        case "exec":
            os.execv("/bin/sleep", ["sleep", "600"])
        case "signal":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "close":
            os.closerange(3, 256)
        case "exit":
            sys.exit(7)
        case "flood":
            for _ in range(2000):
                print("x" * 10_000)
        case "huge":
            return "x" * 50_000_000
        case "block":
            time.sleep(600)
    return "done"

SCHEMA = {"type": "function", "function": {"name": "hostile", "parameters": {
    "type": "object", "properties": {"way": {"type": "string"}}}}}

@function_tool("hostile", schema=SCHEMA)
def hostile(way):
    return attack(way)

@function_tool("hostile_loop", schema=SCHEMA)
async def hostile_loop(way):
    return attack(way)
"""
ENDED, STOPPED = "the process of the agent loop ended", "answered nothing for 3 s"
# Way → the tool (in a thread, or on the event loop), what the event of the lost trajectory says, what the model is told.
WAYS = {
    "fork": ("hostile", "", "done"),
    "exit": ("hostile", "", "SystemExit(7)"),
    "flood": ("hostile", "", "done"),
    "huge": ("hostile", "", "(truncated)"),
    "exec": ("hostile_loop", ENDED, "done"),
    "signal": ("hostile", f"{ENDED}: SIGTERM", "done"),
    "close": ("hostile_loop", ENDED, "done"),
    "stop": ("hostile", STOPPED, "done"),
    "block": ("hostile_loop", STOPPED, "done"),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_hostile_tool_is_contained_in_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setenv("HOSTILE", str(tmp_path))
    monkeypatch.setattr(loop_processes, "_PING_SECONDS", 0.2)
    monkeypatch.setattr(loop_processes, "_GRACE_SECONDS", 1.0)
    tiny_tokenizer(tmp_path / "model", template=_QWEN.replace("%THINK%", ""))
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "hostile").touch()
    tool, lost, told = WAYS[way]
    call = json.dumps({"name": tool, "arguments": {"way": way}})
    words = [
        f"multi_turn.function_tool_path={tmp_path / 'tools.py'}", "multi_turn.enable=True",
        "agent.tool_timeout=2", "agent.max_resamples=1",
    ]  # fmt: skip
    events: list = []
    (t,), _ = play(
        [f"<tool_call>{call}</tool_call>", "Well."],
        *words,
        model=tmp_path / "model",
        processes=1,
        events=events,
    )
    assert t.status == "completed" and told in t.fields["messages"][2]["content"], t.fields["messages"]
    failed = [fields for kind, fields in events if kind == "trajectory_failed"]
    assert [fields["status"] for fields in failed] == ["environment_error"] * bool(lost)
    assert all(lost in fields["error"] for fields in failed) and t.extra.get("resamples", 0) == len(failed)
    assert processes_with("HOSTILE", str(tmp_path)) == []


def test_a_program_that_floods_and_leaves_a_process_behind(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(
        "import json, os, subprocess, sys\n"
        "subprocess.Popen(['sleep', '5'], start_new_session=True)\n"
        "for _ in range(3000): print('x' * 10_000)\n"
        "print(json.dumps({'reward': 0.5}))\n"
    )
    words = [
        "agent.environment.name=command",
        f"agent.environment.path='{sys.executable} {tmp_path}/agent.py'",
    ]
    (t,), _ = play(["12"], *words)
    assert (t.status, t.score) == ("completed", 0.5)
