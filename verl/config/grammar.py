"""The override grammar: Hydra's, widened where users write more than its lexer knows.

A value that Hydra parses means what it means there. What its lexer refuses (`~/data`, `hdfs://h/p?x=1`) is a string
as it stands, item by item inside brackets, unless its quotes or brackets do not balance.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

_OVERRIDE = re.compile(r"(?P<op>\+\+|\+|~)?(?P<key>[\w./\-]+)(?:@(?P<package>[\w.\-]*))?(?:=(?P<value>.*))?", re.S)
_PAIRS = {"(": ")", "[": "]", "{": "}"}
NULLS = ("null", "Null", "NULL", "None", "none")


class GrammarError(ValueError):
    """The text is no override, or its value does not fit the key; the message says why and what to write."""


@dataclass(frozen=True, slots=True)
class Value:
    """A parsed right side: the Python value, the text as written, whether it was quoted, whether `x,y`."""

    data: Any
    text: str
    quoted: bool = False
    sweep: bool = False

    @classmethod
    def given(cls, data: Any, *, quoted: bool = False) -> Value:
        """A value that comes as data, from a file or from inside a mapping."""
        return cls(data, str(data), quoted=quoted or isinstance(data, str))


@dataclass(frozen=True, slots=True)
class Override:
    """One command-line override. `op` is "", "+", "++" or "~"; `package` is set in `group@package=choice`."""

    op: str
    key: str
    package: str | None
    value: Value | None


def parse(argument: str) -> Override:
    """Parse one override. Raises GrammarError."""
    match = _OVERRIDE.fullmatch(argument.strip())
    if not match:
        example = "trainer.total_epochs=2"
        raise GrammarError(f"{argument!r} is no override; write key=value, for example {example}")
    if "" in match["key"].split("."):
        raise GrammarError(f"{argument!r}: there is no name before or after a dot; write group.key=value")
    op, right = match["op"] or "", match["value"]
    if right is None and op != "~":
        raise GrammarError(f"{argument!r} has no value; write {argument}=value")
    try:
        value = None if right is None else parse_value(right)
    except GrammarError as error:
        raise GrammarError(f"{argument!r}: {error}") from None
    return Override(op, match["key"], match["package"], value)


def parse_value(text: str) -> Value:
    """Parse a right side. Raises GrammarError for quotes or brackets that do not balance, and for sweeps."""
    from hydra.core.override_parser.types import ChoiceSweep, Glob, QuotedString, Sweep
    from hydra.errors import HydraException

    try:
        parsed = _hydra().parse_override("k=" + text)
    except HydraException:
        return _widened(text.strip())
    except (RecursionError, ValueError) as error:  # brackets in hundreds of brackets, thousands of digits
        raise GrammarError(f"cannot be read: {error}") from error
    raw = parsed._value
    if isinstance(raw, QuotedString):
        return Value(raw.text, raw.text, quoted=True)
    if isinstance(raw, ChoiceSweep) and raw.simple_form:
        return Value([getattr(item, "text", item) for item in raw.list], text.strip(), sweep=True)
    if isinstance(raw, (Sweep, Glob)):
        raise GrammarError("sweeps are not supported; give one value")
    return Value(parsed.value(), text.strip())


@functools.cache
def _hydra() -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create()


def _widened(text: str) -> Value:
    split(text)  # raises for quotes and brackets that do not balance
    if text[:1] == "[" and text[-1:] == "]":
        return Value([parse_value(item).data for item in split(text[1:-1])], text)
    if text[:1] == "{" and text[-1:] == "}":
        pairs = (item.partition(":") for item in split(text[1:-1]))
        return Value({str(parse_value(k).data): parse_value(v).data for k, _, v in pairs}, text)
    return Value(text, text)


def split(text: str) -> list[str]:
    """Split at commas outside quotes and brackets; empty text gives no items. GrammarError if these do not balance."""
    parts, start, quote, escaped = [], 0, "", False
    closing: list[str] = []
    for i, char in enumerate(text):
        if escaped or char == "\\":
            escaped = not escaped
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in _PAIRS:
            closing.append(_PAIRS[char])
        elif char in _PAIRS.values() and (not closing or closing.pop() != char):
            raise GrammarError(f"{char!r} closes nothing; balance the brackets or quote the value")
        elif char == "," and not closing:
            parts.append(text[start:i])
            start = i + 1
    if quote:
        raise GrammarError(f"the quote {quote} is not closed; close it, or put a backslash before it")
    if closing:
        raise GrammarError(f"{closing[-1]!r} is missing; balance the brackets or quote the value")
    return [part.strip() for part in [*parts, text[start:]]] if text.strip() else []
