"""Phases and the watchdog."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from verl.tracking.timer import Phases, Watchdog, all_stacks


def test_phases_add_up_and_nest():
    phases = Phases()
    phases.start_step()
    with phases("step"):
        for _ in range(2):
            with phases("gen", waits_for="8 answers"):
                assert [p.name for p in phases.stack] == ["step", "gen"]
                assert phases.current.waits_for == "8 answers"
                time.sleep(0.02)
        with pytest.raises(RuntimeError), phases("adv"):
            raise RuntimeError
    found = phases.timings()
    assert set(found) == {"step", "gen", "adv"}
    assert 0.04 <= found["gen"] <= found["step"] < 1
    assert phases.current is None
    phases.start_step()
    assert phases.timings() == {}
    assert found["gen"] > 0


def wait_until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_watchdog_names_phase_and_stacks_and_grows_its_pauses(capsys):
    phases, events = Phases(), []
    times = []

    def on_event(kind, **fields):
        times.append(time.monotonic())
        events.append((kind, fields))

    release = threading.Event()

    def stuck_worker():
        release.wait()

    worker = threading.Thread(target=stuck_worker, name="the-worker")
    worker.start()
    try:
        with (
            Watchdog(phases, 0.1, on_event, extra=lambda: "worker 3: busy") as dog,
            phases("step"),
            phases("gen", waits_for="3 of 8 answers"),
        ):
            assert wait_until(lambda: dog.reports >= 3)
            reports = dog.reports
            phases.beat()
            time.sleep(0.06)
            assert dog.reports == reports
    finally:
        release.set()
        worker.join()
    kind, fields = events[0]
    assert (kind, fields["phase"], fields["waits_for"]) == ("watchdog", "gen", "3 of 8 answers")
    assert "stuck_worker" in fields["stacks"] and "thread the-worker" in fields["stacks"]
    assert "thread MainThread" in fields["stacks"] and "verl-watchdog" not in fields["stacks"]
    text = capsys.readouterr().err
    assert "in step since" in text and "gen since" in text and "waiting for 3 of 8 answers" in text
    assert "worker 3: busy" in text
    first, second = times[1] - times[0], times[2] - times[1]
    assert second > first * 1.3, "the pauses must grow"


def test_watchdog_goes_on_when_the_workers_cannot_be_asked():
    reports = []

    def broken() -> str:
        raise RuntimeError("no cluster")

    def on_event(kind, **fields):
        reports.append(fields["extra"])

    with Watchdog(Phases(), 0.05, on_event, extra=broken):
        assert wait_until(lambda: len(reports) >= 2)
    assert reports[0] == "the workers cannot be asked: RuntimeError: no cluster"


def test_watchdog_is_silent_while_things_move(capsys):
    phases = Phases()
    with Watchdog(phases, 0.2, lambda *a, **k: None) as dog:
        end = time.monotonic() + 0.6
        while time.monotonic() < end:
            phases.beat()
            time.sleep(0.01)
    assert dog.reports == 0 and capsys.readouterr().err == ""


@pytest.mark.parametrize("timeout", [0, -1, None])
def test_watchdog_off(timeout):
    with Watchdog(Phases(), timeout, lambda *a, **k: None):
        assert not [t for t in threading.enumerate() if t.name == "verl-watchdog"]


def test_stacks_leave_the_caller_out():
    assert "MainThread" not in all_stacks()


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
    done = subprocess.run(
        [sys.executable, "-c", STUCK],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert "Timeout" in done.stderr and 'File "<string>"' in done.stderr
