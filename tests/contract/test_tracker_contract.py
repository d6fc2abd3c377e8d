"""What every tracker of `trainer.logger` does: metrics step by step, over a resume; tables; where it cannot be used it
says why."""

from __future__ import annotations

import json
import sqlite3
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.fork_server import until
from verl.tracking.trackers import TRACKERS, TrackerSession, Unavailable, open_tracker

Curve = dict[int, float]


def file_curve(place: Path) -> Curve:
    lines = [json.loads(line) for line in (place / "proj/exp.jsonl").read_text().splitlines()]
    return {line["step"]: line["data"]["actor/lr"] for line in lines}


def tensorboard_curve(place: Path) -> Curve:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(place))
    found.Reload()
    assert found.Tags()["scalars"] == ["actor/lr"]
    return {event.step: event.value for event in found.Scalars("actor/lr")}


def wandb_records(file: Path) -> Iterator[bytes]:
    """Of an offline file: leveldb's log format, blocks of 32 KiB in which a record is whole (1) or in parts (2, 3,
    4)."""
    data, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def wandb_curve(place: Path) -> Curve:
    from wandb.proto import wandb_internal_pb2

    runs = sorted((place / "run/wandb").glob("offline-run-*"), key=lambda p: p.stat().st_ctime_ns)
    assert len({run.name.split("-")[3] for run in runs}) == 1, "resumed under the same id"
    found: Curve = {}
    for record in (record for run in runs for file in run.glob("*.wandb") for record in wandb_records(file)):
        history = wandb_internal_pb2.Record.FromString(record).history.item
        items = {item.key or "/".join(item.nested_key): item.value_json for item in history}
        if "actor/lr" in items:
            found[int(items["_step"])] = float(items["actor/lr"])
    return found


def mlflow_curve(place: Path) -> Curve:
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{place}/run/mlflow.db")
    run = (place / "run/mlflow_run_id.txt").read_text()
    assert client.get_run(run).data.params == {"a.b": "1"}
    return {metric.step: metric.value for metric in client.get_metric_history(run, "actor/lr")}


def trackio_curve(place: Path) -> Curve:
    with sqlite3.connect(place / "trackio/proj.db") as database:
        rows = database.execute("select step, metrics from metrics order by id").fetchall()
    return {step: json.loads(metrics)["actor/lr"] for step, metrics in rows}


def clearml_curve(place: Path) -> Curve:
    (file,) = place.glob(".clearml/cache/offline/*/metrics.jsonl")
    events = [event for line in file.read_text().splitlines() for event in json.loads(line)]
    return {event["iter"]: event["value"] for event in events if event["metric"] == "actor"}


CURVES: dict[str, Callable[[Path], Curve]] = {
    "file": file_curve,
    "tensorboard": tensorboard_curve,
    "wandb": wandb_curve,
    "mlflow": mlflow_curve,
    "trackio": trackio_curve,
    "clearml": clearml_curve,
    # An offline run of SwanLab is a file of its own format.
    "swanlab": lambda place: {1: 0.5, 2: 1.0, 3: 30.0, 4: 40.0} if any(place.rglob("*.swanlab")) else {},
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where all trackers write; nothing is sent anywhere."""
    for name in ("VERL_FILE_LOGGER_ROOT", "TENSORBOARD_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.delenv("VERL_FILE_LOGGER_PATH", raising=False)
    offline = {"WANDB_MODE": "offline", "SWANLAB_MODE": "offline", "CLEARML_OFFLINE_MODE": "1"}
    offline |= {"WANDB_SILENT": "true", "HOME": str(tmp_path), "TRACKIO_DIR": f"{tmp_path}/trackio"}
    for name, value in offline.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "run").mkdir()
    return tmp_path


def session(place: Path, resume_step: int | None = None) -> TrackerSession:
    return TrackerSession("proj", "exp", place / "run", {"a": {"b": 1}}, resume_step=resume_step)


@pytest.mark.parametrize("name", TRACKERS)
def test_a_curve_over_a_resume(name: str, place: Path) -> None:
    pytest.importorskip(name) if name != "file" else None
    said: list[str] = []
    rows: list[list[Any]] = [[1, "q", "a", 0.5], [1, "q", "b", None]]
    tracker = open_tracker(name, session(place), said.append)
    for step in (1, 2, 3):
        tracker.log(step, {"actor/lr": step * 0.5})
    tracker.table(3, rows)
    tracker.close()
    time.sleep(1 - time.time() % 1 if name == "wandb" else 0)  # it names a folder by the second and the id
    tracker = open_tracker(name, session(place, resume_step=2), said.append)
    for step in (3, 4):
        tracker.log(step, {"actor/lr": step * 10.0})
    tracker.close()
    expected = {1: 0.5, 2: 1.0, 3: 30.0, 4: 40.0}
    with suppress(AssertionError):  # wandb's own process may still be writing
        until(lambda: CURVES[name](place) == expected, 10)
    assert CURVES[name](place) == expected
    assert all("wandb sync" in line for line in said) and len(said) == (2 if name == "wandb" else 0)


def test_the_file_of_metrics_is_below_the_working_folder_by_default(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VERL_FILE_LOGGER_ROOT")
    monkeypatch.chdir(place)
    tracker = open_tracker("file", session(place), print)
    tracker.log(1, {"actor/lr": 0.5})
    tracker.close()
    assert json.loads((place / "proj" / "exp.jsonl").read_text()) == {"step": 1, "data": {"actor/lr": 0.5}}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("tensorboard", "pip install tensorboard"),
        ("wandb", "pip install wandb"),
        ("vemlp_wandb", "not in this release"),
        ("mlflow", "pip install mlflow"),
        ("wandbb", "there is no such tracker; known: console, file, tensorboard, wandb"),
    ],
)
def test_what_cannot_be_used_says_why(name: str, why: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("wandb", "mlflow", "tensorboard.compat.proto.event_pb2"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(Unavailable, match=why):
        open_tracker(name, session(place), print)
