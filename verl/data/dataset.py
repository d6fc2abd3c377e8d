"""The prompts of a run: rows of files, checked and measured once, turned into `Prompt`s when they are drawn.

Specification: data.md §1–§6. Order and position belong to `stream.py`.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl.data.chat import BadRow, ChatRenderer, as_messages
from verl.data.files import DataError, RowFiles
from verl.data.rows import GSM8K, RowRules, check_columns, check_plain_truth
from verl.data.scan import Scan, Scanner, scan_all
from verl.trajectory import Prompt

SUBSET = 2**31
"""Stands for the epoch in the draw of train_max_samples, so that it differs from every epoch's order."""


def epoch_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation int64 [rows] of an epoch; a function of (rows, seed, epoch) and nothing else.

    Row numbers sorted by one 64-bit draw each of PCG64(SeedSequence([seed, epoch])): numpy keeps bit
    generators and seed sequences stable between versions (NEP 19), which it does not promise of
    `Generator.permutation`.
    """
    draws = np.random.PCG64(np.random.SeedSequence([seed % 2**64, epoch])).random_raw(rows)
    return np.argsort(draws, kind="stable").astype(np.int64)


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


class PromptDataset:
    """The usable prompts of one split. `len()` counts them; `prompt(i, epoch)` gives number i.

    files: path or list; config: the whole configuration; score_known(data_source): is there a built-in
    reward function for it? (None: ask `verl.reward`.) With data.custom_cls the rows come from the user's
    class. Raises DataError where the data cannot be used; it carries the rows that explain it.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        config: Any,
        tokenizer: Any,
        *,
        split: str = "train",
        score_known: Callable[[str], bool] | None = None,
    ):
        self.split = split
        self.config = config
        self.tokenizer = tokenizer
        self._score_known = score_known
        data = config.data
        self._limit = int(data.max_prompt_length)
        self.rules = RowRules.of(config)
        renderer = ChatRenderer(tokenizer, data.apply_chat_template_kwargs)
        if data.custom_cls.path:
            from verl.data.plugins import CustomRows

            source: Any = CustomRows.load(files, config, tokenizer, split)
            self.paths, plain = [source.name], [False]
        else:
            source = RowFiles(files, data.cache_dir, use_shm=data.use_shm)
            self.paths = [file.path for file in source.files]
            plain = [check_columns(file, self.rules) for file in source.files]
            self._refuse_without_truth(source, plain)
        self._scanner = Scanner(source, plain, self.rules, renderer)
        self._scan = self._run_scan(int(data.filter_overlong_prompts_workers))
        self.bad_rows = self._bad_records()
        self._check_bad_ratio(float(data.max_bad_row_ratio))
        self._rows = self._choose(self._measure())
        if len(self._rows) == 0:
            raise DataError(f"{self._names()}: no usable row is left", self.bad_rows)

    # -------------------------------------------------------------------------------------------- checking

    def _refuse_without_truth(self, source: RowFiles, plain: Sequence[bool]) -> None:
        for file, flag in zip(source.files, plain, strict=True):
            if flag and self.rules.needs_truth:
                check_plain_truth(
                    file.path, (row.get("response") for row in file.rows(0, len(file))), self.rules
                )

    def _run_scan(self, workers: int) -> Scan:
        scan = scan_all(self._scanner, max(1, min(workers, os.cpu_count() or 1)))
        if not self.rules.needs_truth:
            return scan
        unknown = self._unscored({source for source in scan.sources if source})
        for row, source in enumerate(scan.sources):
            if source in unknown and row not in scan.bad:
                scan.bad[row], scan.lengths[row] = ("data_source without a function", unknown[source]), -1
        return scan

    def _unscored(self, sources: set[str]) -> dict[str, str]:
        """Sources that no built-in function scores, each with what to say about it."""
        if self._score_known is None:
            from verl.reward.rules import unsupported

            return unsupported(sorted(sources))
        message = "no built-in reward function for {!r}; set custom_reward_function.path"
        return {source: message.format(source) for source in sources if not self._score_known(source)}

    def _bad_records(self) -> list[dict[str, Any]]:
        out = []
        for row in sorted(self._scan.bad):
            problem, detail = self._scan.bad[row]
            file, number = self._scanner.source.locate(row)
            out.append({"file": self.paths[file], "row": number, "problem": problem, "detail": detail})
        return out

    def _check_bad_ratio(self, ratio: float) -> None:
        sizes = self._scanner.source.sizes
        counts = Counter(record["file"] for record in self.bad_rows)
        for number, path in enumerate(self.paths):
            if counts[path] > ratio * sizes[number]:
                mine = [record for record in self.bad_rows if record["file"] == path]
                raise DataError(
                    f"{path}: {len(mine)} of {sizes[number]} rows cannot be used "
                    f"(data.max_bad_row_ratio={ratio} allows {int(ratio * sizes[number])}): "
                    f"{'; '.join(by_problem(mine))}. Repair the rows, or raise data.max_bad_row_ratio to leave "
                    "them out",
                    self.bad_rows,
                )

    def _measure(self) -> np.ndarray:
        """Rows that fit or are made to fit, int64, ascending; sets the counts of the report."""
        data, lengths = self.config.data, self._scan.lengths
        good = np.flatnonzero(lengths >= 0)
        long = np.flatnonzero(lengths > self._limit)
        self._too_long = long
        if not len(long):
            return good
        if data.filter_overlong_prompts:
            kept = np.flatnonzero((lengths >= 0) & (lengths <= self._limit))
            left = {self._scanner.source.locate(int(row))[0] for row in kept}
            for number, path in enumerate(self.paths):
                if number not in left:
                    raise DataError(
                        f"{path}: no row is left: every prompt is longer than data.max_prompt_length={self._limit} "
                        f"({self._longest()}); raise data.max_prompt_length",
                        self.bad_rows,
                    )
            return kept
        if data.truncation not in ("left", "right", "middle"):
            raise DataError(self._too_long_message(good), self.bad_rows)
        return good

    def _too_long_message(self, good: np.ndarray) -> str:
        return (
            f"{len(self._too_long)} of {len(good)} prompts of {self._names()} are longer than "
            f"data.max_prompt_length={self._limit} tokens: {self._first_long()}; {self._longest()}. Ways out: "
            f"data.max_prompt_length={int(self._scan.lengths.max())} (or more), "
            "data.filter_overlong_prompts=True (drop them), data.truncation=left|right|middle (cut them)"
        )

    def _first_long(self, count: int = 5) -> str:
        return ", ".join(
            f"{self.where(int(row))}: {self._scan.lengths[row]}" for row in self._too_long[:count]
        )

    def _longest(self) -> str:
        row = int(self._scan.lengths.argmax())
        return f"the longest has {self._scan.lengths[row]} ({self.where(row)})"

    def _names(self) -> str:
        return ", ".join(self.paths)

    def where(self, row: int) -> str:
        """ "file row n" of a row of the whole source, for messages."""
        file, number = self._scanner.source.locate(row)
        return f"{self.paths[file]} row {number}"

    def _choose(self, rows: np.ndarray) -> np.ndarray:
        data = self.config.data
        train = self.split == "train"
        wanted = int(data.train_max_samples if train else data.val_max_samples)
        shuffle = data.shuffle if train else data.validation_shuffle
        if wanted < 0 or wanted >= len(rows):
            return rows
        if not shuffle:
            return rows[:wanted]
        seed = data.seed if data.seed is not None else self.config.trainer.seed
        return np.sort(rows[epoch_order(len(rows), int(seed), SUBSET)[:wanted]])

    # --------------------------------------------------------------------------------------------- drawing

    def __len__(self) -> int:
        return len(self._rows)

    def order(self, *, seed: int, shuffle: bool, epoch: int = 0) -> np.ndarray:
        """Row numbers int64 [len] in the order of an epoch: `epoch_order`, or file order without shuffle."""
        return epoch_order(len(self), seed, epoch) if shuffle else np.arange(len(self))

    def prompt(self, row: int, epoch: int = 0) -> Prompt:
        """Usable row number `row` (0 ≤ row < len) as a Prompt with uid "{file}:{row in file}@{epoch}".

        Raises BadRow if the row cannot be used after all (a custom dataset that changed its mind).
        """
        index = int(self._rows[row])
        file, number = self._scanner.source.locate(index)
        fields = self._scanner.fields(self._scanner.source.rows(index, index + 1)[0], index)
        renderer = self._scanner.renderer
        ids = renderer.ids(renderer.prompt_text(fields.cell, self.rules.prompt_key))
        if len(ids) > self._limit:
            if self.config.data.filter_overlong_prompts:
                raise BadRow(
                    "prompt too long", f"{len(ids)} tokens, it had {self._scan.lengths[index]} before"
                )
            ids = truncate(ids, self._limit, self.config.data.truncation)
        return Prompt(
            uid=f"{file}:{number}@{epoch}",
            ids=ids,
            messages=as_messages(fields.cell, self.rules.prompt_key),
            data_source=fields.data_source,
            ground_truth=fields.ground_truth,
            extra_info=fields.extra_info,
            file=self.paths[file],
            row=number,
            epoch=epoch,
            agent_name=fields.agent_name,
            columns=fields.columns,
        )

    def __getitem__(self, row: int) -> dict[str, Any]:
        """The columns of usable row `row` as a dict, with `raw_prompt` (messages), for samplers and plugins."""
        index = int(self._rows[row])
        columns = dict(self._scanner.source.rows(index, index + 1)[0])
        fields = self._scanner.fields(columns, index)
        return columns | {"raw_prompt": as_messages(fields.cell, self.rules.prompt_key), "index": row}

    # ------------------------------------------------------------------------------------------- reporting

    @property
    def report(self) -> dict[str, Any]:
        """Counts for the run folder: rows, used, bad by problem, too long, lengths, sources."""
        lengths = self._scan.lengths[self._rows]
        sources = Counter(self._scan.sources[int(row)] for row in self._rows)
        filtered = bool(self.config.data.filter_overlong_prompts)
        return {
            "split": self.split,
            "files": list(self.paths),
            "rows": len(self._scanner.source),
            "used": len(self._rows),
            "bad": dict(Counter(record["problem"] for record in self.bad_rows)),
            "dropped_too_long": len(self._too_long) if filtered else 0,
            "cut": 0 if filtered else len(np.intersect1d(self._too_long, self._rows)),
            "prompt_tokens_mean": float(np.minimum(lengths, self._limit).mean()),
            "prompt_tokens_max": int(lengths.max()),
            "sources": dict(sources),
        }

    def describe(self) -> list[str]:
        """Lines for the console: what was read, used, dropped, cut, and one example per problem."""
        facts = self.report
        lines = [
            f"{self.split}: {facts['used']} of {facts['rows']} rows from {self._names()}; prompts of "
            f"{facts['prompt_tokens_mean']:.0f} tokens on average, at most {facts['prompt_tokens_max']}"
        ]
        if facts["dropped_too_long"]:
            share = facts["dropped_too_long"] / max(1, int((self._scan.lengths >= 0).sum()))
            lines.append(
                f"{self.split}: dropped {facts['dropped_too_long']} prompts ({share:.1%}) longer than "
                f"{self._limit} tokens; {self._longest()}; first: {self._first_long(3)}"
            )
        if facts["cut"]:
            lines.append(
                f"{self.split}: {facts['cut']} prompts are cut to {self._limit} tokens "
                f"(data.truncation={self.config.data.truncation}); {self._longest()}"
            )
        lines += [f"{self.split}: left out {text}" for text in by_problem(self.bad_rows)]
        if self.plain_gsm8k:
            lines.append(
                f"{self.split}: plain format: ground truth from `#### n`, scored as {GSM8K}, flexible"
            )
        if not self._scanner.renderer.has_template:
            lines.append(
                f"{self.split}: the tokenizer has no chat template; string prompts are taken as raw text"
            )
        return lines

    @property
    def plain_gsm8k(self) -> bool:
        """True if rows of the plain format are scored as GSM8K with method=flexible."""
        return any(self._scanner.plain) and GSM8K in self._scan.sources


def by_problem(records: Sequence[dict[str, Any]]) -> list[str]:
    counts = Counter(record["problem"] for record in records)
    first = {record["problem"]: record for record in reversed(records)}
    return [
        f"{count} × {problem} (e.g. {first[problem]['file']} row {first[problem]['row']}: {first[problem]['detail']})"
        for problem, count in counts.most_common()
    ]


def write_data_report(path: Path, *datasets: Any) -> None:
    """Write the bad rows of the datasets (or the `records` of a DataError) to data_report.jsonl."""
    records = [r for d in datasets for r in (d.records if isinstance(d, DataError) else d.bad_rows)]
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".tmp")
    beside.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")
    beside.replace(path)
