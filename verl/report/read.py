"""Read a run folder for the report: metrics, events, config, versions, sampled responses.

A run may be going on while we read, so every file may end in the middle of a line. Such a line is
skipped and counted, never guessed at; the page shows the count. No torch, no numpy: a run
starts `verl report` every few seconds, and it starts in a moment.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

Record = dict[str, Any]

EVENTS_SHOWN = 400
"""Newest events kept in full; older ones only count."""


@dataclass(slots=True)
class Metrics:
    """`metrics.jsonl` by column. All lists have the length of `steps`; None where a step lacks the name."""

    steps: list[int]
    times: list[float | None]
    columns: dict[str, list[float | None]]


@dataclass(slots=True)
class Events:
    """`events.jsonl`: the newest `EVENTS_SHOWN` records, oldest first, and how many there were by kind."""

    shown: deque[Record] = field(default_factory=lambda: deque(maxlen=EVENTS_SHOWN))
    counts: Counter[str] = field(default_factory=Counter)
    marks: list[Record] = field(default_factory=list)

    def add(self, records: Iterable[Record]) -> None:
        """Add records, in their order."""
        for record in records:
            kind = kind_of(record)
            self.shown.append(record)
            self.counts[kind] += 1
            if kind.startswith("run_") or kind in ("resumed", "plan", "planned"):
                self.marks.append(record)


@dataclass(slots=True)
class Run:
    """Everything of a run folder but the sampled responses, which are read one step at a time."""

    path: Path
    metrics: Metrics
    events: Events
    config: Record
    versions: Record
    response_files: dict[int, Path]
    timeline: list[Record]
    unreadable: Counter[str]
    other: Run | None = None
    curves: Metrics | None = None
    """What the charts show, where that is more than the run's own metrics."""


def number(value: Any) -> float | None:
    """A finite float, or None for everything else (null, NaN, infinity, text)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def json_lines(path: Path, unreadable: Counter[str], limit: int | None = None) -> Iterator[Record]:
    """Objects of a JSON-lines file in order; lines that are none are counted under the file's name.

    `limit`: stop after this many bytes (the line that crosses it is still read).
    """
    if not path.is_file():
        return
    read_bytes = 0
    with path.open("rb") as file:
        for line in file:
            yield from _records(line, path.name, unreadable)
            read_bytes += len(line)
            if limit is not None and read_bytes >= limit:
                return


def _records(line: bytes, name: str, unreadable: Counter[str]) -> list[Record]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if isinstance(record, dict):
        return [record]
    if line.strip():
        unreadable[name] += 1
    return []


class GrowingLines:
    """A JSON-lines file that is read again and again: `new` gives the objects of the lines that were completed since.

    `started_anew` says that the file was replaced or cut (a run that resumed), and `new` begins with its first line.
    """

    def __init__(self, path: Path, unreadable: Counter[str]):
        self.path, self.unreadable = path, unreadable
        self.started_anew = False
        self._inode = self._offset = 0

    def new(self) -> list[Record]:
        """Objects of new whole lines, in order."""
        self.started_anew = False
        try:
            file = self.path.open("rb")
        except OSError:
            return []
        with file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:
                self.started_anew, self._inode, self._offset = self._offset > 0, status.st_ino, 0
            file.seek(self._offset)
            lines = file.read().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        self._offset += sum(map(len, whole))
        return [record for line in whole for record in _records(line, self.path.name, self.unreadable)]


def kind_of(event: Record) -> str:
    """The event's kind."""
    return str(event.get("event", "event"))


def text_of(value: Any, limit: int, more: str = " …") -> str:
    """The value as text, "" for None; what is longer than `limit` is cut, and `more` says so."""
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)
    return text if len(text) <= limit else text[:limit] + more


def read_metrics(path: Path, unreadable: Counter[str]) -> Metrics:
    """Columns of `metrics.jsonl`. A later record of a step adds to an earlier one and wins."""
    rows: dict[int, Record] = {}
    add_rows(rows, json_lines(path, unreadable), path.name, unreadable)
    return columns_of(rows)


def add_rows(rows: dict[int, Record], records: Iterable[Record], name: str, unreadable: Counter[str]) -> None:
    """Add records of `metrics.jsonl` to `rows`, which has one for each step."""
    for record in records:
        step = record.get("step")
        if isinstance(step, int) and not isinstance(step, bool):
            if "event" not in record:  # a mark of release 0.1
                rows[step] = rows.get(step, {}) | record
        else:
            unreadable[name] += 1


def columns_of(rows: dict[int, Record]) -> Metrics:
    """Rows by step as columns."""
    steps = sorted(rows)
    columns: dict[str, list[float | None]] = {}
    for at, step in enumerate(steps):
        for name, value in rows[step].items():
            figure = number(value) if name not in ("step", "time") else None
            if figure is not None:
                if name not in columns:
                    columns[name] = [None] * len(steps)
                columns[name][at] = figure
    times = [number(rows[step].get("time")) for step in steps]
    return Metrics(steps, times, dict(sorted(columns.items())))


def read_events(path: Path, unreadable: Counter[str]) -> Events:
    """The newest events, counts of all, and those that mark the run's life (start, plan, resume, end)."""
    events = Events()
    events.add(json_lines(path, unreadable))
    return events


def read_mapping(path: Path, unreadable: Counter[str]) -> Record:
    """A YAML or JSON file that holds a mapping; an empty one if the file is absent or cannot be read."""
    if not path.is_file():
        return {}
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        text = path.read_text(encoding="utf-8")
        loaded = json.loads(text) if path.suffix == ".json" else yaml.load(text, Loader=loader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        loaded = None
    if isinstance(loaded, dict):
        return loaded
    unreadable[path.name] += 1
    return {}


def response_files(run_dir: Path) -> dict[int, Path]:
    """Files `trajectories/{step}.jsonl` by step, in order, `now.jsonl` last; other names are ignored."""
    folder = run_dir / "trajectories"
    files = {int(p.stem): p for p in folder.glob("*.jsonl") if p.stem.isdecimal()}
    if (now := folder / "now.jsonl").is_file():  # of the step under way
        files[max(files, default=0) + 1] = now
    return dict(sorted(files.items()))


def last_lines(path: Path, unreadable: Counter[str], size: int = 200_000) -> list[Record]:
    """Objects of the lines in the last `size` bytes, oldest first."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        start = max(0, os.fstat(file.fileno()).st_size - size)
        file.seek(start)
        lines = file.read().splitlines(keepends=True)[1 if start else 0 :]
    return [record for line in lines for record in _records(line, path.name, unreadable)]


def read_run(run_dir: Path, *, growing: bool = False) -> Run:
    """Read the folder. Absent files give empty parts; FileNotFoundError if the folder itself is absent. growing: leave
    metrics and events empty, which the caller reads by `GrowingLines`."""
    if not run_dir.is_dir():
        raise FileNotFoundError(f"no run folder at {run_dir}")
    unreadable: Counter[str] = Counter()
    metrics, events = Metrics([], [], {}), Events()
    if not growing:
        metrics = read_metrics(run_dir / "metrics.jsonl", unreadable)
        events = read_events(run_dir / "events.jsonl", unreadable)
    return Run(
        path=run_dir,
        metrics=metrics,
        events=events,
        config=read_mapping(run_dir / "config.yaml", unreadable),
        versions=read_mapping(run_dir / "versions.json", unreadable),
        response_files=response_files(run_dir),
        timeline=last_lines(run_dir / "timeline.jsonl", unreadable),
        unreadable=unreadable,
    )
