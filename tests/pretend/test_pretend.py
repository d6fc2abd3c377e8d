"""The path on CUDA devices, on the pretend one (`tests.pretend`): the device's own tests, its counts, whole steps."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import environment

# Left out: handles of memory and sharded offload, for which these tensors lack storages; repeats that take long.
CHOSEN = "not (handles or offload and sharded or deterministic or float32 and (graphs or agree) or sleeping and False)"
PARTS = {
    "engines": [*(f"tests/gpu/test_{name}.py" for name in ("kernels", "engine_flash", "training")), "-k", CHOSEN],
    "sampler": ["tests/gpu/test_sampler.py", "-k", CHOSEN],
    "counts and steps": ["tests/pretend/cases.py", "tests/unit/engine/native/decode_counts.py"],
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="the pretend device needs a C++ compiler")
@pytest.mark.parametrize("part", PARTS)
def test_the_path_on_cuda(part: str) -> None:
    command = [sys.executable, "-m", "tests.pretend", "pytest", "-p", "no:cacheprovider", *PARTS[part]]
    root = Path(__file__).parents[2]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=root, env=environment(), check=False)
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout[-6000:]
