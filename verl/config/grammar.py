"""The override grammar: Hydra's, widened where users write more than its lexer knows.

A value that Hydra parses means what it means there. What its lexer refuses (`~/data`, `hdfs://h/p?x=1`) is a string
as it stands, item by item inside brackets, unless its quotes or brackets do not balance.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

_OVERRIDE = re.compile(
    r"(?P<op>\+\+|\+|~)?(?P<key>[\w./\-]+)(?:@(?P<package>[\w.\-]*))?(?:=(?P<value>.*))?", re.S
)
_PAIRS = {"(": ")", "[": "]", "{": "}"}
NULLS = ("null", "Null", "NULL", "None", "none")


class GrammarError(ValueError):
    """The text is no override; the message says why and what to write."""


@dataclass(frozen=True, slots=True)
class Value:
    """A parsed right side: the Python value, the text as written, whether it was quoted, whether `x,y`."""

    data: Any
    text: str
    quoted: bool = False
    sweep: bool = False


@dataclass(frozen=True, slots=True)
class Override:
    """One command-line override. `op` is "", "+", "++" or "~"; `package` is set in `group@package=choice`."""

    op: str
    key: str
    package: str | None
    value: Value | None
    source: str


def parse(argument: str) -> Override:
    """Parse one override. Raises GrammarError."""
    found = _OVERRIDE.fullmatch(argument.strip())
    if not found:
        raise GrammarError(
            f"{argument!r} is no override; write key=value, for example trainer.total_epochs=2"
        )
    op, key, package, right = found["op"] or "", found["key"], found["package"], found["value"]
    if right is None and op != "~":
        hint = f"{argument}=…" if op != "+" else f"{argument}=value"
        raise GrammarError(f"{argument!r} has no value; write {hint}")
    try:
        value = None if right is None else parse_value(right)
    except GrammarError as error:
        raise GrammarError(f"{argument!r}: {error}") from None
    return Override(op, key.strip("."), package, value, argument)


def parse_value(text: str) -> Value:
    """Parse a right side. Raises GrammarError for quotes or brackets that do not balance, and for sweeps."""
    from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, QuotedString, RangeSweep
    from hydra.errors import HydraException

    try:
        parsed = _hydra().parse_override("k=" + text)
    except HydraException:
        return _widened(text.strip())
    raw = parsed._value
    if isinstance(raw, QuotedString):
        return Value(raw.text, raw.text, quoted=True)
    if isinstance(raw, ChoiceSweep) and raw.simple_form:
        return Value([_unquote(item) for item in raw.list], text.strip(), sweep=True)
    if isinstance(raw, (ChoiceSweep, RangeSweep, IntervalSweep, Glob)):
        raise GrammarError("sweeps are not supported; give one value")
    return Value(parsed.value(), text.strip())


@functools.cache
def _hydra() -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create()


def _unquote(item: Any) -> Any:
    return getattr(item, "text", item)


def _widened(text: str) -> Value:
    if trouble := unbalanced(text):
        raise GrammarError(trouble)
    if text[:1] == "[" and text[-1:] == "]":
        return Value([parse_value(item).data for item in split(text[1:-1])], text)
    if text[:1] == "{" and text[-1:] == "}":
        pairs = (item.partition(":") for item in split(text[1:-1]))
        return Value({str(parse_value(k).data): parse_value(v).data for k, _, v in pairs}, text)
    return Value(text, text)


def unbalanced(text: str) -> str | None:
    """What does not balance in `text` (quotes, brackets), or None."""
    open_brackets: list[str] = []
    quote = ""
    escaped = False
    for char in text:
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in _PAIRS:
            open_brackets.append(_PAIRS[char])
        elif char in _PAIRS.values() and (not open_brackets or open_brackets.pop() != char):
            return f"{char!r} closes nothing; balance the brackets or quote the value"
    if quote:
        return f"the quote {quote} is not closed; close it, or put a backslash before it"
    return (
        f"{open_brackets[-1]!r} is missing; balance the brackets or quote the value"
        if open_brackets
        else None
    )


def split(text: str) -> list[str]:
    """Split at commas outside quotes and brackets; empty text gives no items."""
    parts, depth, quote, start = [], 0, "", 0
    for i, char in enumerate(text):
        if quote:
            quote = "" if char == quote and text[i - 1] != "\\" else quote
        elif char in "'\"":
            quote = char
        elif char in _PAIRS:
            depth += 1
        elif char in _PAIRS.values():
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    parts.append(text[start:])
    return [part.strip() for part in parts] if text.strip() else []
