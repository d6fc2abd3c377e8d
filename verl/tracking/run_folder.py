"""The run folder: what is written for every run, whatever the trackers.

config.yaml · versions.json · metrics.jsonl · events.jsonl · data_report.jsonl · trajectories/{step}.jsonl ·
report.html, beside the checkpoints. One run at a time: a lock that ends with the process that holds it. A run that
starts in a used folder moves what it will compute again to superseded/: nothing is deleted, and metrics.jsonl has every
step once.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from verl.engine.registry import packages as engine_packages
from verl.errors import UserError
from verl.platform import probe
from verl.tracking.jsonl import JsonLines, line, mend, write_whole

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
DATA_REPORT = "data_report.jsonl"
TRAJECTORIES, JOURNAL = "trajectories", "journal"
NOW = "now.jsonl"
"""Among the trajectories: responses of the step under way."""
SUPERSEDED = "superseded"
LOCK = ".running"
PATIENCE_S = 10.0
"""A run that was told to end just now gets so long to leave its folder."""
PAGE_S = 120.0
"""A page that takes longer is given up."""
_FIRST_PAGE_S = 5.0
"""A run that is shorter writes its page once, at its end."""

_PACKAGES = (
    *("verl", "torch", "transformers", "numpy", "pyarrow", "safetensors", "tokenizers", "hydra-core"),
    *("omegaconf", "math-verify", "ray", "sglang", "flash-attn", "peft", "wandb"),
    "tensorboard",
)
_SECRET = (
    "(?:(?:api|access|private)[_-]?key|secret(?:[_-]?key)?|password|passwd|passphrase|credentials?|authorization|"
    r"(?:access|api|auth|bearer|hf|refresh)[_-]?token|\btoken)"
)
SECRET_NAME = re.compile(f"(?i){_SECRET}$")
"""Of a key whose value is shown nowhere."""
_SECRET_IN_TEXT = re.compile(rf"""(?i)({_SECRET}["']?\s*[:=]\s*["']?)[^\n&"']+|(?<=://)[^/\s"']+(?=@)""")


class FolderInUse(UserError):
    """Another run is at work in the folder."""


def lock_folder(root: Path, warn: Callable[[str], None]) -> int:
    """Lock the folder, which exists, until the returned file is closed. FolderInUse where another process has it.

    A lock of fcntl: it ends with its process, is not inherited by children, and network file systems apply it across
    machines. `warn(text)` is called for a file system without locks, where the run goes on without.
    """
    path = root / LOCK
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    end = time.monotonic() + PATIENCE_S
    while not _locked(handle, path, warn):
        if time.monotonic() >= end:
            owner = os.pread(handle, 200, 0).decode(errors="replace") or "it does not say which"
            os.close(handle)
            raise FolderInUse(
                f"trainer.default_local_dir={root}: another run is at work in this folder ({owner}); two would "
                "overwrite each other's checkpoints and records. Wait for it, or name another folder "
                f"(trainer.experiment_name). If its machine is gone for good, delete {path}"
            )
        time.sleep(0.25)
    text = f"process {os.getpid()} on {platform.node()} since {time.strftime('%Y-%m-%d %H:%M:%S %z')}"
    with suppress(OSError):  # a full disk: the lock holds all the same
        os.ftruncate(handle, 0)
        os.pwrite(handle, text.encode(), 0)
    return handle


def _locked(handle: int, path: Path, warn: Callable[[str], None]) -> bool:
    """False while another process has it."""
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        why = f"this file system has no locks ({error.strerror})"
        warn(f"{path}: {why}, a second run in this folder would not be noticed")
    return True


class RunFolder:
    """Opens (and makes, for this user alone) the folder, for this process alone until `close`. `warn(text)` is called
    for failed writes; they never stop the run. FolderInUse while another process has it open."""

    def __init__(self, root: Path, warn: Callable[[str], None]):
        self.root = root
        self._warn = warn
        root.mkdir(0o700, parents=True, exist_ok=True)
        self._lock = lock_folder(root, warn)
        self.events = JsonLines(root / EVENTS, warn)
        self._metrics: JsonLines | None = None
        self._saved: dict[str, Any] = {}
        self._unwritten: dict[str, None] = {}
        self.relied_on = {"the lock that keeps other runs out of this folder": root / LOCK}
        """What a path is → the path: at every record it is said if one of them is gone."""

    def write_static(self, config: Mapping[str, Any]) -> None:
        """Write config.yaml (secrets masked) and versions.json."""
        import yaml

        text = yaml.safe_dump(mask_secrets(config), sort_keys=False, allow_unicode=True)
        self._write("config.yaml", [text.encode()])
        self._write("versions.json", [json.dumps(versions(), indent=1).encode()])

    def _write(self, name: str, lines: Iterable[bytes]) -> None:
        try:
            self._unwritten[name] = None
            write_whole(self.root / name, lines)
            del self._unwritten[name]
            self.relied_on[f"the run's {name}"] = self.root / name
        except OSError as error:
            self._warn(f"{self.root / name} cannot be written ({error}); the run goes on")

    def begin(self, resume_step: int | None, record: Mapping[str, Any] | None = None) -> int:
        """Open metrics.jsonl to go on after `resume_step` (None: from the start). Returns the lines moved away.

        Lines and trajectory files of later steps, which this run computes again, move to superseded/. `record`
        is the saved step's, kept in its checkpoint: it is written here if the earlier life ended between
        sealing the checkpoint and logging the step.
        """
        moved = 0
        try:
            moved = self._supersede_metrics(resume_step)
            self._supersede_trajectories(resume_step)
        except OSError as error:
            self._warn(f"records of an earlier run in {self.root} could not be moved aside ({error})")
        self._metrics = JsonLines(self.root / METRICS, self._warn)
        if record is not None and resume_step is not None and not self._saved:
            self.metrics(resume_step, record)
            self._saved = {"step": resume_step, **record}
        return moved

    @property
    def begun(self) -> bool:
        """True once `begin` was called."""
        return self._metrics is not None

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Append the record of a step; one of the step that was resumed from (`trainer.val_only`) is added to its
        line."""
        if self._metrics is None:
            self.begin(None)
        assert self._metrics is not None
        self._say_what_vanished()
        record = {"step": step, "time": time.time(), **values}
        if step == self._saved.get("step"):
            record = self._saved = self._saved | record
            path = self._metrics.path
            with suppress(OSError):  # a full disk: one more line
                self._metrics.close()
                lines = path.read_bytes().splitlines(keepends=True)
                write_whole(path, [raw for raw in lines if _step(raw) != step])
        self._metrics.append(record)

    def _say_what_vanished(self) -> None:
        for label, path in list(self.relied_on.items()):
            if not os.path.lexists(path):
                self.relied_on.pop(label, None)
                self._warn(f"{path} is gone: something deleted {label} while the run went on")

    def unwritten(self) -> list[str]:
        """Names of the files that could not be written, or not to their end."""
        lines = {METRICS: self._metrics, EVENTS: self.events}
        return [
            *self._unwritten,
            *(name for name, file in lines.items() if file is not None and file.failing),
        ]

    def data_report(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write data_report.jsonl anew: the data is read anew at every start."""
        self._write(DATA_REPORT, map(line, rows))

    def close(self) -> None:
        """Write and sync what is pending, and leave the folder to others."""
        if self._metrics is not None:
            self._metrics.close()
        self.events.close()
        os.close(self._lock)

    def _supersede_metrics(self, resume_step: int | None) -> int:
        path = self.root / METRICS
        mend(path)
        keep: list[bytes] = []
        drop: list[bytes] = []
        for raw in path.read_bytes().splitlines(keepends=True) if path.is_file() else ():
            (drop if resume_step is None or _step(raw) > resume_step else keep).append(raw)
        if keep and _step(keep[-1]) == resume_step:
            self._saved = json.loads(keep[-1])
        if not drop:
            return 0
        aside = self.root / SUPERSEDED
        aside.mkdir(exist_ok=True)
        with open(aside / METRICS, "ab") as file:
            file.write(line({"event": "superseded", "time": time.time(), "resume_step": resume_step}))
            file.writelines(drop)
            file.flush()
            os.fsync(file.fileno())
        write_whole(path, keep)
        return len(drop)

    def _supersede_trajectories(self, resume_step: int | None) -> None:
        for path in [path for name in (TRAJECTORIES, JOURNAL) for path in (self.root / name).glob("*")]:
            if path.stem.isdecimal() and (resume_step is None or int(path.stem) > resume_step):
                aside = self.root / SUPERSEDED / path.parent.name
                aside.mkdir(parents=True, exist_ok=True)
                os.replace(path, aside / path.name)


def _step(raw: bytes) -> float:
    """The step of a line; other lines (unreadable ones, marks of release 0.1) count as later than every step."""
    try:
        record = json.loads(raw)
        return float("inf") if "event" in record else int(record["step"])
    except (ValueError, TypeError, KeyError):
        return float("inf")


def mask_secrets(value: Any) -> Any:
    """Plain containers (for YAML) with *** in place of values under secret-looking keys, of what follows such a name in
    a text or in a list of arguments, and of users and passwords in URLs."""
    if isinstance(value, Mapping):
        secret = {k for k, v in value.items() if v is not None and SECRET_NAME.search(str(k))}
        return {str(k): "***" if k in secret else mask_secrets(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        flags = [False, *(isinstance(v, str) and v[:1] == "-" and bool(SECRET_NAME.search(v)) for v in value)]
        return ["***" if flag else mask_secrets(v) for flag, v in zip(flags, value, strict=False)]
    if value is None or type(value) in (int, float, bool):
        return value
    return _SECRET_IN_TEXT.sub(lambda match: f"{match[1] or ''}***", str(value))


def _mask_override(argument: str) -> str:
    """An argument `key=value` without the secrets in its value."""
    from verl.config.grammar import GrammarError, parse_value

    key, _, value = argument.partition("=")
    if SECRET_NAME.search(key):
        return f"{key}=***"
    with suppress(GrammarError):
        data = parse_value(value).data
        if isinstance(data, dict | list) and (masked := mask_secrets(data)) != data:
            return f"{key}={json.dumps(masked, ensure_ascii=False)}"
    return argument


def versions() -> dict[str, Any]:
    """Versions of packages, Python, driver and source, and the command line (secrets masked)."""
    return {
        "time": time.time(),
        "command": mask_secrets([sys.executable, *(_mask_override(a) if "=" in a else a for a in sys.argv)]),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cpu_count": os.cpu_count(),
        "driver": _driver(),
        "git_commit": _git_commit(Path(__file__).parent),
        "packages": {
            name: installed for name in (*_PACKAGES, *engine_packages()) if (installed := probe.version(name))
        },
    }


def _driver() -> str | None:
    """First line of the NVIDIA kernel driver's version file, None without one."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return None


def _git_commit(directory: Path) -> str | None:
    """Commit of the source tree this package runs from ("…-dirty" with changes); None when it is not one."""
    # Asking must not write: a git that is killed in it leaves a lock behind, and the user's next commit fails.
    command = ["git", "--no-optional-locks", "-C", str(directory), "status"]
    command += ["--porcelain=v2", "--branch", "--no-ahead-behind", "--untracked-files=no"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    head, *lines = process.stdout.splitlines()
    commit = head.removeprefix("# branch.oid ")
    return commit if all(line.startswith("#") for line in lines) else f"{commit}-dirty"


class LiveReport:
    """Keeps `report.html` of a run folder current, by `verl report` in a process of its own: rewritten at most every
    few seconds and for at most 2 % of the time. A page that cannot be written is reported and neither ends nor delays
    the run."""

    def __init__(self, run_dir: Path, flush: Callable[[], None], event: Callable[..., None]):
        self._run_dir = run_dir.absolute()
        self._flush = flush
        self._event = event
        self._thread = threading.Thread()
        self._not_before = time.monotonic() + _FIRST_PAGE_S
        self.failing = False
        """True if the page could not be written the last time."""

    def write(self, *, last: bool = False) -> None:
        """Begin to rewrite the page if it is time. `last`: in any case, with all that was dumped, and wait for it."""
        if last:
            if self._thread.is_alive():
                self._thread.join()
            self._flush()
            self._build()
        elif not self._thread.is_alive() and time.monotonic() >= self._not_before:
            self._thread = threading.Thread(target=self._build, name="verl-report", daemon=True)
            self._thread.start()

    def _build(self) -> None:
        started, problem = time.monotonic(), self._report()
        if problem and not self.failing:
            message = f"{self._run_dir}/report.html could not be written ({problem}); the run goes on"
            self._event("report_failed", error=problem, message=message)
        self.failing = bool(problem)
        now = time.monotonic()
        self._not_before = started + max(5.0, (now - started) / 0.02)

    def _report(self) -> str:
        """Write the page in a process of its own; what went wrong, if anything."""
        command = [sys.executable, "-m", "verl.cli.main", "report", str(self._run_dir)]
        # In the folder that this package lies in, so that it is found; in a session of its own, spared by Ctrl-C.
        place: dict[str, Any] = {"cwd": Path(__file__).parents[2], "start_new_session": True}
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        try:
            process = subprocess.run(command, **place, **streams, timeout=PAGE_S)
            return process.stderr.strip()[-2000:] if process.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{type(error).__name__}: {error}"
