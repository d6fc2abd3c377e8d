"""Tracking as a whole: where a record goes, trackers that fail, resume, answers, validation."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from verl.tracking import trackers
from verl.tracking.tracker import Tracking
from verl.trajectory import Batch, Prompt, Trajectory


def config(**trainer) -> SimpleNamespace:
    settings = {"project_name": "proj", "experiment_name": "exp", "logger": ["console"], **trainer}
    return SimpleNamespace(trainer=SimpleNamespace(**settings), to_dict=lambda: {"trainer": settings})


def records(path: Path) -> list[dict]:
    return [json.loads(raw) for raw in path.read_bytes().split(b"\n")[:-1]]


def events(run: Path, kind: str) -> list[dict]:
    return [e for e in records(run / "events.jsonl") if e["event"] == kind]


class Tokenizer:
    """Token 7 is "<7>"."""

    def decode(self, ids, **kwargs) -> str:
        return "".join(f"<{i}>" for i in ids)


def answers(groups: int = 3, n: int = 4, length: int = 3) -> Batch:
    rows = []
    for i in range(n):
        for g in range(groups):
            messages = [{"role": "user", "content": f"q{g}"}]
            prompt = Prompt(f"0:{g}@0", np.array([g, g]), messages, "src", f"gt{g}")
            mask = np.array([True] * (length - 1) + [False])
            t = Trajectory(
                prompt,
                i,
                np.arange(length) + 5,
                mask,
                rollout_log_probs=np.full(length, -0.1234567, np.float32),
            )
            t.text, t.score, t.score_parts = f"a{g}.{i}", float(i), {"acc": i % 2 == 0, "input": "not ours"}
            t.advantages = np.full(length, 0.5, np.float32)
            t.loss_mask = t.response_mask.copy()
            rows.append(t)
    rows[1].score, rows[1].score_error, rows[1].score_parts = None, "it raised", {}
    return Batch(rows)


class Memory:
    """A tracker in memory; `fail_at` makes it raise at that step."""

    made: ClassVar[list[Memory]] = []

    def __init__(self, session: trackers.TrackerSession, fail_at: int | None = None):
        self.session, self.fail_at = session, fail_at
        self.logged: dict[int, dict] = {}
        self.tables: list = []
        self.closed = False
        Memory.made.append(self)

    def log(self, step, metrics):
        if step == self.fail_at:
            raise ConnectionError("server gone")
        self.logged[step] = dict(metrics)

    def table(self, step, rows):
        self.tables += rows

    def close(self):
        self.closed = True


@pytest.fixture
def memory(monkeypatch):
    Memory.made = []
    fails: dict[str, int] = {}

    def opened(name, session, say):
        if name == "broken":
            raise RuntimeError("cannot start")
        if name == "absent":
            raise trackers.Unavailable("not installed")
        return Memory(session, fails.get(name))

    monkeypatch.setattr("verl.tracking.tracker.open_tracker", opened)
    return fails


def test_a_record_goes_everywhere(tmp_path, capsys, memory):
    tracking = Tracking(config(logger=["console", "mem"]), tmp_path)
    metrics = {"critic/rewards/mean": np.float32(0.5), "actor/kl_loss": math.nan, "actor/lr": 1e-6}
    metrics["x"] = "text"
    tracking.log(1, metrics)
    tracking.log(2, metrics | {"actor/kl_loss": 0.25})
    tracking.close()
    tracking.close()
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == "step:1 - actor/kl_loss:nan - actor/lr:1e-06 - critic/rewards/mean:0.5"
    assert dict(f.rsplit(":", 1) for f in lines[1].split(" - "))["actor/kl_loss"] == "0.25"
    first, second = records(tmp_path / "metrics.jsonl")
    assert first["step"] == 1 and first["actor/kl_loss"] is None and first["actor/kl_divergence"] is None
    assert first["actor/reward_mean"] == 0.5 and "x" not in first
    assert abs(first["time"] - time.time()) < 60
    assert second["actor/kl_divergence"] == 0.25
    (mem,) = Memory.made
    assert mem.logged[1] == {"actor/lr": 1e-6, "critic/rewards/mean": 0.5, "actor/reward_mean": 0.5}
    assert mem.closed
    assert err.count("metric x is no number") == 1


def test_trackers_that_fail_are_told_once_and_dropped(tmp_path, capsys, memory):
    memory["flaky"] = 2
    tracking = Tracking(config(logger=["broken", "flaky", "absent", "good"]), tmp_path)
    for step in (1, 2, 3):
        tracking.log(step, {"a": step})
    tracking.close()
    err = capsys.readouterr().err
    assert err.count("tracker broken does not start (RuntimeError: cannot start)") == 1
    assert err.count("tracker flaky failed (ConnectionError: server gone)") == 1
    assert err.count("tracker absent: not installed") == 1
    assert [sorted(m.logged) for m in Memory.made] == [[1], [1, 2, 3]]
    assert len(records(tmp_path / "metrics.jsonl")) == 3
    assert len(events(tmp_path, "notice")) == 3


def test_trackers_of_later_releases(tmp_path, capsys):
    later = ["vemlp_wandb"]
    tracking = Tracking(config(logger=["console", *later]), tmp_path)
    for step in (1, 2):
        tracking.log(step, {"a": 1})
    tracking.close()
    out, err = capsys.readouterr()
    for name in later:
        assert err.count(f"tracker {name}: not in this release; metrics.jsonl in the run folder has") == 1
    assert len(out.splitlines()) == 2


@pytest.mark.parametrize("logged", [True, False])
def test_a_kill_between_checkpoint_and_log_loses_no_record(tmp_path, logged, capsys, memory):
    tracking = Tracking(config(logger=["mem"]), tmp_path)
    for step in (1, 2, 3) if logged else (1, 2):
        tracking.log(step, {"a": step, "critic/rewards/mean": 0.5})
    tracking.close()
    assert capsys.readouterr().out == "", "without console no line"
    tracking = Tracking(config(logger=["mem"]), tmp_path)
    tracking.resumed(3, {"a": 3, "critic/rewards/mean": 0.5})
    tracking.log(4, {"a": 4})
    tracking.close()
    found = records(tmp_path / "metrics.jsonl")
    assert [(r["step"], r.get("a")) for r in found] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert found[2]["actor/reward_mean"] == 0.5
    assert Memory.made[1].session.resume_step == 3 and len(events(tmp_path, "run_start")) == 2


def test_events_from_threads_and_with_records(tmp_path, capsys):
    import threading

    tracking = Tracking(config(), tmp_path)
    workers = [
        threading.Thread(target=lambda i=i: [tracking.event("tick", n=i, pad="x" * 500) for _ in range(50)])
        for i in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    tracking.event("reward_failed", {"kind": "timeout", "time": "theirs", "message": "look here"})
    tracking.close()
    assert len(events(tmp_path, "tick")) == 200
    (failed,) = events(tmp_path, "reward_failed")
    assert failed["kind"] == "timeout" and isinstance(failed["time"], float)
    assert "verl: look here" in capsys.readouterr().err


def test_trajectories_and_dumps(tmp_path):
    settings = config(rollout_data_dir=str(tmp_path / "all"))
    tracking = Tracking(settings, tmp_path / "run", tokenizer=Tokenizer())
    batch = answers(groups=20)
    batch[0].old_log_probs = np.full(3, -0.5, np.float32)
    tracking.dump_trajectories(12, batch)
    tracking.dump_trajectories(13, answers(groups=1, n=100))
    tracking.close()
    assert len(records(tmp_path / "run/trajectories/13.jsonl")) == 64, "a larger group is cut"
    rows = records(tmp_path / "run/trajectories/12.jsonl")
    assert len(rows) == 64, "sixteen whole groups of four"
    assert [r["uid"] for r in rows[:5]] == ["0:0@0"] * 4 + ["0:1@0"]
    assert rows[0] == {
        "step": 12,
        "uid": "0:0@0",
        "index": 0,
        "data_source": "src",
        "input": "<0><0>",
        "output": "a0.0",
        "gts": "gt0",
        "score": 0.0,
        "score_error": None,
        "parts": {"acc": True, "input": "not ours"},
        "advantage": 0.5,
        "length": 3,
        "finish_reason": "stop",
        "versions": [0],
        "tokens": ["<5>", "<6>", "<7>"],
        "mask": [1, 1, 0],
        "log_probs": [-0.5, -0.5, None],
        "rollout_log_probs": [-0.123457, -0.123457, None],
        "advantages": [0.5, 0.5, 0.5],
    }
    assert rows[1]["log_probs"] is None
    every = records(tmp_path / "all/12.jsonl")
    assert len(every) == 80
    assert list(every[0]) == ["input", "output", "gts", "score", "step", "uid", "acc"]
    assert every[0]["input"] == "<0><0>" and every[0]["acc"] is True
    assert [r["uid"] for r in every] == [f"0:{g}@0" for g in range(20) for _ in range(4)]
    (failed,) = [r for r in every if "score_error" in r]
    assert failed["score"] is None


def test_validation(tmp_path, capsys, memory):
    kept = {"validation_data_dir": str(tmp_path / "val"), "log_val_generations": 2}
    settings = config(logger=["console", "mem"], **kept)
    tracking = Tracking(settings, tmp_path / "run")
    metrics = {"val-core/src/acc/mean@1": 0.5, "val/accuracy": 0.5, "val-aux/src/x/mean@1": math.nan}
    tracking.validation(0, answers(), metrics)
    tracking.log(0, metrics)
    tracking.validation(5, answers(), metrics | {"val-core/src/acc/mean@1": 0.75})
    tracking.finish("finished")
    tracking.finish("failed", "too late")
    tracking.close()
    out = capsys.readouterr().out.splitlines()
    assert out == [
        "Initial validation metrics: {'val-core/src/acc/mean@1': 0.5, 'val-aux/src/x/mean@1': nan}",
        "step:0 - val-core/src/acc/mean@1:0.5 - val-aux/src/x/mean@1:nan",
        "Final validation metrics: {'val-core/src/acc/mean@1': 0.75, 'val-aux/src/x/mean@1': nan}",
    ]
    assert records(tmp_path / "run/metrics.jsonl")[0]["val/accuracy"] == 0.5
    assert len(records(tmp_path / "val/0.jsonl")) == len(records(tmp_path / "val/5.jsonl")) == 12
    (mem,) = Memory.made
    assert [row[0] for row in mem.tables] == [0, 0, 5, 5]
    first, last = ([row[1:3] for row in rows] for rows in (mem.tables[:2], mem.tables[2:]))
    assert first == last, "always the same answers"
    (end,) = events(tmp_path / "run", "run_end")
    assert end["status"] == "finished"


@pytest.mark.parametrize("full", [False, True])
def test_the_last_line_says_what_the_folder_lacks(tmp_path, capsys, monkeypatch, full) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    tracking, run = Tracking(config(logger=["console"]), tmp_path / "run"), tmp_path / "run"
    if full:
        (run / "report.html").mkdir()
        monkeypatch.setattr("verl.tracking.tracker.write_lines", no_room)
        monkeypatch.setattr("verl.tracking.jsonl.os.write", no_room)
        tracking.unsaved = "the last checkpoint was NOT written"
    tracking.log(1, {"a": 1})
    tracking.dump_trajectories(1, answers())
    tracking.finish("finished")
    tracking.write_page(last=True)
    tracking.close()
    last = capsys.readouterr().err.splitlines()[-1]
    if full:
        lacks = "report.html, metrics.jsonl, events.jsonl and 2 more, which could not be written"
        assert last == f"verl: finished; {run} lacks {lacks}"
    else:
        assert last == f"verl: finished; {run} has all of this run, report.html to begin with"


def test_data_report(tmp_path, capsys):
    bad, report = (
        {"file": "a.parquet", "row": 3, "problem": "empty prompt", "detail": "x"},
        {"rows": 5, "used": 4},
    )
    data = SimpleNamespace(bad_rows=[bad], report=report, describe=lambda: ["train: 4 of 5 rows"])
    tracking = Tracking(config(), tmp_path)
    tracking.data_report(data, None)
    tracking.close()
    assert records(tmp_path / "data_report.jsonl") == [bad]
    assert events(tmp_path, "data")[0]["used"] == 4
    assert "train: 4 of 5 rows" in capsys.readouterr().err


def test_progress_counts_responses(tmp_path, capsys):
    tracking = Tracking(config(), tmp_path)
    tracking.progress("gen", 8)(1)
    tracking.start_progress(2, 0)
    advance = tracking.progress("gen", 8)
    advance(1)
    tracking.log(1, {"a": 1})
    tracking.log(2, {"a": 1})
    tracking.close()
    err = capsys.readouterr().err
    assert "Training Progress: 1/2 (50%)" in err and "Training Progress: 2/2 (100%)" in err


def test_a_login_of_wandb_is_asked_for_and_found_in_netrc(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.com")
    assert not trackers.logged_in(wandb)
    with pytest.raises(trackers.Unavailable, match="not logged in; run `wandb login` or set WANDB_API_KEY"):
        trackers.open_tracker("wandb", trackers.TrackerSession("p", "e", tmp_path, {}), print)
    (tmp_path / "netrc").write_text("machine wandb.example.com login user password " + "x" * 40 + "\n")
    assert trackers.logged_in(wandb)
    (tmp_path / "netrc").write_text("nonsense\n")
    assert not trackers.logged_in(wandb)
