"""Rows for supervised fine-tuning: token ids, the mask of the tokens that are learned, images."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from verl.data.dataset import SMALLER, CheckedRows, CheckProgress
from verl.data.files import DataError, Paths, RowFile, RowFiles
from verl.data.media import ImageProcessor, folder_of, with_images
from verl.data.rows import (
    BadRow,
    ChatRenderer,
    as_messages,
    cells_of,
    check_readable,
    named_function,
    without_nulls,
)
from verl.data.sft_mask import Span, TurnFinder, token_mask
from verl.trajectory import Media

if TYPE_CHECKING:
    from verl.config.schema.data import SFTDataConfig

CHUNK = 256
# Up to this many tokens the encoded rows stay in memory; beyond it they are encoded again when drawn.
KEPT_TOKENS = 2**26


@dataclass(frozen=True, slots=True)
class SFTRow:
    """One sequence: ids int64 [P], mask bool [P] (True: this token is learned), its images."""

    ids: np.ndarray
    mask: np.ndarray
    media: Media | None = None


class _Rendered(NamedTuple):
    """A dialogue: its text, the spans of it that are learned, its images."""

    text: str
    spans: list[Span]
    images: Sequence[Any] = ()


class SFTDataset(CheckedRows):
    """Usable rows of a split; `dataset[i]` is an SFTRow, `order(...)` the rows of an epoch.

    files: path or list; config: the `data` group of the SFT configuration; processor: of a model that sees images. Bad
    rows are in `bad_rows`. Raises DataError for files, columns or lengths that cannot be used; `dataset[i]` raises
    BadRow for an image that cannot be decoded.
    """

    def __init__(
        self,
        files: Paths,
        tokenizer: Any,
        config: SFTDataConfig,
        processor: Any = None,
        max_samples: int = -1,
    ):
        super().__init__(RowFiles(files, config.cache_dir, use_shm=config.use_shm))
        self.config = config
        self.tokenizer = tokenizer
        self._limit = int(config.max_length)
        self._renderer = ChatRenderer(tokenizer, config.apply_chat_template_kwargs)
        self._finder = TurnFinder(self._renderer)
        self.processor = processor
        self._images = None if processor is None else ImageProcessor(processor, config.allow_image_urls)
        if not tokenizer.is_fast:
            why = "it gives the places of tokens in the text, from which the loss mask is taken"
            raise DataError(f"supervised training needs a fast tokenizer (one with tokenizer.json): {why}")
        self._special = self._end_tokens()
        for file in self.source.files:
            self._check_columns(file)
        self._kept: dict[int, list[SFTRow]] | None = {}
        self._scan()
        self._refuse_too_long()
        self.refuse_too_many_bad(float(config.max_bad_row_ratio))
        good = np.array([i for i in range(len(self.source)) if i not in self.bad], np.int64)
        self.choose(good, max_samples, shuffle=config.shuffle, seed=int(config.seed or 0))

    def _check_columns(self, file: RowFile) -> None:
        check_columns(file, self.config)

    def _end_tokens(self) -> frozenset[int]:
        """Special tokens that may end a turn."""
        marked = {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        openers = self._finder.openers() if self._renderer.has_template else set()
        return frozenset((marked | set(self.tokenizer.all_special_ids)) - openers)

    # -------------------------------------------------------------------------------------------- one row

    def _render(self, row: Mapping[str, Any]) -> list[_Rendered]:
        """The dialogues of a row, here one."""
        messages = dialogue(row, self.config, images=self._images is not None)
        images = cells_of(row.get(self.config.image_key))
        if self._images is not None:
            messages, images = with_images(messages, images)
        return [self._turns(row, messages, images, texts=_question_answer(self.config))]

    def _turns(
        self,
        row: Mapping[str, Any],
        messages: Sequence[dict[str, Any]],
        images: Sequence[Any] = (),
        *,
        texts: bool,
        skipped: int = 0,
    ) -> _Rendered:
        """A dialogue. texts: without a template question and answer are just joined. skipped: assistant turns at its
        beginning that are not learned. Raises BadRow."""
        if not self._renderer.has_template and texts and len(messages) == 2:
            question, response = messages[0]["content"], messages[1]["content"]
            whole = question + response + (self.tokenizer.eos_token or "")
            return _Rendered(whole, [(len(question), len(question) + len(response))])
        options = template_options(row, self.config)
        text = self._renderer.text(messages, generation=False, **options)
        try:
            return _Rendered(text, self._finder.spans(messages, text, **options)[skipped:], images)
        except BadRow:
            if not self.config.ignore_input_ids_mismatch:
                raise
            text, spans = self._finder.turns_alone(messages, **options)
            return _Rendered(text, spans[skipped:], images)

    def _encode(self, rendered: Sequence[_Rendered]) -> list[SFTRow]:
        if not rendered:
            return []
        texts = [entry.text for entry in rendered]
        encoded = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        begin = np.array(self._renderer.begin(), np.int64)
        before, out = np.zeros(len(begin), bool), []
        for number, entry in enumerate(rendered):
            ids = np.array(encoded["input_ids"][number], np.int64)
            mask = token_mask(ids, encoded["offset_mapping"][number], entry.text, entry.spans, self._special)
            out.append(SFTRow(np.concatenate([begin, ids]), np.concatenate([before, mask])))
        return out

    def _expanded(self, index: int, row: SFTRow, images: Sequence[Any]) -> SFTRow:
        """The row with all tokens of its images, which precede what is learned and are never cut. Raises BadRow."""
        if self._images is None:
            return row
        repeats = self._images.expanded(row.ids, images, self._folder(index))
        learned = np.flatnonzero(row.mask)
        if len(learned) and (repeats[learned[0] :] > 1).any():
            raise BadRow("image after an answer", "images must come before the first turn that is learned")
        if repeats.sum() > self._limit and len(images):
            message = f"{repeats.sum()} tokens with its images, which are never cut"
            raise BadRow("too long", f"{message}; raise data.max_length={self._limit}, or {SMALLER}")
        return SFTRow(np.repeat(row.ids, repeats), np.repeat(row.mask, repeats))

    def _folder(self, index: int) -> Any:
        return folder_of(self.paths[self.source.locate(index)[0]])

    def _with_media(self, index: int, row: SFTRow) -> SFTRow:
        """The row and what the model sees, decoded now. Raises BadRow if it is not what was measured."""
        rendered = self._render(self.source.row(index))[0]
        if self._images is None or not len(rendered.images):
            return row
        ids, media = self._images(rendered.text, rendered.images, self._folder(index))
        if not np.array_equal(ids, row.ids):
            raise BadRow("image tokens", f"{len(ids)} tokens with its images, {len(row.ids)} were measured")
        return SFTRow(row.ids, row.mask, media)

    def _cut(self, row: SFTRow) -> SFTRow:
        if len(row.ids) > self._limit:
            cut_left = self.config.truncation == "left"
            part = slice(-self._limit, None) if cut_left else slice(self._limit)
            row = SFTRow(row.ids[part], row.mask[part])
        if not row.mask[1:].any():
            raise BadRow("no trained token", f"{len(row.ids)} tokens are left, none of them to learn")
        return row

    # ------------------------------------------------------------------------------------------- all rows

    def _scan(self) -> None:
        total, tokens = len(self.source), 0
        progress = CheckProgress(total)
        for start in range(0, total, CHUNK):
            rendered: dict[int, list[_Rendered]] = {}
            for index, row in enumerate(self.source.rows(start, min(start + CHUNK, total)), start):
                with self._leaving_out(index):
                    rendered[index] = self._render(row)
            encoded = iter(self._encode([entry for entries in rendered.values() for entry in entries]))
            for index, entries in rendered.items():
                rows = [next(encoded) for _ in entries]
                with self._leaving_out(index):
                    whole = [self._expanded(index, row, entry.images) for row, entry in zip(rows, entries, strict=True)]
                    self.lengths[index] = max(len(row.ids) for row in whole)
                    cut = [self._cut(row) for row in whole]
                    tokens += sum(len(row.ids) for row in cut)
                    if self._kept is not None:
                        self._kept[index] = [SFTRow(row.ids.astype(np.int32), row.mask) for row in cut]
            if tokens > KEPT_TOKENS:
                self._kept = None
            progress.at(start + CHUNK)

    @contextmanager
    def _leaving_out(self, index: int) -> Iterator[None]:
        """The block makes a row, which is a bad one where it raises BadRow."""
        try:
            yield
        except BadRow as bad:
            self.bad[index] = (bad.problem, bad.detail)

    def _refuse_too_long(self) -> None:
        long = np.flatnonzero(self.lengths > self._limit)
        if self.config.truncation == "error" and len(long):
            ways = "data.truncation=left|right (cut them)"
            raise self.too_long(long, len(self.source), "data.max_length", self._limit, ways)

    def __getitem__(self, item: int) -> Any:
        index = int(self._rows[item])
        try:
            return self._row(index)
        except BadRow as bad:
            raise BadRow(bad.problem, f"{self.where(index)}: {bad.detail}") from bad

    def _row(self, index: int) -> Any:
        row = self._sequences(index)[0]
        return row if self._images is None else self._with_media(index, row)

    def _sequences(self, index: int) -> list[SFTRow]:
        """The row's dialogues, as they were measured."""
        if self._kept is not None:
            return [SFTRow(row.ids.astype(np.int64), row.mask) for row in self._kept[index]]
        entries = self._render(self.source.row(index))
        encoded = zip(self._encode(entries), entries, strict=True)
        return [self._cut(self._expanded(index, row, entry.images)) for row, entry in encoded]

    @property
    def report(self) -> dict[str, Any]:
        """Counts for the run folder."""
        return self.counts(self._limit) | {"cut": int((self.lengths[self._rows] > self._limit).sum())}

    def describe(self) -> list[str]:
        """Lines for the console."""
        facts, split = self.report, self.split
        sizes = f"{facts['tokens_mean']:.0f} tokens on average, at most {facts['tokens_max']}"
        lines = [f"{split}: {facts['used']} of {facts['rows']} rows from {self.names}; {sizes}"]
        if facts["cut"]:
            limit = f"{self._limit} tokens (data.truncation={self.config.truncation})"
            lines.append(f"{split}: {facts['cut']} rows are cut to {limit}")
        return lines + self.left_out()


