"""kill -9 in the middle of dialogues: of the trainer, of the process that runs the tools, of an environment's program
or server."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.chaos.fork_server import ForkServer, until
from tests.chaos.killing import Kill, assert_none_left, left_in_shared_memory, processes_with, run_and_kill
from tests.integration.test_agent_runs import ROLLOUT, WORDS
from tests.runs import TinyRun, records, weights
from tests.tiny import tiny_tokenizer
from tests.unit.rollout.test_adapters import fake_python
from tests.unit.rollout.test_mcp import STDIO, tools_file
from tests.unit.rollout.test_session import _QWEN

# Who finds the file "kill" takes it away and kills itself, once; who finds "delete", the folder that
# is named there, once a step is recorded.
TOOLS = """
import os, shutil, time
from pathlib import Path
from verl.tools.function_tool import function_tool

@function_tool
def calculate(expression: str) -> str:
    '''Works out a product.

    Args:
        expression: Like 3*4.
    '''
    time.sleep(0.02)
    named = Path(__file__).parent / "delete"
    folder = Path(named.read_text()) if named.exists() else None
    if folder and (folder / "metrics.jsonl").is_file() and (folder / "metrics.jsonl").stat().st_size:
        named.unlink()
        shutil.rmtree(folder)
    try:
        (Path(__file__).parent / "kill").unlink()
    except FileNotFoundError:
        return expression
    os.kill(os.getpid(), 9)
"""
PROGRAM = """
import json, os, sys, time, urllib.request
from pathlib import Path
base, row = os.environ["OPENAI_BASE_URL"], json.loads(os.environ["VERL_ROW"])
def ask():
    body = json.dumps({"messages": row["messages"]}).encode()
    kind = {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(base + "/chat/completions", body, kind)).read()
ask()
try:
    Path(os.environ["KILL"]).unlink()
except FileNotFoundError:
    ask()
    print(json.dumps({"reward": 0.5}))
else:
    os.kill(os.getpid(), 9)
