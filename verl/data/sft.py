"""Rows for supervised fine-tuning: token ids and the mask of the tokens that are learned. Data.md §13."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl.data.chat import BadRow, ChatRenderer, as_messages
from verl.data.dataset import SUBSET, by_problem, epoch_order
from verl.data.files import DataError, RowFiles, absent_column
from verl.data.sft_mask import Span, TurnFinder, token_mask

CHUNK = 256
KEPT_TOKENS = 2**26
"""Up to this many tokens the encoded rows stay in memory; beyond it they are encoded again when drawn."""
MAX_BAD_RATIO = 0.01


@dataclass(frozen=True, slots=True)
class SFTRow:
    """One sequence: ids int64 [P], mask bool [P] (True: this token is learned)."""

    ids: np.ndarray
    mask: np.ndarray


@dataclass(slots=True)
class _Rendered:
    text: str
    spans: list[Span]


class SFTDataset:
    """Usable rows of a split; `dataset[i]` is an SFTRow, `order(...)` the rows of an epoch.

    files: path or list; config: the `data` group of the SFT configuration. Bad rows are in `bad_rows`.
    Raises DataError for files, columns or lengths that cannot be used.
    """

    split = "train"

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: Any,
        config: Any,
        processor: Any = None,
        max_samples: int = -1,
    ):
        self.config = config
        self.tokenizer = tokenizer
        self._source = RowFiles(files, config.get("cache_dir"), use_shm=bool(config.get("use_shm", False)))
        self.paths = [file.path for file in self._source.files]
        self._renderer = ChatRenderer(tokenizer, config.get("apply_chat_template_kwargs"))
        self._finder = TurnFinder(self._renderer)
        if not tokenizer.is_fast:
            raise DataError(
                "supervised training needs a fast tokenizer (one with tokenizer.json): it gives the places "
                "of tokens in the text, from which the loss mask is taken"
            )
        self._special = self._end_tokens()
        self._check_columns()
        self._lengths = np.full(len(self._source), -1, np.int64)
        self._kept: dict[int, SFTRow] | None = {}
        self._bad: dict[int, tuple[str, str]] = {}
        self._scan()
        self.bad_rows = self._bad_records()
        self._check_bad_ratio()
        self._rows = self._choose(max_samples)
        if len(self._rows) == 0:
            raise DataError(f"{', '.join(self.paths)}: no usable row is left", self.bad_rows)

    def _end_tokens(self) -> frozenset[int]:
        """Special tokens that may end a turn."""
        marked = {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        openers = self._finder.openers() if self._renderer.has_template else set()
        return frozenset((marked | set(self.tokenizer.all_special_ids)) - openers)

    # ---------------------------------------------------------------------------------------------- columns

    @property
    def question_answer(self) -> bool:
        """True for question/answer rows, False for messages."""
        return self.config.get("prompt_key") is not None or self.config.get("response_key") is not None

    def _check_columns(self) -> None:
        config = self.config
        keys = {"data.messages_key": config.get("messages_key", "messages")}
        if self.question_answer:
            keys = {"data.prompt_key": config.prompt_key, "data.response_key": config.response_key}
            missing = [name for name, column in keys.items() if column is None]
            if missing:
                raise DataError(
                    f"{missing[0]} is not set: question/answer rows need data.prompt_key and data.response_key"
                )
        for file in self._source.files:
            for name, column in keys.items():
                if column not in file.columns:
                    hint = "" if self.question_answer else _hint(file.columns)
                    raise DataError(absent_column(column, name, file.path, file.columns) + hint)

    # -------------------------------------------------------------------------------------------- one row

    def messages(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The row's dialogue. Raises BadRow."""
        config = self.config
        for key in (config.get("image_key", "images"), config.get("video_key", "videos")):
            if row.get(key):
                raise BadRow(
                    "media", f"column {key!r} is not empty: images and videos are not in this release"
                )
        if not self.question_answer:
            key = config.get("messages_key", "messages")
            if isinstance(row.get(key), str):
                raise BadRow(
                    "prompt is not messages", f"column {key!r} is text, a list of messages is needed"
                )
            return as_messages(row.get(key), key)
        question = _reach(row, config.prompt_key, config.get("prompt_dict_keys"))
        answer = _reach(row, config.response_key, config.get("response_dict_keys"))
        if not isinstance(answer, str) or not answer.strip():
            raise BadRow("answer missing", f"column {config.response_key!r} is {answer!r:.60}")
        return [*as_messages(question, config.prompt_key), {"role": "assistant", "content": answer}]

    def _options(self, row: Mapping[str, Any]) -> dict[str, Any]:
        options: dict[str, Any] = {}
        thinking = row.get(self.config.get("enable_thinking_key", "enable_thinking"))
        thinking = self.config.get("enable_thinking_default") if thinking is None else thinking
        if thinking is not None:
            options["enable_thinking"] = bool(thinking)
        tools = row.get(self.config.get("tools_key", "tools"))
        if tools:
            options["tools"] = _tools(tools)
        return options

    def _render(self, row: Mapping[str, Any]) -> _Rendered:
        messages = self.messages(row)
        if not self._renderer.has_template and self.question_answer and len(messages) == 2:
            question, answer = messages[0]["content"], messages[1]["content"]
            whole = question + answer + (self.tokenizer.eos_token or "")
            return _Rendered(whole, [(len(question), len(question) + len(answer))])
        options = self._options(row)
        text = self._renderer.text(messages, generation=False, **options)
        try:
            return _Rendered(text, self._finder.spans(messages, text, **options))
        except BadRow:
            if not self.config.get("ignore_input_ids_mismatch", False):
                raise
            return _Rendered(*self._finder.turns_alone(messages, **options))

    def _encode(self, rendered: Sequence[_Rendered]) -> list[SFTRow]:
        if not rendered:
            return []
        texts = [one.text for one in rendered]
        found = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        out = []
        for one, ids, offsets in zip(rendered, found["input_ids"], found["offset_mapping"], strict=True):
            array = np.array(ids, np.int64)
            out.append(SFTRow(array, token_mask(array, offsets, one.text, one.spans, self._special)))
        return out

    def _cut(self, row: SFTRow) -> SFTRow:
        limit, mode = int(self.config.max_length), self.config.truncation
        if len(row.ids) > limit:
            part = slice(len(row.ids) - limit, None) if mode == "left" else slice(0, limit)
            row = SFTRow(row.ids[part], row.mask[part])
        if not row.mask[1:].any():
            raise BadRow("no trained token", f"{len(row.ids)} tokens are left, none of them to learn")
        return row

    # ------------------------------------------------------------------------------------------- all rows

    def _scan(self) -> None:
        total, tokens = len(self._source), 0
        for start in range(0, total, CHUNK):
            rendered: dict[int, _Rendered] = {}
            for index, row in enumerate(self._source.rows(start, min(start + CHUNK, total)), start):
                try:
                    rendered[index] = self._render(row)
                except BadRow as bad:
                    self._bad[index] = (bad.problem, bad.detail)
            for index, encoded in zip(rendered, self._encode(list(rendered.values())), strict=True):
                self._lengths[index] = len(encoded.ids)
                tokens += self._note(index, encoded)
            if tokens > KEPT_TOKENS:
                self._kept = None
        self._refuse_too_long()

    def _note(self, index: int, row: SFTRow) -> int:
        try:
            row = self._cut(row)
        except BadRow as bad:
            self._bad[index] = (bad.problem, bad.detail)
            return 0
        if self._kept is not None:
            self._kept[index] = SFTRow(row.ids.astype(np.int32), row.mask)
        return len(row.ids)

    def _refuse_too_long(self) -> None:
        limit = int(self.config.max_length)
        long = np.flatnonzero(self._lengths > limit)
        if self.config.truncation != "error" or not len(long):
            return
        first = ", ".join(f"{self._where(int(i))}: {self._lengths[i]}" for i in long[:5])
        longest = int(self._lengths.argmax())
        raise DataError(
            f"{len(long)} of {len(self._source)} rows are longer than data.max_length={limit} tokens: {first}; the "
            f"longest has {self._lengths[longest]} ({self._where(longest)}). Ways out: data.max_length="
            f"{self._lengths[longest]} (or more), data.truncation=left|right (cut them)"
        )

    def _where(self, index: int) -> str:
        file, number = self._source.locate(index)
        return f"{self.paths[file]} row {number}"

    def _bad_records(self) -> list[dict[str, Any]]:
        out = []
        for index in sorted(self._bad):
            file, number = self._source.locate(index)
            problem, detail = self._bad[index]
            out.append({"file": self.paths[file], "row": number, "problem": problem, "detail": detail})
        return out

    def _check_bad_ratio(self) -> None:
        ratio = float(self.config.get("max_bad_row_ratio", MAX_BAD_RATIO))
        counts = Counter(self._source.locate(index)[0] for index in self._bad)
        for number, size in enumerate(self._source.sizes):
            if counts[number] > ratio * size:
                raise DataError(
                    f"{self.paths[number]}: {counts[number]} of {size} rows cannot be used, {ratio:.1%} are allowed: "
                    f"{'; '.join(by_problem([r for r in self.bad_rows if r['file'] == self.paths[number]]))}",
                    self.bad_rows,
                )

    def _choose(self, wanted: int) -> np.ndarray:
        rows = np.array([i for i in range(len(self._source)) if i not in self._bad], np.int64)
        if wanted < 0 or wanted >= len(rows):
            return rows
        if not self.config.get("shuffle", True):
            return rows[:wanted]
        return np.sort(rows[epoch_order(len(rows), int(self.config.get("seed") or 0), SUBSET)[:wanted]])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, item: int) -> SFTRow:
        index = int(self._rows[item])
        if self._kept is not None:
            kept = self._kept[index]
            return SFTRow(kept.ids.astype(np.int64), kept.mask)
        return self._cut(self._encode([self._render(self._source.row(index))])[0])

    def order(self, *, seed: int, shuffle: bool, epoch: int = 0) -> np.ndarray:
        """Row numbers int64 [len] in the order of an epoch."""
        return epoch_order(len(self), seed, epoch) if shuffle else np.arange(len(self))

    @property
    def report(self) -> dict[str, Any]:
        """Counts for the run folder."""
        lengths, limit = self._lengths[self._rows], int(self.config.max_length)
        return {
            "split": self.split,
            "files": list(self.paths),
            "rows": len(self._source),
            "used": len(self),
            "bad": dict(Counter(record["problem"] for record in self.bad_rows)),
            "cut": int((lengths > limit).sum()),
            "tokens_mean": float(np.minimum(lengths, limit).mean()),
            "tokens_max": int(lengths.max()),
        }

    def describe(self) -> list[str]:
        """Lines for the console."""
        facts, split = self.report, self.split
        lines = [
            f"{split}: {facts['used']} of {facts['rows']} rows from {', '.join(self.paths)}; "
            f"{facts['tokens_mean']:.0f} tokens on average, at most {facts['tokens_max']}"
        ]
        if facts["cut"]:
            cut = f"{facts['cut']} rows are cut to {self.config.max_length} tokens"
            lines.append(f"{split}: {cut} (data.truncation={self.config.truncation})")
        return lines + [f"{split}: left out {text}" for text in by_problem(self.bad_rows)]


