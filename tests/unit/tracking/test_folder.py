"""Run folder: JSON lines under kills and full disks, resume, secrets, versions; dumps by thread."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.runs import report_by_a_process
from verl.tracking import run_folder
from verl.tracking.journal import Journal, read, steps
from verl.tracking.jsonl import JsonLines, line, mend, write_lines
from verl.tracking.responses import Dumper
from verl.tracking.run_folder import FolderInUse, LiveReport, RunFolder, _git_commit
from verl.trajectory import Batch, Prompt, Segment, Trajectory


def records(path: Path) -> list[dict]:
    data = path.read_bytes()
    assert data.endswith(b"\n") or not data
    return [json.loads(raw) for raw in data.split(b"\n")[:-1]]


def never(error: OSError) -> None:
    raise AssertionError(error)


@given(st.binary(max_size=40).map(lambda b: b.replace(b"\n", b"x")), st.integers(0, 3), st.integers(0, 200_000))
def test_mend_keeps_exactly_the_whole_lines(tmp_path_factory, tail, whole, padding):
    path = tmp_path_factory.mktemp("m") / "a.jsonl"
    head = b"".join(line({"n": i, "pad": "x" * padding}) for i in range(whole))
    torn = tail + b"y" * padding if tail else b""
    path.write_bytes(head + torn)
    assert mend(path) == len(torn)
    assert path.read_bytes() == head


def test_appending_goes_on_after_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line({"step": 1}) + b'{"step": 2, "a": 0.')
    lines = JsonLines(path, never)
    lines.append({"step": 2, "a": float("nan"), "b": np.float32(0.5), "c": "é\u2028\ud800"})
    lines.append({1: (np.arange(2), {"x"}), "t": torch.ones(1), "p": Path("a"), "b": np.bool_(True)})
    assert records(path)[:2] == [{"step": 1}, {"step": 2, "a": None, "b": 0.5, "c": "é\u2028?"}]
    assert records(path)[2] == {"1": [[0, 1], ["x"]], "t": [1.0], "p": "a", "b": True}
    lines.close()
    lines.close()


def test_a_full_disk_delays_lines_and_loses_none(tmp_path, monkeypatch):
    heard = []
    lines = JsonLines(tmp_path / "a.jsonl", heard.append)
    real, room = os.write, [10]

    def write(handle: int, data: bytes) -> int:
        if room[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = real(handle, data[: room[0]])
        room[0] -= done
        return done

    monkeypatch.setattr(os, "write", write)
    for n in range(3):
        lines.append({"n": n, "pad": "x" * 20})
    assert len(heard) == 1, "told once, not at every line"
    room[0] = 10_000
    lines.append({"n": 3})
    assert [r["n"] for r in records(tmp_path / "a.jsonl")] == [0, 1, 2, 3]
    room[0] = 0
    lines.append({"n": 4})
    assert len(heard) == 2
    room[0] = 1000
    lines.close()
    assert [r["n"] for r in records(tmp_path / "a.jsonl")] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("deletion", [lambda path: path.unlink(), lambda path: shutil.rmtree(path.parent)])
def test_a_file_that_is_taken_away_is_named_once_and_begun_anew(tmp_path, deletion):
    heard, path = [], tmp_path / "run/a.jsonl"
    lines = JsonLines(path, heard.append)
    lines.append({"n": 0})
    deletion(path)
    for n in (1, 2):
        lines.append({"n": n})
    lines.close()
    assert [r["n"] for r in records(path)] == [1, 2] and len(heard) == 1 and f"{path} is gone" in heard[0]


def test_what_the_run_relies_on_and_something_deleted_is_named_once(tmp_path):
    heard = []
    folder = RunFolder(tmp_path, heard.append)
    folder.write_static({})
    for step in (1, 2):
        folder.relied_on["the newest checkpoint"] = tmp_path / f"global_step_{step}"
        (tmp_path / f"global_step_{step}").mkdir()
    (tmp_path / "global_step_1").rmdir()  # as the run does: not the newest
    folder.metrics(1, {})
    assert heard == []
    for path in (tmp_path / ".running", tmp_path / "config.yaml"):
        path.unlink()
    (tmp_path / "global_step_2").rmdir()
    folder.metrics(2, {})
    folder.metrics(3, {})
    folder.close()
    assert len(heard) == 3
    assert [text.split(" is gone: ")[0] for text in heard] == [
        str(tmp_path / name) for name in (".running", "config.yaml", "global_step_2")
    ]


def fill(folder: RunFolder, steps) -> None:
    for step in steps:
        folder.metrics(step, {"a": step / 2})
        write_lines(folder.root / "trajectories" / f"{step}.jsonl", [{"step": step}])


def test_resume_keeps_each_step_once(tmp_path):
    warned = []
    folder = RunFolder(tmp_path, warned.append)
    folder.begin(None)
    fill(folder, range(6))
    folder.close()
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 6, "a"')
    again = RunFolder(tmp_path, warned.append)
    assert again.begin(3) == 2
    fill(again, [4])
    again.close()
    assert [r["step"] for r in records(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    aside = records(tmp_path / "superseded" / "metrics.jsonl")
    assert [r.get("step") for r in aside] == [None, 4, 5]
    assert sorted(p.stem for p in (tmp_path / "trajectories").iterdir()) == ["0", "1", "2", "3", "4"]
    assert sorted(p.stem for p in (tmp_path / "superseded/trajectories").iterdir()) == ["4", "5"]
    third = RunFolder(tmp_path, warned.append)
    assert third.begin(4) == 0
    third.metrics(4, {"val": 0.5})  # trainer.val_only
    third.close()
    found = records(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in found] == [0, 1, 2, 3, 4] and (found[4]["a"], found[4]["val"]) == (2, 0.5)
    assert warned == []


def test_fresh_start_in_a_used_folder_moves_the_old_records(tmp_path):
    folder = RunFolder(tmp_path, print)
    folder.begin(None)
    fill(folder, range(3))
    folder.close()
    again = RunFolder(tmp_path, print)
    again.metrics(1, {"a": 9})
    again.close()
    assert [(r["step"], r["a"]) for r in records(tmp_path / "metrics.jsonl")] == [(1, 9)]
    assert len(records(tmp_path / "superseded" / "metrics.jsonl")) == 4
    assert list((tmp_path / "trajectories").iterdir()) == []


def test_config_and_versions(tmp_path, monkeypatch):
    plain = [
        "main",
        "trainer.x=1",
        "data.max_token_len=5",
        "eos_token='a b'",
        "x=[1,{pad_token:2}]",
        "y=s3://a/b",
    ]
    secrets = [
        "+env.WANDB_API_KEY=xyz", "a.password='xyz and xyz'", "a={url:b,api_key:xyz,l:[{token: xyz}]}", "a=[{private_key:'xyz, xyz'}]",
        "a={headers:{Authorization:Bearer xyz}}", "a=http://u:xyz@h/p", "a={credentials:{user:xyz,x:xyz}}",
        "a=http://h/p?api_key=xyz&b=1", "a=[--api-key,xyz,b]", "--token=xyz", '--headers={"Authorization": "Bearer xyz"}',
    ]  # fmt: skip
    monkeypatch.setattr("sys.argv", [*plain, *secrets, "--auth-token", "xyz"])
    folder = RunFolder(tmp_path, print)
    given = {"hf_token": "xyz", "access_key": "abc", "password": None, "tokenizer": "t", "max_token_len": 5}
    servers = [{"headers": ["Authorization: Bearer xyz"], "args": ["--token", "xyz", "b"], "url": "http://u:xyz@h"}]
    folder.write_static({"a": given | {"path": Path("/x"), "l": (1,)}, "servers": servers})
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    hidden = [{"headers": ["Authorization: ***"], "args": ["--token", "***", "b"], "url": "http://***@h"}]
    shown = given | {"hf_token": "***", "access_key": "***", "path": "/x", "l": [1]}
    assert config == {"a": shown, "servers": hidden}
    found = json.loads((tmp_path / "versions.json").read_text())
    assert "xyz" not in (tmp_path / "versions.json").read_text()
    assert found["command"][1 : 1 + len(plain)] == plain and len(found["command"]) == 3 + len(plain) + len(secrets)
    assert '"url": "b"' in found["command"][3 + len(plain)] and "http://h/p?api_key=***&b=1" in str(found["command"])
    assert found["packages"]["numpy"] == np.__version__ and "git_commit" in found


def test_a_new_folder_is_the_users_alone_and_one_that_exists_keeps_its_mode(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o755)
    for name, mode in (("a/new", 0o700), ("shared", 0o755)):
        RunFolder(tmp_path / name, print).close()
        assert (tmp_path / name).stat().st_mode & 0o777 == mode


def test_dumper_writes_whole_files_and_reports_failures(tmp_path):
    events = []
    dumper = Dumper(lambda kind, **fields: events.append((kind, fields)))
    (tmp_path / "file").write_text("in the way")
    for step in range(20):
        dumper.submit(tmp_path / "out" / f"{step}.jsonl", partial(write_lines, records=[{"step": step}] * 3))
    dumper.submit(tmp_path / "file" / "1.jsonl", partial(write_lines, records=[{"a": 1}]))

    def bad():
        yield {"a": 1}
        raise RuntimeError("no rows")

    dumper.submit(tmp_path / "x.jsonl", partial(write_lines, records=bad()))
    dumper.close()
    dumper.close()
    assert [len(records(tmp_path / "out" / f"{s}.jsonl")) for s in range(20)] == [3] * 20
    assert [kind for kind, _ in events] == ["dump_failed", "dump_failed"]
    assert "no rows" in events[1][1]["error"]
    assert not list(tmp_path.rglob("*.tmp")) and not (tmp_path / "x.jsonl").exists(), "whole or not there"


HOLDER = """
import sys, time
from pathlib import Path
from verl.tracking.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]), print)
print("open", flush=True)
if sys.stdin.readline():
    folder.close()
    print("closed", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that has the folder open; a line on its standard input makes it close the folder."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], text=True, **pipes)
    assert process.stdout.readline() == "open\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_run_in_the_folder_is_refused_before_it_touches_anything(tmp_path, holder, monkeypatch):
    monkeypatch.setattr(run_folder, "PATIENCE_S", 0.1)
    (tmp_path / "events.jsonl").write_text('{"torn')
    said = rf"default_local_dir={tmp_path}: .* \(process {holder.pid} on .*delete"
    with pytest.raises(FolderInUse, match=said):
        RunFolder(tmp_path, print)
    assert (tmp_path / "events.jsonl").read_text() == '{"torn'
    holder.kill()
    monkeypatch.setattr(run_folder, "PATIENCE_S", 10.0)
    RunFolder(tmp_path, print).close()


def test_a_run_that_is_just_leaving_the_folder_is_waited_for(tmp_path, holder):
    timer = threading.Timer(0.5, lambda: (holder.stdin.write("\n"), holder.stdin.flush()))
    timer.start()
    folder = RunFolder(tmp_path, print)
    assert holder.stdout.readline() == "closed\n"
    folder.close()
    timer.join()


def test_a_file_system_without_locks_is_told_and_used(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_folder.fcntl, "lockf", refused)
    told: list[str] = []
    RunFolder(tmp_path, told.append).close()
    assert len(told) == 1 and "has no locks" in told[0]


def test_asking_for_the_commit_writes_nothing_into_the_repository(tmp_path):
    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True)

    (tmp_path / "file").write_text("text")
    git("init")
    git("add", "file")
    git("commit", "-m", "one")
    os.utime(tmp_path / "file", (1, 1))  # git would note in its index that the file is the same all the same
    before = (tmp_path / ".git/index").read_bytes()
    commit = _git_commit(tmp_path)
    assert commit is not None and len(commit) == 40
    assert (tmp_path / ".git/index").read_bytes() == before
    (tmp_path / "file").write_text("other")
    assert _git_commit(tmp_path) == f"{commit}-dirty" and (tmp_path / ".git/index").read_bytes() == before


