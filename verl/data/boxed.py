r"""The last `\boxed{…}` of a solution."""

from __future__ import annotations

import re

_TOKEN = re.compile(r"\\[{}\\]|[{}]")


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{…}` or `\fbox{…}` whose braces balance, or None."""
    box = last_box(text)
    return None if box is None else text[box[1] + 1 : box[2]]


def last_box(text: str) -> tuple[int, int, int] | None:
    r"""Where the last balanced `\boxed{…}` or `\fbox{…}` begins, and its two braces; None without one.

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
    if best is None:
        return None
    command = max(text.rfind(name, 0, best[0]) for name in ("\\boxed", "\\fbox"))
    return command, *best
