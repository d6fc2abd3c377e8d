"""Killing a run at a chosen moment, and what must be true of a run folder whatever happened to it."""

from __future__ import annotations

import json
import os
import random
import selectors
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.fork_server import ENTRY, ForkServer, Run, until
from tests.runs import UNSTABLE

MOMENTS = ("half written", "sealed", "published", "retired", "saved, not logged", "logged")
"""Marks of `tests.chaos.marks` that last no time at all: the run is told to rest there, so that no kill misses them."""


@dataclass(frozen=True)
class Kill:
    """`count` times `where` is marked, then `delay` seconds, then the signal.

    where "": `delay` seconds after the start, or when the third step begins, if that is sooner.
    """

    where: str
    count: int = 1
    delay: float = 0.0
    slow: bool = False


class Marks:
    """The reading end of a run's marks."""

    def __init__(self, path: Path):
        self.path = path
        if not path.exists():
            os.mkfifo(path)
        self._handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._handle, selectors.EVENT_READ)
        self._pending = b""
        self.seen: list[str] = []

    def read(self, timeout: float) -> None:
        """Take what is there, or wait for more up to `timeout` seconds."""
        if not self._selector.select(timeout):
            return
        data = os.read(self._handle, 1 << 16)
        if not data:  # nobody writes: not yet opened, or gone
            time.sleep(min(timeout, 0.002))
            return
        *lines, self._pending = (self._pending + data).split(b"\n")
        self.seen += [line.decode() for line in lines]

    def close(self) -> None:
        """Let the pipe go."""
        self._selector.close()
        os.close(self._handle)


def run_and_kill(
    fork_server: ForkServer, words: list[str], kill: Kill, marks: Path, module: str = ENTRY
) -> tuple[Run, str]:
    """Start the command and kill it as told. Returns it, ended, and the last mark it made ("start-up" if none)."""
    reader = Marks(marks)
    try:
        more = {"VERL_USE_EXTERNAL_MODULES": "tests.chaos.marks", "CHAOS_MARKS": str(marks)}
        run = fork_server.start(words, module=module, **more, CHAOS_SLOW=kill.where if kill.slow else "")
        end = time.monotonic() + 60
        while kill.where and reader.seen.count(kill.where) < kill.count and not run.ended:
            assert time.monotonic() < end, f"{kill} never came: {reader.seen[-5:]}\n{run.stderr[-2000:]}"
            reader.read(0.05)
        end = time.monotonic() + kill.delay
        while kill.where == "" and reader.seen.count("logged") < 2 and time.monotonic() < end:
            reader.read(0.01)
        if kill.where:
            time.sleep(kill.delay)
        run.kill()
        run.wait(10)
        reader.read(0)
        return run, reader.seen[-1] if reader.seen else "start-up"
    finally:
        reader.close()


def sealed_steps(run: Path) -> list[int]:
    """Steps of the checkpoints under their final names."""
    return sorted(int(p.name.rpartition("_")[2]) for p in run.glob("global_step_*") if p.suffix != ".tmp")


def newest_step(run: Path) -> int:
    """The step a restart must go on from: of the newest checkpoint that is sealed, renamed already or not."""
    sealed = [
        int(p.name.split("_")[2].split(".")[0]) for p in run.glob("global_step_*") if (p / "manifest.json").exists()
    ]
    return max(sealed, default=0)


def step_lines(run: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl that are steps; a half-written last line does not count."""
    found = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if "step" in record and "event" not in record:
            found.append(record)
    return found


def responses(run: Path, step: int) -> list[dict[str, Any]]:
    """What the sampled responses of a step were, in order, without clocks."""
    lines = (run / f"trajectories/{step}.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(("timing", "time"))} for line in lines]


def state_files(run: Path, step: int) -> dict[str, bytes | dict[str, Any]]:
    """Every file of a checkpoint by name, as it must be again after any history of kills.

    Left out: the manifest (clock, serial), the index of torch.distributed.checkpoint (a random id), and of loop.json
    the clocks and the settings, which name the folder.
    """
    root = run / f"global_step_{step}"
    out: dict[str, bytes | dict[str, Any]] = {}
    for path in sorted(p for p in root.rglob("*") if p.is_file()):
        name = path.relative_to(root).as_posix()
        if name == "state/loop.json":
            loop = json.loads(path.read_text())
            loop.pop("settings", None)
            if "record" in loop:
                loop["record"] = {
                    k: v for k, v in loop["record"].items() if not k.startswith((*UNSTABLE, "train/time"))
                }
            out[name] = loop
        elif path.name not in ("manifest.json", ".metadata"):
            out[name] = path.read_bytes()
    return out


def processes_with(variable: str, value: str) -> list[int]:
    """Pids of living processes that have the environment variable."""
    wanted = f"{variable}={value}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def left_in_shared_memory(before: set[str]) -> set[str]:
    """What came after `before` into the shared memory of this machine, which others use too, and no living process
    holds."""
    new, held = set(os.listdir("/dev/shm")) - before, b""
    for entry in Path("/proc").glob("[0-9]*/maps") if new else ():
        try:
            held += entry.read_bytes()
        except OSError:
            continue
    return {name for name in new if f"/dev/shm/{name}".encode() not in held}


def assert_none_left(variable: str, value: str) -> None:
    """No process of the killed runs lives on."""
    until(lambda: not processes_with(variable, value), timeout=10, pause=0.1)


def one_of_each(rng: random.Random) -> list[Kill]:
    """Eight kills, in random order, that meet every part of a run, none of them by chance."""
    kills = [
        Kill("", delay=0.02),
        *(Kill(where, slow=True) for where in ("gen", "update_actor", *MOMENTS[:5])),
    ]
    rng.shuffle(kills)
    return kills


def moments(rng: random.Random) -> list[Kill]:
    """Twenty kills that meet every part of a run, in random order and with random delays."""
    kills = [Kill("", delay=rng.uniform(*span)) for span in ((0.02, 0.15), (0.05, 1.2), (0.05, 1.2))]
    for phase in ("gen", "reward", "old_log_prob", "ref", "update_actor", "update_weights"):
        kills.append(Kill(phase, rng.randint(1, 2), rng.uniform(0, 0.04)))
    kills += [Kill(phase, rng.randint(1, 2), slow=True) for phase in ("gen", "update_actor")]
    kills.append(Kill("testing", 1, rng.uniform(0, 0.04)))
    kills += [Kill("save_checkpoint", 1, rng.uniform(0, 0.05)) for _ in range(2)]
    kills += [Kill(moment, 1, rng.uniform(0, 0.1), slow=True) for moment in MOMENTS]
    rng.shuffle(kills)
    return kills
