"""Which characters of a rendered dialogue are learned: every assistant turn's text and its end token.

The template is rendered once over the whole dialogue and that rendering wins; the turns are found in it by
the template's own generation prompt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from verl.data.rows import BadRow, ChatRenderer

Span = tuple[int, int]
Message = Mapping[str, Any]
Messages = Sequence[Message]
_PROBE = {"role": "user", "content": "a"}
_BLANKS = re.compile(r"\s*")
_WAY_OUT = "data.ignore_input_ids_mismatch=True learns the turns as they are rendered one by one"
_THOUGHT = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)


class TurnFinder:
    """Finds assistant turns in text that `renderer` wrote."""

    def __init__(self, renderer: ChatRenderer):
        self.renderer = renderer
        self._frames: dict[str, tuple[tuple[str, ...], str]] = {}

    def headers(self, **options: Any) -> tuple[str, ...]:
        """What the template writes before an answer: the generation prompt, and it without its think block.

        Templates leave the think block out of earlier turns, so both occur in one dialogue.
        """
        return self._frame(options)[0]

    def _frame(self, options: Mapping[str, Any]) -> tuple[tuple[str, ...], str]:
        """(headers, what the template writes after a dialogue that no generation prompt follows)."""
        key = repr(sorted(options.items()))
        if key not in self._frames:
            bare = self.renderer.text([_PROBE], generation=False, **options)
            prompt = self.renderer.text([_PROBE], generation=True, **options)
            # Some templates (Phi's) write either the generation prompt or an end of text.
            before = bare if prompt.startswith(bare) else self._unended(bare)
            header = prompt[len(before) :] if prompt.startswith(before) else ""
            role = header.split("<think>")[0]
            headers = (header, role) if role and role != header else (header,)
            self._frames[key] = headers, bare[len(before) :] if header else ""
        return self._frames[key]

    @cached_property
    def _special(self) -> set[str]:
        tokenizer = self.renderer.tokenizer
        marked = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        return marked.union(tokenizer.all_special_tokens)

    def _unended(self, text: str) -> str:
        """`text` without blanks and the special token at its end."""
        text = text.rstrip()
        return text[: len(text) - max((len(token) for token in self._special if text.endswith(token)), default=0)]

    def spans(self, messages: Messages, text: str, **options: Any) -> list[Span]:
        """[start, end of content) of every assistant turn of `text`, the rendering of `messages`.

        Raises BadRow if a turn cannot be found.
        """
        spans: list[Span] = []
        cursor = 0
        for number in (n for n, message in enumerate(messages) if message["role"] == "assistant"):
            place = self._place(messages[:number], text, cursor, options)
            span = None if place is None else self._span(messages[: number + 1], text, place, options)
            if span is None:
                problem = f"turn {number} is rendered differently in the whole dialogue"
                if place is None:
                    problem = f"the generation prompt, {self.headers(**options)[-1]!r}, is not before turn {number}"
                raise BadRow("assistant span not found", f"{problem}; {_WAY_OUT}")
            spans.append(span)
            cursor = span[1]
        return spans

    def _place(self, before: Messages, text: str, cursor: int, options: Mapping[str, Any]) -> int | None:
        """Where the header of the turn after `before` begins."""
        headers = self.headers(**options)
        base = self._rendered(before, options)
        if base is not None and len(base) >= cursor and text.startswith(base) and text.startswith(headers, len(base)):
            return len(base)
        places = [text.find(header, cursor) for header in headers if header]
        return min((place for place in places if place >= 0), default=None)

    def _span(self, upto: Messages, text: str, place: int, options: Mapping[str, Any]) -> Span | None:
        """The last turn of `upto`, whose header begins at `place`, from behind the longest header that is there.

        Its content is looked for behind the shortest first: only there is a think block whole that the generation
        prompt begins, and thoughts that begin as the answer does are not taken for it.
        """
        message = upto[-1]
        begins = [place + len(header) for header in self.headers(**options) if text.startswith(header, place)]
        if not begins:
            return None
        start = begins[0]
        content_ends = (
            [] if message.get("tool_calls") else [_content_end(text, b, start, message) for b in reversed(begins)]
        )
        ends = [end for end in content_ends if end is not None][:1]
        # Content that is empty is found at once, before all that the template writes of such a turn.
        if not ends or not str(message["content"]).strip():
            turn_end = self._written_end(upto, text, start, options)
            ends += [] if turn_end is None else [turn_end]
        return (start, max(ends)) if ends else None

    def _written_end(self, upto: Messages, text: str, start: int, options: Mapping[str, Any]) -> int | None:
        """Where the last turn of `upto` ends, if `text` holds at `start` what the template writes of it where it is
        the last of all; or the part of that behind thoughts, which templates leave out of earlier turns."""
        whole, base = self._rendered(upto, options), text[:start]
        if whole is not None and not whole.startswith(base):  # templates leave out thoughts before this turn, too
            base = self._rendered(upto[:-1], options) or base
        if whole is None or not whole.startswith(base):
            return None
        turn = self._unended(whole)[len(base) :]
        if text.startswith(turn, start):
            return start + len(turn)
        begin = start + len(text[start:]) - len(text[start:].lstrip())
        # Thoughts end with </think>, or are a message of their own, after which the header is repeated.
        marks = "|".join(re.escape(mark) for mark in ("</think>", *self.headers(**options)) if mark)
        rests = [turn[mark.end() :].lstrip() for mark in re.finditer(marks, turn)]
        return next((begin + len(rest) for rest in rests if rest and text.startswith(rest, begin)), None)

    def openers(self) -> set[int]:
        """Ids of the tokens that open a user or an assistant turn: they never end one."""
        tokenizer = self.renderer.tokenizer
        once, twice = (self._rendered([_PROBE] * n, {}) for n in (1, 2))
        # A template that wants turns to alternate tells nothing about user turns here.
        pieces = [twice[len(once) :] if once and twice else "", *self.headers()]
        ids = [tokenizer(piece, add_special_tokens=False)["input_ids"][:1] for piece in pieces if piece]
        return {int(first) for first_ids in ids for first in first_ids} - {tokenizer.eos_token_id}

    def _rendered(self, before: Messages, options: Mapping[str, Any]) -> str | None:
        """`before` as it begins a longer dialogue; None where the template refuses a dialogue that ends there."""
        try:
            return self._bare(before, options) if before else ""
        except BadRow:
            return None

    def _bare(self, messages: Messages, options: Mapping[str, Any]) -> str:
        text = self.renderer.text(messages, generation=False, **options)
        return text.removesuffix(self._frame(options)[1])

    def turns_alone(self, messages: Messages, **options: Any) -> tuple[str, list[Span]]:
        """The dialogue as its turns rendered one by one and joined, and the assistant spans in that."""
        once, twice = self._bare([_PROBE], options), self._bare([_PROBE, _PROBE], options)
        preamble = once[: len(once) - (len(twice) - len(once))]
        text, spans = "", []
        for number, message in enumerate(messages):
            piece = self._bare([message], options)
            opening = len(preamble) if piece.startswith(preamble) else 0
            cut = opening if number else 0
            if message["role"] == "assistant":
                span = self._span([message], piece, opening, options)
                if span is None:
                    problem = f"turn {number}, rendered alone, has no content behind the generation prompt"
                    raise BadRow("assistant span not found", f"{problem}; change the model's chat_template.jinja")
                spans.append((len(text) + span[0] - cut, len(text) + span[1] - cut))
            text += piece[cut:]
        return text + self._frame(options)[1], spans


def _content_end(text: str, begin: int, least: int, message: Message) -> int | None:
    """Where the turn's content ends in `text`, not before `least`: it is at `begin`, or after a think block there that
    the template wrote."""
    content = str(message["content"]).strip()
    answer = content.split("</think>")[-1].strip()
    for lead, visible in ((_BLANKS, content), (_THOUGHT, content), (_THOUGHT, answer), (_BLANKS, answer)):
        match = lead.match(text, begin)
        if match is not None and text.startswith(visible, match.end()) and match.end() + len(visible) >= least:
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
