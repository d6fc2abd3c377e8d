"""The metrics that verl logs, in the order in which they are shown: metrics_table.txt, a row per line with pattern, unit,
when it is logged, and meaning.

docs/metrics.md, the console, metrics.jsonl and the trackers use this table; the charts of the report
(`verl.report.charts`) name its metrics.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from typing import NamedTuple


class Row(NamedTuple):
    """A metric, or several of one kind. In `pattern`, `{a,b}` stands for either and `{word}` for any text."""

    section: str
    pattern: str
    unit: str
    when: str
    meaning: str


OWN_LOSS = "actor/{name}"
"""The row of what a registered policy loss reports by itself."""
ALIASES = {
    "actor/reward_mean": ("critic/rewards/mean",),
    "actor/kl_divergence": ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl"),
    "critic/value_loss": ("critic/vf_loss",),
}
"""Second spelling → the metrics it repeats: the first of them that the step has."""
NOT_ON_CONSOLE = frozenset((*ALIASES, "val/accuracy", "val/multimodal_score"))
"""Names that only metrics.jsonl and the trackers get."""


def _rows() -> list[Row]:
    section, rows = "", []
    text = (resources.files("verl.tracking") / "metrics_table.txt").read_text("utf-8")
    for line in filter(None, text.splitlines()):
        if line.startswith("# "):
            section = line[2:]
        else:
            pattern, unit, when, meaning = (cell.strip() for cell in line.split("|"))
            rows.append(Row(section, pattern, unit, when, meaning))
    return rows


def regex_of(pattern: str) -> re.Pattern[str]:
    """What a pattern matches as a whole."""
    parts = re.split(r"\{(.*?)\}", pattern)
    for at, part in enumerate(parts):
        choices = "|".join(map(re.escape, part.split(",")))
        parts[at] = re.escape(part) if at % 2 == 0 else f"(?:{choices})" if "," in part else ".+"
    return re.compile("".join(parts))


ROWS = _rows()
_PATTERNS = [regex_of(row.pattern) for row in ROWS]
_EXACT = {row.pattern: place for place, row in enumerate(ROWS)}


@lru_cache(maxsize=4096)
def rank(name: str) -> int:
    """Index in `ROWS` of the row that a name belongs to: the row of that name, else the first whose pattern matches;
    `len(ROWS)` if there is none."""
    if name in _EXACT:
        return _EXACT[name]
    return next((place for place, regex in enumerate(_PATTERNS) if regex.fullmatch(name)), len(ROWS))


def in_order(metrics: Mapping[str, float]) -> dict[str, float]:
    """The same metrics in the order of the table; those of one row keep their order, unlisted names come last."""
    return dict(sorted(metrics.items(), key=lambda item: rank(item[0])))


def with_aliases(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics and the second spellings that depend on other metrics."""
    out = dict(metrics)
    for alias, sources in ALIASES.items():
        values = [metrics[name] for name in sources if name in metrics]
        if values:
            out.setdefault(alias, values[0])
    return out
