"""MindSpeed, which makes megatron-core work on Ascend NPUs: where it is installed it is imported before megatron-core,
whose functions it replaces, then and with every set of options. It has never run here.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from verl.config.schema.base import setting


def is_installed() -> bool:
    """Imports nothing."""
    return importlib.util.find_spec("mindspeed") is not None


def adapt(megatron: Any) -> None:
    """Import MindSpeed, where it is installed, and give it its options: `mindspeed.*` of a role's `megatron` group, and
    `override_transformer_config`, where its documentation puts them."""
    if not is_installed():
        return
    words, sys.argv = sys.argv, sys.argv[:1]  # it takes the command line for its own
    try:
        adaptor = importlib.import_module("mindspeed.megatron_adaptor")
    finally:
        sys.argv = words
    options = {"use_flash_attn": True, "context_parallel_size": int(setting(megatron, "context_parallel_size", 1))}
    for group in ("override_transformer_config", "mindspeed"):
        options |= dict(setting(megatron, group) or {})
    adaptor.repatch(options)
