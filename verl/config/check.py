"""Checking a configuration as a whole: every rule, all problems in one report, without torch."""

from __future__ import annotations

from verl.config.problems import CheckReport
from verl.config.rules import algorithm, data, lora, machine, profiling, scoring, silent, sizes, values
from verl.config.rules.context import Check
from verl.config.schema.base import Root


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