def test_the_page_of_a_run_is_written_beside_it_and_waited_for_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(LiveReport, "_report", report_by_a_process)
    flushed, events = [], []
    report = LiveReport(tmp_path, lambda: flushed.append(1), lambda kind, **fields: events.append(kind))
    RunFolder(tmp_path, print).close()
    report.write()
    assert not report._thread.is_alive(), "a short run writes it once"
    monkeypatch.setattr(report, "_not_before", 0.0)
    held = threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr(report, "_build", held.wait)
        report.write()
        report.write()
        assert report._thread.is_alive() and not flushed, "the run does not wait for it"
        held.set()
    report.write(last=True)
    assert (tmp_path / "report.html").is_file() and flushed == [1] and events == []
    report.write()
    assert not [t for t in threading.enumerate() if t.name == "verl-report"], "not again so soon"


def test_a_page_that_cannot_be_written_is_told_once_and_ends_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(LiveReport, "_report", report_by_a_process)
    events = []

    def told(kind, **fields):
        events.append((kind, fields))

    report = LiveReport(tmp_path / "absent", lambda: None, told)
    for _ in range(2):
        report.write(last=True)
    ((kind, fields),) = events
    assert kind == "report_failed" and "does not exist" in fields["error"] and "goes on" in fields["message"]
    monkeypatch.setattr(run_folder, "PAGE_S", 0.01)
    RunFolder(tmp_path, print).close()
    LiveReport(tmp_path, lambda: None, told).write(last=True)
    assert "TimeoutExpired" in events[1][1]["error"]


