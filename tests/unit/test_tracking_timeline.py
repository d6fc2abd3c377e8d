"""The timeline: shares of a step, its file, what happens when it cannot be written."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from verl.tracking.timer import Phases, Timeline, step_times


def test_shares_of_a_step() -> None:
    phases = [("gen", 10.0, 12.0), ("reward", 12.0, 13.0), ("update_actor", 13.0, 19.0), ("step", 10.0, 20.0)]
    times = step_times(phases, [(8.0, 11.0), (13.0, 17.0), (19.0, 25.0)])
    assert times.trainer_idle_ratio == pytest.approx(0.3)
    assert times.sampler_idle_ratio == pytest.approx((10 - 1 - 4 - 1) / 10), (
        "only what lies in the step counts"
    )
    found = times.metrics(samplers=3, trainers=1)
    assert found["perf/device_busy_ratio"] == pytest.approx(1 - (3 * 0.4 + 0.3) / 4)
    assert "perf/device_busy_ratio" not in times.metrics(samplers=0, trainers=4)
    with pytest.raises(ValueError, match="expected 1"):
        step_times(phases[:-1], [])


def test_phases_keep_their_spans() -> None:
    phases = Phases()
    phases.start_step()
    before = time.monotonic()
    with phases("step"), phases("gen"):
        pass
    (gen, step) = phases.spans()
    assert (gen[0], step[0]) == ("gen", "step")
    assert before <= step[1] <= gen[1] <= gen[2] <= step[2] <= time.monotonic()
    phases.start_step()
    assert phases.spans() == []


def test_one_line_a_step_on_the_wall_clock(tmp_path: Path) -> None:
    told: list[str] = []
    timeline = Timeline(tmp_path / "timeline.jsonl", told.append)
    now = time.monotonic()
    for step in (1, 2):
        timeline.write(step, step_times([("gen", now, now + 1), ("step", now, now + 2)], [(now, now + 0.5)]))
    lines = [json.loads(line) for line in (tmp_path / "timeline.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2] and told == []
    assert abs(lines[0]["begin"] - time.time()) < 60
    assert lines[0]["sampler"][0][1] - lines[0]["begin"] == pytest.approx(0.5, abs=1e-3)
    assert lines[0]["trainer"][0][0] == "gen"


def test_a_write_that_fails_is_told_once(tmp_path: Path) -> None:
    told: list[str] = []
    timeline = Timeline(tmp_path / "absent" / "timeline.jsonl", told.append)
    for step in (1, 2):
        timeline.write(step, step_times([("step", 0.0, 1.0)], []))
    assert len(told) == 1 and "the run goes on" in told[0]


def test_a_torn_line_of_an_earlier_life_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "beg')
    Timeline(path, print).write(2, step_times([("step", 0.0, 1.0)], []))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]
