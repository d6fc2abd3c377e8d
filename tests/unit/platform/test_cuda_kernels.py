"""Triton's kernels for layers and for the head, by Triton's interpreter, in a process that interprets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import environment


def test_kernels_compute_what_their_references_do() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/gpu/test_kernels.py"]
    variables = environment(TRITON_INTERPRET="1", VERL_TEST_DEVICE="cpu")
    root = Path(__file__).parents[3]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=root, env=variables, check=False)
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout[-4000:]
