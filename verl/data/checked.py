"""What the data sets of prompts and of supervised rows share: rows that cannot be used are counted, reported and limited;
the order of the others is a function of (seed, epoch). Specification: data.md §6, §7."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from verl.data.files import DataError

# Stands for the epoch in the draw of train_max_samples, so that it differs from every epoch's order.
SUBSET = 2**31


def epoch_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation int64 [rows] of an epoch; a function of (rows, seed, epoch) and nothing else.

    Row numbers sorted by one 64-bit draw each of PCG64(SeedSequence([seed, epoch])): numpy keeps bit
    generators and seed sequences stable between versions (NEP 19), which it does not promise of
    `Generator.permutation`.
    """
    draws = np.random.PCG64(np.random.SeedSequence([seed % 2**64, epoch])).random_raw(rows)
    return np.argsort(draws, kind="stable").astype(np.int64)


class CheckedRows:
    """Rows of a source (`RowFiles` or `CustomRows`), of which a subclass finds out which can be used, and chooses.

    `lengths` int64 [rows of the source]: tokens, −1 for a bad row; `bad`: row → (problem, detail); `split`: for
    messages. `len()` counts the chosen rows.
    """

    split = "train"

    def __init__(self, source: Any):
        self.source = source
        self.paths: list[str] = source.paths
        self.lengths = np.full(len(source), -1, np.int64)
        self.bad: dict[int, tuple[str, str]] = {}
        self._rows = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def order(self, *, seed: int, shuffle: bool, epoch: int = 0) -> np.ndarray:
        """Row numbers int64 [len] in the order of an epoch: `epoch_order`, or file order without shuffle."""
        return epoch_order(len(self), seed, epoch) if shuffle else np.arange(len(self))

    def where(self, row: int) -> str:
        """ "file row n" of a row of the whole source, for messages."""
        file, number = self.source.locate(row)
        return f"{self.paths[file]} row {number}"

    @property
    def names(self) -> str:
        """The files, for messages."""
        return ", ".join(self.paths)

    @property
    def bad_rows(self) -> list[dict[str, Any]]:
        """Records of data_report.jsonl: file, row, problem, detail."""
        out = []
        for row in sorted(self.bad):
            file, number = self.source.locate(row)
            problem, detail = self.bad[row]
            out.append({"file": self.paths[file], "row": number, "problem": problem, "detail": detail})
        return out

    def refuse_too_many_bad(self, ratio: float) -> None:
        """DataError where more than this share of a file's rows is bad."""
        records = self.bad_rows
        counts = Counter(record["file"] for record in records)
        for path, size in zip(self.paths, self.source.sizes, strict=True):
            if counts[path] > ratio * size:
                mine = [record for record in records if record["file"] == path]
                raise DataError(
                    f"{path}: {len(mine)} of {size} rows cannot be used (data.max_bad_row_ratio={ratio} allows "
                    f"{int(ratio * size)}): {'; '.join(by_problem(mine))}. Repair the rows, or raise "
                    "data.max_bad_row_ratio to leave them out",
                    records,
                )

    def choose(self, rows: np.ndarray, wanted: int, *, shuffle: bool, seed: int) -> None:
        """Use `wanted` of the rows (−1: all): the first, or with `shuffle` a draw. DataError if none is left."""
        if 0 <= wanted < len(rows):
            rows = np.sort(rows[epoch_order(len(rows), seed, SUBSET)[:wanted]]) if shuffle else rows[:wanted]
        if len(rows) == 0:
            raise DataError(f"{self.names}: no usable row is left", self.bad_rows)
        self._rows = rows

    def first_of(self, rows: Sequence[int] | np.ndarray, count: int = 5) -> str:
        """The first rows of `rows` with their lengths, for messages."""
        return ", ".join(f"{self.where(int(row))}: {self.lengths[row]}" for row in rows[:count])

    def longest(self) -> str:
        """The longest row, for messages."""
        row = int(self.lengths.argmax())
        return f"the longest has {self.lengths[row]} ({self.where(row)})"

    def counts(self, limit: int, prefix: str = "") -> dict[str, Any]:
        """What every report of a split has: files, rows, bad rows by problem, lengths of the rows used."""
        lengths = self.lengths[self._rows]
        return {
            "split": self.split,
            "files": list(self.paths),
            "rows": len(self.source),
            "used": len(self),
            "bad": dict(Counter(record["problem"] for record in self.bad_rows)),
            f"{prefix}tokens_mean": float(np.minimum(lengths, limit).mean()),
            f"{prefix}tokens_max": int(lengths.max()),
        }

    def left_out(self) -> list[str]:
        """A line for the console for each problem."""
        return [f"{self.split}: left out {text}" for text in by_problem(self.bad_rows)]


def by_problem(records: Sequence[dict[str, Any]]) -> list[str]:
    """ "n × problem (e.g. file row n: detail)" of bad rows, the most frequent first."""
    counts = Counter(record["problem"] for record in records)
    first = {record["problem"]: record for record in reversed(records)}
    return [
        f"{count} × {problem} (e.g. {first[problem]['file']} row {first[problem]['row']}: {first[problem]['detail']})"
        for problem, count in counts.most_common()
    ]
