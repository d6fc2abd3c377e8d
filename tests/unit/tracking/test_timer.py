"""Phases, the watchdog, the timeline."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.chaos.fork_server import until
from verl.tracking.timer import Phases, StepTimes, Timeline, Watchdog


def test_phases_add_up_and_nest():
    phases = Phases()
    phases.start_step()
    with phases("step"):
        for _ in range(2):
            with phases("gen", waits_for="8 answers"):
                assert [p.name for p in phases.stack] == ["step", "gen"]
                assert phases.stack[-1].waits_for == "8 answers"
                time.sleep(0.02)
        with pytest.raises(RuntimeError), phases("adv"):
            raise RuntimeError
    found = phases.timings()
    assert set(found) == {"step", "gen", "adv"}
    assert 0.04 <= found["gen"] <= found["step"]
    assert phases.stack == ()
    spans = phases.spans
    assert [name for name, _, _ in spans] == ["gen", "gen", "adv", "step"]
    assert spans[3][1] <= spans[0][1] <= spans[0][2] <= spans[1][1] and spans[2][2] <= spans[3][2]
    phases.start_step()
    assert phases.timings() == {} and phases.spans == [] and found["gen"] > 0


def test_watchdog_names_phase_and_stacks_and_grows_its_pauses(capsys):
    phases, events = Phases(), []

    release = threading.Event()

    def stuck_worker():
        release.wait()

    worker = threading.Thread(target=stuck_worker, name="the-worker")
    worker.start()
    try:
        with (
            Watchdog(
                phases,
                0.1,
                lambda *kind, **fields: events.append((kind, fields)),
                extra=lambda: "worker 3: busy",
            ),
            phases("step"),
            phases("gen", waits_for="3 of 8 answers"),
        ):
            until(lambda: len(events) >= 3)
            phases.beat()
            until(lambda: len(events) >= 4)
    finally:
        release.set()
        worker.join()
    kind, fields = events[0]
    assert (kind, fields["phase"], fields["waits_for"]) == (("watchdog",), "gen", "3 of 8 answers")
    assert "stuck_worker" in fields["stacks"] and "thread the-worker" in fields["stacks"]
    assert "thread MainThread" in fields["stacks"] and "verl-watchdog" not in fields["stacks"]
    text = capsys.readouterr().err
    assert "in step since" in text and "gen since" in text and "waiting for 3 of 8 answers" in text
    assert "worker 3: busy" in text
    idle = [fields["idle_s"] for _, fields in events]
    assert idle[2] > 1.6 * idle[1], "the pauses must grow"
    assert idle[3] < idle[2], "and begin anew when something moves"


def test_watchdog_goes_on_when_the_workers_cannot_be_asked():
    reports = []

    def broken() -> str:
        raise RuntimeError("no cluster")

    def on_event(kind, **fields):
        reports.append(fields["extra"])

    with Watchdog(Phases(), 0.05, on_event, extra=broken):
        until(lambda: len(reports) >= 2)
    assert reports[0] == "the workers cannot be asked: RuntimeError: no cluster"


def test_watchdog_is_silent_while_things_move(capsys):
    phases = Phases()
    events = []
    with Watchdog(phases, 0.5, lambda *a, **k: events.append(a)):
        end = time.monotonic() + 0.8
        while time.monotonic() < end:
            phases.beat()
            time.sleep(0.01)
    assert not events and capsys.readouterr().err == ""


@pytest.mark.parametrize("timeout", [0, -1, None])
def test_watchdog_off(timeout):
    with Watchdog(Phases(), timeout, lambda *a, **k: None):
        assert not [t for t in threading.enumerate() if t.name == "verl-watchdog"]


STUCK = """
import ctypes, sys
from verl.tracking.timer import Phases, Watchdog
phases = Phases()
with Watchdog(phases, 0.2, lambda *a, **k: None):
    with phases("update_actor"):
        import time; time.sleep(0.15)
        ctypes.PyDLL(None).usleep(900_000)   # holds the interpreter lock
"""


def test_stacks_come_even_when_the_interpreter_is_stuck():
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60, cwd=root)
    assert done.returncode == 0, done.stderr
    assert "Timeout" in done.stderr and 'File "<string>"' in done.stderr


def test_shares_of_a_step() -> None:
    phases = [("gen", 10.0, 12.0), ("reward", 12.0, 13.0), ("update_actor", 13.0, 19.0), ("step", 10.0, 20.0)]
    times = StepTimes(phases, [(8.0, 11.0), (13.0, 17.0), (19.0, 25.0)])
    found = times.metrics(samplers=3, trainers=1)
    assert found["perf/trainer_idle_ratio"] == pytest.approx(0.3)
    assert found["perf/sampler_idle_ratio"] == pytest.approx((10 - 1 - 4 - 1) / 10), "only what is in the step"
    assert found["perf/device_busy_ratio"] == pytest.approx(1 - (3 * 0.4 + 0.3) / 4)
    assert "perf/device_busy_ratio" not in times.metrics(samplers=0, trainers=4)
    with pytest.raises(ValueError, match="expected 1"):
        StepTimes(phases[:-1], [])


def test_one_line_a_step_on_the_wall_clock(tmp_path: Path) -> None:
    told: list[str] = []
    (tmp_path / "timeline.jsonl").write_text('{"step": 2, "torn in an earlier li')
    timeline = Timeline(tmp_path / "timeline.jsonl", told.append)
    now = time.monotonic()
    for step in (1, 2):
        timeline.write(step, StepTimes([("gen", now, now + 1), ("step", now, now + 2)], [(now, now + 0.5)]))
    lines = [json.loads(line) for line in (tmp_path / "timeline.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2] and told == []
    assert abs(lines[0]["begin"] - time.time()) < 60
    assert lines[0]["sampler"][0][1] - lines[0]["begin"] == pytest.approx(0.5, abs=1e-3)
    assert lines[0]["trainer"][0][0] == "gen"


def test_a_write_that_fails_is_told_once(tmp_path: Path) -> None:
    told: list[str] = []
    (tmp_path / "file").touch()
    timeline = Timeline(tmp_path / "file" / "timeline.jsonl", told.append)
    for step in (1, 2):
        timeline.write(step, StepTimes([("step", 0.0, 1.0)], []))
    assert len(told) == 1 and "the run goes on" in told[0]
