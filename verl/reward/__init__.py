"""Scores for sampled answers: built-in rules, custom functions, a pool of scoring processes, checks.

Everything here is imported lazily: a scoring process loads only the rule it runs, and none loads torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.reward.errors import RewardError, RewardErrorLimit, RewardLoadError, RewardPrecheckError
    from verl.reward.precheck import precheck
    from verl.reward.registry import default_compute_score, known_sources
    from verl.reward.runner import RewardRunner

_WHERE = {
    "RewardError": "errors",
    "RewardErrorLimit": "errors",
    "RewardLoadError": "errors",
    "RewardPrecheckError": "errors",
    "RewardRunner": "runner",
    "default_compute_score": "registry",
    "known_sources": "registry",
    "precheck": "precheck",
}

__all__ = [
    "RewardError",
    "RewardErrorLimit",
    "RewardLoadError",
    "RewardPrecheckError",
    "RewardRunner",
    "default_compute_score",
    "known_sources",
    "precheck",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'verl.reward' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"verl.reward.{_WHERE[name]}"), name)
    globals()[name] = value
    return value