def _reach(row: Mapping[str, Any], column: str, keys: Sequence[str] | None) -> Any:
    value: Any = row.get(column)
    for key in keys or ():
        if not isinstance(value, Mapping) or key not in value:
            found = ", ".join(value) if isinstance(value, Mapping) else type(value).__name__
            raise BadRow("wrong column type", f"column {column!r} has no {key!r} inside ({found})")
        value = value[key]
    return value


def _hint(columns: Sequence[str]) -> str:
    if {"prompt", "response"} <= set(columns):
        return "; for question/answer rows: data.prompt_key=prompt data.response_key=response"
    if "extra_info" in columns:
        return (
            "; for the answers of a gsm8k file: data.prompt_key=extra_info data.prompt_dict_keys=[question] "
            "data.response_key=extra_info data.response_dict_keys=[answer]"
        )
    if {"question", "answer"} <= set(columns):
        return "; for question/answer rows: data.prompt_key=question data.response_key=answer"
    return ""


def _tools(cell: Any) -> list[Any]:
    try:
        tools = json.loads(cell) if isinstance(cell, str) else cell
        return [json.loads(tool) if isinstance(tool, str) else _without_nulls(tool) for tool in tools]
    except (ValueError, TypeError) as error:
        raise BadRow("wrong column type", f"tools are not a list of schemas: {error}") from error


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value
