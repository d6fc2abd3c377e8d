"""Write the tables of docs/metrics.md again, after its introduction: `python docs/write_metrics_page.py`."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

from verl.report.charts import CHARTS
from verl.tracking.metrics_table import ROWS, Row, regex_of

PAGE = Path(__file__).with_name("metrics.md")


def render(page: str) -> str:
    """The page with its tables written again; what is in front of the first one stays."""
    parts = [page.partition("## Training")[0].rstrip("\n") + "\n"]
    for section, rows in groupby(ROWS, lambda row: row.section):
        lines = ["| name | unit | logged | meaning | chart |", "|---|---|---|---|---|", *map(table_row, rows)]
        parts.append("\n".join([f"## {section}", "", *lines, ""]))
    return "\n".join(parts)


def table_row(row: Row) -> str:
    """A row of the page's tables."""
    cells = (f"`{row.pattern}`", row.unit, row.when, row.meaning, charts_of(row.pattern))
    return f"| {' | '.join(cells)} |"


def charts_of(pattern: str) -> str:
    """Titles of the charts that show a metric of a row."""
    names = alternatives(pattern)
    shows = [c for c in CHARTS if any(regex_of(line.metric).fullmatch(n) for line in c.lines for n in names)]
    return ", ".join(dict.fromkeys(chart.title for chart in shows))


def alternatives(pattern: str) -> list[str]:
    """The names that the `{a,b}` of a pattern stand for."""
    choice = re.search(r"\{(\w+(?:,\w+)+)\}", pattern)
    if choice is None:
        return [pattern]
    return [n for word in choice[1].split(",") for n in alternatives(pattern.replace(choice[0], word, 1))]


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
