"""Look at every row once before the run: is it usable, and how long is its rendered prompt?

In this process, with the tokenizer's own threads, or in several processes where the rows are many and
data.filter_overlong_prompts_workers asks for them.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl.data.chat import BadRow, ChatRenderer
from verl.data.rows import RowFields, RowRules, fields_of

CHUNK = 512
# Fewer rows than this are scanned in this process: starting others takes longer.
WORTH_PROCESSES = 20_000


@dataclass
class Scan:
    """lengths int64 [rows], −1 for a bad row; bad: row → (problem, detail); sources: data_source of each row."""

    lengths: np.ndarray
    bad: dict[int, tuple[str, str]] = field(default_factory=dict)
    sources: list[str] = field(default_factory=list)


@dataclass
class Scanner:
    """Everything a process needs to scan rows of a source. `plain[f]`: has file f the plain format?"""

    source: Any
    plain: Sequence[bool]
    rules: RowRules
    renderer: ChatRenderer

    def fields(self, row: dict[str, Any], index: int) -> RowFields:
        """The row's parts. Raises BadRow."""
        file, number = self.source.locate(index)
        return fields_of(row, number, self.plain[file], self.rules)

    def chunk(self, start: int, stop: int) -> Scan:
        """Scan rows start..stop−1; `bad` has row numbers of the whole source."""
        scan = Scan(np.full(stop - start, -1, np.int64), sources=[""] * (stop - start))
        texts: dict[int, str] = {}
        for index, row in enumerate(self.source.rows(start, stop), start):
            try:
                fields = self.fields(row, index)
                scan.sources[index - start] = fields.data_source
                texts[index] = self.renderer.prompt_text(fields.cell, self.rules.prompt_key)
            except BadRow as bad:
                scan.bad[index] = (bad.problem, bad.detail)
        for index, ids in zip(texts, self.renderer.batch_ids(list(texts.values())), strict=True):
            if len(ids):
                scan.lengths[index - start] = len(ids)
            else:
                scan.bad[index] = ("prompt empty", "it renders to no token")
        return scan


def scan_all(scanner: Scanner, workers: int = 1) -> Scan:
    """Scan every row of the source."""
    total = len(scanner.source)
    spans = [(start, min(start + CHUNK, total)) for start in range(0, total, CHUNK)]
    parts = list(_parts(scanner, spans, workers))
    whole = Scan(np.concatenate([part.lengths for part in parts]))
    for part in parts:
        whole.bad |= part.bad
        whole.sources += part.sources
    return whole


def _parts(scanner: Scanner, spans: list[tuple[int, int]], workers: int) -> Iterator[Scan]:
    if workers <= 1 or len(scanner.source) < WORTH_PROCESSES:
        yield from (scanner.chunk(start, stop) for start, stop in spans)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_adopt, initargs=(scanner,)) as pool:
        yield from pool.map(_scan_span, spans)


_scanner: Scanner | None = None


def _adopt(scanner: Scanner) -> None:
    global _scanner
    _scanner = scanner


def _scan_span(span: tuple[int, int]) -> Scan:
    assert _scanner is not None
    return _scanner.chunk(*span)
