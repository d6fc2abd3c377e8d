"""One run beside another: the other's curves in the charts of the first, and the settings in which they differ."""

from __future__ import annotations

from verl.report.read import Metrics, Run
from verl.report.summary import flatten

OTHER = "other run: "
"""Before the names of the other run's columns."""


def joined(run: Run, *others: Run) -> Run:
    """`run`, whose curves have the columns of one other run too, over the steps of both. `run` without another one."""
    for other in others:
        steps = sorted({*run.metrics.steps, *other.metrics.steps})
        columns = _over(steps, run.metrics, "") | _over(steps, other.metrics, OTHER)
        run.other, run.curves = other, Metrics(steps, [None] * len(steps), columns)
    return run


def _over(steps: list[int], metrics: Metrics, prefix: str) -> dict[str, list[float | None]]:
    at = {step: number for number, step in enumerate(metrics.steps)}
    places = [at.get(step) for step in steps]
    return {
        prefix + name: [None if place is None else column[place] for place in places]
        for name, column in metrics.columns.items()
    }


def differences(run: Run, other: Run) -> list[tuple[str, str, str]]:
    """(key, value, the other's value) of settings and versions in which two runs differ; "–" where one lacks the
    key."""
    rows = []
    for prefix, mine, theirs in (("", run.config, other.config), ("versions.", run.versions, other.versions)):
        first, second = dict(flatten(mine)), dict(flatten(theirs))
        for key in dict.fromkeys([*first, *second]):
            if first.get(key) != second.get(key):
                rows.append((prefix + key, first.get(key, "–"), second.get(key, "–")))
    return rows
