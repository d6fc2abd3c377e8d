"""Scoring through processes: what a bad function can do, and what it must never do to the run."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.chaos.fork_server import until
from verl.platform.processes import process_start_time
from verl.reward.outcome import RewardErrorLimit, RewardLoadError, RewardPrecheckError
from verl.reward.pool import Call, FunctionSpec, ScoringPool
from verl.reward.precheck import precheck
from verl.reward.runner import RewardRunner
from verl.reward.settings import Overlong, RewardSettings
from verl.tracking.console import show_step
from verl.tracking.step_metrics import reward_metrics
from verl.tracking.validation_metrics import validation_metrics
from verl.trajectory import Batch, Prompt, Trajectory

REWARDS = """
import asyncio, ctypes, json, os, random, sys, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    what = solution_str
    if what == "raise": raise KeyError("no such thing")
    if what == "hang": time.sleep(60)
    if what == "spin": 9**9**9**9
    if what == "nan": return float("nan")
    if what == "exit": os._exit(7)
    if what == "sys.exit": sys.exit(0)
    if what == "segfault": ctypes.string_at(0)
    if what == "print": print("hello from the reward")
    if what == "random": return random.random()
    if what == "pid": return {"score": 1.0, "pid": os.getpid()}
    if what == "fork": os.fork()
    if what == "dumps": json.dumps = lambda *values, **options: "null"
    if what == "unknown id": tell('{"id": 99, "outcomes": []}')
    if what == "no message": tell("I am not a message")
    if what == "forged": tell(json.dumps({"id": 0, "outcomes": [{"score": [1.0]}]}))
    if what == "surrogate": return {"score": 1.0, "\\ud800": 1.0}
    if what == "child": os.system("sleep 30 &"); time.sleep(60)
    if what.startswith("daemon"):
        import subprocess
        bare = {"env": {}} if what == "daemon bare" else {}
        sleeper = subprocess.Popen(["/bin/sleep", "300"], start_new_session=True, stdout=subprocess.DEVNULL, **bare)
        return {"score": 1.0, "pid": sleeper.pid}
    if what == "no accuracy": return {"score": 1.0, "acc": None}
    if what == "nan accuracy": return {"score": 1.0, "acc": float("nan")}
    if what == "info": return {"score": 1.0, "info": repr(extra_info)}
    if what == "abstain": return {"abstain": "no idea", "agreement": 0.5}
    if what == "dict": return {"score": 0.5 + bonus, "acc": True, "pred": "72", "format": 0.25}
    if what.startswith("sleep"): time.sleep(float(what[5:]))
    return float(what == ground_truth) + bonus

def tell(text):
    for fd in range(3, 256):
        try: os.write(fd, text.encode() + b"\\n")
        except OSError: pass

