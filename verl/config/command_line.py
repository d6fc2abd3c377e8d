"""The front of every entry point: --help, --cfg job, --check, and errors that end with the right exit status."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Literal, NoReturn, overload

from verl.config.load import Arguments, build, split_arguments
from verl.config.problems import ConfigError
from verl.config.report import EXIT_CONFIGURATION, EXIT_OK, Report
from verl.config.schema import Config, EvalConfig, GenerationConfig, Root, SFTConfig

PROGRAMS = {
    "ppo": "verl.trainer.main_ppo",
    "sft": "verl.trainer.sft_trainer",
    "eval": "verl.trainer.main_eval",
    "generation": "verl.trainer.main_generation",
}


@overload
def resolve(argv: Sequence[str] | None, entry: Literal["ppo"] = "ppo") -> Config: ...
@overload
def resolve(argv: Sequence[str] | None, entry: Literal["sft"]) -> SFTConfig: ...
@overload
def resolve(argv: Sequence[str] | None, entry: Literal["eval"]) -> EvalConfig: ...
@overload
def resolve(argv: Sequence[str] | None, entry: Literal["generation"]) -> GenerationConfig: ...
@overload
def resolve(argv: Sequence[str] | None, entry: str) -> Root: ...
def resolve(argv: Sequence[str] | None, entry: str = "ppo") -> Root:
    """The configuration to run, checked; `argv` null means the process's own.

    Leaves the process (SystemExit) after --help, --cfg and --check, with 2 for a configuration that is wrong and 3
    where only the machine lacks something. What there is to say goes to stderr, once.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        options = split_arguments(arguments)
        if options.help is not None:
            from verl.config.reference import help_text

            _leave(help_text(entry, options.help, PROGRAMS[entry]), EXIT_OK)
        cfg = build(options, entry)
    except ConfigError as error:
        print(f"verl: {error}", file=sys.stderr)
        print(f"help on a key: python3 -m {PROGRAMS[entry]} --help KEY", file=sys.stderr)
        raise SystemExit(EXIT_CONFIGURATION) from None
    if options.show:
        _leave(to_yaml(cfg), EXIT_OK)
    _checked(cfg, options)
    return cfg


def _checked(cfg: Root, options: Arguments) -> None:
    """Check; leave unless the run can start."""
    from verl.config.check import check

    report = check(cfg)
    if not options.check:
        report.allow_downloads()
    for notice in [*report.notices, *(report.check_only if options.check else [])]:
        print(f"note: {notice}", file=sys.stderr)
    if report.problems:
        print(f"verl: {report.problem_text()}", file=sys.stderr)
    if options.check:
        _leave(_answer(report), report.exit_code)
    if report.problems:
        raise SystemExit(report.exit_code)


def _answer(report: Report) -> str:
    """What --check prints: the plan and the verdict."""
    ours, theirs = len(report.of("configuration")), len(report.of("machine"))
    if ours:
        verdict = f"check: the configuration has {ours} problem{'s' if ours > 1 else ''}"
    elif theirs:
        verdict = (
            f"check: the configuration is right; this machine lacks {theirs} thing{'s' if theirs > 1 else ''}"
        )
    else:
        verdict = "check: ok"
    plan = ["plan:", *(f"  {line}" for line in report.plan)] if report.plan and not ours else []
    return "\n".join([*plan, verdict])


def to_yaml(cfg: Root) -> str:
    """The resolved configuration as YAML, in the schema's order; `load --config-name` reads it back."""
    from verl.config.files import dump_yaml

    return dump_yaml(cfg.to_dict()).rstrip("\n")


def _leave(text: str, status: int) -> NoReturn:
    try:
        print(text)
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stderr.close()
    raise SystemExit(status)
