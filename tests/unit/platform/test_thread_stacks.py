"""Stacks of another process: one that computes, one that is stopped, one that is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from unittest.mock import patch

import pytest

from verl.platform import thread_stacks

CHILD = """
import sys, time
from verl.platform import thread_stacks
thread_stacks.register()
def the_place_where_it_hangs():
    print("ready", flush=True)
    time.sleep(60)
the_place_where_it_hangs()
"""


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path) -> None:
    """Any process that registers removes the files of those that have ended."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def child():
    process = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()


def test_a_process_says_where_it_stands_again_and_again(child) -> None:
    for _ in range(2):
        text = thread_stacks.ask(child.pid)
        assert text.count("in the_place_where_it_hangs") == 1
    assert child.poll() is None, "asking does no harm"


def test_a_question_needs_no_signal_which_could_end_a_process_at_work(child) -> None:
    """faulthandler's signal reads frames that change meanwhile: about one answer in a few hundred ended the process."""
    with patch("os.kill", side_effect=AssertionError("a signal")):
        assert all("the_place_where_it_hangs" in thread_stacks.ask(child.pid) for _ in range(3))


def test_an_interpreter_that_is_stuck_says_where() -> None:
    """`PyDLL` keeps the interpreter's lock."""
    stuck = CHILD.replace("time.sleep(60)", "import ctypes; ctypes.PyDLL(None).sleep(60)")
    process = subprocess.Popen([sys.executable, "-c", stuck], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        assert "in the_place_where_it_hangs" in thread_stacks.ask(process.pid, timeout=1.5)
    finally:
        process.kill()
        process.wait()


def test_a_stopped_process_and_one_that_is_gone(child) -> None:
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert "does not answer" in thread_stacks.ask(child.pid, timeout=0.3)
    child.kill()
    child.wait()
    time.sleep(0.05)
    assert "is gone" in thread_stacks.ask(child.pid)
    assert "is gone" in thread_stacks.ask(child.pid), "its file is removed"


def test_a_later_process_with_the_number_is_not_asked_for_it_would_end(child) -> None:
    """SIGUSR1 ends a process that does not expect it."""
    path = thread_stacks._path(child.pid)
    child.kill()
    child.wait()
    later = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        time.sleep(0.2)
        path = path.rename(path.with_name(path.name.replace(str(child.pid), str(later.pid))))
        assert "is gone" in thread_stacks.ask(later.pid)
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
    assert thread_stacks.summary(f"{idle}\n\n{plugin}") == "is at /home/me/plug.py:4 in loss"
    assert thread_stacks.summary(idle) == "has no thread at work"
    assert thread_stacks.summary(waits).startswith("waits for other ranks") and "agree.py:5" in thread_stacks.summary(
        waits
    )
    assert thread_stacks.summary(hangs) == "is at /x/verl/worker/execute.py:7 in update"
    assert "does not answer" in thread_stacks.summary(
        "process 3 does not answer: it is stopped, or waits in the kernel"
    )
