"""Which process a number means: lives, has ended, was somebody else's; whatever happens to the clock."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from verl.platform import processes


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
