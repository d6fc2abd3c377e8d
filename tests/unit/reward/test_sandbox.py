"""Programs that a model might write, against the local sandbox: each limit by a program that tries to break it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.chaos.fork_server import until
from verl.preflight import doctor
from verl.reward import default_compute_score
from verl.reward.outcome import SandboxFailed
from verl.reward.sandbox import isolate, local

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the local sandbox needs Linux")

REFUSED = {
    "fork bomb": "import os\nwhile True: os.fork()",
    "fork by number": "import ctypes, os\nassert ctypes.CDLL(None, use_errno=True).syscall(57) >= 0, PermissionError('1')",
    "subprocess": "import subprocess\nsubprocess.run(['/usr/bin/true'])",
    "socket": "import socket\nsocket.create_connection(('127.0.0.1', PORT))",
    "datagrams": "import socket\nsocket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b'hidden', LISTENER)",
    "packets": "import socket\nsocket.socketpair(type=socket.SOCK_SEQPACKET)",
    "a pair's name": "import socket\nsocket.socketpair()[0].bind('\\0verl-test')",
    "send from a pair": "import socket\nsocket.socketpair()[0].connect(LISTENER)",
    "fanotify": "import ctypes\nassert ctypes.CDLL(None).fanotify_init(0x200, 0) >= 0, PermissionError()",
    "read the run's files": "print(open(r'FOLDER/secret').read())",
    "list the run's folder": "import os\nprint(os.listdir(r'FOLDER'))",
    "write outside": "open(r'FOLDER/new', 'w')",
    "delete outside": "import os\nos.unlink(r'FOLDER/secret')",
    "modes outside": "import os\nos.chmod(r'FOLDER/secret', 0o777)",
    "truncate outside": "import os\nos.truncate(r'FOLDER/secret', 0)",
    "the parent's secrets": "import os\nprint(open(f'/proc/{os.getppid()}/environ').read())",
    "own environment": "import os\nassert 'VERL_TEST_SECRET' not in os.environ, os.environ\nraise PermissionError",
    "signal": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "limits of the parent": "import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (1, 1))",
    "raise its own limit": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "outlive the parent": "import ctypes\nassert ctypes.CDLL(None).prctl(1, 0) == 0, PermissionError()",
    "new namespace": "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0, PermissionError()",
    "truncate what it reads": "import os\nos.open(__file__, os.O_RDONLY | os.O_TRUNC)",
    "signals of a pipe": "import fcntl, os\nfcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())",
    "lease": "import fcntl\nfcntl.fcntl(open(__file__), fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    "the programs beside": "import os\nprint(os.listdir('/tmp'))",
}
FULL = "No space left|Permission denied"
STOPPED = {
    "endless loop": ("while True: pass", "exit status -"),
    "sleep": ("import time\ntime.sleep(60)", "took more than 2 s"),
    "memory": ("hold = []\nwhile True: hold.append(bytearray(1 << 24))", "MemoryError|exit status -9"),
    "output": ("while True: print('x' * 1000000)", "File too large"),
    "big file": ("open('big', 'wb').write(bytes(1 << 26))", "File too large|Permission denied"),
    "many big files": ("for i in range(1000): open(str(i), 'wb').write(bytes(1 << 23))", FULL),
    "many files": ("for i in range(100000): open(str(i), 'w').close()", FULL),
    "open files": ("hold = [open('/dev/null') for i in range(1000)]", "Too many open files"),
    "threads": (
        "import threading, time\nthreading.stack_size(1 << 16)\n"
        "for i in range(100000): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "start new thread|took more than|MemoryError|exit status -",
    ),
}


@pytest.fixture(params=[True, False], ids=["namespaces", "no namespaces"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the run, with a secret; the programs run with and without namespaces."""
    monkeypatch.setattr(local, "NAMESPACES", request.param)
    monkeypatch.setenv("VERL_TEST_SECRET", "hidden")
    (tmp_path / "secret").write_text("hidden")
    return tmp_path


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_program_may_not_do(folder: Path, name: str) -> None:
    import socket

    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener,
    ):
        listener.bind(f"\0verl-test-{os.getpid()}")
        program = REFUSED[name].replace("FOLDER", str(folder)).replace("PORT", str(server.getsockname()[1]))
        ran = local.run(program.replace("LISTENER", repr(listener.getsockname())))
        with pytest.raises(BlockingIOError):
            listener.recv(100, socket.MSG_DONTWAIT)
    assert not ran.finished and "hidden" not in ran.output
    assert any(word in ran.note for word in ("PermissionError", "not allowed to raise", "not permitted")), ran
    assert [p.name for p in folder.iterdir()] == ["secret"] and (folder / "secret").read_text() == "hidden"


