r"""Find `\boxed{…}` in an answer: one pass, any nesting, safe on unbalanced or hostile text."""

from __future__ import annotations

import re

_TOKEN = re.compile(r"\\[{}\\]|[{}]")


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{…}` or `\fbox{…}` whose braces balance, or None.

    Escaped braces (`\{`, `\}`) do not count. A box that never closes is not a box; the one before it counts.
    """
    if "\\boxed" not in text and "\\fbox" not in text:
        return None
    opened: list[int] = []
    best: tuple[int, int] | None = None
    for match in _TOKEN.finditer(text):
        token = match.group()
        if token == "{":
            opened.append(match.start())
        elif token == "}" and opened:
            start = opened.pop()
            # `\boxed {5}` is written too, so blanks before the brace are looked through.
            before = text[max(0, start - 24) : start].rstrip()
            if before.endswith(("\\boxed", "\\fbox")) and (best is None or start > best[0]):
                best = (start, match.start())
    return None if best is None else text[best[0] + 1 : best[1]]
