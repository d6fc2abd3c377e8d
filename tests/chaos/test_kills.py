"""kill -9 of any process of a run at any moment: the run goes on, or ends within a minute, names what died and is
resumed; nothing of it is left. The runs see images and take turns with a tool that draws.

CHAOS_KILLS: how many moments of each kind, spread over the whole of a run; CHAOS_SEED: which; CHAOS_RECORD: a file that
keeps what came of them.
"""

from __future__ import annotations

import importlib.util
import json
import operator
import os
import random
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import ray_cluster
from tests.chaos.fork_server import ForkServer, Run, until
from tests.chaos.killing import left_in_shared_memory, processes_with
from tests.chaos.ray_runs import log_of, responses, steps_logged
from tests.integration.test_agent_runs import ROLLOUT, SEES, WORDS
from tests.integration.test_vision_runs import VisionRun
from tests.runs import records, weights
from tests.tiny import SPECIAL, VISION, tiny_tokenizer, tiny_vision_model
from tests.unit.rollout.test_adapters import fake_python
from verl.engine.registry import EnginePackageError
from verl.engine.rollout.vllm import ENGINE

KILLS = int(os.environ.get("CHAOS_KILLS", "2"))
# 61 seconds pass where the head dies while Ray itself starts, which says so after a minute.
NAMED_S, GONE_S = 65.0, 30.0
STEPS = 3
TOOLS = """
import time
from tests.integration.test_vision_runs import drawn
from verl.tools.function_tool import function_tool
from verl.tools.schemas import ToolResponse

@function_tool
def calculate(expression: str) -> ToolResponse:
    '''Draws.

    Args:
        expression: Like 3*4.
    '''
    time.sleep(0.02)
    size = int(expression.split("*")[0])
    return ToolResponse(f"{size} drawn", image=[drawn(size)] * (size % 2))
"""
RAY = ("trainer.n_gpus_per_node=2",)
VLLM = (f"{ROLLOUT}name=vllm", f"{ROLLOUT}dtype=float32", f"{ROLLOUT}limit_images=8")
VLLM += (f"+{ROLLOUT}engine_kwargs.vllm.disable_mm_preprocessor_cache=True",)


@dataclass(frozen=True)
class Kind:
    """What is killed. process: in its command line. said: what a run that ends says of it. words: of the run. exact: a
    run that was resumed is the same bit for bit."""

    process: str
    said: str
    words: tuple[str, ...] = ()
    exact: bool = False


KINDS = {
    "driver": Kind("", "", (f"{ROLLOUT}agent.num_workers=0",), exact=True),
    "scoring worker": Kind("verl.reward.scoring_process", "SIGKILL"),
    "loop process": Kind("verl.rollout.loop_processes", "SIGKILL"),
    "environment server": Kind("/server/python", "ended with status -9"),
    "training rank": Kind("ray::RayWorker", r"training worker \d", RAY),
    "sampler": Kind("ray::RolloutWorker", r"sampler \d", RAY),
    "Ray's head": Kind("gcs_server", "the head of the Ray cluster|GCS", RAY),
    "driver of Ray workers": Kind("", "", RAY),
    "vLLM's engine": Kind("multiprocessing.forkserver", "vLLM", VLLM),
    "driver of vLLM": Kind("", "", VLLM),
    "vLLM's engine below Ray": Kind("multiprocessing.forkserver", "vLLM|sampler", (*VLLM, *RAY)),
}


@dataclass
class Found:
    """What came of kills of a kind. moments: steps that were done, with the part of the next one."""

    kills: int = 0
    went_on: int = 0
    named: int = 0
    resumed: int = 0
    resumed_bit_for_bit: int = 0
    processes_left: int = 0
    left_in_shared_memory: int = 0
    failures: int = 0
    longest_s_until_the_end: float = 0.0
    longest_s_until_all_are_gone: float = 0.0
    moments: list[float] = field(default_factory=list)

    def add(self, other: dict[str, Any]) -> None:
        """Counts and lists together, of seconds the longest."""
        for name, value in vars(self).items():
            both = max if isinstance(value, float) else operator.add
            setattr(self, name, both(value, other.get(name, type(value)())))


