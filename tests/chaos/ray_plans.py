"""Modules that make workers slow or hang, written by a test and imported by every process of a run as plug-ins."""

from __future__ import annotations

from pathlib import Path

SLOW_SAMPLING = """
import time
from verl.engine.rollout.native.engine import NativeEngine

_step = NativeEngine.step

def slow(self):
    time.sleep({seconds})
    _step(self)

NativeEngine.step = slow
"""

HANGING_RANK = """
import time
from verl.worker.train_host import TrainHost

_update, calls = TrainHost.update, [0]

def update(self, *args):
    calls[0] += 1
    if self.rank == {rank} and calls[0] == {call}:
        hang_here()
    return _update(self, *args)

def hang_here():
    time.sleep(600)

TrainHost.update = update
"""


def plan(folder: Path, name: str, text: str, **values: object) -> dict[str, str]:
    """Write the module; returns the environment that makes a run import it."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(text.format(**values))
    return {"PYTHONPATH": str(folder), "VERL_USE_EXTERNAL_MODULES": name}
