"""The front of every entry point: --help, --cfg job, --check, and errors that end with the right exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from verl.config.command_line import build, split_arguments
from verl.config.matching import Spellings
from verl.config.problems import EXIT_CONFIGURATION, EXIT_OK, ConfigError, counted
from verl.config.reference import help_text
from verl.config.report import Report
from verl.config.schema.base import Root
from verl.config.schema.entries import PROGRAMS
from verl.config.yaml_files import dump_yaml
from verl.trainer.run import run_guarded


def run_command(argv: Sequence[str] | None, entry: str, work: str, spellings: Spellings) -> int:
    """Resolve and check the configuration of an entry point, then call its function of (config, tracking), given as
    "module:name" Returns the exit status of `run_guarded`, or that of the check."""
    try:
        config = resolve(argv, entry, spellings)
    except SystemExit as error:
        return int(error.code or 0)
    return run_guarded(config, work)


def resolve(argv: Sequence[str] | None, entry: str, spellings: Spellings) -> Any:
    """The configuration to run, checked; `argv` null means the process's own.

    Leaves the process (SystemExit) after --help, --cfg and --check, with 2 for a configuration that is wrong and 3
    where only the machine lacks something. What there is to say goes to stderr, once.
    """
    try:
        options = split_arguments(sys.argv[1:] if argv is None else argv)
        if options.help is not None:
            _leave(help_text(entry, options.help, spellings), EXIT_OK)
        config = build(options, entry, spellings)
    except ConfigError as error:
        print(f"verl: {error}", file=sys.stderr)
        print(f"help on a key: python3 -m {PROGRAMS[entry]} --help KEY", file=sys.stderr)
        raise SystemExit(EXIT_CONFIGURATION) from None
    if options.show:
        _leave(dump_yaml(config.to_dict()), EXIT_OK)
    _checked(config, options)
    return config


def _checked(config: Root, options: argparse.Namespace) -> None:
    """Check; leave unless the run can start."""
    from verl.preflight.check import check, prediction  # --help and --cfg load no component

    report = check(config)
    if not options.check:
        report.allow_run()
    elif report.ppo and not report.of("configuration"):
        from verl.preflight.reward import try_first_rows

        try_first_rows(report)
    for notice in [*report.notices, *(report.check_only if options.check else [])]:
        print(f"note: {notice}", file=sys.stderr)
    if report.problems:
        print(f"verl: {report.problem_text()}", file=sys.stderr)
    if options.check:
        report.plan += prediction(report)
        _leave(_verdict(report), report.exit_code)
    if report.problems:
        raise SystemExit(report.exit_code)


def _verdict(report: Report) -> str:
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