async def later(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "raise": raise ValueError("from later")
    if solution_str == "hang": await asyncio.sleep(60)
    if solution_str == "block": time.sleep(60)
    if solution_str == "exit": os._exit(7)
    if solution_str == "nonsense": tell("I am not a message")
    await asyncio.sleep(0.2)
    return 1.0

def batch(data_sources, solution_strs, ground_truths, extra_infos):
    if "short" in solution_strs: return [1.0]
    if "raise" in solution_strs: raise ValueError("all of it")
    longest = max(map(len, solution_strs))
    return [float("nan") if s == "nan" else {"score": len(s) / longest, "n": len(solution_strs)} for s in solution_strs]

def positional(source, answer, truth, info=None): return float(answer == truth)
def coroutine_in_disguise(**kwargs): return later(**kwargs)
"""


@pytest.fixture()
def rewards(tmp_path: Path) -> str:
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    return str(path)


@pytest.fixture()
def make(rewards: str) -> Iterator[Any]:
    runners: list[RewardRunner] = []

    def build(
        name: str = "compute_score", events: Any = None, path: str | None = rewards, **fields: Any
    ) -> RewardRunner:
        spec = {key: fields.pop(key) for key in ("kwargs", "batch", "positional") if key in fields}
        fields = {"num_workers": 2, "timeout": 20.0} | fields
        settings = RewardSettings(function=FunctionSpec(path=path, name=name, **spec), **fields)
        runners.append(RewardRunner(None, events=events, settings=settings))
        return runners[-1]

    yield build
    for runner in runners:
        runner.close()


def trajectory_of(text: str, index: int = 0, truth: Any = "72", tokens: int = 5, **prompt: Any) -> Trajectory:
    fields = {"data_source": "mine", "ground_truth": truth, "file": "f.parquet", "row": 3}
    fields |= {"extra_info": {"a": 1}} | prompt
    row = Prompt("0:3@0", np.zeros(2, np.int64), [{"role": "user", "content": "q?"}], **fields)
    return Trajectory(row, index, np.zeros(tokens, np.int64), np.ones(tokens, bool), text=text)


def run(runner: RewardRunner, texts: Sequence[str | Trajectory]) -> list[Trajectory]:
    """Score in an event loop of its own, as the trainer does each step."""
    found = [trajectory_of(t, i) if isinstance(t, str) else t for i, t in enumerate(texts)]

    async def all_of_them() -> None:
        await asyncio.gather(*(runner.score(t) for t in found))

    asyncio.run(all_of_them())
    return found


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("raise", "exception", "it raised KeyError: 'no such thing'"),
        ("nan", "value", "is nan; a score must be finite"),
        ("exit", "crash", "ended the scoring process (exit code 7)"),
        ("sys.exit", "exception", "it raised SystemExit: 0"),
        ("segfault", "crash", "ended the scoring process (SIGSEGV)"),
    ],
)
def test_a_bad_function_fails_its_response_only(make: Any, text: str, kind: str, message: str) -> None:
    events: list[dict[str, Any]] = []
    runner = make(events=lambda kind, **fields: events.append({"event": kind, **fields}))
    bad, good, other = run(runner, [text, "72", "71"])
    assert bad.score is None and not bad.score_parts and message in str(bad.score_error)
    assert "data_source 'mine', f.parquet row 3, uid 0:3@0, response 0" in str(bad.score_error)
    assert (good.score, other.score) == (1.0, 0.0)
    assert run(runner, ["72"])[0].score == 1.0
    (event,) = [e for e in events if e["event"] == "reward_failed"]
    assert event["failure"] == kind and event["response"] == text and event["prompt"] == bad.prompt.messages
    if kind == "exception":
        assert "rewards.py" in event["traceback"] and "scoring_process.py" not in event["traceback"]
    if kind == "crash":
        assert any(e["event"] == "reward_worker_replaced" for e in events)


@pytest.mark.parametrize("text", ["fork", "dumps", "unknown id", "no message", "forged"])
def test_a_process_that_sends_nonsense_costs_its_own_call_at_most(make: Any, text: str) -> None:
    runner = make(num_workers=1, timeout=5.0)
    bad, *others = run(runner, [text, "72", "71", "72"])
    assert [t.score for t in others] == [1.0, 0.0, 1.0]
    assert bad.score == 0.0 or "scoring process" in str(bad.score_error)
    assert run(runner, ["72"])[0].score == 1.0


@pytest.mark.parametrize("text", ["hang", "spin", "child"])
def test_a_function_that_hangs_is_killed_in_time_and_says_where(make, text, capfd) -> None:
    runner = make(timeout=0.5)
    started = time.monotonic()
    bad, good = run(runner, [text, "72"])
    assert time.monotonic() - started < 20
    assert "it took more than 0.5 s" in str(bad.score_error) and good.score == 1.0
    assert bad.extra["score_failure"]["kind"] == "timeout"
    assert bad.timing["compute_score"] >= 0.5
    assert text != "hang" or "time.sleep(60)" in capfd.readouterr().err
    assert run(runner, ["72"])[0].score == 1.0


def test_printing_goes_to_standard_error(make: Any, capfd: pytest.CaptureFixture[str]) -> None:
    runner = make()
    assert run(runner, ["print"])[0].score == 0.0
    runner.close()
    captured = capfd.readouterr()
    assert "hello from the reward" in captured.err and "hello" not in captured.out


def test_a_dict_gives_parts_and_kwargs_reach_the_function(make: Any) -> None:
    (found,) = run(make(kwargs={"bonus": 0.25}), ["dict"])
    assert found.score == 0.75 and found.score_parts == {"acc": True, "pred": "72", "format": 0.25}
    assert found.timing["compute_score"] >= 0


def test_a_key_that_is_no_unicode_reaches_the_console(make: Any, capfd: pytest.CaptureFixture[str]) -> None:
    (found,) = run(make(), ["surrogate"])
    assert found.score_parts == {"\ud800": 1.0}
    show_step(1, {f"reward_extra/{name}/mean": value for name, value in found.score_parts.items()})
    assert r"reward_extra/\ud800/mean:1.0" in capfd.readouterr().out


def test_a_reward_may_abstain_which_is_counted_and_no_failure(make: Any, capfd: pytest.CaptureFixture[str]) -> None:
    runner = make(max_error_ratio=0.0)
    rows = run(runner, ["abstain", "72"])
    assert rows[0].score is None and "no idea" in rows[0].score_error and rows[0].score_parts == {"agreement": 0.5}
    assert rows[1].score == 1.0 and not capfd.readouterr().err
    runner.check_errors(rows)
    metrics = reward_metrics(Batch(rows))
    assert metrics["reward/abstained"] == 1 and metrics["reward/errors"] == metrics["reward/error_ratio"] == 0


def test_what_the_function_sees(make: Any) -> None:
    t = trajectory_of("info")
    t.num_turns = 4
    t.extra["reward_scores"] = {"tool": [0.5]}
    run(make(), [t])
    info = {"index": 3, "a": 1, "num_turns": 4, "rollout_reward_scores": {"tool": [0.5]}}
    assert t.score_parts["info"] == repr(info)
    assert t.prompt.extra_info == {"a": 1}


def test_what_cannot_be_sent_is_named(make: Any) -> None:
    (bad,) = run(make(), [trajectory_of("72", extra_info={"image": object()})])
    assert "the call.arguments.extra_info.image is a builtins.object" in str(bad.score_error)


def test_scored_responses_are_left_alone(make: Any) -> None:
    t, lost, todo = trajectory_of("72"), trajectory_of("72"), trajectory_of("72")
    t.score, lost.score_error = 0.125, "lost by the sampler"
    runner = make()
    run(runner, [t, lost])
    asyncio.run(runner.score_batch([t, lost, todo]))
    assert (t.score, lost.score, todo.score) == (0.125, None, 1.0)


@pytest.mark.parametrize("workers", [1, 3])
def test_scores_depend_neither_on_workers_nor_on_order(make: Any, workers: int) -> None:
    texts = ["random"] * 12 + ["sleep0.05"] * 4
    runner = make(num_workers=workers)
    first = [t.score for t in run(runner, texts)]
    order = [trajectory_of(t, i) for i, t in enumerate(texts)][::-1]
    second = [t.score for t in run(make(num_workers=2), order)][::-1]
    assert first == second and len(set(first)) > 10


def test_processes_start_only_as_needed_and_stay(make: Any) -> None:
    runner = make(num_workers=8)
    assert runner._pool is None
    pids = {t.score_parts["pid"] for t in run(runner, ["pid"] * 20)}
    pids |= {t.score_parts["pid"] for t in run(runner, ["pid"] * 20)}
    assert len(pids) < 8  # eight are allowed; a loaded machine may make a call wait and start another
    runner.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
    assert run(runner, ["72"])[0].score == 1.0


def test_functions_that_wait_get_more_processes(make: Any) -> None:
    runner = make(num_workers=4, timeout=20)
    run(runner, ["sleep0.5"] * 10)
    assert len(runner._pool._workers) > 1


def test_workers_never_import_torch_and_start_fast() -> None:
    code = (
        "import time; t = time.process_time(); import sys; import verl.reward.scoring_process, verl.reward.rules.gsm8k, "
        "verl.reward.rules, verl.reward.user_function; heavy = ('torch', 'numpy', 'sympy', 'asyncio', 'transformers'); "
        "assert time.process_time() - t < 0.5; assert not [m for m in heavy if m in sys.modules]"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=True)


def test_processes_end_with_the_run_even_if_the_function_spins_or_left_one_in_another_session(
    rewards: str,
) -> None:
    code = (
        "import sys, time, os\n"
        "from verl.reward.pool import *\n"
        f"pool = ScoringPool(FunctionSpec(path={rewards!r}), workers=1)\n"
        "arguments = dict(data_source='', ground_truth='', extra_info={})\n"
        "for what in ('pid', 'daemon', 'daemon bare'):\n"
        "    outcome = pool.submit(Call(arguments | {'solution_str': what}), 9).result()[0]\n"
        "    print(outcome.parts['pid'], flush=True)\n"
        "pool.submit(Call(arguments | {'solution_str': 'spin'}), 99)\n"
        "time.sleep(0.3); os.kill(os.getpid(), 9)\n"
    )
    root = Path(__file__).parents[3]
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root).stdout
    for pid in map(int, out.split()):
        until(lambda pid=pid: process_start_time(pid) == 0)


@pytest.mark.parametrize("name", ["later", "coroutine_in_disguise"])
def test_async_functions(make: Any, name: str) -> None:
    runner = make(name)
    found = run(runner, ["a", "raise", "b"])
    assert [t.score for t in found] == [1.0, None, 1.0]
    assert "ValueError: from later" in str(found[1].score_error)
    if name == "later":
        started = time.monotonic()
        run(runner, ["x"] * 100)  # 20 s, one after the other
        assert time.monotonic() - started < 15 and len(runner._pool._workers) == 1


def test_an_async_function_over_its_time_is_cancelled_without_killing_the_others(make: Any) -> None:
    runner = make("later", timeout=1.2)
    bad, good = run(runner, ["hang", "72"])
    assert "more than 1.2 s" in str(bad.score_error) and good.score == 1.0
    assert bad.extra["score_failure"]["kind"] == "timeout"


@pytest.mark.parametrize(
    ("text", "message"),
    [("exit", "exit code 7"), ("block", "took more than 2 s"), ("nonsense", "no message of ours")],
)
def test_only_the_guilty_of_several_concurrent_calls_fails(make, text, message, monkeypatch) -> None:
    monkeypatch.setattr("verl.reward.pool.ASYNC_GRACE", 0.3)
    found = run(make("later", timeout=2.0), ["a", text, "b", "c"])
    assert [t.score for t in found] == [1.0, None, 1.0, 1.0]
    assert message in str(found[1].score_error)


def test_batch_manager(make: Any) -> None:
    runner = make("batch", batch=True)
    assert not runner.per_response
    found = [trajectory_of(t, i) for i, t in enumerate(["a", "bb", "nan", "dddd"])]
    for t in found:
        asyncio.run(runner.score(t))
    assert not any(t.scored for t in found)
    asyncio.run(runner.score_batch(found))
    assert [t.score for t in found] == [0.25, 0.5, None, 1.0]
    assert found[0].score_parts == {"n": 4} and "nan" in str(found[2].score_error)
    for text, message in (("short", "it returned 1 scores for 2 responses"), ("raise", "Error: all of it")):
        pair = [trajectory_of(text), trajectory_of("b")]
        asyncio.run(runner.score_batch(pair))
        assert all(message in str(t.score_error) for t in pair)
    asyncio.run(runner.score_batch([]))


def test_positional_functions_with_prime_only(make: Any) -> None:
    assert run(make("positional", positional=4), ["72"])[0].score == 1.0
    (bad,) = run(make("positional"), ["72"])
    assert "cannot be called as positional(data_source" in str(bad.score_error)


def test_rate_limited_calls_run_one_at_a_time(make: Any) -> None:
    runner = make("later", rate=(2, None, None, 2000))
    run(runner, ["warm"])
    started = time.monotonic()
    assert all(t.score == 1.0 for t in run(runner, ["x"] * 6))
    assert time.monotonic() - started >= 0.6


def test_required_parts(make: Any) -> None:
    good, bad = run(make(required_parts=("format",)), ["dict", "72"])
    assert good.score == 0.5 and "lacks format" in str(bad.score_error)
    runner = make(required_parts=("acc",))  # a number alone is the accuracy, for the check and for the run
    asyncio.run(precheck(runner, [trajectory_of("").prompt]))
    assert run(runner, ["72"])[0].score_parts == {"acc": 1.0}


def test_what_groups_are_filtered_by_is_looked_for_before_the_run(make: Any) -> None:
    asyncio.run(precheck(make(groups_metric=("acc",)), [trajectory_of("").prompt]))
    with pytest.raises(RewardPrecheckError, match=r"lacks format .*filter_groups\.metric"):
        asyncio.run(precheck(make(groups_metric=("format",)), [trajectory_of("").prompt]))
    assert run(make(groups_metric=("format",)), ["72"])[0].score == 1.0
    for text in ("no accuracy", "nan accuracy"):
        (row,) = run(make(groups_metric=("acc",)), [text])
        assert row.score is None and "lacks acc (algorithm.filter_groups.metric)" in row.score_error


def test_overlong_penalty_is_part_of_the_score_and_acc_is_not(make: Any) -> None:
    runner = make(overlong=Overlong(10, 1.0, 100, log=True))
    rows = [trajectory_of("72", tokens=50), trajectory_of("72", tokens=95), trajectory_of("dict", tokens=100)]
    both = trajectory_of("72", tokens=80).segments + trajectory_of("72", tokens=95).segments
    rows.append(Trajectory(rows[0].prompt, 3, segments=both, text="72"))
    short, long, parts, of_segments = run(runner, rows)
    assert of_segments.score == 0.5, "the limit is on each segment, and so is the penalty"
    assert short.score == 1.0 and short.score_parts == {"acc": 1.0, "overlong_reward": 0.0, "overlong": False}
    assert long.score == 0.5 and long.score_parts == {"acc": 1.0, "overlong_reward": -0.5, "overlong": True}
    assert parts.score == -0.5 and parts.score_parts["acc"] is True


@pytest.mark.parametrize(
    ("source", "name", "kind", "message"),
    [
        (None, "compute_score", "load", "no such file"),
        (REWARDS, "nothing", "load", "defines no 'nothing'"),
        ("import no_such_module_x\n", "compute_score", "load", "No module named 'no_such_module_x'"),
        ("import os; os._exit(5)\n", "compute_score", "load", "exit code 5"),
    ],
)
def test_a_function_that_cannot_be_loaded_fails_every_response_with_the_reason(
    make: Any, tmp_path: Path, source: str | None, name: str, kind: str, message: str
) -> None:
    path = tmp_path / "other.py"
    if source is not None:
        path.write_text(source)
    found = run(make(name, path=str(path)), ["72", "71"])
    assert all(message in str(t.score_error) for t in found)
    assert found[0].extra["score_failure"]["kind"] == kind


@pytest.mark.parametrize("use", ["scores.math.is_eqiv", "from verl.utils.reward_score.math import is_eqiv"])
@pytest.mark.parametrize("catches", ["Exception", "BaseException"])
def test_a_name_that_verl_lacks_ends_the_run_whatever_catches_it(make, tmp_path, use: str, catches: str) -> None:
    path = tmp_path / "user.py"
    path.write_text(
        "import inspect, pickle\nfrom verl.utils import reward_score as scores\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    inspect.getmodule(compute_score), pickle.dumps(compute_score), hasattr(scores.math, '__wrapped__')\n"
        f"    if solution_str == 'right': return 1.0\n    try: {use}\n    except {catches}: return 0.0\n"
    )
    runner, (right, missing) = make(path=str(path), max_error_ratio=1.0), map(trajectory_of, ("right", "72"))
    asyncio.run(runner.score_batch([right]))
    assert right.score == 1.0
    with pytest.raises(RewardLoadError, match=r"verl\.utils\.reward_score\.math\.is_eqiv .* has: .*is_equiv"):
        asyncio.run(runner.score_batch([missing]))
    with pytest.raises(RewardPrecheckError, match="is_eqiv"):
        asyncio.run(precheck(make(path=str(path)), [missing.prompt]))
    path.write_text(
        "def compute_score(**row): return 0.0\ntry: import verl.utils.reward_score.nothing\nexcept ImportError: 0\n"
    )
    assert "verl.utils.reward_score.nothing" in str(run(make(path=str(path)), ["72"])[0].score_error)


def test_one_version_of_a_file_a_run(make: Any, tmp_path: Path) -> None:
    path, events = tmp_path / "user.py", []
    (tmp_path / "beside.py").write_text("BONUS = 0.25\n")
    source = (
        "import os, beside\ndef compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if solution_str == 'exit': os._exit(1)\n    if solution_str == 'raise': raise ValueError  # line four\n"
        "    return {'score': 0.25 + beside.BONUS, 'file': __file__}\n"
    )
    path.write_text(source)
    runner = make(path=str(path), max_error_ratio=1.0, events=lambda kind, **fields: events.append((kind, fields)))
    assert run(runner, ["72"])[0].score == 0.5
    path.write_text("# edited\n" * 9 + source.replace("0.25 +", "777 +"))
    run(runner, ["exit"])
    found = run(runner, ["72", "raise"])
    assert found[0].score == 0.5 and found[0].score_parts["file"] == str(path)
    for _ in range(2):
        runner.check_errors(found)
    assert [fields["path"] for kind, fields in events if kind == "reward_file_changed"] == [str(path)]
    assert "line four" in next(fields["traceback"] for kind, fields in events if fields.get("failure") == "exception")
    assert run(make(path=str(path)), ["72"])[0].score == 777.25


def test_built_in_rules_and_rows_that_ask_for_the_flexible_one(make: Any) -> None:
    runner = make(path=None)
    gsm = {"data_source": "openai/gsm8k"}
    flexible = {"columns": {"reward_kwargs": {"method": "flexible"}}}
    texts = [
        trajectory_of("#### 72", **gsm),
        trajectory_of("72", **gsm),
        trajectory_of("72", **gsm, **flexible),
        trajectory_of("72"),
    ]
    found = run(runner, texts)
    assert [t.score for t in found] == [1.0, 0.0, 1.0, None]
    assert "has no built-in reward" in str(found[3].score_error)
    strict = make(path=None, kwargs={"method": "strict"})
    assert run(strict, [trajectory_of("72", **gsm, **flexible)])[0].score == 0.0
    (misspelt,) = run(make(path=None, kwargs={"metod": 1}), ["72"])
    assert "no built-in reward takes it" in str(misspelt.score_error)


def test_what_math_verify_cannot_decide_is_wrong_and_counted(make: Any) -> None:
    events: list[dict[str, Any]] = []
    runner = make(path=None, events=lambda kind, **fields: events.append({"event": kind, **fields}))
    rows = [
        trajectory_of(rf"\boxed{{{text}}}", data_source="lighteval/MATH", truth="0.5")
        for text in ("9^{9^{9^9}}", r"\frac12")
    ]
    huge, right = run(runner, rows)
    assert (huge.score, right.score) == (0.0, 1.0)
    assert [event["event"] for event in events] == ["reward_undecided"] and events[0]["response"] == huge.text
    found = reward_metrics(Batch(rows))
    assert (found["reward/undecided"], found["reward/errors"]) == (1, 0)
    assert validation_metrics(rows)["val-aux/lighteval/MATH/undecided"] == 1


def test_too_many_failures_stop_the_run_with_the_most_frequent_error(make: Any) -> None:
    runner = make(max_error_ratio=0.1)
    found = run(runner, ["raise", "nan", "nan", "72"])
    lost = trajectory_of("")
    lost.finish_reason, lost.score_error = "lost", "lost by the sampler"
    with pytest.raises(RewardErrorLimit, match=r"3 of 4 .*max_error_ratio is 10%.*\(2 times\).*is nan"):
        runner.check_errors(Batch([*found, lost]))
    make(max_error_ratio=0.75).check_errors(found)
    runner.check_errors([found[3], lost])


def test_the_console_shows_the_first_failures_only(make: Any, capfd: pytest.CaptureFixture[str]) -> None:
    run(make(), ["raise"] * 6 + ["nan"])
    shown = capfd.readouterr().err
    assert shown.count("reward failed: ") == 3 and "events.jsonl" in shown and "rewards.py" in shown


def test_precheck_shows_values_and_refuses_a_function_that_fails(make, tmp_path, capsys) -> None:
    prompts = [trajectory_of("", truth=t).prompt for t in ("72", "raise", "5")]
    probes = asyncio.run(precheck(make(), prompts[:1] + prompts[2:]))
    assert [(p.of_reference.score, p.of_empty.score) for p in probes] == [(1.0, 0.0)] * 2
    assert "the reference '72' scores 1, an empty response 0" in capsys.readouterr().err
    with pytest.raises(RewardPrecheckError, match=r"on the response 'raise' to f\.parquet row 3 .*KeyError"):
        asyncio.run(precheck(make(), prompts))
    (tmp_path / "empty.py").write_text("def compute_score(**k): return 1 / len(k['solution_str'])\n")
    with pytest.raises(RewardPrecheckError, match=r"on an empty response .*ZeroDivisionError"):
        asyncio.run(precheck(make(path=str(tmp_path / "empty.py")), prompts))
    with pytest.raises(RewardPrecheckError, match=r"lacks fromat \(reward_model\.weights\)"):
        asyncio.run(precheck(make(weights={"function": 1.0, "fromat": 0.2}), prompts[:1]))


def test_precheck_shows_a_function_what_agent_loops_add(make: Any, tmp_path: Path) -> None:
    (tmp_path / "reads.py").write_text(
        "def compute_score(extra_info, **k):\n"
        "    rewards, said = extra_info['rollout_reward_scores'], extra_info['messages'][-1]\n"
        "    earned = sum(rewards['tool_rewards']) + sum(extra_info['tool_metrics']) + extra_info['environment_reward']\n"
        "    return earned + (said == {'role': 'assistant', 'content': '72'})\n"
    )
    runner = make(path=str(tmp_path / "reads.py"))
    (probe,) = asyncio.run(precheck(runner, [trajectory_of("", agent_name="tool_agent").prompt]))
    assert (probe.of_reference.score, probe.of_empty.score) == (1.0, 0.0)
    with pytest.raises(RewardPrecheckError, match="KeyError: 'messages'"):
        asyncio.run(precheck(runner, [trajectory_of("", agent_name="single_turn_agent").prompt]))


def test_precheck_takes_rows_of_every_source(make: Any) -> None:
    prompts = [trajectory_of("", data_source=s).prompt for s in ("a", "a", "a", "b")]
    assert [p.prompt.data_source for p in asyncio.run(precheck(make(), prompts, rows=2))] == ["a", "a", "b"]


def test_a_pool_that_is_closed_says_so_and_lets_nobody_wait(rewards: str) -> None:
    pool = ScoringPool(FunctionSpec(path=rewards), workers=1)
    arguments = {"data_source": "", "solution_str": "hang", "ground_truth": "", "extra_info": {}}
    futures = [pool.submit(Call(arguments), 60) for _ in range(3)]
    time.sleep(0.3)
    pool.close()
    pool.close()
    assert all("closed" in str(f.result(timeout=5)[0].error) for f in futures)
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(Call(arguments), 1)


def test_long_responses_travel(make: Any) -> None:
    texts = ["x" * 3_000_000, "72"]
    assert [t.score for t in run(make(), texts)] == [0.0, 1.0]


def test_many_short_calls_wake_each_thread_a_few_times(rewards: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ScoringPool(FunctionSpec(path=rewards), workers=1)
    wakes, hand_overs = [], []
    wake, hand_over = pool._loop.call_soon_threadsafe, pool._hand_over
    monkeypatch.setattr(pool._loop, "call_soon_threadsafe", lambda *call: wakes.append(call) or wake(*call))
    monkeypatch.setattr(pool, "_hand_over", lambda: hand_overs.append(len(pool._finished)) or hand_over())
    arguments = {"data_source": "", "solution_str": "72", "ground_truth": "72", "extra_info": {}}
    futures = [pool.submit(Call(arguments), 20) for _ in range(200)]
    assert all(future.result(timeout=20)[0].score == 1.0 for future in futures)
    pool.close()
    assert sum(hand_overs) == 200 and len(hand_overs) < 100 and len(wakes) < 100


def test_a_cancelled_response_disturbs_nothing(make: Any) -> None:
    runner = make(num_workers=1)

    async def cancel_some() -> None:
        tasks = [asyncio.ensure_future(runner.score(trajectory_of("sleep0.2"))) for _ in range(4)]
        await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(cancel_some())
    assert run(runner, ["72"])[0].score == 1.0
