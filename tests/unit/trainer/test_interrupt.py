"""Signals: the first waits for a safe point while a run is patient, the second does not, handlers come back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from verl import interrupt
from verl.checkpoint.write import CheckpointWriter
from verl.tracking.timer import Phases

ROOT = Path(__file__).parents[3]


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_impatient_is_at_once(number) -> None:
    with interrupt.handled():
        assert not interrupt.noted()
        with pytest.raises(KeyboardInterrupt):
            send(number)
        assert interrupt.noted()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_waits_for_a_phase(number, capfd) -> None:
    phases = Phases()
    with pytest.raises(KeyboardInterrupt), interrupt.handled(), interrupt.patient():
        with phases("update"):
            send(number)
            reached = interrupt.noted()
        with phases("save"):
            pytest.fail("the next phase begins after a stop was asked for")
    assert reached and number.name in capfd.readouterr().err


STRAY = """
import os, signal, subprocess
from verl import interrupt
with interrupt.handled():
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
        os.kill(os.getpid(), number)
        print(subprocess.run(["/bin/sh", "-c", f"kill -{number.value} $$"]).returncode == -number)
"""


def test_stray_signals_do_not_end_a_run_but_what_it_starts() -> None:
    done = subprocess.run([sys.executable, "-c", STRAY], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["True"] * 3 and done.stderr.count("from another process") == 3, done


def test_the_second_is_at_once() -> None:
    seen = []
    with pytest.raises(KeyboardInterrupt), interrupt.handled(), interrupt.patient():
        send(signal.SIGINT)
        seen.append("first")
        send(signal.SIGINT)
        seen.append("second")
    assert seen == ["first"]


def test_everything_is_put_back() -> None:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with interrupt.handled(), interrupt.patient():
        send(signal.SIGTERM)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    assert not interrupt.noted(), "what runs later in this process was told nothing"
    interrupt.check()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_library_that_brings_handlers_of_its_own_does_not_keep_them(number) -> None:
    with interrupt.handled(), interrupt.patient():
        with interrupt.kept():
            signal.signal(number, signal.SIG_IGN)
        send(number)
        assert interrupt.noted()


@pytest.mark.parametrize(
    ("entry", "number"),
    [
        ("main_ppo", signal.SIGINT),
        ("main_ppo", signal.SIGTERM),
        ("main_ppo", signal.SIGHUP),
        ("sft_trainer", signal.SIGINT),
    ],
)
def test_before_there_is_a_run_a_signal_ends_the_command_without_a_traceback(entry, number, tmp_path) -> None:
    (tmp_path / "interrupting.py").write_text(f"import os; os.kill(os.getpid(), {int(number)})")
    command = [sys.executable, "-m", f"verl.trainer.{entry}", "--check"]
    environment = os.environ | {
        "VERL_USE_EXTERNAL_MODULES": "interrupting",
        "PYTHONPATH": f"{ROOT}:{tmp_path}",
    }
    command.append(("model" if entry == "sft_trainer" else "actor_rollout_ref.model") + ".path=/nowhere")
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (130, "verl: interrupted\n")


# -- how to go on --------------------------------------------------------------------------------------------


def save(folder: Path, step: int) -> None:
    writer = CheckpointWriter(folder, step)
    writer.fill({}, {})
    assert writer.seal()


def stopped_at_once(config, tracking) -> None:
    send(signal.SIGINT)


def stopped_after_a_checkpoint(config, tracking) -> None:
    save(tracking.run_dir, 2)
    send(signal.SIGINT)


def failed(config, tracking) -> None:
    raise RuntimeError("broken")


FIRST = "interrupted before this run saved a checkpoint (trainer.save_freq): the same command starts from the beginning"
GO_ON = "Run the same command again{} to go on from {{folder}}/global_step_{}"


@pytest.mark.parametrize(
    ("mode", "steps", "work", "words"),
    [
        ("auto", [], stopped_at_once, FIRST),
        ("auto", [3], stopped_at_once, GO_ON.format("", 3)),
        ("auto", [3], stopped_after_a_checkpoint, GO_ON.format("", 2)),
        ("auto", [3], failed, GO_ON.format("", 3)),
        ("disable", [], stopped_at_once, FIRST),
        ("disable", [3], stopped_at_once, FIRST),
        ("disable", [3], failed, "RuntimeError: broken\n"),
        ("disable", [3], stopped_after_a_checkpoint, GO_ON.format(" with trainer.resume_mode=auto", 2)),
        ("disable", [2], stopped_after_a_checkpoint, GO_ON.format(" with trainer.resume_mode=auto", 2)),
        ("resume_path", [1, 3], stopped_at_once, GO_ON.format("", 1)),
        ("resume_path", [1, 3], stopped_after_a_checkpoint, GO_ON.format(" with trainer.resume_mode=auto", 2)),
    ],
)
def test_what_a_run_offers_to_go_on_from_is_its_own(tmp_path, capsys, mode, steps, work, words) -> None:
    """What an earlier run left in the folder is offered only where the same command goes on from it."""
    from verl.config import load
    from verl.trainer.run import run_guarded

    for step in steps:
        save(tmp_path, step)
    argv = [f"trainer.default_local_dir={tmp_path}", "trainer.logger=[]", f"trainer.resume_mode={mode}"]
    argv += [f"trainer.resume_from_path={tmp_path}/global_step_1"] * (mode == "resume_path")
    assert run_guarded(load(argv), f"{__name__}:{work.__name__}") == (1 if work is failed else 130)
    last = capsys.readouterr().err.splitlines(keepends=True)[-1]
    assert words.format(folder=tmp_path) in last and ("go on from" in last) == ("go on from" in words)
