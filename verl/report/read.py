"""Read a run folder for the report: metrics, events, config, versions, sampled responses.

A run may be going on while we read, so every file may end in the middle of a line. Such a line is
skipped and counted, never guessed at; the page shows the count. No torch, no numpy: a run
starts `verl report` every few seconds, and it starts in a moment.
"""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Iterator
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


@dataclass(slots=True)
class Run:
    """Everything of a run folder but the sampled responses, which are read one step at a time."""

    path: Path
    metrics: Metrics
    events: Events
    config: Record
    versions: Record
    response_files: dict[int, Path]
    unreadable: Counter[str]


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
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if isinstance(record, dict):
                yield record
            elif line.strip():
                unreadable[path.name] += 1
            read_bytes += len(line)
            if limit is not None and read_bytes >= limit:
                return


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
    for record in json_lines(path, unreadable):
        step = record.get("step")
        if isinstance(step, int) and not isinstance(step, bool):
            if "event" not in record:  # a mark of release 0.1
                rows[step] = rows.get(step, {}) | record
        else:
            unreadable[path.name] += 1
    return _columns(rows)


def _columns(rows: dict[int, Record]) -> Metrics:
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
    for record in json_lines(path, unreadable):
        kind = kind_of(record)
        events.shown.append(record)
        events.counts[kind] += 1
        if kind.startswith("run_") or kind in ("resumed", "plan"):
            events.marks.append(record)
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
    """Files `trajectories/{step}.jsonl` by step, in order; other names are ignored."""
    files = {int(p.stem): p for p in (run_dir / "trajectories").glob("*.jsonl") if p.stem.isdecimal()}
    return dict(sorted(files.items()))


def read_run(run_dir: Path) -> Run:
    """Read the folder. Absent files give empty parts; FileNotFoundError if the folder itself is absent."""
    if not run_dir.is_dir():
        raise FileNotFoundError(f"no run folder at {run_dir}")
    unreadable: Counter[str] = Counter()
    return Run(
        path=run_dir,
        metrics=read_metrics(run_dir / "metrics.jsonl", unreadable),
        events=read_events(run_dir / "events.jsonl", unreadable),
        config=read_mapping(run_dir / "config.yaml", unreadable),
        versions=read_mapping(run_dir / "versions.json", unreadable),
        response_files=response_files(run_dir),
        unreadable=unreadable,
    )
