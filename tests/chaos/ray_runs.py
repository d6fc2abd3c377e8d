"""What chaos tests of Ray runs share: a short run on a cluster, and looks at what it has written so far."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.chaos import ray_plans
from tests.chaos.fork_server import ForkServer, Run
from tests.chaos.fork_server import until as waited_for
from tests.runs import TinyRun, records

WORDS = (
    "trainer.nnodes=2",
    "trainer.n_gpus_per_node=1",
    "trainer.total_training_steps=2",
    "trainer.test_freq=-1",
    "trainer.val_before_train=False",
    "data.max_response_length=12",
)
LIMIT_S = 60
"""Within so many seconds a run that cannot go on has to end."""


@contextmanager
def started(server: ForkServer, tiny: TinyRun, address: str, out: Path, *words: str, **more: str) -> Iterator[Run]:
    """The command; it is ended with the block. It prints to OUT.log beside its run folder."""
    words = tiny.overrides(out, *WORDS, *words)
    run = server.start(words, streams=out.parent / f"{out.name}.log", RAY_ADDRESS=address, **more)
    try:
        yield run
    finally:
        run.kill()
        run.wait()


def slow_sampling(folder: Path, mark: Path, seconds: float = 0.25) -> dict[str, str]:
    """The environment that makes a token take so long, a response twelve times as long; `mark` is there once one
    began."""
    return ray_plans.plan(folder / "plug", "slow_sampling", ray_plans.SLOW_SAMPLING, seconds=seconds, mark=mark)


def events(out: Path, kind: str) -> list[dict[str, Any]]:
    """Events of a kind, so far."""
    try:
        lines = (out / "events.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [e for e in map(json.loads, lines) if e["event"] == kind]


def reports(out: Path, phase: str) -> list[dict[str, Any]]:
    """What the watchdog has said in a phase, so far."""
    return [event for event in events(out, "watchdog") if event["phase"] == phase]


def until(what: Callable[[], Any], run: Run, out: Path, timeout: float = 240) -> Any:
    """What `what` gives once it is true; the run must go on until then."""
    end = time.monotonic() + timeout
    while not (found := what()):
        assert not run.ended, f"the run ended ({run.status}):\n{log_of(out)[-3000:]}"
        if time.monotonic() >= end:
            run.kill(signal.SIGABRT)  # the fault handler writes where every thread is
            waited_for(lambda: run.ended, 30, pause=0.1)
            raise AssertionError(f"nothing happened for {timeout} s:\n{log_of(out)[-9000:]}")
        time.sleep(0.1)
    return found


def pid_of(out: Path, name: str) -> int:
    """Process of a worker by its name."""
    return next(w["pid"] for w in events(out, "workers")[-1]["workers"] if w["name"] == name)


def steps_logged(out: Path) -> int:
    """The last step in metrics.jsonl."""
    path = out / "metrics.jsonl"
    return max(records(out), default=0) if path.exists() else 0


def responses(out: Path, step: int) -> list[tuple[str, int]]:
    """(group, number) of each response of a step."""
    lines = (out / f"trajectories/{step}.jsonl").read_text().splitlines()
    return sorted((row["uid"], row["index"]) for row in map(json.loads, lines))


def nothing_lost(out: Path, steps: Sequence[int]) -> None:
    """Each of these steps has every response of every group once, sampled with the weights that were then current."""
    found = records(out)
    for step in steps:
        rows = responses(out, step)
        assert len(rows) == len(set(rows)) == 12, "every response of every group, once"
        assert found[step]["training/rollout_logprob_abs_diff/max"] < 1e-4, "sampled with the current weights"


def replaced_once(out: Path) -> dict[str, Any]:
    """One sampler died and was replaced, and was asked again for what it owed; returns the event of its death."""
    died, again = events(out, "sampler_died"), events(out, "sampler_restarted")
    assert len(died) == 1 and died[0]["unfinished"] > 0, died
    assert len(again) == 1 and again[0]["asked_again"] == died[0]["unfinished"]
    assert not events(out, "rollout_failure")
    assert 1 <= died[0]["step"] == again[0]["step"], "the step under way is named"
    return died[0]


def log_of(out: Path) -> str:
    """What a run has printed."""
    return (out.parent / f"{out.name}.log").read_text()


def last_word(out: Path) -> str:
    """The last line that the run itself printed."""
    return next(line for line in reversed(log_of(out).splitlines()) if line.startswith("verl: "))
