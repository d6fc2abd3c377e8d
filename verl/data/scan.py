"""Look at every row once before the run: is it usable, and how long is its rendered prompt?

In this process, with the tokenizer's own threads, or in several processes where the rows are many and
data.filter_overlong_prompts_workers asks for them.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from verl.data.chat import BadRow, ChatRenderer
from verl.data.rows import RowFields, RowRules, chat_row, plain_row

CHUNK = 512
WORTH_PROCESSES = 20_000
"""Fewer rows than this are scanned in this process: starting others takes longer."""


class RowSource(Protocol):
    """Numbered rows: files, or a custom dataset."""

    def __len__(self) -> int: ...

    @property
    def sizes(self) -> list[int]:
        """Rows of each file."""
        ...

    def rows(self, start: int, stop: int) -> list[dict[str, Any]]:
        """Rows start..stop−1."""
        ...

    def locate(self, index: int) -> tuple[int, int]:
        """(file number, row number in that file)."""
        ...


@dataclass
class Scan:
    """lengths int32 [rows], −1 for a bad row; bad: row → (problem, detail); sources: data_source of each row."""

    lengths: np.ndarray
    bad: dict[int, tuple[str, str]] = field(default_factory=dict)
    sources: list[str] = field(default_factory=list)


@dataclass
class Scanner:
    """Everything a process needs to scan rows. `plain[f]` says whether file f has the plain format."""

    source: RowSource
    plain: Sequence[bool]
    rules: RowRules
    renderer: ChatRenderer

    def fields(self, row: dict[str, Any], index: int) -> RowFields:
        """The row's parts. Raises BadRow."""
        file, number = self.source.locate(index)
        if self.plain[file]:
            return plain_row(row, number, self.rules)
        return chat_row(row, self.rules)

    def chunk(self, start: int, stop: int) -> Scan:
        """Scan rows start..stop−1; positions in the result count from 0."""
        scan = Scan(np.full(stop - start, -1, np.int32), sources=[""] * (stop - start))
        texts: dict[int, str] = {}
        for offset, row in enumerate(self.source.rows(start, stop)):
            try:
                fields = self.fields(row, start + offset)
                scan.sources[offset] = fields.data_source
                texts[offset] = self.renderer.prompt_text(fields.cell, self.rules.prompt_key)
            except BadRow as bad:
                scan.bad[offset] = (bad.problem, bad.detail)
        for offset, ids in zip(texts, self.renderer.batch_ids(list(texts.values())), strict=True):
            scan.lengths[offset] = len(ids)
            if len(ids) == 0:
                scan.lengths[offset], scan.bad[offset] = -1, ("prompt empty", "it renders to no token")
        return scan


def scan_all(scanner: Scanner, workers: int = 1, on_progress: Callable[[int], None] | None = None) -> Scan:
    """Scan every row of the source. `on_progress` receives the number of rows done so far."""
    total = len(scanner.source)
    spans = [(start, min(start + CHUNK, total)) for start in range(0, total, CHUNK)]
    whole = Scan(np.full(total, -1, np.int32), sources=[""] * total)
    for (start, stop), part in zip(spans, _parts(scanner, spans, workers), strict=True):
        whole.lengths[start:stop] = part.lengths
        whole.sources[start:stop] = part.sources
        whole.bad.update({start + offset: what for offset, what in part.bad.items()})
        if on_progress is not None:
            on_progress(stop)
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
