"""Which process a number means, whatever happens to the clock; the stacks of another process; what is printed may be lost
without harm (a full disk under the log, a reader that has gone)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from verl import interrupt
from verl.platform import processes, stacks
from verl.platform.processes import Spared


@pytest.fixture
def child():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_a_process_is_known_by_its_number_and_its_start(child) -> None:
    start = processes.process_start_time(child.pid)
    assert start > 0 and processes.alive(child.pid, start)
    assert not processes.alive(child.pid, start - 500), "an earlier one that had the number"
    assert processes.identity() == (
        os.getpid(),
        processes.process_start_time(os.getpid()),
        processes.namespace(),
    )


def test_one_that_has_ended_does_not_live(child) -> None:
    start = processes.process_start_time(child.pid)
    child.kill()
    while processes.process_start_time(child.pid):
        time.sleep(0.01)
    assert not processes.alive(child.pid, start), "a zombie"
    child.wait()
    assert processes.process_start_time(child.pid) == 0 and not processes.alive(child.pid, start)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's own count")
def test_setting_the_clock_makes_nobody_another_process(child, monkeypatch) -> None:
    """The time of the machine's start, as the kernel tells it, moves with the clock."""
    from psutil import _pslinux

    start, booted = processes.process_start_time(child.pid), psutil.boot_time()
    monkeypatch.setattr(_pslinux, "boot_time", lambda: booted + 3)
    assert processes.alive(child.pid, start)


# -- stacks --------------------------------------------------------------------------------------------------


HANGING = """
import sys, time
from verl.platform import stacks
stacks.register()
def the_place_where_it_hangs():
    print("ready", flush=True)
    time.sleep(60)
the_place_where_it_hangs()
"""


@pytest.fixture
def hanging():
    process = subprocess.Popen([sys.executable, "-c", HANGING], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()


def test_a_process_says_where_it_stands_again_and_again(hanging) -> None:
    for _ in range(2):
        text = stacks.ask(hanging.pid)
        assert text.count("in the_place_where_it_hangs") == 1
    assert hanging.poll() is None, "asking does no harm"


def test_a_stopped_process_and_one_that_is_gone(hanging) -> None:
    os.kill(hanging.pid, signal.SIGSTOP)
    assert "does not answer" in stacks.ask(hanging.pid, timeout=0.3)
    hanging.kill()
    hanging.wait()
    time.sleep(0.05)
    assert "is gone" in stacks.ask(hanging.pid)
    assert "is gone" in stacks.ask(hanging.pid), "its file is removed"


def test_a_later_process_with_the_number_is_not_asked_for_it_would_end(hanging) -> None:
    """SIGUSR1 ends a process that does not expect it."""
    path = stacks._path(hanging.pid)
    hanging.kill()
    hanging.wait()
    later = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        time.sleep(0.2)
        path = path.rename(path.with_name(path.name.replace(str(hanging.pid), str(later.pid))))
        assert "is gone" in stacks.ask(later.pid)
        time.sleep(0.2)
        assert later.poll() is None
        assert not path.exists(), "what ended processes leave is removed"
    finally:
        later.kill()
        later.wait()


def test_a_summary_tells_a_rank_that_waits_from_one_that_hangs() -> None:
    waits = """Thread 0x1 (most recent call first):
  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 3 in all_gather
  File "/x/verl/engine/training/agree.py", line 5 in all_gather_json
"""
    hangs = 'Thread 0x1 (most recent call first):\n  File "/x/verl/worker/execute.py", line 7 in update\n'
    idle = 'Thread 0x2 (most recent call first):\n  File "/x/verl/controller/ray/hosts.py", line 31 in stay\n'
    plugin = 'Thread 0x3 (most recent call first):\n  File "/home/me/plug.py", line 4 in loss\n' + hangs
    assert stacks.summary(f"{idle}\n\n{plugin}") == "is at /home/me/plug.py:4 in loss"
    assert stacks.summary(idle) == "has no thread at work"
    assert stacks.summary(waits).startswith("waits for other ranks") and "agree.py:5" in stacks.summary(waits)
    assert stacks.summary(hangs) == "is at /x/verl/worker/execute.py:7 in update"
    assert "does not answer" in stacks.summary(
        "process 3 does not answer: it is stopped, or waits in the kernel"
    )


# -- output --------------------------------------------------------------------------------------------------


@pytest.fixture
def full():
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    handle = os.open("/dev/full", os.O_WRONLY)
    yield open(handle, "w", closefd=False)  # noqa: SIM115
    os.close(handle)


def test_what_cannot_be_printed_is_dropped(full) -> None:
    with pytest.raises(OSError, match="No space left"):
        print("x", file=full, flush=True)
    stream = Spared(full)
    for _ in range(100):
        print("x" * 1000, file=stream, flush=True)  # type: ignore[arg-type]
    assert stream.fileno() == full.fileno() and not stream.isatty()


def test_both_streams_are_spared_once(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    processes.spare()
    once = sys.stdout
    processes.spare()
    assert sys.stdout is once and isinstance(sys.stderr, Spared)
    print("heard")
    assert capsys.readouterr().out == "heard\n"


def test_a_signal_is_noted_though_nobody_can_be_told(full) -> None:
    kept = os.dup(2)
    try:
        with interrupt.handled(), interrupt.patient():
            os.dup2(full.fileno(), 2)
            os.kill(os.getpid(), signal.SIGTERM)
            assert interrupt.noted()
    finally:
        os.dup2(kept, 2)
        os.close(kept)
