"""Modules that make workers slow or hang, written by a test and imported by every process of a run as plug-ins."""

from __future__ import annotations

from pathlib import Path

SLOW_SAMPLING = """
import time
from pathlib import Path
from verl.engine.rollout.native.engine import NativeEngine

_step = NativeEngine.step

def slow(self):
    Path("{mark}").touch()
    time.sleep({seconds})
    _step(self)

NativeEngine.step = slow
"""

STANDING_STILL = """
import os, signal
from verl.engine.rollout.native.engine import NativeEngine

_step, calls = NativeEngine.step, [0]

def step(self):
    calls[0] += 1
    if calls[0] == {call}:
        try:
            mark = os.open("{mark}", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            pass
        else:
            os.write(mark, str(os.getpid()).encode() + b"\\n")
            os.kill(os.getpid(), signal.SIGSTOP)
    _step(self)

NativeEngine.step = step
"""

HANGING_RANK = """
import time
from verl.workers.training_worker import Worker

_update, calls = Worker.update, [0]

def update(self, *args):
    calls[0] += 1
    if self.rank == {rank} and calls[0] == {call}:
        hang_here()
    return _update(self, *args)

def hang_here():
    time.sleep(600)

Worker.update = update
"""


DYING_RANK = """
import os, signal
from pathlib import Path
from verl.workers.training_worker import Worker

_update, _save, calls = Worker._update, Worker.save, [0]

def die(self, where):
    if self.rank == {rank} and where == "{where}":
        calls[0] += 1
        if calls[0] == {call}:
            Path("{mark}").touch()
            os.kill(os.getpid(), signal.SIGKILL)

def update(self, *args):
    die(self, "update")
    return _update(self, *args)

def save(self, role, part, directory):
    if part == "optimizer":
        die(self, "save")
    return _save(self, role, part, directory)

Worker._update, Worker.save = update, save
"""


HANGING_START = """
import time
from verl.workers.rollout_worker import RolloutWorker

_start = RolloutWorker.start

async def start(self):
    if self.number == {number}:
        hang_in_start()
    return await _start(self)

def hang_in_start():
    time.sleep(600)

RolloutWorker.start = start
"""

SLOW_RESTART = """
import asyncio, os, signal, time
from pathlib import Path
from verl.workers.rollout_worker import RolloutWorker
from verl.workers.training_worker import Worker

_start, _update = RolloutWorker.start, Worker.update
updating, killed, again = Path("{marks}/updating"), Path("{marks}/killed"), Path("{marks}/again")

async def start(self):
    if killed.exists():
        if not again.exists():
            again.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep({seconds})
    return await _start(self)

def update(self, *args):
    if getattr(self, "calls", 0) == 1:
        updating.touch()
        while not killed.exists():
            time.sleep(0.05)
        time.sleep(2)
    self.calls = getattr(self, "calls", 0) + 1
    return _update(self, *args)

RolloutWorker.start, Worker.update = start, update
"""

SHORT_PATIENCE = """
from verl.workers.ray import watch

watch._SILENCE_S, watch._LAST_S = {seconds}, {seconds}
"""

DYING_VLLM = """
import os, signal
from pathlib import Path
from verl.engine.rollout.vllm_engine import VLLMEngine

_generate, calls, mark = VLLMEngine.generate, [0], Path("{mark}")

async def generate(self, *args, **kwargs):
    calls[0] += 1
    if calls[0] == {call} and not mark.exists():
        mark.touch()
        for pid, _ in self._processes:
            if pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
    return await _generate(self, *args, **kwargs)

VLLMEngine.generate = generate
"""

DYING_PART = """
import os, signal
from pathlib import Path
from verl.engine.rollout.vllm.part import VLLMPart

mark = Path("{mark}")

def dead(self):
    if mark.exists():
        mark.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return False

VLLMPart.dead = property(dead)
"""


FAILING_PART = """
from verl.engine.rollout.vllm.part import VLLMPart

def fail(self, *_):
    raise RuntimeError("no memory for this part")

VLLMPart.__init__ = fail
"""


def plan(folder: Path, name: str, text: str, **values: object) -> dict[str, str]:
    """Write the module; returns the environment that makes a run import it."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(text.format(**values))
    return {"PYTHONPATH": str(folder), "VERL_USE_EXTERNAL_MODULES": name}
