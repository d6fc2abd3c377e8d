"""The prompts of a run: rows of files, checked and measured once, turned into `Prompt`s when they are drawn.

`CheckedRows` is the base of the data sets of prompts and of supervised rows: rows that cannot be used are counted,
reported and limited; the order of the others is a function of (seed, epoch). Prompts are measured in this process, with
the tokenizer's own threads, or in several processes where the rows are many and data.filter_overlong_prompts_workers
asks for them. The position in the order belongs to `stream.py`.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.data.augmentation import Augmentation
from verl.data.files import DataError, Paths, RowFiles, notice
from verl.data.media import ImageProcessor, check_number, folder_of, has_frames, with_images
from verl.data.plugins import CustomRows
from verl.data.rows import (
    GSM8K,
    BadRow,
    ChatRenderer,
    RowFields,
    RowRules,
    RowTools,
    Video,
    check_columns,
    fields_of,
    messages_of,
)
from verl.trajectory import Prompt

if TYPE_CHECKING:
    from verl.config.schema.entries import Config

CHUNK = 512
# Fewer rows than this are scanned in this process: starting others takes longer.
WORTH_PROCESSES = 20_000
TELL_SECONDS = 10
# Stands for the epoch in the draw of train_max_samples, so that it differs from every epoch's order.
SUBSET = 2**31
SMALLER = "lower data.mm_processor_kwargs.max_pixels (smaller images)"


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
        for path, size in zip(self.paths, self.source.sizes, strict=True):
            mine = [record for record in records if record["file"] == path]
            if len(mine) > ratio * size:
                raise DataError(
                    f"{path}: {len(mine)} of {size} rows cannot be used (data.max_bad_row_ratio={ratio} allows "
                    f"{int(ratio * size)}): {'; '.join(by_problem(mine))}. Repair the rows (all of them are in the run "
                    "folder's data_report.jsonl), or raise data.max_bad_row_ratio to leave them out",
                    records,
                )

    def leave_out(self, row: int, bad: BadRow, ratio: float) -> None:
        """Report once that usable row number `row` cannot be drawn, and count it as bad from now on.

        DataError if more than `ratio` of a file's rows are bad, or no usable row is left.
        """
        index = int(self._rows[row])
        if index not in self.bad:
            notice(f"{self.split}: left out {self.where(index)}: {bad}")
        self.bad[index] = (bad.problem, bad.detail)
        self.refuse_too_many_bad(ratio)
        if self.bad.keys() >= set(self._rows.tolist()):
            raise DataError(f"{self.names}: no usable row is left; the last: {bad}", self.bad_rows)

    def choose(self, rows: np.ndarray, count: int, *, shuffle: bool, seed: int) -> None:
        """Use `count` of the rows (−1: all): the first, or with `shuffle` a draw. DataError if none is left."""
        if 0 <= count < len(rows):
            rows = np.sort(rows[epoch_order(len(rows), seed, SUBSET)[:count]]) if shuffle else rows[:count]
        if len(rows) == 0:
            raise DataError(f"{self.names}: no usable row is left", self.bad_rows)
        self._rows = rows

    def too_long(self, rows: np.ndarray, usable: int, key: str, limit: int, ways: str) -> DataError:
        """The error of rows that exceed the limit of `key`; `ways`: what to do besides raising it."""
        return DataError(
            f"{len(rows)} of {usable} rows of {self.names} are longer than {key}={limit} tokens: "
            f"{self.first_of(rows)}; {self.longest()}. Ways out: {key}={int(self.lengths.max())} (or more), {ways}",
            self.bad_rows,
        )

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
    examples = {p: f"{record['file']} row {record['row']}: {record['detail']}" for p, record in first.items()}
    return [f"{count} × {problem} (e.g. {examples[problem]})" for problem, count in counts.most_common()]


def truncate(ids: np.ndarray, limit: int, mode: str) -> np.ndarray:
    """Cut ids int64 [P] to at most `limit`: left keeps the last, right the first, middle both ends."""
    if len(ids) <= limit:
        return ids
    kept_first = {"left": 0, "right": limit, "middle": limit // 2}
    if mode not in kept_first:
        raise DataError(f"data.truncation={mode!r}: a prompt of {len(ids)} tokens exceeds {limit}")
    head = kept_first[mode]
    return np.concatenate([ids[:head], ids[len(ids) - (limit - head) :]])


class PromptDataset(CheckedRows):
    """The usable prompts of one split. `len()` counts them; `prompt(i, epoch)` gives number i.

    files: path or list; config: the whole configuration; check_truth(data_source, ground_truth): raises BadRow where no
    built-in function can give a full score (None: no check). rules: what a row must have (None: as the configuration
    says). tools: what rows of `tool_agent` are rendered with. processor: of a model that sees images (None: rows with
    images are bad). With data.custom_cls the rows come from the user's class. Raises DataError where the data cannot be
    used; it carries the rows that explain it.
    """

    def __init__(
        self,
        files: Paths,
        config: Config,
        tokenizer: Any,
        *,
        split: str = "train",
        check_truth: Callable[[str, Any], None] | None = None,
        rules: RowRules | None = None,
        tools: RowTools | None = None,
        processor: Any = None,
    ):
        data = config.data
        self.split = split
        self.config = config
        self._limit = int(data.max_prompt_length)
        self.rules = replace(rules or RowRules.of(config), images=processor is not None)
        self.images = None
        if processor is not None:
            most = config.actor_rollout_ref.rollout.limit_images
            scored = config.reward_model.images
            self.images = ImageProcessor(processor, data.allow_image_urls, most, scored)
        self._augment = Augmentation.of(config) if self.images is not None and split == "train" else None
        renderer = ChatRenderer(tokenizer, data.apply_chat_template_kwargs)
        if data.custom_cls.path:
            super().__init__(CustomRows.load(files, config, tokenizer, split, processor))
            plain, workers = [False], 1  # the class of a user's file is not known to another process
        else:
            super().__init__(RowFiles(files, data.cache_dir, use_shm=data.use_shm))
            plain = [check_columns(file, self.rules) for file in self.source.files]
            workers = int(data.filter_overlong_prompts_workers)
        judged = check_truth if self.rules.needs_truth else None
        self._scanner = Scanner(self.source, plain, self.rules, renderer, tools, self.images, judged)
        self._scan(workers)
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

    def _scan(self, workers: int) -> None:
        self._scanned = scan = scan_all(self._scanner, max(1, min(workers, os.cpu_count() or 1)))
        self.lengths, self.bad = scan.lengths, scan.bad
        if self.config.data.truncation != "error" and not self.config.data.filter_overlong_prompts:
            for row in (row for row in sorted(scan.media) if self.lengths[row] > self._limit):
                message = f"{self.lengths[row]} tokens with its images, which are never cut"
                detail = f"{message}; raise data.max_prompt_length={self._limit}, or {SMALLER}"
                self.bad[row], self.lengths[row] = ("prompt too long", detail), -1

    def _fitting(self) -> np.ndarray:
        """Rows that fit or are made to fit, int64, ascending."""
        data, long = self.config.data, self._too_long
        good = np.flatnonzero(self.lengths >= 0)
        if data.filter_overlong_prompts and len(long):
            good = np.setdiff1d(good, long)
            files_with_rows = {self.source.locate(int(row))[0] for row in good}
            for number, path in enumerate(self.paths):
                if number not in files_with_rows:
                    limit = f"data.max_prompt_length={self._limit} ({self.longest()}); raise it"
                    text = f"{path}: no row is left: every prompt is longer than {limit}"
                    raise DataError(text, self.bad_rows)
        elif data.truncation == "error" and len(long):
            ways = "data.filter_overlong_prompts=True (drops them), data.truncation=left|right|middle (cuts)"
            if self._scanned.media.intersection(long.tolist()):
                ways = f"data.filter_overlong_prompts=True (drops them), {SMALLER}"
            raise self.too_long(long, len(good), "data.max_prompt_length", self._limit, ways)
        return good

    # --------------------------------------------------------------------------------------------- drawing

    def prompt(self, row: int, epoch: int = 0) -> Prompt:
        """Usable row number `row` (0 ≤ row < len) as a Prompt with uid "{file}:{row in file}@{epoch}".

        Raises BadRow, which names file and row, if it cannot be used after all: a truncated image, a remote image that
        is gone, a custom dataset whose row changed.
        """
        index = int(self._rows[row])
        try:
            return self._prompt(index, epoch)
        except BadRow as bad:
            raise BadRow(bad.problem, f"{self.where(index)}: {bad.detail}") from bad

    def prompts(self, rows: Iterable[int], most: int | None = None) -> list[Prompt]:
        """The first `most` (None: all) of these usable rows that can be drawn.

        The others are reported and count as bad from now on. DataError where a file has too many.
        """
        out: list[Prompt] = []
        for row in rows:
            if most is not None and len(out) >= most:
                break
            try:
                out.append(self._prompt(int(self._rows[row]), 0))
            except BadRow as bad:
                self.leave_out(row, bad, float(self.config.data.max_bad_row_ratio))
        return out

    def _prompt(self, index: int, epoch: int) -> Prompt:
        file, number = self.source.locate(index)
        fields = self._scanner.fields(self.source.row(index), index)
        messages, cells = self._scanner.dialogue(fields)
        text, media = self._scanner.text(fields, messages) if messages else "", None
        if cells:
            assert self.images is not None
            change = None
            if self._augment is not None:
                change = partial(self._augment, epoch=epoch, file=file, row=number)
            ids, media = self.images(text, cells, folder_of(self.paths[file]), change)
        else:
            ids = self._scanner.renderer.ids(text) if messages else np.zeros(0, np.int64)
        if len(ids) > self._limit:
            if media is not None or self.config.data.filter_overlong_prompts:
                message = f"{len(ids)} tokens, it had {self.lengths[index]} before"
                less = ", or augment less" if self._augment else ""
                raise BadRow("prompt too long", f"{message}; raise data.max_prompt_length={self._limit}{less}")
            ids = truncate(ids, self._limit, self.config.data.truncation)
        if self.images is not None:
            self.images.counts["drawn"] += len(cells)
        place = {"file": self.paths[file], "row": number, "epoch": epoch, "media": media}
        return fields.prompt(f"{file}:{number}@{epoch}", ids, messages, **place)

    def __getitem__(self, row: int) -> dict[str, Any]:
        """The columns of usable row `row` as a dict, with `raw_prompt` (messages), for samplers and plugins."""
        index = int(self._rows[row])
        columns = dict(self.source.row(index))
        messages = messages_of(self._scanner.fields(columns, index), self.rules)
        return columns | {"raw_prompt": messages, "index": row}

    # ------------------------------------------------------------------------------------------- reporting

    @property
    def report(self) -> dict[str, Any]:
        """Counts for the run folder: rows, used, bad by problem, too long, lengths, sources."""
        filtered = bool(self.config.data.filter_overlong_prompts)
        return self.counts(self._limit, "prompt_") | {
            "dropped_too_long": len(self._too_long) if filtered else 0,
            "cut": 0 if filtered else len(np.intersect1d(self._too_long, self._rows)),
            "sources": dict(Counter(self._scanned.sources[int(row)] for row in self._rows)),
        }

    def describe(self) -> list[str]:
        """Lines for the console: what was read, used, dropped, cut, and one example per problem."""
        facts = self.report
        sizes = f"{facts['prompt_tokens_mean']:.0f} tokens on average, at most {facts['prompt_tokens_max']}"
        lines = [f"{facts['used']} of {facts['rows']} rows from {self.names}; prompts of {sizes}"]
        if dropped := facts["dropped_too_long"]:
            share = dropped / max(1, int((self.lengths >= 0).sum()))
            which = f"{self.longest()}; first: {self.first_of(self._too_long, 3)}"
            lines.append(f"dropped {dropped} prompts ({share:.1%}) longer than {self._limit} tokens; {which}")
        if facts["cut"]:
            limit = f"{self._limit} tokens (data.truncation={self.config.data.truncation})"
            lines.append(f"{facts['cut']} prompts are cut to {limit}; {self.longest()}")
        if frames := self._scanned.frames:
            used = f"of which the first frame is used (e.g. {self.where(frames[0])})"
            lines.append(f"animations in {len(frames)} of the rows, {used}")
        if any(self._scanner.plain) and GSM8K in self._scanned.sources:
            lines.append(f"plain format: ground truth from `#### n`, scored as {GSM8K}, flexible")
        if not self._scanner.renderer.has_template:
            lines.append("the tokenizer has no chat template; string prompts are taken as raw text")
        return [f"{self.split}: {line}" for line in lines] + self.left_out()


@dataclass
class Scan:
    """The result of a scan.

    lengths: int64 [rows], −1 for a bad row; bad: row → (problem, detail); sources: data_source of each row; media: rows
    with images; frames: rows with an image of several frames.
    """

    lengths: np.ndarray
    bad: dict[int, tuple[str, str]] = field(default_factory=dict)
    sources: list[str] = field(default_factory=list)
    media: set[int] = field(default_factory=set)
    frames: list[int] = field(default_factory=list)


@dataclass
class Scanner:
    """Everything a process needs to scan rows of a source.

    `plain[f]`: whether file f has the plain format; `images`: None for a model that sees none;
    `check_truth(data_source, ground_truth)` raises BadRow.
    """

    source: Any
    plain: Sequence[bool]
    rules: RowRules
    renderer: ChatRenderer
    tools: RowTools | None = None
    images: ImageProcessor | None = None
    check_truth: Callable[[str, Any], None] | None = None

    def dialogue(self, fields: RowFields) -> tuple[list[dict[str, Any]], list[Any]]:
        """A row's messages with places for its images, and these in order. Raises BadRow."""
        messages = messages_of(fields, self.rules)
        return with_images(messages, fields.images) if self.rules.images else (messages, [])

    def text(self, fields: RowFields, messages: Sequence[dict[str, Any]]) -> str:
        """A row's `dialogue`, rendered; a string without a template stays raw text. Raises BadRow."""
        if isinstance(fields.cell, str) and not fields.images and not self.renderer.has_template:
            return fields.cell
        tools = None if self.tools is None else self.tools.of(fields)
        extra: dict[str, Any] = {"tools": tools} if tools else {}
        return self.renderer.text(messages, **extra)

    def fields(self, row: dict[str, Any], index: int) -> Any:
        """The row's parts, a `RowFields`. Raises BadRow."""
        file, number = self.source.locate(index)
        return fields_of(row, number, self.plain[file], self.rules)

    def chunk(self, start: int, stop: int) -> Scan:
        """Scan rows start..stop−1; `bad` has row numbers of the whole source."""
        scan = Scan(np.full(stop - start, -1, np.int64), sources=[""] * (stop - start))
        texts: dict[int, str] = {}
        extra: dict[int, tuple[int, int]] = {}  # images, tokens they add
        for index, row in enumerate(self.source.rows(start, stop), start):
            try:
                fields = self.fields(row, index)
                scan.sources[index - start] = source = fields.facts["data_source"]
                scored = not self.rules.loop_makes_prompt(fields.facts["agent_name"])
                if scored and self.check_truth is not None:
                    self.check_truth(source, fields.facts["ground_truth"])
                messages, cells = self.dialogue(fields)
                if not messages:
                    scan.lengths[index - start] = 0
                    continue
                text = self.text(fields, messages)
                if cells:
                    assert self.images is not None
                    folder = folder_of(self.source.paths[self.source.locate(index)[0]])
                    scan.media.add(index)
                    if any(isinstance(cell, Video) for cell in cells):
                        check_number(cells, self.images.limit)
                        scan.lengths[index - start] = len(self.images(text, cells, folder)[0])
                        continue
                    headers = self.images.headers(cells, folder)
                    more = sum(self.images.tokens(headers))
                    scan.frames += [index] * any(map(has_frames, headers))
                    extra[index] = len(cells), more - len(cells)
                texts[index] = text
            except BadRow as bad:
                scan.bad[index] = (bad.problem, bad.detail)
        for index, length in zip(texts, self._lengths(texts, extra, scan), strict=True):
            if index in scan.bad:
                continue
            if length:
                scan.lengths[index - start] = length + extra.get(index, (0, 0))[1]
            else:
                scan.bad[index] = ("prompt empty", "it renders to no token")
        return scan

    def _lengths(self, texts: dict[int, str], extra: dict[int, tuple[int, int]], scan: Scan) -> list[int]:
        """Tokens of the rendered texts; where images are seen, rows whose text has other image tokens become bad."""
        if self.images is None:
            return self.renderer.lengths(list(texts.values()))
        encoded = self.renderer.batch_ids(list(texts.values()))
        for index, ids in zip(texts, encoded, strict=True):
            if stray := self.images.wrong_tokens(ids, extra.get(index, (0, 0))[0]):
                scan.bad[index] = ("image tokens", stray)
        return [len(ids) for ids in encoded]


