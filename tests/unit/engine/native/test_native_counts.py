"""The shape of a decode step on CUDA, by counts on the pretend device (`decode_counts`)."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("tests.pretend") is None, reason="there is no pretend device (tests.pretend)"
)
def test_counts_of_a_decode_step() -> None:
    here = Path(__file__)
    command = [sys.executable, "-m", "tests.pretend", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(here.with_name("decode_counts.py"))], cwd=here.parents[4], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
