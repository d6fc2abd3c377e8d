"""The schema: the one source of keys, types, defaults and help."""

from verl.config.schema.base import FilePath, Group, Map, Root, select
from verl.config.schema.entries import Config, EvalConfig, GenerationConfig, SFTConfig

ROOTS: dict[str, type[Root]] = {
    "ppo": Config,
    "sft": SFTConfig,
    "eval": EvalConfig,
    "generation": GenerationConfig,
}

__all__ = [
    "ROOTS",
    "Config",
    "EvalConfig",
    "FilePath",
    "GenerationConfig",
    "Group",
    "Map",
    "Root",
    "SFTConfig",
    "select",
]
