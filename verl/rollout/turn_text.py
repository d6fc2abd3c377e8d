"""The text of a turn while it is sampled: what has arrived, as far as no later token can change it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from verl.rollout.tools.parsers import marks, parse


class TurnText:
    """Passes on the text of a turn in pieces, which together are the content of its message.

    tool_format: how calls are written, "" where no call is read. The text of a format whose calls have no marks comes
    as a whole at the end. stop: strings before which the message ends.
    """

    def __init__(self, tokenizer: Any, tool_format: str, stop: Sequence[str], on_text: Callable[[str], None]):
        self._tokenizer, self._format, self._on_text = tokenizer, tool_format, on_text
        of_format = marks(tool_format) if tool_format else ()
        self._marks = None if of_format is None else (*of_format, *stop)
        self._stop = stop
        self._ids: list[int] = []
        self._ends = frozenset(
            tokenizer.added_tokens_decoder
        )  # the turn may end with one, which is no part of its text
        self._begun, self._read = 0, 0  # places in `_ids`: where decoding starts, and up to where `_text` goes
        self._text = self._sent = ""

    def add(self, ids: Sequence[int]) -> None:
        """More tokens were sampled."""
        self._ids += ids
        if self._marks is None or self._ids[-1] in self._ends:
            return
        before, after = (self._decode(self._ids[self._begun : end]) for end in (self._read, None))
        if after.endswith("\ufffd"):  # a part of a character
            return
        self._text += after[len(before) :]
        self._begun, self._read = self._read, len(self._ids)
        ended = any(end in self._text for end in self._stop)
        unsure = 0 if ended else _begun(self._text, self._marks)
        self._send(self._content(self._text[: len(self._text) - unsure]))
        if ended or (
            self._format and self._marks[0] in self._text
        ):  # what is left of the content, if anything, comes at the end
            self._marks = None

    def end(self, content: str) -> None:
        """The turn is over, and this is its message's content."""
        self._send(content)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def _content(self, text: str) -> str:
        text = text[: min((text.index(end) for end in self._stop if end in text), default=None)]
        return parse(self._format, text)[0].lstrip() if self._format else text

    def _send(self, content: str) -> None:
        """Pass on what is new of a content. One that does not go on from what was passed on adds nothing: the client's
        next request then opens a segment."""
        if self._format:
            content = content.lstrip()
        if len(content) > len(self._sent) and content.startswith(self._sent):
            self._on_text(content[len(self._sent) :])
            self._sent = content


def _begun(text: str, begins: Sequence[str]) -> int:
    """How many characters at the text's end may be the beginning of one of these."""
    longest = max((len(begin) - 1 for begin in begins), default=0)
    sizes = range(min(longest, len(text)), 0, -1)
    return next((size for size in sizes if any(begin.startswith(text[-size:]) for begin in begins)), 0)


class Thinking:
    """Splits a turn's content, as it comes, into what the model thought and its answer: `("thinking" | "text", piece)`.

    open: the prompt has opened the thinking. `form` says afterwards how the content is joined again (`joined`).
    """

    def __init__(self, *, open: bool):
        self.form = "…" if open else ""
        self._kind, self._waiting = ("thinking" if open else ""), ""

    def feed(self, text: str, *, last: bool = False) -> list[tuple[str, str]]:
        """What more of the content says. last: nothing follows."""
        self._waiting += text
        pieces = []
        if not self._kind and (last or len(self._waiting) >= len(_OPEN) or not _OPEN.startswith(self._waiting)):
            opened = self._waiting.startswith(_OPEN)
            self._kind = "thinking" if opened else "text"
            if opened:
                self._waiting, self.form = self._waiting[len(_OPEN) :], f"{_OPEN}…"
        if self._kind == "thinking" and _CLOSE in self._waiting:
            thought, self._waiting = self._waiting.split(_CLOSE, 1)
            pieces.append((self._kind, thought))
            self._kind, self.form = "text", self.form + _CLOSE
        if self._kind:
            size = 0 if last or self._kind == "text" else _begun(self._waiting, [_CLOSE])
            end = len(self._waiting) - size
            pieces.append((self._kind, self._waiting[:end]))
            self._waiting = self._waiting[end:]
        return [(kind, piece) for kind, piece in pieces if piece]


_OPEN, _CLOSE = "<think>", "</think>"


def joined(thought: str, form: str | None) -> str:
    """What stood before the answer. form: of `Thinking`; another's is taken for that of a whole thought."""
    before, mark, after = (form or "").partition("…")
    return f"{before}{thought}{after}" if mark else f"{_OPEN}{thought}{_CLOSE}"
