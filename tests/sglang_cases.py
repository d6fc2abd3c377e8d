"""What the SGLang tests share: an engine with small limits, and when there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from verl.engine.registry import EnginePackageError
from verl.engine.rollout.sglang import ENGINE


def require_sglang() -> None:
    """Skip where SGLang cannot be used, saying why."""
    try:
        ENGINE.installed()
    except EnginePackageError as error:
        pytest.skip(f"{error}", allow_module_level=True)


def sglang_engine(path: Path, **more: Any) -> Any:
    """A float32 engine of at most 8 responses of at most 256 tokens."""
    from verl.engine.rollout.sglang.engine import SGLangEngine

    return SGLangEngine(str(path), **({"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8} | more))
