"""Code of a user's that attacks its process, in a tool or an environment: the trajectory ends as text or is sampled again, the run goes on."""

from __future__ import annotations

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

def attack():
    path = Path(__file__).parent / "ways"
    way, _, rest = path.read_text().partition(" ")
    path.write_text(rest)
    match way:
        case "fork":
            os.fork()
        case "exec":
            os.execv("/bin/sleep", ["sleep", "600"])
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "close":
            os.closerange(3, 256)
        case "block":
            time.sleep(600)
        case "exit":
            sys.exit(7)
        case "flood":
            for _ in range(2000):
                print("x" * 10_000)
            return "x" * 50_000_000
    return "done"

SCHEMA = {"type": "function", "function": {"name": "hostile"}}

@function_tool("in_thread", schema=SCHEMA)
def in_thread():
    return attack()

@function_tool("in_loop", schema=SCHEMA)
async def in_loop():
    return attack()
"""


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["stop", pytest.param("exec close block", marks=pytest.mark.long)])
def test_a_hostile_tool_is_contained_in_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    monkeypatch.setenv("HOSTILE", str(tmp_path))
    monkeypatch.setattr(loop_processes, "_PING_SECONDS", 0.2)
    monkeypatch.setattr(loop_processes, "_GRACE_SECONDS", 1.0)
    tiny_tokenizer(tmp_path / "model", template=_QWEN.replace("%THINK%", ""))
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "ways").write_text(f"{ends} fork exit flood")
    names = ("in_loop", "in_thread", "in_thread")
    calls = [f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>' for name in names]
    words = [
        f"multi_turn.function_tool_path={tmp_path / 'tools.py'}", "multi_turn.enable=True",
        "multi_turn.max_tool_response_length=60", "agent.tool_timeout=2", "agent.max_resamples=4",
    ]  # fmt: skip
    events: list = []
    (t,), _ = play([*calls, "Well."], *words, model=tmp_path / "model", processes=1, events=events)
    told = [m["content"] for m in t.fields["messages"] if m["role"] == "tool"]
    lost = [end in ("stop", "block") for end in ends.split()]
    assert (
        t.status == "completed"
        and t.extra["resamples"] == len(lost)
        and t.extra["tool_counts"]["errors"] == 1
    )
    assert told[0] == "done" and "SystemExit(7)" in told[1] and "(truncated)" in told[2]
    failed = [fields for kind, fields in events if kind == "trajectory_failed"]
    assert {fields["status"] for fields in failed} == {"environment_error"}
    assert ["answered nothing for 3 s" in fields["error"] for fields in failed] == lost
    assert processes_with("HOSTILE", str(tmp_path)) == []


def test_a_program_that_floods_and_leaves_a_process_behind(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(
        "import json, os, subprocess, sys\n"
        "subprocess.Popen(['sleep', '3'], start_new_session=True)\n"
        "for _ in range(3000): print('x' * 10_000)\n"
        "print(json.dumps({'reward': 0.5}))\n"
    )
    words = [
        "agent.environment.name=command",
        f"agent.environment.path='{sys.executable} {tmp_path}/agent.py'",
    ]
    (t,), _ = play(["12"], *words)
    assert (t.status, t.score) == ("completed", 0.5)
