"""The options and overrides of a command line, and the configuration that they describe."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.config.conversion import expand
from verl.config.defaults import fill
from verl.config.grammar import GrammarError
from verl.config.matching import Spellings
from verl.config.problems import ConfigError, Problem
from verl.config.resolve import Resolver
from verl.config.schema.base import Root
from verl.config.yaml_files import read

_SCHEMA_ONLY = Spellings()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--help", "-h", "--hydra-help", nargs="?", const="")
    parser.add_argument("--check", action="store_true")
    for long, short in (("--config-path", "-cp"), ("--config-name", "-cn"), ("--config-dir", "-cd")):
        parser.add_argument(long, short, type=lambda text: text.strip("'\""))
    parser.add_argument("--cfg", "-c", dest="show", choices=("job", "all", "hydra"))
    for accepted in (["--resolve"], ["--run", "-r"], ["--multirun", "-m"]):
        parser.add_argument(*accepted, action="store_true")
    return parser


def split_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Options (`help` is None, "" for the overview, or a key) and `overrides` of a command line.

    Raises ConfigError for an option that does not exist.
    """
    try:
        namespace, remaining = _parser().parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError([Problem(error.argument_name or "", error.message)]) from None
    namespace.overrides = [argument for argument in remaining if not argument.startswith("-")]
    unknown = [argument.partition("=")[0] for argument in remaining if argument.startswith("-")]
    options = "--cfg, --check, --config-dir, --config-name, --config-path, --help; keys are set as key=value"
    problems = [Problem(option, f"no such option; options: {options}") for option in unknown]
    if namespace.multirun:
        problems.append(Problem("--multirun", "sweeps are not supported; start one run per set of overrides"))
    if problems:
        raise ConfigError(problems)
    return namespace


def load(argv: Sequence[str], entry: str = "ppo", spellings: Spellings = _SCHEMA_ONLY) -> Any:
    """The configuration of an argument list: Config, SFTConfig, EvalConfig or GenerationConfig, by the entry point.

    Raises ConfigError with every problem of grammar, type and spelling.
    """
    return build(split_arguments(argv), entry, spellings)


def build(arguments: argparse.Namespace, entry: str, spellings: Spellings = _SCHEMA_ONLY) -> Root:
    """The configuration that arguments (of `split_arguments`) describe, automatic values filled in.

    Raises ConfigError with every problem of grammar, type and spelling. Looks at no file but the configuration's own,
    and not at the machine: `verl.preflight` does.
    """
    try:
        folders = [Path(expand(path)) for path in (arguments.config_path, arguments.config_dir) if path]
    except GrammarError as error:
        raise ConfigError([Problem("--config-path", str(error))]) from None
    # `config` is the public system's own folder, whose files are built in here.
    built_in = [folder for folder in folders if not folder.is_absolute() and folder.name == "config"]
    if absent := [str(folder) for folder in folders if folder not in built_in and not folder.is_dir()]:
        raise ConfigError([Problem("--config-path", f"no such directory: {', '.join(absent)}")])
    resolver = Resolver(entry, spellings)
    for layer in read(arguments.config_name, folders or [Path()], spellings.configurations, entry):
        resolver.add_layer(layer)
    for argument in arguments.overrides:
        resolver.add_override(argument)
    resolver.finish()
    fill(resolver)
    if resolver.problems:
        raise ConfigError(resolver.problems)
    return resolver.root