class Runs:
    """Runs of one kind: their words, their processes, what they leave."""

    def __init__(self, name: str, server: ForkServer, folder: Path, seed: int):
        self.kind, self.server, self.folder = KINDS[name], server, folder
        self.rng, self.found = random.Random(f"{seed}/{name}"), Found()
        self.tiny = VisionRun(folder / "tiny")
        if "vllm" in name.lower():
            self.tiny.model = tiny_vision_model(folder / "tiny/heads", head=32)
        tiny_tokenizer(self.tiny.model, template=SEES, special=SPECIAL + VISION)
        (folder / "tools.py").write_text(TOOLS)
        self._servers, self._variables = [psutil.Process(server.pid)], {}
        self._begin(name)
        self._before = {p.pid for p in self._forked()}

    def _begin(self, name: str) -> None:
        plugs = []
        self._more = [
            f"{ROLLOUT}agent.num_workers=1",
            "data.max_prompt_length=500",
            f"{ROLLOUT}stop_token_ids={list(range(32, 128))}",
        ]
        if RAY[0] in self.kind.words:
            pytest.importorskip("ray")
            plugs.append("tests.ray_own")
            self._variables |= ray_cluster.forking(self.server)
        if VLLM[0] in self.kind.words:
            vllm_processes = forked_vllm()
            self._variables |= vllm_processes.variables()
            plugs.append(vllm_processes.__name__)
            self._servers.append(psutil.Process(vllm_processes._own._forkserver_pid))
        if name == "environment server":
            (self.folder / "server").mkdir()
            path = fake_python(self.folder / "server")
            self._more += [
                f"{ROLLOUT}agent.environment.name=verifiers",
                f"{ROLLOUT}agent.environment.path={path}",
            ]
            self._more += [f"{ROLLOUT}agent.environment.kwargs.taskset=a"]
        self._variables["VERL_USE_EXTERNAL_MODULES"] = ",".join(plugs)

    def start(self, out: Path) -> Run:
        tools = f"{ROLLOUT}multi_turn.function_tool_path={self.folder / 'tools.py'}"
        own = [tools, f"trainer.total_training_steps={STEPS}", *self._more, *self.kind.words]
        words = self.tiny.overrides(out, *WORDS, *own)
        self.shared = set(os.listdir("/dev/shm"))
        return self.server.start(
            words,
            streams=out.parent / f"{out.name}.log",
            RAY_ADDRESS=None,
            CHAOS_RUN=str(out),
            **self._variables,
        )

    def _forked(self) -> list[psutil.Process]:
        return [p for server in self._servers for p in server.children(recursive=True)]

    def victims(self, run: Run) -> list[psutil.Process]:
        """Those of the kind that live now."""
        if not self.kind.process:
            return [] if run.ended else [psutil.Process(run.pid)]
        found = []
        for process in self._forked():
            try:
                if process.pid not in self._before and self.kind.process in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def whole(self) -> list[float]:
        """A run without a kill; returns how many seconds passed from the first process to kill to the end of step 1, to
        that of step 2, …"""
        run, out, ends = self.start(self.folder / "whole"), self.folder / "whole", list[float]()
        until(lambda: run.ended or self.victims(run), timeout=120)
        assert not run.ended, f"there was nothing to kill:\n{log_of(out)[-4000:]}"
        began = time.monotonic()
        while len(ends) < STEPS and not run.ended:
            until(lambda: run.ended or steps_logged(out) > len(ends), timeout=400, pause=0.1)
            ends.append(time.monotonic() - began)
        assert run.wait(400) == 0, log_of(out)[-4000:]
        return [end - before for end, before in zip(ends, [0.0, *ends], strict=False)]

    def kill(self, number: int, steps: list[float]) -> str:
        """Kill one at a moment of the `number`th part of a run, and look at what comes of it; returns what is wrong
        with that."""
        moment, part = divmod((number + self.rng.random()) / KILLS * len(steps), 1.0)
        for attempt in range(9):  # the step may be over sooner than the one that was measured
            step = max(moment - attempt // 4, 0.0)
            run = self.start(out := self.folder / f"run{number}.{attempt}")
            there = lambda run=run, out=out, step=step: steps_logged(out) >= step and self.victims(run)  # noqa: E731
            until(lambda run=run, there=there: run.ended or there(), timeout=400, pause=0.01)
            time.sleep(part * steps[int(step)] * 0.7 ** (attempt + 1))
            # One that looks at the environment before the first step may have ended.
            until(lambda run=run: run.ended or self.victims(run), timeout=400, pause=0.01)
            if victims := self.victims(run):
                break
            assert run.wait() == 0, f"it ended without a kill:\n{log_of(out)[-3000:]}"
        assert victims, "nine runs were over before there was a moment to kill"
        victim = self.rng.choice(victims)
        what = f"{victim.pid} {' '.join(victim.cmdline())[-60:]}"
        victim.kill()
        killed = time.monotonic()
        self.found = Found(kills=1, moments=[round(step + part, 2)])
        try:
            self._outcome(run, out, killed)
        except AssertionError as error:
            self.found.failures += 1
            return f"{out.name}, step {step + part:.2f}, {what}: {str(error)[-3000:]}"
        return ""

    def _outcome(self, run: Run, out: Path, killed: float) -> None:
        found, driver = self.found, not self.kind.process
        status = run.wait(400)
        if status:
            found.longest_s_until_the_end = max(found.longest_s_until_the_end, round(time.monotonic() - killed, 1))
            assert driver or time.monotonic() - killed < NAMED_S, f"it ended late:\n{log_of(out)[-2000:]}"
        self._nothing_left(out, time.monotonic())
        if status and not driver:
            assert re.search(self.kind.said, last_word(out)), log_of(out)[-2500:]
            found.named += 1
        if status:
            again = self.start(out)
            assert again.wait(400) == 0, log_of(out)[-3000:]
            self._nothing_left(out, time.monotonic())
            found.resumed += 1
            same = weights(out, STEPS) == weights(self.folder / "whole", STEPS)
            found.resumed_bit_for_bit += same
            assert same or not self.kind.exact, "it was resumed and is not the same bit for bit"
        else:
            found.went_on += 1
        assert sorted(records(out)) == list(range(1, STEPS + 1)), sorted(records(out))
        for step in range(1, STEPS + 1):
            rows = responses(out, step)
            assert len(rows) == len(set(rows)) == 12, f"step {step} has {rows}"

    def _nothing_left(self, out: Path, ended: float) -> None:
        """Within GONE_S of the end."""

        def left() -> tuple[list[Any], set[str]]:
            forked = {p.pid for p in self._forked()} - self._before
            return sorted({*forked, *processes_with("CHAOS_RUN", str(out))}), left_in_shared_memory(self.shared)

        while any(left()) and time.monotonic() - ended < GONE_S:
            time.sleep(0.1)
        self.found.longest_s_until_all_are_gone = max(
            self.found.longest_s_until_all_are_gone, round(time.monotonic() - ended, 1)
        )
        processes, files = left()
        self.found.processes_left += len(processes)
        self.found.left_in_shared_memory += len(files)
        assert not processes and not files, f"left: {[describe(pid) for pid in processes]}, {files}"


def describe(pid: int) -> str:
    try:
        return f"{pid} {' '.join(psutil.Process(pid).cmdline()).strip()[-100:]}"
    except psutil.Error:
        return f"{pid}, which ended"


def last_word(out: Path) -> str:
    """From the last line on that the run itself printed."""
    return log_of(out).rpartition("\nverl: ")[2]


def forked_vllm() -> Any:
    """tests.vllm_processes, its server with this process's path. Skips where vLLM cannot be used with images."""
    try:
        ENGINE.installed()
    except EnginePackageError as error:
        pytest.skip(str(error))
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("vLLM reads models that see images with torchvision, which is not on this process's path")
    from tests import vllm_processes

    vllm_processes.variables()
    return vllm_processes


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", KINDS)
def test_a_process_killed_at_any_moment_is_named_or_made_good(
    name: str, fork_server: ForkServer, tmp_path: Path
) -> None:
    seed = int(os.environ.get("CHAOS_SEED") or random.randrange(10**6))
    runs, wrong = Runs(name, fork_server, tmp_path, seed), list[str]()
    steps = runs.whole()
    for number in range(KILLS):
        wrong.append(runs.kill(number, steps))
        print(wrong[-1])
        if path := os.environ.get("CHAOS_RECORD"):
            keep(Path(path), name, runs.found)
    assert not any(wrong), f"CHAOS_SEED={seed}\n" + "\n\n".join(filter(None, wrong))


def keep(path: Path, name: str, found: Found) -> None:
    """Add what was found to the record."""
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    found.add(record.get(name, {}))
    record[name] = vars(found)
    path.write_text(json.dumps(record, indent=1) + "\n")