"""


@pytest.fixture(scope="module")
def dialogues(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    tiny = TinyRun(tmp_path_factory.mktemp("dialogues"))
    tiny_tokenizer(template=_QWEN.replace("%THINK%", "")).save_pretrained(tiny.model)
    (tiny.root / "tools.py").write_text(TOOLS)
    return tiny


def words_of(tiny: TinyRun, out: Path, workers: int, *more: str) -> list[str]:
    tools = f"{ROLLOUT}multi_turn.function_tool_path={tiny.root / 'tools.py'}"
    return tiny.overrides(out, *WORDS, tools, f"{ROLLOUT}agent.num_workers={workers}", "trainer.save_freq=1", *more)


@pytest.mark.slow
def test_a_trainer_killed_in_the_middle_of_a_dialogue_resumes_exactly(
    dialogues: TinyRun, fork_server: ForkServer, tmp_path: Path
) -> None:
    done = fork_server.run(words_of(dialogues, tmp_path / "whole", 0))
    assert done.status == 0, done.stderr
    words = words_of(dialogues, tmp_path / "killed", 0)
    _, mark = run_and_kill(fork_server, words, Kill("gen", 2, 0.15), tmp_path / "marks")
    assert mark == "gen"
    assert fork_server.run(words).status == 0
    assert weights(tmp_path / "killed", 2) == weights(tmp_path / "whole", 2)
    killed, whole = records(tmp_path / "killed"), records(tmp_path / "whole")
    assert killed.keys() == whole.keys()
    for (
        step,
        record,
    ) in whole.items():  # which turns are computed together depends on time: rounding of the sampler's log-probs
        assert killed[step] == pytest.approx(record, rel=1e-3, abs=1e-6, nan_ok=True)


# What is killed → what the event says of it.
KILLED = {
    "tool": "SIGKILL",
    "program": "exit status -9",
    "mcp": "mcp_server_of_a_user.py) is gone",
    "verifiers": "ended with status -9",
}


def what_is_killed(what: str, folder: Path, **variables: str) -> list[str]:
    """The words of a run that uses it."""
    environment = f"{ROLLOUT}agent.environment."
    if what == "mcp":
        pytest.importorskip("mcp")
        path = tools_file(folder, {"calculator": STDIO | {"env": variables}}, tool_selected_list=["calculate"])
        return [
            f"{ROLLOUT}multi_turn.function_tool_path=null",
            f"{ROLLOUT}multi_turn.tool_config_path={path}",
        ]
    if what == "program":
        (folder / "program.py").write_text(PROGRAM)
        path = f"{environment}path='{sys.executable} {folder / 'program.py'}'"
        return [f"{environment}name=command", path, f"{environment}kwargs.KILL={variables['KILL']}"]
    if what == "verifiers":
        return [
            f"{environment}name=verifiers",
            f"{environment}path={fake_python(folder)}",
            f"{environment}kwargs.taskset=a",
        ]
    return []


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", ["tool", "verifiers", *(pytest.param(w, marks=pytest.mark.long) for w in ("mcp", "program"))]
)
def test_a_process_that_is_killed_is_an_outcome_and_none_outlives_the_trainer(
    dialogues: TinyRun, fork_server: ForkServer, tmp_path: Path, what: str
) -> None:
    # A tool of the run's own looks for the file beside its module.
    kill = (dialogues.root if what == "tool" else tmp_path) / "kill"
    kill.touch()
    marks = str(tmp_path / "marks")
    more = what_is_killed(what, tmp_path, KILL=str(kill), AGENT_KILL=str(tmp_path), CHAOS_MARKS=marks)
    words = words_of(dialogues, tmp_path / "run", 1, "trainer.total_training_steps=1", *more)
    done = fork_server.run(words, AGENT_KILL=str(tmp_path), KILL=str(kill))
    assert done.status == 0 and not kill.exists(), done.stderr
    (record,) = [r for r in records(tmp_path / "run").values() if "agent/resampled" in r]
    lost = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    lost = [event for event in lost if event["event"] == "trajectory_failed"]
    assert record["agent/resampled"] == len(lost) >= 1 and record["agent/status/environment_error"] == 0
    assert all(event["status"] == "environment_error" for event in lost)
    assert KILLED[what] in lost[0]["error"]
    assert processes_with("AGENT_KILL", str(tmp_path)) == []

    if what != "tool":
        words = words_of(dialogues, tmp_path / "run2", 1, *more)
        run_and_kill(fork_server, words, Kill("gen", 1, 2.0 if what == "mcp" else 0.6), tmp_path / "marks")
        assert_none_left("CHAOS_MARKS", marks)


@pytest.mark.slow
def test_a_tool_that_deletes_the_run_folder_costs_what_was_in_it(
    dialogues: TinyRun, fork_server: ForkServer, tmp_path: Path
) -> None:
    (dialogues.root / "delete").write_text(str(tmp_path / "run"))
    done = fork_server.run(words_of(dialogues, tmp_path / "run", 1))
    for name in ("metrics.jsonl", "events.jsonl", ".running", "config.yaml"):
        assert done.status == 0 and done.stderr.count(f"{tmp_path / 'run' / name} is gone") == 1, done.stderr
    assert sorted(records(tmp_path / "run")) == [2] and weights(tmp_path / "run", 2)
    assert '"run_end"' in (tmp_path / "run/events.jsonl").read_text()


@pytest.mark.slow
def test_any_process_killed_at_any_moment_is_named_or_made_good(
    dialogues: TinyRun, fork_server: ForkServer, tmp_path: Path
) -> None:
    """CHAOS_KILLS runs, in each a process other than the driver, at a random moment: the run goes on, or ends within 60
    s and says what died; then it goes on from its checkpoint. Nothing of it is left."""
    rng = random.Random(seed := int(os.environ.get("CHAOS_SEED") or random.randrange(10**6)))
    shared, kinds = set(os.listdir("/dev/shm")), []
    for number in range(int(os.environ.get("CHAOS_KILLS", "1"))):
        out = tmp_path / f"run{number}"
        words = words_of(dialogues, out, rng.randint(0, 2), f"reward_model.num_workers={rng.randint(1, 2)}")
        run = fork_server.start(words, CHAOS_RUN=str(out))
        until(lambda run=run: run.ended or psutil.Process(run.pid).children(recursive=True))
        time.sleep(rng.uniform(0, 3))
        victims = [] if run.ended else psutil.Process(run.pid).children(recursive=True)
        if victims:
            victim = rng.choice(victims)
            kinds.append(f"{victim.name()} {' '.join(victim.cmdline())[-60:]}")
            victim.kill()
        story = f"CHAOS_SEED={seed}, kills {kinds}"
        if run.wait(60) != 0:
            assert "SIGKILL" in run.stderr or "signal" in run.stderr, f"{story}\n{run.stderr[-3000:]}"
            again = fork_server.run(words, CHAOS_RUN=str(out))
            assert again.status == 0, f"{story}\n{again.stderr[-3000:]}"
        assert sorted(records(out)) == [1, 2], story
        until(lambda out=out: not processes_with("CHAOS_RUN", str(out)), timeout=30, pause=0.1)
    until(lambda: not left_in_shared_memory(shared), timeout=30, pause=0.1)
