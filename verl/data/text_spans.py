"""Two tokenizations of one text: the spans that both cut it into, and what a teacher with a tokenizer of its own
says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import takewhile
from typing import Any

import numpy as np

from verl.data.rows import ChatRenderer, as_messages
from verl.data.teacher_prompt import TeacherPrompt
from verl.errors import UserError
from verl.trajectory import Segment, Trajectory


@cache
def _bytes_of_characters() -> Mapping[str, int]:
    """What the characters of a byte-level vocabulary stand for."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}


def token_bytes(tokenizer: Any, ids: Sequence[int]) -> list[bytes]:
    """The bytes that each token writes. ValueError where together they are not the decoded text."""
    table, out = _bytes_of_characters(), list[bytes]()
    for token in ids:
        text, piece = (
            tokenizer.decode([token], clean_up_tokenization_spaces=False),
            tokenizer.convert_ids_to_tokens(token),
        )
        if "\ufffd" not in text:
            out.append(text.encode())
        elif piece.startswith("<0x"):
            out.append(bytes([int(piece[1:-1], 16)]))
        else:
            out.append(bytes(table[c] for c in piece) if all(c in table for c in piece) else text.encode())
    whole = tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
    if b"".join(out).decode(errors="replace") != whole:
        raise ValueError(f"the tokens of {type(tokenizer).__name__} do not write their text one after the other")
    return out


def common_spans(first: Sequence[bytes], second: Sequence[bytes]) -> list[tuple[slice, slice]]:
    """The finest spans of tokens whose bytes are the same on both sides, in order, up to where the texts part.
    ValueError where they share nothing."""
    texts = zip(b"".join(first), b"".join(second), strict=False)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], texts))
    if not common and first and second:
        raise ValueError("the two do not begin with the same text")
    ends = [np.cumsum([len(piece) for piece in pieces] or [0]) for pieces in (first, second)]
    spans, starts = list[tuple[slice, slice]](), [0, 0]
    for end in np.intersect1d(ends[0], ends[1]).tolist():
        if 0 < end <= common:
            stops = [int(np.searchsorted(side, end, "right")) for side in ends]
            spans.append((slice(starts[0], stops[0]), slice(starts[1], stops[1])))
            starts = stops
    return spans


class TextTeacher(TeacherPrompt):
    """A teacher with another tokenizer: it reads the prompt in its own template, and the response's text in tokens of
    its own.

    On every token of a span the policy's log-prob at the start of the step plus the mean difference over the span,
    (Σ log ν − Σ log π) / n, n the policy's tokens: so a span's log-ratio is that of its text, equally shared. Tokens
    from the first on whose bytes are no text, or that the teacher's tokenizer writes otherwise, have a log-ratio of 0.
    Sources: alignment of text spans as in GOLD (Hugging Face 2025) and SimCT, arXiv 2605.07711.
    """

    def __init__(self, template: str, key: str, renderer: ChatRenderer, solution_score: float, tokenizer: Any):
        super().__init__(template, key, renderer, solution_score)
        self._policys, self._own = tokenizer, renderer.tokenizer

    def _after(self, trajectory: Trajectory, solution: str | None) -> Trajectory:
        prompt, segment = trajectory.prompt, trajectory.segments[0]
        if len(trajectory.segments) > 1 or not segment.response_mask.all() or prompt.media is not None:
            why = "a teacher with a tokenizer of its own reads responses of one turn, without images"
            raise UserError(f"{self._key}: {prompt.file} row {prompt.row}: {why}")
        messages = as_messages(prompt.messages)
        question = self._question(trajectory, solution, messages[-1]["content"])
        context = self._ids([*messages[:-1], {**messages[-1], "content": question}])
        _, tokens, end = self._tokens(trajectory)
        ids = np.array(tokens + end, np.int64)
        return Trajectory(prompt, trajectory.index, segments=[Segment(context, ids, np.ones(len(ids), bool))])

    def _tokens(self, trajectory: Trajectory) -> tuple[int, list[int], list[int]]:
        """How many of the policy's tokens are text, not the end token; the teacher's tokens of that text, up to bytes
        that are none; its end token if the policy's is there and it reads all."""
        ids = trajectory.segments[0].response_ids.tolist()
        ends = bool(ids) and ids[-1] == self._policys.eos_token_id and self._own.eos_token_id is not None
        count = len(ids) - ends
        text = self._policys.decode(ids[:count], clean_up_tokenization_spaces=False)
        readable = text.partition("\ufffd")[0]
        tokens = self._own.encode(readable, add_special_tokens=False)
        return count, tokens, [self._own.eos_token_id] if ends and readable == text else []

    def column(self, trajectory: Trajectory, reading: Trajectory, name: str) -> np.ndarray:
        """A column of log-probs of the teacher's tokens, for the policy's tokens, float32 [L]."""
        segment, (count, tokens, end) = trajectory.segments[0], self._tokens(trajectory)
        teacher_log_probs, mine = (
            np.asarray(reading.column(name), np.float64),
            np.asarray(segment.old_log_probs, np.float64),
        )
        sides = ((self._policys, segment.response_ids[:count].tolist()), (self._own, tokens))
        try:
            spans = common_spans(*(token_bytes(tokenizer, ids) for tokenizer, ids in sides))
        except ValueError as error:
            prompt = trajectory.prompt
            where = f"{prompt.file} row {prompt.row}, response {trajectory.index}"
            raise UserError(f"{self._key}: {where}: {error}") from error
        if end and (spans[-1][0].stop if spans else 0) == count:
            spans.append((slice(count, count + 1), slice(len(tokens), len(tokens) + 1)))
        values = mine.copy()
        for policys, teachers in spans:
            difference = teacher_log_probs[teachers].sum() - mine[policys].sum()
            values[policys] += difference / (policys.stop - policys.start)
        return values.astype(np.float32)
