"""What is printed may be lost without harm: a full disk under the log, a reader that has gone."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from verl import interrupt
from verl.platform import processes
from verl.platform.processes import Spared

FULL = "/dev/full"
pytestmark = pytest.mark.skipif(not os.path.exists(FULL), reason=f"needs {FULL}")


@pytest.fixture
def full():
    handle = os.open(FULL, os.O_WRONLY)
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
