"""Configuration: schema, grammar, checks. Imports no torch and answers in under a second."""

from verl.config.command_line import load
from verl.config.problems import ConfigError, Problem
from verl.config.schema.base import Group, Map, Root
from verl.config.schema.entries import Config, EvalConfig, GenerationConfig, SFTConfig

__all__ = [
    "Config",
    "ConfigError",
    "EvalConfig",
    "GenerationConfig",
    "Group",
    "Map",
    "Problem",
    "Root",
    "SFTConfig",
    "load",
]
