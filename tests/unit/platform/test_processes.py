"""Which process a number means, whatever happens to the clock; what is printed may be lost without harm
(a full disk under the log, a reader that has gone)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest

from verl import interrupt
from verl.platform import processes
from verl.tracking.console import LossyStream, spare


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


def test_a_process_that_ends_while_it_is_looked_at_is_no_trouble(tmp_path, monkeypatch, capfd) -> None:
    """A run with a Ray of its own would print what `ls` says of it; `grep` names here one that is gone."""
    folder, grep = tmp_path / "ray", tmp_path / "grep"
    folder.mkdir()
    found = 'case "$*" in *ray::*) echo /proc/4194305/cmdline;; *) exec ' + str(shutil.which("grep")) + ' "$@";; esac'
    grep.write_text(f"#!/bin/sh\n{found}\n")
    grep.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    processes.sweep_at_exit("cmdline", f"{folder}/", str(folder)).communicate()
    assert not folder.exists() and capfd.readouterr() == ("", "")


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
    stream = LossyStream(full)
    for _ in range(100):
        print("x" * 1000, file=stream, flush=True)  # type: ignore[arg-type]
    assert stream.fileno() == full.fileno() and not stream.isatty()


def test_both_streams_are_spared_once(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    spare()
    once = sys.stdout
    spare()
    assert sys.stdout is once and isinstance(sys.stderr, LossyStream)
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