class CheckProgress:
    """Says how many of the rows are checked, where that takes long."""

    def __init__(self, total: int):
        self._total = total
        self._next = time.monotonic() + TELL_SECONDS

    def at(self, rows: int) -> None:
        """So many are."""
        if rows < self._total and time.monotonic() >= self._next:
            notice(f"{rows} of {self._total} rows are checked")
            self._next = time.monotonic() + TELL_SECONDS


_own: list[Scanner] = []
"""The scanner of a scanning process. It is sent once: its tokenizer is large."""


def _own_scanner(scanner: Scanner) -> None:
    _own[:] = [scanner]


def _chunk(start: int, stop: int) -> Scan:
    return _own[0].chunk(start, stop)


def scan_all(scanner: Scanner, workers: int) -> Scan:
    """Scan every row of the source."""
    total = len(scanner.source)
    starts = range(0, total, CHUNK)
    stops = [min(start + CHUNK, total) for start in starts]
    parts, progress = [], CheckProgress(total)
    with ExitStack() as stack:
        scans: Iterable[Scan] = map(scanner.chunk, starts, stops)
        if workers > 1 and total >= WORTH_PROCESSES:
            spawn = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(workers, spawn, initializer=_own_scanner, initargs=(scanner,))
            scans = stack.enter_context(pool).map(_chunk, starts, stops)
        for part, stop in zip(scans, stops, strict=True):
            parts.append(part)
            progress.at(stop)
    whole = Scan(np.concatenate([part.lengths for part in parts]))
    for part in parts:
        whole.bad |= part.bad
        whole.sources += part.sources
        whole.media |= part.media
        whole.frames += part.frames
    return whole
