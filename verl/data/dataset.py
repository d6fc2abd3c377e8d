"""The prompts of a run: rows of files, checked and measured once, turned into `Prompt`s when they are drawn.

Rows are measured in this process, with the tokenizer's own threads, or in several processes where the rows are many
and data.filter_overlong_prompts_workers asks for them. Specification: data.md §1–§6. Order and position belong to
`stream.py`.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl.data.chat import BadRow, ChatRenderer, as_messages
from verl.data.checked import CheckedRows
from verl.data.files import DataError, RowFiles
from verl.data.plugins import CustomRows
from verl.data.rows import GSM8K, RowFields, RowRules, check_columns, fields_of
from verl.trajectory import Prompt

CHUNK = 512
# Fewer rows than this are scanned in this process: starting others takes longer.
WORTH_PROCESSES = 20_000


def truncate(ids: np.ndarray, limit: int, mode: str) -> np.ndarray:
    """Cut ids int64 [P] to at most `limit`: left keeps the last, right the first, middle both ends."""
    if len(ids) <= limit:
        return ids
    if mode == "left":
        return ids[len(ids) - limit :]
    if mode == "right":
        return ids[:limit]
    if mode == "middle":
        head = limit // 2
        return np.concatenate([ids[:head], ids[len(ids) - (limit - head) :]])
    raise DataError(
        f"data.truncation={mode!r}: a prompt of {len(ids)} tokens exceeds {limit} and cannot be cut"
    )


class PromptDataset(CheckedRows):
    """The usable prompts of one split. `len()` counts them; `prompt(i, epoch)` gives number i.

    files: path or list; config: the whole configuration; score_known(data_source): is there a built-in
    reward function for it? (None: for all.) rules: what a row must have (None: as the configuration says). With
    data.custom_cls the rows come from the user's class. Raises DataError where the data cannot be used; it carries the rows that explain it.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        config: Any,
        tokenizer: Any,
        *,
        split: str = "train",
        score_known: Callable[[str], bool] | None = None,
        rules: RowRules | None = None,
    ):
        data = config.data
        self.split = split
        self.config = config
        self._limit = int(data.max_prompt_length)
        self.rules = rules or RowRules.of(config)
        renderer = ChatRenderer(tokenizer, data.apply_chat_template_kwargs)
        if data.custom_cls.path:
            super().__init__(CustomRows.load(files, config, tokenizer, split))
            plain = [False]
        else:
            super().__init__(RowFiles(files, data.cache_dir, use_shm=data.use_shm))
            plain = [check_columns(file, self.rules) for file in self.source.files]
        self._scanner = Scanner(self.source, plain, self.rules, renderer)
        self._scan(int(data.filter_overlong_prompts_workers), score_known)
        self.refuse_too_many_bad(float(data.max_bad_row_ratio))
        self._too_long = np.flatnonzero(self.lengths > self._limit)
        train = split == "train"
        self.choose(
            self._fitting(),
            int(data.train_max_samples if train else data.val_max_samples),
            shuffle=data.shuffle if train else data.validation_shuffle,
            seed=int(data.seed if data.seed is not None else config.trainer.seed),
        )

    # -------------------------------------------------------------------------------------------- checking

    def _scan(self, workers: int, score_known: Callable[[str], bool] | None) -> None:
        scan = scan_all(self._scanner, max(1, min(workers, os.cpu_count() or 1)))
        self.lengths, self.bad, self._sources = scan.lengths, scan.bad, scan.sources
        if not self.rules.needs_truth or score_known is None:
            return
        unknown = {source for source in set(scan.sources) if source and not score_known(source)}
        for row, source in enumerate(scan.sources):
            if source in unknown and row not in self.bad:
                detail = f"no built-in reward function for {source!r}; set custom_reward_function.path"
                self.bad[row], self.lengths[row] = ("data_source without a function", detail), -1

    def _fitting(self) -> np.ndarray:
        """Rows that fit or are made to fit, int64, ascending."""
        data, long = self.config.data, self._too_long
        good = np.flatnonzero(self.lengths >= 0)
        if data.filter_overlong_prompts and len(long):
            good = np.setdiff1d(good, long)
            left = {self.source.locate(int(row))[0] for row in good}
            for number, path in enumerate(self.paths):
                if number not in left:
                    raise DataError(
                        f"{path}: no row is left: every prompt is longer than data.max_prompt_length={self._limit} "
                        f"({self.longest()}); raise data.max_prompt_length",
                        self.bad_rows,
                    )
        elif data.truncation == "error" and len(long):
            raise DataError(
                f"{len(long)} of {len(good)} prompts of {self.names} are longer than "
                f"data.max_prompt_length={self._limit} tokens: {self.first_of(long)}; {self.longest()}. Ways out: "
                f"data.max_prompt_length={int(self.lengths.max())} (or more), "
                "data.filter_overlong_prompts=True (drop them), data.truncation=left|right|middle (cut them)",
                self.bad_rows,
            )
        return good

    # --------------------------------------------------------------------------------------------- drawing

    def prompt(self, row: int, epoch: int = 0) -> Prompt:
        """Usable row number `row` (0 ≤ row < len) as a Prompt with uid "{file}:{row in file}@{epoch}".

        Raises BadRow if the row cannot be used after all (a custom dataset that changed its mind).
        """
        index = int(self._rows[row])
        file, number = self.source.locate(index)
        fields = self._scanner.fields(self.source.row(index), index)
        renderer = self._scanner.renderer
        ids = renderer.ids(renderer.prompt_text(fields.cell, self.rules.prompt_key))
        if len(ids) > self._limit:
            if self.config.data.filter_overlong_prompts:
                raise BadRow("prompt too long", f"{len(ids)} tokens, it had {self.lengths[index]} before")
            ids = truncate(ids, self._limit, self.config.data.truncation)
        messages = as_messages(fields.cell, self.rules.prompt_key)
        place = {"file": self.paths[file], "row": number, "epoch": epoch}
        return fields.prompt(f"{file}:{number}@{epoch}", ids, messages, **place)

    def __getitem__(self, row: int) -> dict[str, Any]:
        """The columns of usable row `row` as a dict, with `raw_prompt` (messages), for samplers and plugins."""
        index = int(self._rows[row])
        columns = dict(self.source.row(index))
        fields = self._scanner.fields(columns, index)
        return columns | {"raw_prompt": as_messages(fields.cell, self.rules.prompt_key), "index": row}

    # ------------------------------------------------------------------------------------------- reporting

    @property
    def report(self) -> dict[str, Any]:
        """Counts for the run folder: rows, used, bad by problem, too long, lengths, sources."""
        filtered = bool(self.config.data.filter_overlong_prompts)
        return self.counts(self._limit, "prompt_") | {
            "dropped_too_long": len(self._too_long) if filtered else 0,
            "cut": 0 if filtered else len(np.intersect1d(self._too_long, self._rows)),
            "sources": dict(Counter(self._sources[int(row)] for row in self._rows)),
        }

    def describe(self) -> list[str]:
        """Lines for the console: what was read, used, dropped, cut, and one example per problem."""
        facts = self.report
        lines = [
            f"{facts['used']} of {facts['rows']} rows from {self.names}; prompts of "
            f"{facts['prompt_tokens_mean']:.0f} tokens on average, at most {facts['prompt_tokens_max']}"
        ]
        if dropped := facts["dropped_too_long"]:
            share = dropped / max(1, int((self.lengths >= 0).sum()))
            lines.append(
                f"dropped {dropped} prompts ({share:.1%}) longer than {self._limit} tokens; {self.longest()}; "
                f"first: {self.first_of(self._too_long, 3)}"
            )
        if facts["cut"]:
            lines.append(
                f"{facts['cut']} prompts are cut to {self._limit} tokens "
                f"(data.truncation={self.config.data.truncation}); {self.longest()}"
            )
        if any(self._scanner.plain) and GSM8K in self._sources:
            lines.append(f"plain format: ground truth from `#### n`, scored as {GSM8K}, flexible")
        if not self._scanner.renderer.has_template:
            lines.append("the tokenizer has no chat template; string prompts are taken as raw text")
        return [f"{self.split}: {line}" for line in lines] + self.left_out()


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


def scan_all(scanner: Scanner, workers: int) -> Scan:
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
