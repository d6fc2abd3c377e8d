"""Reading a run folder: torn lines, repeated steps, resumed lives, files that are absent or broken."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest

from verl.report.read import EVENTS_SHOWN, json_lines, read_events, read_metrics, read_run


def lines(path: Path, *records: object) -> Path:
    """Write records as JSON lines; a string is written as it is."""
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in records))
    return path


def test_columns_are_aligned_and_sorted(tmp_path: Path) -> None:
    rows = [{"step": 2, "b": 3}, {"step": 1, "time": 5, "a": 0.5}, {"step": 3, "a": 1, "b": 4}]
    metrics = read_metrics(lines(tmp_path / "metrics.jsonl", *rows), Counter())
    assert metrics.steps == [1, 2, 3] and metrics.times == [5.0, None, None]
    assert metrics.columns == {"a": [0.5, None, 1.0], "b": [None, 3.0, 4.0]}


def test_a_later_record_of_a_step_adds_to_it_and_marks_of_release_0_1_are_passed_over(tmp_path: Path) -> None:
    rows = [{"step": 1, "a": 1, "old": 2}, {"event": "resume", "step": 1}, {"step": 1, "a": 9, "val": 0.5}]
    unreadable: Counter[str] = Counter()
    metrics = read_metrics(lines(tmp_path / "metrics.jsonl", *rows), unreadable)
    assert metrics.columns == {"a": [9.0], "old": [2.0], "val": [0.5]} and not unreadable


def test_torn_and_foreign_lines_are_counted(tmp_path: Path) -> None:
    odd = ["\n", "[1, 2]\n", {"a": 3}, "[" * 100_000 + "\n", '{"step": 2, "a": ']
    file = lines(tmp_path / "metrics.jsonl", {"step": 1, "a": 1}, *odd)
    file.write_bytes(file.read_bytes() + b"\xff")
    bad: Counter[str] = Counter()
    assert read_metrics(file, bad).steps == [1]
    assert bad == {"metrics.jsonl": 4}


def test_values_that_are_no_numbers_are_gaps(tmp_path: Path) -> None:
    file = lines(
        tmp_path / "m.jsonl",
        '{"step": 1, "a": NaN, "b": null, "c": "3", "e": true, "f": [1], "g": 1e999, "d": 2}\n',
    )
    assert read_metrics(file, Counter()).columns == {"d": [2.0]}


def test_byte_limit_stops_reading(tmp_path: Path) -> None:
    file = lines(tmp_path / "t.jsonl", *[{"i": i} for i in range(100)])
    assert len(list(json_lines(file, Counter(), limit=30))) == math.ceil(30 / 9)


def test_events_keep_the_newest_and_count_all(tmp_path: Path) -> None:
    many = [{"event": "notice", "n": i} for i in range(EVENTS_SHOWN + 10)]
    file = lines(tmp_path / "events.jsonl", {"event": "run_start", "total_steps": 5}, *many)
    events = read_events(file, Counter())
    assert len(events.shown) == EVENTS_SHOWN and events.shown[-1]["n"] == EVENTS_SHOWN + 9
    assert events.counts == {"run_start": 1, "notice": EVENTS_SHOWN + 10}
    assert events.counts.total() == EVENTS_SHOWN + 11
    assert events.marks[0]["total_steps"] == 5, "the start is remembered even when it is too old to be shown"


def test_folder_without_files_and_no_folder(tmp_path: Path) -> None:
    run = read_run(tmp_path)
    assert (run.metrics.steps, run.events.counts.total(), run.config, run.response_files) == ([], 0, {}, {})
    with pytest.raises(FileNotFoundError, match="no run folder at"):
        read_run(tmp_path / "absent")


def test_broken_config_is_counted_not_raised(tmp_path: Path) -> None:
    (tmp_path / "versions.json").write_text("[1]")
    for text in ("a: [1,\n b: }", "a: !!python/object/apply:os.getcwd []"):
        (tmp_path / "config.yaml").write_text(text)
        run = read_run(tmp_path)
        assert run.config == {} and run.versions == {}
        assert run.unreadable == {"config.yaml": 1, "versions.json": 1}


def test_response_files_are_ordered_by_number(tmp_path: Path) -> None:
    folder = tmp_path / "trajectories"
    folder.mkdir()
    for name in ("10.jsonl", "9.jsonl", "x.jsonl", "3.jsonl.tmp"):
        (folder / name).write_text("")
    assert list(read_run(tmp_path).response_files) == [9, 10]
