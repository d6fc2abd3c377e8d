"""What a check of `verl prove` found, and how it is shown."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verl.data.files import written_whole
from verl.report.build import table_page

OK, FAILED, LOOK, SKIPPED = "ok", "FAILED", "look", "skipped"
HEADER = ("check", "measured", "bound", "verdict", "what to do")
_WIDTHS = (18, 44, 22, 8, 60)


@dataclass(frozen=True, slots=True)
class Finding:
    """verdict: OK, FAILED, LOOK (the user decides) or SKIPPED (it does not apply); advice: what to do unless OK."""

    check: str
    measured: str
    bound: str = ""
    verdict: str = OK
    advice: str = ""

    @classmethod
    def within(cls, check: str, value: float, bound: float, unit: str, advice: str, about: str = "") -> Finding:
        """OK where the value is at most the bound; nan is not."""
        right = value <= bound
        measured = f"{value:.3g} {unit}".strip() + (f" ({about})" if about else "")
        return cls(check, measured, f"{bound:g} {unit}".strip(), OK if right else FAILED, "" if right else advice)

    @property
    def cells(self) -> tuple[str, ...]:
        """In the order of `HEADER`."""
        return self.check, self.measured, self.bound, self.verdict, self.advice


def table(findings: Sequence[Finding]) -> str:
    """The findings as text."""
    lines = []
    for row in (HEADER, *(finding.cells for finding in findings)):
        columns = [textwrap.wrap(cell, width) or [""] for cell, width in zip(row, _WIDTHS, strict=True)]
        for number in range(max(map(len, columns))):
            parts = [column[number] if number < len(column) else "" for column in columns]
            lines.append("  ".join(part.ljust(width) for part, width in zip(parts, _WIDTHS, strict=True)).rstrip())
    return "\n".join(lines)


def summary(findings: Sequence[Finding]) -> str:
    """How many checks there are of each verdict."""
    counts = {verdict: sum(f.verdict == verdict for f in findings) for verdict in (OK, FAILED, LOOK, SKIPPED)}
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)


def write_page(folder: Path, findings: Sequence[Finding], about: str) -> Path:
    """Write `folder/prove.html` and return its path. OSError where it cannot be written."""
    path = folder / "prove.html"
    page = table_page("verl prove", f"{about}: {summary(findings)}", HEADER, [finding.cells for finding in findings])
    with written_whole(path) as beside:
        beside.write_text(page, "utf-8")
    return path
