"""The seal of a checkpoint: `manifest.json`, a list of all files with sizes and SHA-256, written last.

{"format": 1, "step": 12, "serial": 3, "time": unix, "files": {"actor/config.json": {"size": 812, "sha256": "…"}},
 "sha256": "…"}

`serial` counts the checkpoints ever sealed in a folder: it, not the step, says which one is newest, because a
run may be started again from the beginning in a folder that already holds checkpoints. The last `sha256` is that of the
rest; manifests of before it was written have none.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl.errors import UserError

FORMAT = 1
NAME = "manifest.json"
LATEST = "latest_checkpointed_iteration.txt"
LOOP = "state/loop.json"
_STEP_NAME = re.compile(r"global_step_(\d+)")


class CheckpointError(UserError):
    """A checkpoint that cannot be used; the message names the path, what is wrong and what to do."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What manifest.json says. `files` maps relative POSIX paths to {"size": bytes, "sha256": hex}."""

    step: int
    serial: int
    time: float
    files: dict[str, dict[str, Any]]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry["size"] for entry in self.files.values())


def step_of(path: Path) -> int | None:
    """N of a directory named global_step_N, else None."""
    match = _STEP_NAME.fullmatch(path.name)
    return int(match.group(1)) if match else None


def step_directories(root: Path) -> Iterator[Path]:
    """Directories named global_step_N directly under root, in no particular order."""
    if root.is_dir():
        yield from (p for p in root.iterdir() if step_of(p) is not None and p.is_dir())


def stale_entries(root: Path) -> list[Path]:
    """Left-overs of interrupted saves and deletions: global_step_*.tmp directly under root, whatever they are."""
    return sorted(root.glob("global_step_*.tmp"))


def remove(path: Path) -> None:
    """Remove a directory with all in it, a file, or a link (never what it points to); nothing there is fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def files_under(directory: Path) -> list[str]:
    """Relative POSIX paths of all regular files below, sorted, the manifest itself left out.

    CheckpointError for a link or special file: a checkpoint must stand alone.
    """
    paths = [path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir()]
    for path in paths:
        if path.is_symlink() or not path.is_file():
            raise CheckpointError(f"{path} is not a plain file; a checkpoint may hold only plain files")
    return sorted({path.relative_to(directory).as_posix() for path in paths} - {NAME})


def hash_files(directory: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of each file, by a few threads: hashing releases the interpreter lock."""

    def hash_file(name: str) -> dict[str, Any]:
        with open(directory / name, "rb") as file:
            digest = hashlib.file_digest(file, "sha256")
            return {"size": os.fstat(file.fileno()).st_size, "sha256": digest.hexdigest()}

    workers = min(4, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers, thread_name_prefix="checkpoint-hash") as pool:
        return dict(zip(names, pool.map(hash_file, names), strict=True))


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Seal: write the manifest and sync it. Everything else must be on disk already."""
    record = {"format": FORMAT, **asdict(manifest)}
    write_synced(directory / NAME, json.dumps(record | {"sha256": _digest(record)}, indent=1))
    sync_directory(directory)


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a sealed checkpoint. Its own syntax is checked: its names lie in the folder. CheckpointError if
    it is missing or cannot be read."""
    path = directory / NAME
    try:
        record: Any = json.loads(path.read_text("utf-8"))
        if record["format"] != FORMAT:
            problem = f"checkpoint format {record['format']!r}, this version of verl reads format {FORMAT}"
            raise CheckpointError(f"{directory} has {problem}: use the one that wrote it")
        if (digest := record.pop("sha256", None)) is not None and digest != _digest(record):
            raise CheckpointError(f"{path} is damaged: it is not what was written")
        files = {name: {"size": int(e["size"]), "sha256": e["sha256"]} for name, e in record["files"].items()}
        if outside := [name for name in files if name.startswith("/") or ".." in name.split("/")]:
            raise CheckpointError(f"{path} names a file outside of its folder ({outside[0]!r}): it is refused")
        return Manifest(int(record["step"]), int(record["serial"]), float(record["time"]), files)
    except FileNotFoundError:
        raise CheckpointError(f"{directory} has no {NAME}: it was never completed") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {error})") from error


def verify(directory: Path, manifest: Manifest, *, hashes: bool = True) -> None:
    """Compare the directory with its manifest. CheckpointError naming every file that is missing or differs."""
    problems = []
    for name, entry in manifest.files.items():
        path = directory / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif path.stat().st_size != entry["size"]:
            problems.append(f"{name} has {path.stat().st_size} bytes instead of {entry['size']}")
    if not problems and hashes:
        actual = hash_files(directory, sorted(manifest.files))
        differ = [name for name, entry in actual.items() if entry != manifest.files[name]]
        problems = [f"{name} has other content" for name in differ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(f"{directory} is damaged: {'; '.join(problems[:5])}{more}")


def write_synced(path: Path, text: str) -> None:
    """Write a small text file and sync its content to disk."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_text(path: Path, text: str) -> None:
    """Replace a small text file atomically and durably."""
    beside = path.with_name(path.name + ".tmp")
    write_synced(beside, text)
    os.replace(beside, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames and new names in a directory durable; file systems without such a call are let pass."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems cannot sync a directory and order their metadata themselves.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(handle)


def sync_tree(directory: Path) -> None:
    """Sync every file and directory below, and the directory itself."""
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            with open(Path(folder, name), "rb") as file:
                os.fsync(file.fileno())
        sync_directory(Path(folder))
