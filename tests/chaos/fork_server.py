"""Starts commands of verl in milliseconds: a process that has imported everything forks a child per command.

As a program (`python -m tests.chaos.fork_server`): JSON lines on stdin, {"id", "module", "argv", "cwd", "environment",
"teardown", "alone", "stdout", "stderr"}; responses on stdout, {"id", "pid"} once the child runs and {"id", "status"}
once it has ended (negative: the signal). With an argument: the same from the connections to that socket. The child is
what a fresh `python -m MODULE ARGV…` would be: a session of its own, its own streams, default signals, sys.argv, an
exit that waits for threads and runs what atexit has.

`ForkServer` is the client for tests.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
ENTRY = "verl.trainer.main_ppo"
SFT = "verl.trainer.sft_trainer"
FORKS_WELL = ("jemalloc_bg_thd",)
"""Threads that are started anew in a forked child."""
OF_RAY = (
    "jsonschema",
    "requests",
    "google.protobuf.internal.builder",
    "google.protobuf.text_format",
    "psutil",
)
"""What Ray imports."""


# ------------------------------------------------------------------------------------------------- the program


def import_everything() -> None:
    """All of verl, and what it imports lazily, without Ray, which takes its settings from the environment as it is
    imported. Raises RuntimeError if an import started a thread: fork forbids it."""
    import verl

    sys.modules["ray"] = None  # type: ignore[assignment] # an ImportError for whoever asks
    importlib.import_module("tests.warm")
    for name in OF_RAY:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    import transformers

    for name in ("AutoModelForCausalLM", "AutoTokenizer", "PreTrainedTokenizerFast"):
        getattr(transformers, name)
    for found in pkgutil.walk_packages(verl.__path__, "verl."):
        if found.name.rsplit(".", 1)[-1] == "__main__":
            continue
        # Ray's, or an engine that is not installed: the child's own import says so if it is asked for.
        with contextlib.suppress(ImportError):
            importlib.import_module(found.name)
    del sys.modules["ray"]
    from tests.runs import write_pages_here

    write_pages_here()
    others = [task for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
    if lost := {(task / "comm").read_text().strip() for task in others} - set(FORKS_WELL):
        raise RuntimeError(f"threads after the imports, which a fork would lose: {lost}")
    gc.collect()
    gc.freeze()  # a child's collector would write to every page of what it shares with this process


@dataclass
class Client:
    """One that sends orders: to a child's end its process answers to, on `out`."""

    out: int
    pending: bytes = b""
    children: set[int] = field(default_factory=set)

    def tell(self, message: dict[str, Any]) -> None:
        """One line; a client that has gone needs none."""
        with contextlib.suppress(OSError):
            os.write(self.out, json.dumps(message).encode() + b"\n")


