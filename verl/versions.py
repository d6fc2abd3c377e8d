"""Installed packages, read without importing them: versions, ranges, builds; those with known security holes are
refused."""

from __future__ import annotations

import ast
import importlib.util
import re
from importlib.machinery import PathFinder
from pathlib import Path

from verl.errors import UserError

HOLES: dict[str, str] = {"ray": "<2.54", "transformers": "<5.3"}
"""Versions with known security holes, which are refused (of engines see their records)."""
SUPPORTED = {"torch": ">=2.11,<2.15", "transformers": ">=5.16,<5.24"}
"""Versions with which this release was tested, as pyproject.toml has them; a run does not start with others."""
NO_TORCHVISION = "torchvision, which is not installed: pip install torchvision (on a CPU see docs/vllm.md)"


def version(package: str) -> str | None:
    """Installed version of a distribution, None if it is absent."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def package_folder(module: str) -> Path | None:
    """Folder of a top-level module, found without importing it."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def torch_build() -> str | None:
    """ "cpu", or what torch was built for ("cuda 13.0", "rocm 6.4"), read from its version.py; None without one."""
    folder = package_folder("torch")
    if folder is None or not (folder / "version.py").is_file():
        return None
    text = (folder / "version.py").read_text()
    for key, name in (("cuda", "cuda"), ("hip", "rocm")):
        match = re.search(rf"^{key}(?:\s*:[^=]*)?\s*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
        if match:
            return f"{name} {match.group(1)}"
    return "cpu"


def unsupported() -> dict[str, str]:
    """What is installed outside of SUPPORTED, by "name version", with what to do."""
    installed = {name: version(name) for name in SUPPORTED}
    return {
        f"{name} {present}": f"this release works with {SUPPORTED[name]}: pip install '{name}{SUPPORTED[name]}'"
        for name, present in installed.items()
        if present is not None and not satisfies(present, SUPPORTED[name])
    }


def refuse_holes(*packages: str) -> None:
    """UserError if an installed one of these distributions has a known security hole. Engines call it as they start."""
    for name in packages:
        installed = version(name)
        if installed is not None and satisfies(installed, HOLES[name]):
            raise UserError(
                f"{name} {installed} is installed, which has a known security hole and is refused: "
                f"pip install -U '{name}>={HOLES[name].removeprefix('<')}'"
            )


def satisfies(version: str, ranges: str) -> bool:
    """True if the version lies in e.g. ">=5.16,<5.24" or "==4.9.*"; pre-releases count as their release. ValueError for
    what packaging cannot read."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    parsed = Version(version)
    build = f"+{parsed.local}" if parsed.local else ""
    return SpecifierSet(ranges).contains(parsed.base_version + build)


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