def test_a_journal_gives_back_what_it_was_given_and_keeps_the_newest_steps(tmp_path) -> None:
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 99, 4)
    trajectories = []
    for index in range(3):
        prompt = (
            trajectories[0].prompt if trajectories else Prompt("0:1@0", shared, [{"role": "user"}], columns={"a": 1})
        )
        segments = []
        for length, context in ((3, shared), (index, rng.integers(0, 99, 6))):
            mask = rng.random(length) < 0.5
            segment = Segment(context, rng.integers(0, 99, length), mask, versions=(2, 3), parent=0, shared=1)
            segment.rollout_log_probs = rng.standard_normal(length).astype(np.float32)
            segment.advantages = np.full(length, np.nan, np.float32)
            if index:
                segment.sampling_mask = np.array([b"", b"\1ab", b"\0\0"][:length], object)
                segment.routed_experts = rng.integers(0, 9, (length, 2, 3)).astype(np.int16)
                segment.context_columns["routed_experts"] = rng.integers(0, 9, (len(context), 2, 3)).astype(np.int16)
            segments.append(segment)
        score = None if index == 2 else 1 / 3
        trajectories.append(Trajectory(prompt, index, segments=segments, score=score, fields={"x": [index]}, text="é"))
    baseline = trajectories[0].baseline = Trajectory(prompt, 0, shared, shared > 5, score=0.5)
    dumper = Dumper(lambda kind, **fields: pytest.fail(fields["error"]))
    record = Journal(tmp_path, 1, dumper.submit)
    for step in (9, 10):
        record.add(step, Batch(trajectories), {"threads": 1})
    dumper.close()
    assert list(steps(tmp_path)) == [10]
    batch, about = read(tmp_path / "10.parquet", computed=True)
    assert about == {"step": 10, "threads": 1}
    for old, new in zip([*trajectories, baseline], [*batch, batch[0].baseline], strict=True):
        assert (new.uid, new.index, new.score, new.text, new.fields) == (
            old.uid,
            old.index,
            old.score,
            old.text,
            old.fields,
        )
        assert new.prompt.columns == {"a": 1} and new.segments[0].context_ids is new.prompt.ids
        for a, b in zip(old.segments, new.segments, strict=True):
            assert (a.versions, a.parent, a.shared, a.columns.keys()) == (
                b.versions,
                b.parent,
                b.shared,
                b.columns.keys(),
            )
            for name, values in (a.columns | {"c": a.context_ids} | a.context_columns).items():
                copy = (b.columns | {"c": b.context_ids} | b.context_columns)[name]
                assert copy.dtype == values.dtype
                np.testing.assert_array_equal(copy, values)
    assert all(t.advantages is None for t in read(tmp_path / "10.parquet")[0])


def test_a_journal_keeps_its_limit_over_runs_of_a_folder(tmp_path, monkeypatch) -> None:
    """Files of an earlier run count; those that are there are listed once, not after each step."""
    batch = Batch([Trajectory(Prompt("0", np.arange(3), "?"), 0, np.arange(4), np.ones(4, bool))])

    def run(steps_of_run: range, limit: float) -> list[int]:
        record = Journal(tmp_path, limit, lambda path, write: write(path))
        for step in steps_of_run:
            record.add(step, batch, {})
        return sorted(steps(tmp_path))

    run(range(1, 5), 2**20)
    size = (tmp_path / "4.parquet").stat().st_size
    listed = []
    monkeypatch.setattr("verl.tracking.journal.steps", lambda folder: listed.append(folder) or steps(folder))
    assert run(range(5, 9), 3.5 * size) == [6, 7, 8]
    assert len(listed) == 1
    assert run(range(7, 8), 1) == [7]
