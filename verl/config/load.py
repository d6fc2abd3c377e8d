"""From an argument list to a configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, overload

from verl.config.build import Builder
from verl.config.coerce import CoerceError, expand
from verl.config.files import read
from verl.config.fill import fill
from verl.config.problems import ConfigError, Problem
from verl.config.schema import Config, EvalConfig, GenerationConfig, Root, SFTConfig
from verl.config.tables import DEFAULT_NAME

_VALUED = {
    "--config-path": "config_path",
    "-cp": "config_path",
    "--config-name": "config_name",
    "-cn": "config_name",
    "--config-dir": "config_dir",
    "-cd": "config_dir",
    "--cfg": "show",
    "-c": "show",
}
_PLAIN = {"--check": "check", "--resolve": "", "--run": "", "-r": ""}
_SWEEP = ("--multirun", "-m")


@dataclass
class Arguments:
    """A command line taken apart. `help` is None, "" (overview) or a key."""

    overrides: list[str] = field(default_factory=list)
    config_path: str | None = None
    config_name: str | None = None
    config_dir: str | None = None
    show: str | None = None
    check: bool = False
    help: str | None = None


def split_arguments(argv: list[str]) -> Arguments:
    """Options and overrides of a command line. Raises ConfigError for an option that does not exist."""
    found = Arguments()
    problems: list[Problem] = []
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        name, eq, value = argument.partition("=")
        if not argument.startswith("-"):
            found.overrides.append(argument)
        elif name in ("--help", "-h", "--hydra-help"):
            found.help = value if eq else (rest.pop(0) if rest and not rest[0].startswith("-") else "")
        elif name in _PLAIN and not eq:
            if _PLAIN[name]:
                found.check = True
        elif name in _VALUED:
            if not eq and not rest:
                problems.append(Problem(name, "needs a value"))
                break
            setattr(found, _VALUED[name], (value if eq else rest.pop(0)).strip("'\""))
        elif name in _SWEEP:
            problems.append(Problem(name, "sweeps are not supported; start one run per set of overrides"))
        else:
            options = ", ".join(sorted({"--help", *(n for n in [*_VALUED, "--check"] if n.startswith("--"))}))
            problems.append(Problem(name, f"no such option; options: {options}; keys are set as key=value"))
    if found.show not in (None, "job", "all", "hydra"):
        problems.append(Problem("--cfg", f"{found.show!r}: write --cfg job"))
    if problems:
        raise ConfigError(problems)
    return found


@overload
def load(argv: list[str], entry: Literal["ppo"] = "ppo") -> Config: ...
@overload
def load(argv: list[str], entry: Literal["sft"]) -> SFTConfig: ...
@overload
def load(argv: list[str], entry: Literal["eval"]) -> EvalConfig: ...
@overload
def load(argv: list[str], entry: Literal["generation"]) -> GenerationConfig: ...
@overload
def load(argv: list[str], entry: str) -> Root: ...
def load(argv: list[str], entry: str = "ppo") -> Root:
    """The configuration an argument list describes, automatic values filled in.

    Raises ConfigError with every problem of grammar, type and spelling. Looks at no file but the configuration's own,
    and not at the machine: `verl.config.check` does.
    """
    return build(split_arguments(argv), entry)


def build(arguments: Arguments, entry: str) -> Root:
    """As `load`, from arguments already taken apart."""
    builder = Builder(entry)
    folders: list[Path] = []
    for given in (arguments.config_path, arguments.config_dir):
        if given:
            try:
                folders.append(Path(expand(given)))
            except CoerceError as error:
                raise ConfigError([Problem("--config-path", str(error))]) from None
    for layer in read(arguments.config_name or DEFAULT_NAME[entry], folders or [Path()], entry):
        builder.add_layer(layer)
    for argument in arguments.overrides:
        builder.add_override(argument)
    builder.finish()
    fill(builder)
    if builder.problems:
        raise ConfigError(builder.problems)
    return builder.root
