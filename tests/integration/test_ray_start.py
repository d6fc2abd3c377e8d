"""`examples/ray_start.sh`: a head that a driver finds, and what it says when it cannot start."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from tests.ranks import free_port

pytest.importorskip("ray")
SCRIPT = Path(__file__).parents[2] / "examples/ray_start.sh"
MARK = "VERL_TEST_RAY_START"


def start(
    home: Path, mark: str, *, path: str | None = None, **settings: str
) -> subprocess.CompletedProcess[str]:
    """The script with nothing set but these; Ray's command is the one beside this Python."""
    own = Path(sys.executable).parent
    dropped = ("RAY_", "MASTER_", "NNODES", "GPUS_", "NPUS_", "SOCKET_", "NODE_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    env |= {"PATH": path or f"{own}{os.pathsep}{env['PATH']}", "HOME": str(home), MARK: mark, **settings}
    return subprocess.run(
        [shutil.which("bash") or "bash", str(SCRIPT)], env=env, capture_output=True, text=True, timeout=300
    )


def marked(environment: Mapping[str, str], mark: str) -> bool:
    return environment.get(MARK) == mark


@pytest.fixture
def mark() -> Iterator[str]:
    """A word in the environment of all that the script starts; what is still there afterwards is ended."""
    word = secrets.token_hex(8)
    yield word
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and marked(process.environ(), word):
                process.kill()
        except psutil.Error:
            continue


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "MASTER_ADDR is not set"),
        ({"MASTER_ADDR": "127.0.0.1", "GPUS_PER_NODE": "1", "NPUS_PER_NODE": "1"}, "not both"),
        ({"MASTER_ADDR": "127.0.0.1", "SOCKET_IFNAME": "none7"}, "interface none7 has no IPv4 address"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, mark: str, settings: dict[str, str], words: str) -> None:
    done = start(tmp_path, mark, **settings)
    assert done.returncode == 2 and words in done.stderr, done.stderr


@pytest.mark.slow
def test_a_head_on_one_node(tmp_path: Path, mark: str) -> None:
    port = str(free_port())
    done = start(tmp_path, mark, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 nodes are here" in done.stdout and f"RAY_ADDRESS=127.0.0.1:{port}" in done.stdout
    token = tmp_path / ".ray/auth_token"
    assert token.is_file() and not token.stat().st_mode & 0o077, "the token is its owner's alone"
    again = start(tmp_path, mark, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    assert again.returncode == 2 and f"port {port} of 127.0.0.1 is taken" in again.stderr
