"""The sides of a benchmark: worker processes that do one step when asked, and TRL in an environment of its own."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
TRL = ["torch==2.13.0", "trl==1.16.*", "transformers>=5.16,<5.20", "datasets"]


def end_with_parent() -> None:
    """In a new process: the kernel kills it when its parent ends, however that happens (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def write_result(result: dict, file: Path | None) -> None:
    """Print a benchmark's result, and write it where a file is named."""
    text = json.dumps(result, indent=1)
    print(text)
    if file:
        file.write_text(text + "\n")


class SideEnded(RuntimeError):
    """A worker ended before it answered; the text is the end of what it wrote."""


class Side:
    """A worker process. It says that it is ready, then responses each line on stdin with one JSON record.

    `ready`: the first record; `start_s`: seconds until it came. `limit`: seconds after which it is ended, None for
    none. Raises SideEnded.
    """

    def __init__(self, name: str, command: list[str], threads: int | None, limit: float | None = None):
        self.name = name
        paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]  # another Python has no verl
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.pathsep.join(paths)}
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        self._log = tempfile.NamedTemporaryFile("w+", suffix=f"_{name}.log", delete=False)  # noqa: SIM115
        began = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            preexec_fn=end_with_parent,
        )
        self._late = False
        if limit is not None:
            watch = threading.Timer(limit, self._end_late)
            watch.daemon = True
            watch.start()
        self.records: list[dict] = []
        self.ready = self._read()
        self.start_s = time.perf_counter() - began

    def _end_late(self) -> None:
        if self._process.poll() is None:
            self._late = True
            self._process.kill()

    def _read(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.flush()
            what = "took too long and was ended" if self._late else "ended"
            raise SideEnded(f"{self.name} {what}:\n{Path(self._log.name).read_text()[-3000:]}")
        return json.loads(line)

    def step(self) -> dict:
        """One step's record."""
        try:
            self._process.stdin.write("step\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; reading says so, with its last words
        record = self._read()
        self.records.append(record)
        return record

    def close(self) -> None:
        """End it; its log is removed if it ended well."""
        self._process.stdin.close()
        try:
            self._process.wait(20)
            Path(self._log.name).unlink()
        except subprocess.TimeoutExpired:
            self._process.kill()

    def median(self, key: str) -> float:
        """Median without the first, warming step."""
        return statistics.median(record[key] for record in self.records[1:])


def trl_python(given: str | None, folder: Path) -> str:
    """The Python of an environment with TRL: `given`, or one that is made in `folder`."""
    if given:
        return given
    python = folder / "trl-venv/bin/python"
    if not python.exists():
        print("installing TRL in an environment of its own …", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(folder / "trl-venv")], check=True)
        for packages in (TRL[:1], TRL[1:]):
            subprocess.run([str(python), "-m", "pip", "install", "-q", *packages], check=True)
    return str(python)
