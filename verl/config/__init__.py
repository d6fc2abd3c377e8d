"""Configuration: schema, grammar, checks. Imports no torch and answers in under a second."""

from verl.config.command_line import load
from verl.config.problems import ConfigError, Problem
from verl.config.schema import Config, EvalConfig, GenerationConfig, Group, Map, Root, SFTConfig

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