def _question_answer(config: SFTDataConfig) -> bool:
    """True for question/answer rows, False for messages."""
    return config.prompt_key is not None or config.response_key is not None


def check_columns(file: RowFile, config: SFTDataConfig) -> None:
    """DataError for a column that the `data` group `config` names and the file lacks."""
    pair = _question_answer(config)
    for name in ("prompt_key", "response_key") if pair else ("messages_key",):
        column = config[name]
        if column is None:
            raise DataError(f"data.{name} is not set: data.prompt_key and data.response_key go together")
        file.need(column, f"data.{name}", "" if pair else _hint(file.columns))


def dialogue(row: Mapping[str, Any], config: SFTDataConfig, *, images: bool) -> list[dict[str, Any]]:
    """The messages of a row by the `data` group `config`; `images`: the model sees them. Raises BadRow."""
    check_readable(row)
    unseen = {} if images else {config.image_key: "the model does not see images"}
    unseen |= {config.video_key: "videos are not in this release"}
    for key, why in unseen.items():
        if row.get(key):
            raise BadRow("media", f"column {key!r} is not empty: {why}")
    if not _question_answer(config):
        key, cell = config.messages_key, row.get(config.messages_key)
        if isinstance(cell, str):
            detail = f"column {key!r} is text, a list of messages is needed"
            raise BadRow("prompt is not messages", detail)
        messages = as_messages(cell, key, images=images)
        if not any(message["role"] == "assistant" for message in messages):
            raise BadRow("no assistant turn", "there is nothing to learn in this row")
        return messages
    question = _reach(row, config.prompt_key, config.prompt_dict_keys)
    response = _reach(row, config.response_key, config.response_dict_keys)
    if isinstance(response, list | np.ndarray) and len(response) == 1:  # what main_generation writes
        response = response[0]
    if not isinstance(response, str) or not response.strip():
        raise BadRow("answer missing", f"column {config.response_key!r} is {response!r:.60}")
    prompt = as_messages(question, config.prompt_key, images=images)
    return [*prompt, {"role": "assistant", "content": response}]


