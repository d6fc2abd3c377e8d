"""Files and folders here or behind a URL that fsspec knows (hdfs://, s3://, …): the public `verl.utils.hdfs_io` and
`verl.utils.fs`."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

from verl.data.files import is_remote as is_non_local
from verl.data.files import naming


def _system(path: str) -> tuple[Any, str]:
    import fsspec

    system, place = fsspec.core.url_to_fs(os.path.expanduser(path))
    return system, place


def exists(path: str, **kwargs: Any) -> bool:
    """True if the file or folder is there. DataError where its file system cannot be reached."""
    with naming(path, "looking for it failed"):
        system, place = _system(path)
        return bool(system.exists(place))


def makedirs(name: str, mode: int = 0o777, exist_ok: bool = True, **kwargs: Any) -> None:
    """Make a folder and those above it. DataError where that fails; mode has no effect behind a URL."""
    with naming(name, "making the folder failed"):
        system, place = _system(name)
        system.makedirs(place, exist_ok=exist_ok)


def copy(src: str, dst: str, **kwargs: Any) -> bool:
    """Copy a file, or a folder with its content, to, from or beside a URL, over what is there; into `dst` where that is
    a folder. DataError where it fails; True."""
    with naming(src, f"copying it to {dst} failed"):
        (system, source), (target_system, target) = _system(src), _system(dst)
        if target_system.isdir(target):
            target = f"{target.rstrip('/')}/{Path(source).name}"
        if not is_non_local(src):
            target_system.put(source, target, recursive=True)
        elif not is_non_local(dst):
            system.get(source, target, recursive=True)
        else:
            system.copy(source, target, recursive=True)
    return True


def copy_to_local(
    src: str,
    cache_dir: str | None = None,
    filelock: str = ".file.lock",
    verbose: bool = False,
    always_recopy: bool = False,
    use_shm: bool = False,
) -> str:
    """The local path of a file or folder: its own, or that of a copy in `cache_dir`, made once unless `always_recopy`.

    A copy is written beside its place and renamed; the other arguments have no effect. DataError where it cannot be
    fetched.
    """
    if not is_non_local(src):
        return os.path.expanduser(src.removeprefix("file://"))
    cache = Path(os.path.expanduser(cache_dir or "~/.cache/verl/rlhf"))
    place = cache / hashlib.sha256(src.encode()).hexdigest()[:16] / Path(src.rstrip("/")).name
    if always_recopy or not place.exists():
        beside = place.with_name(f".{os.getpid()}.tmp")
        beside.mkdir(parents=True)
        try:
            copy(src, str(beside))
            shutil.rmtree(place, ignore_errors=True)
            (beside / place.name).replace(place)
        finally:
            shutil.rmtree(beside)
    return str(place)


def local_mkdir_safe(path: str) -> str:
    """Make a local folder and those above it, unless they are there; its path."""
    os.makedirs(path, exist_ok=True)
    return path
