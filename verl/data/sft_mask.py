"""Which characters of a rendered dialogue are learned: every assistant turn's text and its end token.

The template is rendered once over the whole dialogue and that rendering wins; the turns are found in it by
the template's own generation prompt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verl.data.rows import BadRow, ChatRenderer

Span = tuple[int, int]
Message = Mapping[str, Any]
Messages = Sequence[Message]
_PROBE = {"role": "user", "content": "a"}
_BLANKS = re.compile(r"\s*")
_THOUGHT = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)


class TurnFinder:
    """Finds assistant turns in text that `renderer` wrote."""

    def __init__(self, renderer: ChatRenderer):
        self.renderer = renderer
        self._headers: dict[str, tuple[str, ...]] = {}

    def headers(self, **options: Any) -> tuple[str, ...]:
        """What the template writes before an answer: the generation prompt, and it without its think block.

        Templates leave the think block out of earlier turns, so both occur in one dialogue.
        """
        key = repr(sorted(options.items()))
        if key not in self._headers:
            bare = self.renderer.text([_PROBE], generation=False, **options)
            prompt = self.renderer.text([_PROBE], generation=True, **options)
            header = prompt[len(bare) :] if prompt.startswith(bare) else ""
            role = header.split("<think>")[0]
            self._headers[key] = (header, role) if role and role != header else (header,)
        return self._headers[key]

    def spans(self, messages: Messages, text: str, **options: Any) -> list[Span]:
        """[start, end of content) of every assistant turn of `text`, the rendering of `messages`.

        Raises BadRow if a turn cannot be found.
        """
        spans: list[Span] = []
        cursor = 0
        for number in (n for n, message in enumerate(messages) if message["role"] == "assistant"):
            start = self._start(messages[:number], text, cursor, options)
            end = self._end(messages[: number + 1], text, start, options) if start is not None else None
            if start is None or end is None:
                detail = f"turn {number} is rendered differently in the whole dialogue"
                raise BadRow("assistant span not found", detail)
            spans.append((start, end))
            cursor = end
        return spans

    def _start(self, before: Messages, text: str, cursor: int, options: Mapping[str, Any]) -> int | None:
        headers = self.headers(**options)
        base = self._rendered(before, options)
        if base is not None and len(base) >= cursor and text.startswith(base):
            for header in headers:
                if text.startswith(header, len(base)):
                    return len(base) + len(header)
        starts = [(text.find(header, cursor), -len(header)) for header in headers if header]
        starts = [(place, size) for place, size in starts if place >= 0]
        return min(starts)[0] - min(starts)[1] if starts else None

    def _end(self, upto: Messages, text: str, start: int, options: Mapping[str, Any]) -> int | None:
        if not upto[-1].get("tool_calls"):
            return _content_end(text, start, upto[-1])
        whole = self._rendered(upto, options)
        if whole is None or not text.startswith(whole) or len(whole) <= start:
            return None
        turn = whole.rstrip()
        last = next((t for t in self.renderer.tokenizer.all_special_tokens if turn.endswith(t)), "")
        return len(turn) - len(last)

    def openers(self) -> set[int]:
        """Ids of the tokens that open a user or an assistant turn: they never end one."""
        tokenizer = self.renderer.tokenizer
        try:
            once, twice = (self.renderer.text([_PROBE] * n, generation=False) for n in (1, 2))
        except BadRow:  # a template that wants turns to alternate tells nothing about user turns here
            once = twice = ""
        pieces = [twice[len(once) :], *self.headers()]
        ids = [tokenizer(piece, add_special_tokens=False)["input_ids"][:1] for piece in pieces if piece]
        return {int(first) for first_ids in ids for first in first_ids} - {tokenizer.eos_token_id}

    def _rendered(self, before: Messages, options: Mapping[str, Any]) -> str | None:
        if not before:
            return ""
        try:
            return self.renderer.text(before, generation=False, **options)
        except BadRow:  # some templates refuse a dialogue that ends early; the header search remains
            return None

    def turns_alone(self, messages: Messages, **options: Any) -> tuple[str, list[Span]]:
        """The dialogue as its turns rendered one by one and joined, and the assistant spans in that."""
        once = self.renderer.text([_PROBE], generation=False, **options)
        twice = self.renderer.text([_PROBE, _PROBE], generation=False, **options)
        preamble = once[: len(once) - (len(twice) - len(once))]
        text, spans = "", []
        for number, message in enumerate(messages):
            piece = self.renderer.text([message], generation=False, **options)
            opening = len(preamble) if piece.startswith(preamble) else 0
            cut = opening if number else 0
            if message["role"] == "assistant":
                start, end = self._within(piece, opening, message, number, options)
                spans.append((len(text) + start - cut, len(text) + end - cut))
            text += piece[cut:]
        return text, spans

    def _within(self, piece: str, opening: int, message: Message, number: int, options: Any) -> Span:
        for header in self.headers(**options):
            if piece.startswith(header, opening):
                end = _content_end(piece, opening + len(header), message)
                if end is not None:
                    return opening + len(header), end
        raise BadRow("assistant span not found", f"turn {number}, rendered alone, does not hold its content")


def _content_end(text: str, start: int, message: Message) -> int | None:
    """Where the turn's content ends in `text`: at once, or after a think block that the template wrote."""
    content = str(message["content"]).strip()
    answer = content.split("</think>")[-1].strip()
    for lead, visible in ((_BLANKS, content), (_THOUGHT, content), (_THOUGHT, answer), (_BLANKS, answer)):
        match = lead.match(text, start)
        if match is not None and text.startswith(visible, match.end()):
            return match.end() + len(visible)
    return None


def token_mask(
    ids: np.ndarray,
    offsets: Sequence[tuple[int, int]],
    text: str,
    spans: Sequence[Span],
    special: frozenset[int],
) -> np.ndarray:
    """bool [P]: tokens that begin inside a span, and the end token that follows it.

    The end token is the first special token after the content, with nothing but blanks between. A token that
    begins before the span (it joins header and content) is not learned.
    """
    mask = np.zeros(len(ids), bool)
    starts = np.fromiter((o[0] for o in offsets), np.int64, len(ids))
    ends = np.fromiter((o[1] for o in offsets), np.int64, len(ids))
    for start, stop in spans:
        mask |= (starts >= start) & (starts < stop) & (ends > start)
        first = int(np.searchsorted(starts, stop))
        for after in range(first, len(ids)):
            if int(ids[after]) in special:
                mask[first : after + 1] = True
                break
            if text[starts[after] : ends[after]].strip():
                break
    return mask
