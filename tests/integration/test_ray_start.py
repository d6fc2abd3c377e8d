"""`examples/ray_start.sh`: a head that a driver finds, and what it says when it cannot start. The clusters are the
script's."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from tests.chaos.fork_server import ForkServer, until
from tests.ranks import free_port
from tests.ray_cluster import forking
from tests.runs import TinyRun, records

pytest.importorskip("ray")
SCRIPT = Path(__file__).parents[2] / "examples/ray_start.sh"
MARK = "VERL_TEST_RAY_START"
SHORT = (
    "trainer.nnodes=2",
    "trainer.n_gpus_per_node=1",
    "trainer.total_training_steps=1",
    "trainer.test_freq=-1",
)


FORKED = """
import sys
if any(word.endswith("/ray") for word in sys.orig_argv):
    import tests.ray_own
"""


def begin(home: Path, mark: str, **settings: str) -> subprocess.Popen[str]:
    """The script with nothing set but these; Ray's command is the one beside this Python."""
    own = Path(sys.executable).parent
    dropped = ("RAY_", "MASTER_", "NNODES", "GPUS_", "NPUS_", "SOCKET_", "NODE_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    env |= {"PATH": f"{own}{os.pathsep}{env['PATH']}", "HOME": str(home), MARK: mark, **settings}
    command = [shutil.which("bash") or "bash", str(SCRIPT)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def start(home: Path, mark: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """`begin`, to its end."""
    run = begin(home, mark, **settings)
    out, err = run.communicate(timeout=300)
    return subprocess.CompletedProcess(run.args, run.returncode, out, err)


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
        (
            {"MASTER_ADDR": "no-such-node.invalid"},
            "MASTER_ADDR=no-such-node.invalid means no IPv4 address here",
        ),
        ({"MASTER_ADDR": "a..b"}, "MASTER_ADDR=a..b means no IPv4 address here"),
        (
            {"MASTER_ADDR": "localhost", "NNODES": "2"},
            "MASTER_ADDR=localhost means 127.0.0.1 here, which no other",
        ),
        ({"MASTER_ADDR": "127.0.0.1", "NODE_ADDR": "a..b"}, "NODE_ADDR=a..b means no IPv4 address here"),
        ({"MASTER_ADDR": "127.0.0.1", "SOCKET_IFNAME": "none7"}, "interface none7 has no IPv4 address"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, mark: str, settings: dict[str, str], words: str) -> None:
    done = start(tmp_path, mark, **settings)
    assert done.returncode == 2 and words in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.long
def test_a_head_on_one_node(tmp_path: Path, mark: str) -> None:
    port = str(free_port())
    token = tmp_path / ".ray/auth_token"
    token.parent.mkdir()
    token.write_text(secrets.token_hex(32))
    token.chmod(0o644)
    done = start(tmp_path, mark, MASTER_ADDR="localhost", MASTER_PORT=port)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 nodes are here" in done.stdout and f"RAY_ADDRESS=127.0.0.1:{port}" in done.stdout
    assert not token.stat().st_mode & 0o077, "the token is its owner's alone"
    again = start(tmp_path, mark, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    assert again.returncode == 2 and f"port {port} of 127.0.0.1 is taken" in again.stderr


@pytest.mark.slow
@pytest.mark.long
def test_a_head_and_a_worker_train_together(tmp_path: Path, mark: str, fork_server: ForkServer) -> None:
    """Two addresses of this machine stand for two nodes; the token is copied by hand, as between machines. What the
    nodes start is forked from `fork_server`."""
    home, other, out = tmp_path / "home", tmp_path / "other", tmp_path / "out"
    home.mkdir()
    (home / "sitecustomize.py").write_text(FORKED)
    common = {
        **forking(fork_server),
        "PYTHONPATH": f"{home}:{SCRIPT.parents[1]}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "NNODES": "2",
        "WAIT_SECONDS": "120",
    }
    head = begin(home, mark, **common)
    nobody = start(other, mark, **common, NODE_ADDR="127.0.0.2")
    assert nobody.returncode == 2 and "no token here: copy ~/.ray/auth_token" in nobody.stderr, nobody.stderr
    token = home / ".ray/auth_token"
    until(lambda: token.is_file() and token.stat().st_size)
    (other / ".ray").mkdir(parents=True)
    shutil.copy(token, other / ".ray/auth_token")
    worker = start(other, mark, **common, NODE_ADDR="127.0.0.2")
    assert worker.returncode == 0, worker.stdout + worker.stderr
    said, problem = head.communicate(timeout=200)
    assert head.returncode == 0 and "2 of 2 nodes are here" in said, said + problem
    address = f"127.0.0.1:{common['MASTER_PORT']}"
    words = TinyRun(tmp_path / "tiny").overrides(out, *SHORT)
    for mode, said in (("disabled", "asks for its token"), ("token", "a token, and none is here")):
        refused = fork_server.run(
            words, RAY_ADDRESS=address, HOME=str(tmp_path), RAY_AUTH_MODE=mode, RAY_NUM_REDIS_GET_RETRIES="1"
        )
        assert refused.status == 2 and said in refused.stderr, refused.stderr[-2000:]
    done = fork_server.run(words, timeout=240, RAY_ADDRESS=address, HOME=str(home), RAY_AUTH_MODE="token")
    assert done.status == 0, (done.stdout + done.stderr)[-3000:]
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    workers = next(e["workers"] for e in events if e["event"] == "workers")
    nodes = {w["node"] for w in workers if "training" in w["name"]}
    assert len(nodes) == 2 and "127.0.0.2" in nodes, workers
    assert max(records(out)) == 1