def template_options(row: Mapping[str, Any], config: SFTDataConfig) -> dict[str, Any]:
    """What the chat template gets of a row besides its messages: `enable_thinking`, `tools`. Raises BadRow."""
    options: dict[str, Any] = {}
    thinking = row.get(config.enable_thinking_key)
    thinking = config.enable_thinking_default if thinking is None else thinking
    if thinking is not None:
        options["enable_thinking"] = bool(thinking)
    if tools := row.get(config.tools_key):
        options["tools"] = _tools(tools)
    return options


def _reach(row: Mapping[str, Any], column: str | None, keys: Sequence[str] | None) -> Any:
    value: Any = row.get(str(column))
    for key in keys or ():
        if not isinstance(value, Mapping) or key not in value:
            content = ", ".join(value) if isinstance(value, Mapping) else type(value).__name__
            raise BadRow("wrong column type", f"column {column!r} has no {key!r} inside ({content})")
        value = value[key]
    return value


def _hint(columns: Sequence[str]) -> str:
    pairs = [pair for pair in (("prompt", "response"), ("question", "answer")) if {*pair} <= {*columns}]
    if pairs:
        return f"; for question/answer rows: data.prompt_key={pairs[0][0]} data.response_key={pairs[0][1]}"
    if "extra_info" in columns:
        question = "data.prompt_key=extra_info data.prompt_dict_keys=[question]"
        answer = "data.response_key=extra_info data.response_dict_keys=[answer]"
        return f"; for the answers of a gsm8k file: {question} {answer}"
    return ""


def _tools(cell: Any) -> list[Any]:
    try:
        tools = json.loads(cell) if isinstance(cell, str) else cell
        tools = [json.loads(tool) if isinstance(tool, str) else without_nulls(tool) for tool in tools]
    except (ValueError, TypeError, RecursionError) as error:
        raise BadRow("wrong column type", f"tools are not a list of schemas: {error}") from error
    for number, tool in enumerate(tools):
        named_function(tool, f"tools[{number}]", "wrong column type")
    return tools