class Server:
    """Forks children until stdin closes. Orders come from there, and from the connections to a socket if it has one."""

    def __init__(self, address: str | None = None):
        self._selector = selectors.DefaultSelector()
        self._running: dict[int, tuple[Client, int]] = {}
        self._woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._selector.register(0, selectors.EVENT_READ, Client(out=1))
        self._listener = None
        if address is not None:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(address)
            self._listener.listen()
            self._selector.register(self._listener, selectors.EVENT_READ)

    def serve(self) -> None:
        """Until stdin closes."""
        Client(out=1).tell({"ready": True})
        while True:
            for key, _ in self._selector.select():
                if key.fd == self._woken:
                    os.read(self._woken, 4096)
                    self._reap()
                elif key.data is None:
                    self._accept()
                elif data := os.read(key.fd, 1 << 16):
                    self._heard(key.data, data)
                elif key.fd == 0:
                    return
                else:
                    self._gone(key.fd, key.data)

    def _accept(self) -> None:
        assert self._listener is not None
        handle = self._listener.accept()[0].detach()
        self._selector.register(handle, selectors.EVENT_READ, Client(out=handle))

    def _gone(self, handle: int, client: Client) -> None:
        """A client that was killed: its children go with it."""
        self._selector.unregister(handle)
        os.close(handle)
        for pid in client.children & self._running.keys():
            os.kill(pid, signal.SIGKILL)

    def _heard(self, client: Client, data: bytes) -> None:
        *lines, client.pending = (client.pending + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                become(order)
            self._running[pid] = client, order["id"]
            client.children.add(pid)
            client.tell({"id": order["id"], "pid": pid})

    def _reap(self) -> None:
        """Report the children that have ended."""
        while self._running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            client, number = self._running.pop(pid)
            client.tell({"id": number, "status": os.waitstatus_to_exitcode(status)})


def become(order: dict[str, Any]) -> None:
    """In the child: be the command. Does not return."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, name in ((0, os.devnull), (1, order["stdout"]), (2, order["stderr"])):
        handle = os.open(name, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, number)
        os.close(handle)
    os.closerange(3, 256)
    faulthandler.enable()
    os.chdir(order["cwd"])
    if order.get("alone", "path" in order):  # its environment is the whole one
        os.environ.clear()
    for name, value in order["environment"].items():
        os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
    sys.path[:0] = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p not in sys.path]
    if "path" in order:
        from verl.plugins import import_modules

        import_modules(None)  # Ray holds on to an actor's methods before the actor imports what changes them
        sys.argv = [order["path"], *order["argv"]]
        runpy.run_path(order["path"], run_name="__main__")
        sys.exit()
    module = importlib.import_module(order["module"])
    sys.argv = [str(module.__file__), *order["argv"]]
    if order["teardown"]:
        sys.exit(module.main())
    leave(module.main)


def leave(main: Callable[[], int | None]) -> NoReturn:
    """Exit as the interpreter does, but for taking apart everything that was ever imported, which takes half a
    second."""
    try:
        status = main()
    except SystemExit as error:
        if not isinstance(error.code, int):
            raise
        status = error.code
    threading._shutdown()  # type: ignore[attr-defined] # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status or 0)


# -------------------------------------------------------------------------------------------------- the client


class Run:
    """A command that a fork_server started. `out` and `err` are the files of its streams."""

    def __init__(self, number: int, out: Path, err: Path):
        self.number, self.out, self.err = number, out, err
        self.pid = 0
        self.status: int | None = None
        self._started, self._ended = threading.Event(), threading.Event()

    def heard(self, message: dict[str, Any]) -> None:
        """A message of the fork_server about this run."""
        if "pid" in message:
            self.pid = message["pid"]
            self._started.set()
        else:
            self.status = message["status"]
            self._ended.set()

    def wait_started(self, timeout: float = 60.0) -> None:
        """Until the process exists."""
        assert self._started.wait(timeout), "the fork_server did not fork"

    def wait(self, timeout: float = 120.0) -> int:
        """Exit status; negative for a signal. Kills the run and fails if it takes longer than `timeout`."""
        if not self._ended.wait(timeout):
            self.kill(signal.SIGABRT)  # the fault handler writes where every thread is
            self._ended.wait(5)
            raise AssertionError(f"still running after {timeout} s\n{self.stdout[-2000:]}\n{self.stderr[-3000:]}")
        assert self.status is not None
        return self.status

    @property
    def ended(self) -> bool:
        """True once the process is gone."""
        return self._ended.is_set()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the process alone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    @property
    def stdout(self) -> str:
        """What it wrote so far."""
        return self.out.read_text(errors="replace") if self.out.exists() else ""

    @property
    def stderr(self) -> str:
        """What it wrote so far."""
        return self.err.read_text(errors="replace") if self.err.exists() else ""


PYTHON = """#!{python} -SE
import os, sys

sys.path.insert(0, {root!r})
from tests.ray_setup_worker import forked

flag, *words = sys.argv[1:]
if flag != "-m":
    os.execv({python!r}, [{python!r}, flag, *words])
order = {{"module": words[0], "argv": words[1:], "environment": dict(os.environ), "alone": True, "teardown": False}}
sys.exit(forked({address!r}, order))
"""


class ForkServer:
    """The helper process; `with ForkServer(folder) as fork_server: fork_server.run([...])`. Streams are kept in
    `folder`, and `address` there is a socket for other processes' orders."""

    def __init__(self, folder: Path):
        from tests.runs import environment

        self._folder = folder
        self.address = folder / "fork_server.socket"
        self._runs: dict[int, Run] = {}
        self._ready = threading.Event()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.fork_server", str(self.address)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=environment(),
        )
        self.pid = self._process.pid
        self._listener = threading.Thread(target=self._listen, name="fork_server", daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            if "ready" in message:
                self._ready.set()
            else:
                self._runs[message["id"]].heard(message)

    def ready(self) -> None:
        """Wait until it takes orders."""
        assert self._ready.wait(240), "the fork_server did not come up"

    def make_python(self, path: Path) -> None:
        """Make `path` a Python whose `-m MODULE` is forked from here; whatever else is run by this interpreter."""
        self.ready()
        words = {"python": sys.executable, "root": str(ROOT), "address": str(self.address)}
        path.write_text(PYTHON.format(**words))
        path.chmod(0o755)

    def start(
        self,
        argv: list[str],
        *,
        module: str = ENTRY,
        cwd: Path = ROOT,
        streams: Path | None = None,
        teardown: bool = False,
        **more: str | None,
    ) -> Run:
        """Start `python -m module argv…` in `cwd`; `more` are environment variables (None: unset). Both streams go to
        the file `streams`, if one is given. `teardown`: at its end it takes its modules apart as any Python does, see
        `leave`."""
        self.ready()
        number = len(self._runs)
        out, err = (streams or self._folder / f"{number}.{name}" for name in ("out", "err"))
        run = Run(number, out, err)
        self._runs[number] = run
        order = {
            "id": number,
            "module": module,
            "argv": [str(word) for word in argv],
            "cwd": str(cwd),
            "environment": more,
            "teardown": teardown,
            "stdout": str(run.out),
            "stderr": str(run.err),
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        run.wait_started()
        return run

    def run(self, argv: list[str], *, timeout: float = 120.0, **options: Any) -> Run:
        """Start and wait for the end."""
        run = self.start(argv, **options)
        run.wait(timeout)
        return run

    def close(self) -> None:
        """Kill what still runs and end the helper."""
        for run in self._runs.values():
            if run.pid and not run.ended:
                run.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def until(what: Any, timeout: float = 60.0, pause: float = 0.005) -> Any:
    """The first true value of what(); fails after `timeout` seconds."""
    end = time.monotonic() + timeout
    while not (value := what()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(pause)
    return value


if __name__ == "__main__":
    import_everything()
    Server(*sys.argv[1:]).serve()
