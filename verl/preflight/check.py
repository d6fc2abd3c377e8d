"""`check(config)`: every component's check, all problems in one report, without torch."""

from __future__ import annotations

from verl.algorithms import check as algorithms
from verl.config.report import Report
from verl.config.schema.base import Root
from verl.data import check as data
from verl.engine.training import check as training
from verl.errors import UserError
from verl.planning import report as planning
from verl.planning.plan import plan
from verl.preflight import machine, rows, values
from verl.reward import check as reward
from verl.rollout import check as rollout
from verl.tracking import check as tracking
from verl.trainer import check as trainer

_CHECKS = (values, algorithms, reward, training, trainer, machine, tracking, data, rows, rollout)


def check(config: Root) -> Report:
    """All problems and notices of a configuration, and its plan of batches.

    Reads the model's config.json, the data files' schema, reward columns and first rows, /dev and the environment.
    Loads no weights, fetches nothing.
    """
    report = Report(config)
    report.plugins  # noqa: B018  (imports the plug-in modules, or reports one that fails)
    for part in _CHECKS:
        part.check(config, report)
    report.plan = trainer.plan(report)
    return report


def prediction(report: Report) -> list[str]:
    """Memory and time of a step of reinforcement learning in two lines; [] where they cannot be predicted."""
    if not report.ppo or report.of("configuration") or report.facts is None or report.trainer.val_only:
        return []
    try:
        device = planning.device_of(report.config)
        return planning.summary(plan(report.config, report.facts.config, device))
    except UserError:  # a device that is not in the table, or a config.json that leaves sizes to the library
        return []
