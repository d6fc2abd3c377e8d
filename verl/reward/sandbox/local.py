"""Run a Python program on this machine, in a process without network, files of the run, secrets, or further processes.

    program, input ──run──→ isolate.py (shuts itself in) ──exec──→ python program.py ──→ ProgramResult
    test, program  ──run_test──→ two of these; each reads what the other one prints ──→ ProgramResult of the test

`isolate.py` lists what is enforced; this module limits the time. Where the kernel cannot isolate a process, nothing
runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from verl.reward.outcome import SandboxFailed

_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_SYSTEM = ("/usr/bin", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/lib", "/lib64")
_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/zero", "/dev/urandom")
_OF_PYTHON = ("bin", "lib", "lib64", "pyvenv.cfg")
_SHOWN = 500
ISOLATE = str(Path(__file__).with_name("isolate.py"))
WAIT = 2.0
NAMESPACES = True
"""Use them where they are allowed; tests switch this off."""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """A program's result. `finished`: it ended by itself, in time, with exit status 0. `note`: how it ended else."""

    output: str
    finished: bool
    note: str = ""


def run(program: str, text: str = "", *, seconds: float = 10.0, memory_mb: int = 1024) -> ProgramResult:
    """Run Python source with `text` as its standard input. SandboxFailed if it cannot be isolated here.

    Limits: `seconds` of processor time, WAIT times that of wall clock, so that a score does not depend on the machine's
    load; `memory_mb` of address space; 16 MiB of output.
    """
    _try_once(memory_mb)
    return _run(program, text, seconds, memory_mb)[0]


def run_test(test: str, program: str, *, seconds: float = 10.0, memory_mb: int = 1024) -> ProgramResult:
    """Run two Python sources at a time, the standard output of each being the input of the other; what became of
    `test`, whose process `program` cannot reach. Limits and SandboxFailed as in `run`, for each of the two."""
    _try_once(memory_mb)
    (test_in, program_out), (program_in, test_out) = os.pipe(), os.pipe()
    with ThreadPoolExecutor(1) as thread:
        beside = thread.submit(_run, program, (program_in, program_out), seconds, memory_mb)
        ran = _run(test, (test_in, test_out), seconds, memory_mb)[0]
        beside.result()
    return ran


def state() -> tuple[str | None, str | None]:
    """(why programs cannot run here, why they run without namespaces and without a writable folder); None where
    fine."""
    try:
        report = _try_once(1024)
    except SandboxFailed as error:
        return str(error), None
    return None, report["without_namespaces"]


@cache
def _try_once(memory_mb: int) -> dict[str, Any]:
    """The report of a program that prints a line. SandboxFailed if that does not work: programs then earn no 0."""
    ran, report = _run("print(6 * 7)", "", 60.0, memory_mb)
    if ran.output.strip() != "42":
        raise SandboxFailed(f"a program that prints one line does not run with {memory_mb} MB: {ran.note}")
    return report


def _run(
    program: str, text: str | tuple[int, int], seconds: float, memory_mb: int
) -> tuple[ProgramResult, dict[str, Any]]:
    """The result and the report. `text`: the input, or descriptors to read from and to write to, which it closes."""
    with tempfile.TemporaryDirectory(prefix="verl-sandbox-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        source, scratch = folder / "program.py", folder / "scratch"
        scratch.mkdir()
        source.write_text(program, "utf-8", "replace")
        (folder / "in").write_text(text if isinstance(text, str) else "", "utf-8", "replace")
        (folder / "out").touch()
        streams = (folder / "in", folder / "out") if isinstance(text, str) else text
        job = {
            "program": str(source),
            "scratch": str(scratch),
            "memory_mb": memory_mb,
            "seconds": seconds,
            "namespaces": NAMESPACES,
            "readable": [*_readable(), str(source)],
            "environment": _ENVIRONMENT | {"HOME": str(scratch), "TMPDIR": str(scratch)},
        }
        note = _start(folder, job, *streams)
        files = (folder / kind for kind in ("out", "err", "report"))
        output, errors, raw = (file.read_text("utf-8", "replace") for file in files)
    report = json.loads(raw.splitlines()[-1]) if raw else {"error": f"its process ended too early: {note}"}
    if "error" in report:
        raise SandboxFailed(f"code cannot be run here: {report['error']}")
    return ProgramResult(output, not note, f"{note} {errors[-_SHOWN:]}".strip()), report


def _start(folder: Path, job: dict[str, Any], source: int | Path, target: int | Path) -> str:
    """Run the job to its end; how it ended, "" for exit status 0."""
    limit = job["seconds"] * WAIT
    with (
        open(source, "rb") as stdin,
        open(target, "wb") as out,
        open(folder / "err", "wb") as err,
        open(folder / "report", "wb") as report,
    ):
        job = job | {"report": report.fileno()}
        try:
            ended = subprocess.run(
                [sys.executable, "-I", "-S", ISOLATE, json.dumps(job)],
                stdin=stdin,
                stdout=out,
                stderr=err,
                env=_ENVIRONMENT,
                pass_fds=(report.fileno(),),
                start_new_session=True,
                timeout=limit,
            )
        except subprocess.TimeoutExpired:
            return f"it took more than {limit:g} s"
    return f"exit status {ended.returncode}" if ended.returncode else ""


@cache
def _readable() -> list[str]:
    """What Python and its packages need. Never a whole prefix: a virtual environment may lie in a project's folder."""
    prefixes = dict.fromkeys((sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix))
    return [*_SYSTEM, *_FILES, *(os.path.join(prefix, name) for prefix in prefixes for name in _OF_PYTHON)]