@pytest.mark.parametrize("name", STOPPED)
def test_what_a_program_may_not_do_for_ever(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, said = STOPPED[name]
    if "took more than" not in said:  # another limit is met first, however busy the machine is
        monkeypatch.setattr(local, "WAIT", 30.0)
    before = set(psutil.Process().children(recursive=True))
    started = time.monotonic()
    ran = local.run(program, seconds=1, memory_mb=512)
    assert time.monotonic() - started < 30
    assert not ran.finished and re.search(said, ran.note), ran
    assert set(psutil.Process().children(recursive=True)) <= before


def test_what_a_program_may_do(folder: Path) -> None:
    program = (
        "import asyncio, sys, threading\nimport numpy\nout = []\nthreading.stack_size(1 << 27)\nasyncio.run(asyncio.sleep(0))\n"
        "t = threading.Thread(target=lambda: out.append(int(numpy.ones(3).sum())))\nt.start(); t.join()\n"
        "print(out, sys.stdin.read(), __name__)"
    )
    assert local.run(program, "4 é") == local.ProgramResult("[3] 4 é __main__\n", True)
    ran = local.run("open('a', 'w').write('x')\nprint(open('a').read())")
    assert ran.finished == local.NAMESPACES


def test_where_nothing_can_be_shut_in_nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "isolate.py"
    text = Path(isolate.__file__).read_text()
    broken.write_text(text.replace("= 444, 445, 446", "= 9444, 445, 446"))
    monkeypatch.setattr(local, "ISOLATE", str(broken))
    local._try_once.cache_clear()
    try:
        with pytest.raises(SandboxFailed, match="Landlock, which protects files: Function not implemented"):
            default_compute_score("apps", "```python\nprint(1)\n```", {"inputs": [""], "outputs": ["1"]})
        finding = next(f for f in doctor.check() if f.name == "code sandbox")
        assert "Landlock" in finding.found and "sandbox_fusion.url" in finding.todo
    finally:
        local._try_once.cache_clear()


def test_a_limit_too_small_for_python_is_no_zero() -> None:
    with pytest.raises(SandboxFailed, match="does not run with 8 MB"):
        local.run("print(1)", memory_mb=8)


def test_a_program_dies_with_the_process_that_started_it() -> None:
    code = "from verl.reward.sandbox import local; local.run('import time\\ntime.sleep(50)', seconds=30)"
    parent = subprocess.Popen([sys.executable, "-c", code])
    children = psutil.Process(parent.pid).children
    found = until(lambda: [child.pid for child in children() if _is_the_program(child)])
    parent.kill()
    parent.wait()
    until(lambda: not os.path.exists(f"/proc/{found[0]}"))


def _is_the_program(process: psutil.Process) -> bool:
    try:
        words = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return "program.py" in words and "isolate" not in words


def test_the_filter_knows_both_processors() -> None:
    for column, architecture in isolate._ARCHITECTURES.values():
        filters = isolate.filter_program(column, architecture)
        assert len(filters) % 8 == 0 and len(filters) // 8 < 4096
