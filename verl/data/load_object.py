"""Load a user's module or object by `file.py`, `pkg://module.path` or dotted module name."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import linecache
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from verl.config.matching import nearest
from verl.data.files import DataError, files_beside


class NoSuchFile(DataError, FileNotFoundError):
    """The user's file is not there; a FileNotFoundError for plug-ins that catch one."""


class NoSuchName(DataError, AttributeError):
    """The user's module defines no such name; an AttributeError for plug-ins that catch one."""


# Path → content of files that are loaded as they were when the run read them, whatever is on disk now.
SOURCES: dict[str, bytes] = {}


def read_source(module_path: str) -> dict[str, bytes]:
    """{resolved path: content} of the Python file that `module_path` names, for `SOURCES`; {} where it names none."""
    path = _path_of(module_path)
    return {str(path): path.read_bytes()} if path.is_file() else {}


def _path_of(module_path: str) -> Path:
    return Path(os.path.expandvars(module_path.removeprefix("file://"))).expanduser().resolve()


def _execute(spec: ModuleSpec, module: ModuleType) -> None:
    """Run the file's code in the module: that of `SOURCES` if it is there, with its lines for tracebacks."""
    assert spec.loader is not None and spec.origin is not None
    path = spec.origin
    if not path.endswith(".py"):
        spec.loader.exec_module(module)
        return
    source = SOURCES[path] if path in SOURCES else Path(path).read_bytes()
    if b"\0" in source:  # Python says neither where, nor in every version that it is a SyntaxError
        line = source[: source.index(b"\0")].count(b"\n") + 1
        raise SyntaxError("source code cannot contain null bytes", (path, line, None, None))
    code = compile(source, path, "exec")
    if path in SOURCES:
        text = importlib.util.decode_source(source)
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    exec(code, module.__dict__)


def load_module(module_path: str) -> ModuleType:
    """Import `module_path`: a Python file (its directory becomes importable) or `pkg://module`.

    A file is imported once per process. Raises DataError naming what was looked at; errors that the
    module itself raises while it is imported pass through unchanged; a SyntaxError names file and line.
    """
    if module_path.startswith("pkg://"):
        name = module_path.removeprefix("pkg://").strip("/").removesuffix(".py").replace("/", ".")
        return _import(name, module_path)
    path = _path_of(module_path)
    if str(path) not in SOURCES and not path.exists() and path.suffix != ".py" and "/" not in module_path:
        return _import(module_path, module_path)
    if path.is_dir():
        raise DataError(f"{module_path}: a directory; name the file in it")
    if str(path) not in SOURCES and not path.is_file():
        beside = files_beside(path, (".py",))
        raise NoSuchFile(f"{module_path}: no such file (looked at {path.absolute()}){beside}")
    name = f"verl_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise DataError(f"{module_path}: not a Python file (its name must end in .py)")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        _execute(spec, module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, SystemExit):
            raise DataError(f"{module_path}: it calls sys.exit({error.code}) when it is imported") from error
        raise
    return module


def _import(name: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise DataError(f"{path}: no module {error.name!r} can be imported here") from error
        raise
    except SystemExit as error:
        raise DataError(f"{path}: it calls sys.exit({error.code}) when it is imported") from error


def load_extern_object(module_path: str, object_name: str) -> Any:
    """The object `object_name` of `load_module(module_path)`. Raises DataError naming what the module holds."""
    module = load_module(module_path)
    if not hasattr(module, object_name):
        public = [name for name in vars(module) if not name.startswith("_")]
        choices = f"{nearest(object_name, public)} (found: {', '.join(public[:20])})"
        raise NoSuchName(f"{module_path}: it defines no {object_name!r}{choices}")
    return getattr(module, object_name)
