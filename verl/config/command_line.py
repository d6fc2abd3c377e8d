"""The front of every entry point: --help, --cfg job, --check, and errors that end with the right exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from verl.config.conversion import expand
from verl.config.defaults import fill
from verl.config.grammar import GrammarError
from verl.config.matching import Spellings
from verl.config.problems import EXIT_CONFIGURATION, EXIT_OK, CheckReport, ConfigError, Problem, counted
from verl.config.resolve import Resolver
from verl.config.schema.base import Root
from verl.config.schema.entries import PROGRAMS
from verl.config.yaml_files import dump_yaml, read

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
    and not at the machine: `verl.config.check` does.
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


def resolve(argv: Sequence[str] | None, entry: str, spellings: Spellings) -> Any:
    """The configuration to run, checked; `argv` null means the process's own.

    Leaves the process (SystemExit) after --help, --cfg and --check, with 2 for a configuration that is wrong and 3
    where only the machine lacks something. What there is to say goes to stderr, once.
    """
    try:
        options = split_arguments(sys.argv[1:] if argv is None else argv)
        if options.help is not None:
            from verl.config.reference import help_text

            _leave(help_text(entry, options.help, spellings), EXIT_OK)
        cfg = build(options, entry, spellings)
    except ConfigError as error:
        print(f"verl: {error}", file=sys.stderr)
        print(f"help on a key: python3 -m {PROGRAMS[entry]} --help KEY", file=sys.stderr)
        raise SystemExit(EXIT_CONFIGURATION) from None
    if options.show:
        _leave(dump_yaml(cfg.to_dict()), EXIT_OK)
    _checked(cfg, options)
    return cfg


def _checked(cfg: Root, options: argparse.Namespace) -> None:
    """Check; leave unless the run can start."""
    from verl.config.check import check

    report = check(cfg)
    if not options.check:
        report.allow_run()
    for notice in [*report.notices, *(report.check_only if options.check else [])]:
        print(f"note: {notice}", file=sys.stderr)
    if report.problems:
        print(f"verl: {report.problem_text()}", file=sys.stderr)
    if options.check:
        _leave(_verdict(report), report.exit_code)
    if report.problems:
        raise SystemExit(report.exit_code)


def _verdict(report: CheckReport) -> str:
    """What --check prints: the plan and the verdict."""
    problems, missing = len(report.of("configuration")), len(report.of("machine"))
    verdict = "check: ok"
    if problems:
        verdict = f"check: the configuration has {counted(problems, 'problem')}"
    elif missing:
        verdict = f"check: the configuration is right; this machine lacks {counted(missing, 'thing')}"
    plan = ["plan:", *(f"  {line}" for line in report.plan)] if report.plan and not problems else []
    return "\n".join([*plan, verdict])


def _leave(text: str, status: int) -> NoReturn:
    try:
        print(text)
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stderr.close()
    raise SystemExit(status)
