"""kill -9 at random moments of saving: the newest complete checkpoint is always there, with the right content."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from verl.checkpoint import newest

KILLS = 25
WRITER = """
import random, sys
from pathlib import Path
from tests.saving import save
from verl.checkpoint import newest

root = Path(sys.argv[1])

def content(step, name, size):
    return random.Random(f"{step}/{name}").randbytes(size)

def part(step, name, count, size):
    def write(directory):
        for i in range(count):
            (directory / f"{name}_{i}.bin").write_bytes(content(step, f"{name}_{i}", size))
    return write

found = newest(root)
step = found.step if found else 0
print("ready", step, flush=True)
while True:
    step += 1
    parts = {"actor": part(step, "w", 3, 1_000_000), "state/actor_optim": part(step, "o", 4, 300_000)}
    SAVE
"""
SAVES = {
    "at once": """
    path = save(root, step, parts, loop_state={"mark": step * 7}, keep=2)
    assert path is not None
    print(f"saved {step}", flush=True)
""",
    # While a thread seals this one, the next is filled by the caller; what is announced is what was waited for.
    "in the background": """
    from threading import Thread
    from verl.checkpoint.write import CheckpointWriter
    unsealed = CheckpointWriter(root, step, keep=2)
    if "thread" in globals():
        thread.join()
        print(f"saved {step - 1}", flush=True)
    unsealed.fill(parts, {"mark": step * 7})
    thread = Thread(target=unsealed.seal)
    thread.start()
""",
}


@pytest.mark.parametrize("how", SAVES)
def test_kill_while_saving(tmp_path, how):
    rng = random.Random(0)
    best = 0
    left_overs = 0
    window = 0.12
    for _ in range(KILLS):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER.replace("    SAVE\n", SAVES[how]), str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert child.stdout is not None
        assert child.stdout.readline().split() == ["ready", str(best)]
        time.sleep(rng.uniform(0.0, window))
        child.send_signal(signal.SIGKILL)
        announced = [int(line.split()[1]) for line in child.stdout.read().splitlines() if line.startswith("saved")]
        child.wait()
        left_overs += any(tmp_path.glob("global_step_*.tmp"))
        found = newest(tmp_path)
        floor = max(announced, default=best)
        if found is None:
            assert floor == 0
            window *= 1.5  # a machine too busy to save in that time
            continue
        assert found.step in (floor, floor + 1, *([floor + 2] if how == "in the background" else []))
        assert found.loop_state["mark"] == found.step * 7
        for folder, name, count, size in (
            ("actor", "w", 3, 1_000_000),
            ("state/actor_optim", "o", 4, 300_000),
        ):
            for i in range(count):
                expected = random.Random(f"{found.step}/{name}_{i}").randbytes(size)
                assert (found.part(folder) / f"{name}_{i}.bin").read_bytes() == expected
        assert not list(tmp_path.glob("global_step_*.tmp"))
        best = found.step
    assert best > 0, "no save ever finished: the test did not test anything"
    assert left_overs > 0, "no kill came in the middle of a save: the test did not test anything"
