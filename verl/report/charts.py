"""The charts of the page, in order: charts.txt. A chart without a value to show does not appear.

`# id | title | unit | flags` begins a chart: wide; log (logarithmic axis); zero (the axis begins at 0); quiet (lines
that are 0 at every step are left out); stack=METRIC (areas whose total is that metric). Then a line each, `metric |
label | flags`: sparse (has a value at few steps); right (has the axis on the right); raw (is not smoothed). Metrics are
names or patterns of `metrics_table`; the label of a pattern is what `{…}` stands for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from verl.report import summary
from verl.report.compare import OTHER
from verl.report.read import Metrics
from verl.tracking.metrics_table import regex_of

_MOST = 8
"""Most lines that a pattern gives."""
_FLAT = 5
"""Steps after which a line without any change says nothing."""


@dataclass(frozen=True, slots=True)
class Line:
    """A metric in a chart."""

    metric: str
    label: str
    flags: frozenset[str]


@dataclass(slots=True)
class Chart:
    """A chart and its lines."""

    id: str
    title: str
    unit: str
    flags: frozenset[str]
    stack: str
    lines: list[Line] = field(default_factory=list)


def _charts() -> list[Chart]:
    charts: list[Chart] = []
    text = (resources.files("verl.report") / "charts.txt").read_text("utf-8")
    for row in filter(None, text.splitlines()):
        *cells, words = (cell.strip() for cell in row.removeprefix("# ").split("|"))
        flags = frozenset(words.split())
        if row.startswith("# "):
            stack = next((flag.removeprefix("stack=") for flag in flags if flag.startswith("stack=")), "")
            charts.append(Chart(*cells, flags, stack))
        else:
            charts[-1].lines.append(Line(*cells, flags))
    return charts


CHARTS = _charts()


def chart_list(metrics: Metrics, other: str = "") -> list[dict[str, Any]]:
    """The charts that a run has, as the page's script reads them: each with its lines in `series`.

    other: the name of another run, whose columns `joined` has added: each line is followed by that run's. `flat`: every
    line has one value at all steps; such charts come last.
    """
    charts = [_chart(chart, metrics) for chart in CHARTS]
    charts = [chart for chart in charts if chart["series"]]
    for chart in charts:
        values = [{v for v in metrics.columns[line["name"]] if v is not None} for line in chart["series"]]
        chart["flat"] = len(metrics.steps) >= _FLAT and all(len(distinct) <= 1 for distinct in values)
        if other and not chart["stack"]:
            chart["series"] = [line for own in chart["series"] for line in _with_other(own, metrics, other)]
    return sorted(charts, key=lambda chart: bool(chart["flat"]))


def _with_other(line: dict[str, Any], metrics: Metrics, other: str) -> list[dict[str, Any]]:
    name = OTHER + line["name"]
    if name not in metrics.columns:
        return [line]
    return [line, line | {"name": name, "label": f"{line['label']} ({other})", "other": True}]


def _chart(chart: Chart, metrics: Metrics) -> dict[str, Any]:
    columns, title = metrics.columns, chart.title
    series = [line for pattern in chart.lines for line in _lines(pattern, columns)]
    if "quiet" in chart.flags:
        series = [line for line in series if any(columns[line["name"]])]
    if chart.id == "validation":
        series = [line for line in series if columns[line["name"]] != columns.get("val/accuracy")]
    for line in series if chart.id == "reward" else ():
        if line["name"] == "val/accuracy":
            line["label"] = summary.validation_label(metrics, "val/accuracy").lower()
            title = f"Reward and {line['label']}"
    if chart.id == "reward" and columns.get("critic/rewards/mean") == columns.get("critic/score/mean"):
        series = [line for line in series if line["name"] != "critic/rewards/mean"]
    shown = {"id": chart.id, "title": title, "unit": chart.unit, "stack": chart.stack, "series": series}
    return shown | {flag: flag in chart.flags for flag in ("wide", "log", "zero")}


def _lines(line: Line, columns: dict[str, list[float | None]]) -> list[dict[str, Any]]:
    regex, flags = regex_of(line.metric), ("sparse", "right", "raw")
    before, _, rest = line.metric.partition("{")
    after = rest.rpartition("}")[2]
    names = [name for name in columns if regex.fullmatch(name)][:_MOST]
    labels = [line.label or name.removeprefix(before).removesuffix(after).removesuffix("/mean") for name in names]
    return [
        {"name": name, "label": label} | {flag: flag in line.flags for flag in flags}
        for name, label in zip(names, labels, strict=True)
    ]
