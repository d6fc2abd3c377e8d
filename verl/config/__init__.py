"""Configuration: schema, grammar, checks. Imports no torch and answers in under a second."""

from verl.config.command_line import load
from verl.config.problems import ConfigError
from verl.config.schema.base import Map
from verl.config.schema.entries import Config, EvalConfig, GenerationConfig, SFTConfig

__all__ = ["Config", "ConfigError", "EvalConfig", "GenerationConfig", "Map", "SFTConfig", "load"]
