"""Checking a configuration as a whole: every rule, all problems in one report, without torch."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from verl.algorithms import check as algorithm
from verl.config.command_line import build, split_arguments
from verl.config.files import dump_yaml
from verl.config.names import PROGRAMS
from verl.config.problems import EXIT_CONFIGURATION, EXIT_OK, CheckReport, ConfigError, counted
from verl.config.reference import help_text
from verl.config.report import Check
from verl.config.schema.base import Root
from verl.data import check as data
from verl.engine.training import check as lora
from verl.preflight import machine, values
from verl.reward import check as scoring
from verl.rollout import check as silent
from verl.tracking import check as profiling
from verl.trainer import check as sizes
from verl.trainer.run import run_guarded


def check(cfg: Root) -> CheckReport:
    """All problems and notices of a configuration, and its plan of batches.

    Reads the model's config.json, the data files' schema, reward columns and first rows, /dev and the environment.
    Loads nothing, fetches nothing.
    """
    c = Check(cfg)
    for rules in (values, algorithm, scoring, lora, sizes, machine, profiling, data, silent):
        rules.check(c)
    c.report.plan = sizes.plan(c)
    return c.report


def run_command(argv: Sequence[str] | None, entry: str, work: str) -> int:
    """Resolve and check the configuration of an entry point, then call its function of (config, tracking), given as
    "module:name" and imported last. Returns the exit status of `run_guarded`, or that of the check."""
    try:
        config = resolve(argv, entry)
    except SystemExit as error:
        return int(error.code or 0)
    module, _, name = work.partition(":")
    return run_guarded(config, getattr(importlib.import_module(module), name))


def resolve(argv: Sequence[str] | None, entry: str = "ppo") -> Any:
    """The configuration to run, checked; `argv` null means the process's own.

    Leaves the process (SystemExit) after --help, --cfg and --check, with 2 for a configuration that is wrong and 3
    where only the machine lacks something. What there is to say goes to stderr, once.
    """
    try:
        options = split_arguments(sys.argv[1:] if argv is None else argv)
        if options.help is not None:
            _leave(help_text(entry, options.help), EXIT_OK)
        cfg = build(options, entry)
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
