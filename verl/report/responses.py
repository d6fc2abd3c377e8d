"""Choose the sampled responses that go into the page and pack them small.

A long run writes gigabytes of responses; the page carries a few megabytes. Steps are taken in an order
that always has the newest and the first and then spreads evenly over the run, each step gives whole
groups, and both what is read and what is kept is limited in bytes. Tokens are numbers into one shared
list of strings, log-probs are integers in units of 1e-4.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.data.rows import PLACEHOLDER
from verl.report.read import Record, json_lines, number, text_of

LOG_PROB_UNIT = 1e-4
DIFF_UNIT = 1e-6
_SEGMENTS = 64


@dataclass(frozen=True, slots=True)
class PageLimits:
    """What the page may hold. Bytes are of packed JSON, `read_bytes` of input."""

    steps: int = 24
    responses_ends: int = 64
    responses_between: int = 16
    read_bytes: int = 12_000_000
    page_bytes: int = 5_000_000
    text: int = 20_000
    tokens: int = 4_096


@dataclass(slots=True)
class Packed:
    """Responses for the page: `rows` refer to `prompts`, `tokens` and `images` (data URIs) by number."""

    rows: list[Record] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    steps_on_disk: int = 0
    bytes: int = 0


def spread(steps: list[int], limit: int) -> list[int]:
    """Up to `limit` of the steps, most wanted first: newest, first, then evenly over what is left."""
    if len(steps) <= 2:
        return steps[::-1]
    picked = sorted({round(i * (len(steps) - 1) / (limit - 1)) for i in range(limit)}) if limit > 2 else []
    between = [steps[i] for i in picked if 0 < i < len(steps) - 1] if len(steps) > limit else steps[1:-1]
    # Halving order: if the byte budget ends early, what was taken is still spread over the run.
    order: list[int] = []
    spans = [(0, len(between))]
    while spans:
        low, high = spans.pop(0)
        if low < high:
            middle = (low + high) // 2
            order.append(between[middle])
            spans += [(low, middle), (middle + 1, high)]
    return [steps[-1], steps[0], *order][:limit]


def pack_responses(files: dict[int, Path], unreadable: Counter[str], limits: PageLimits | None = None) -> Packed:
    """Read and pack responses of some steps. `files`: path by step; unreadable lines are counted."""
    limits = limits or PageLimits()
    packer = _Packer(limits)
    budget = limits.read_bytes
    for step in spread(list(files), limits.steps):
        if budget <= 0 or packer.packed.bytes >= limits.page_bytes:
            break
        ends = step in (next(iter(files)), next(reversed(files)))
        most = limits.responses_ends if ends else limits.responses_between
        budget -= packer.add_step(step, files[step], most, budget, unreadable)
    packed = packer.packed
    packed.steps_on_disk = len(files)
    packed.steps.sort()
    packed.rows.sort(key=lambda row: row["s"])
    return packed


class _Packer:
    """Accumulates rows and the two shared string lists."""

    def __init__(self, limits: PageLimits):
        self.limits = limits
        self.packed = Packed()
        self._prompt_at: dict[str, int] = {}
        self._token_at: dict[str, int] = {}
        self._image_at: dict[str, int] = {}
        self._group: tuple[int, Any] = (-1, None)
        self._seen: Record = {}  # images of the group and their tokens

    def add_step(self, step: int, path: Path, most: int, read_limit: int, unreadable: Counter[str]) -> int:
        """Pack up to about `most` responses of one file, whole groups; returns the bytes read."""
        packed_rows, group = 0, None
        try:
            size = path.stat().st_size
            for record in json_lines(path, unreadable, limit=read_limit):
                uid = record.get("uid")
                if packed_rows >= most and uid != group:
                    size = size * packed_rows // (packed_rows + 1)
                    break
                if self.packed.bytes >= self.limits.page_bytes:
                    break
                group = uid
                packed_rows += 1
                self._add(step, record)
        except OSError:
            unreadable[path.name] += 1
            return 0
        if packed_rows:
            self.packed.steps.append(step)
        return min(size, read_limit)

    def _add(self, step: int, record: Record) -> None:
        row = self._text(step, record) | self._images(step, record) | self._dialogue(record) | self._tree(record)
        if tokens := self._tokens(record):
            row |= tokens
            self._drop_repeated_text(row)
        self.packed.rows.append(row)
        self.packed.bytes += len(json.dumps(row, ensure_ascii=False, default=str))

    def _drop_repeated_text(self, row: Record) -> None:
        """Leave the response's text out where it is its tokens joined, but for up to `z` special ones at the end."""
        texts = [self.packed.tokens[i] for i in row["t"]]
        joined, text = "".join(texts), row["o"]
        for cut in range(min(3, len(texts) - 1) + 1):
            if len(joined) == len(text) and joined == text:
                del row["o"]
                if cut:
                    row["z"] = cut
                return
            joined = joined[: len(joined) - len(texts[-1 - cut])]

    def _text(self, step: int, record: Record) -> Record:
        row: Record = {
            "s": step,
            "u": str(record.get("uid", "")),
            "i": record.get("index", 0),
            "p": self._intern(self._cut(record.get("input")), self._prompt_at, self.packed.prompts),
            "o": self._cut(record.get("output")),
            "g": self._cut(record.get("gts")),
            "sc": number(record.get("score")),
            "a": number(record.get("advantage")),
            "n": record.get("length"),
            "f": record.get("finish_reason") or "",
            "v": record.get("versions", [])[:16],
            "x": {str(k): _short(v) for k, v in list(record.get("parts", {}).items())[:24]},
        }
        if record.get("data_source"):
            row["d"] = str(record["data_source"])
        if record.get("score_error"):
            row["e"] = self._cut(record["score_error"])
        return row

    def _tokens(self, record: Record) -> Record:
        tokens = record.get("tokens", [])
        count = len(tokens)
        if not 0 < count <= self.limits.tokens:
            return {}
        out: Record = {"t": [self._intern(t, self._token_at, self.packed.tokens) for t in tokens]}
        mask = record.get("mask") or []
        if len(mask) == count and not all(mask):
            out["m"] = mask
        names = ("log_probs", "rollout_log_probs", "advantages")
        old, mu, advantages = (_numbers(record.get(name), count) for name in names)
        if old:
            out["l"] = _units(old, LOG_PROB_UNIT)
        if mu:
            out["r"] = _units(mu, LOG_PROB_UNIT)
        if old and mu:
            pairs = zip(mu, old, strict=True)
            out["q"] = _units([None if m is None or o is None else m - o for m, o in pairs], DIFF_UNIT)
        if advantages:
            rounded = [None if a is None else round(a, 4) for a in advantages]
            out["w"] = rounded[0] if all(a == rounded[0] for a in rounded) else rounded
        return out

    def _images(self, step: int, record: Record) -> Record:
        """The images of the response's group, which came with its first response."""
        group = step, record.get("uid")
        if group != self._group:
            self._group = group
            at = self._numbers_of(_uris(record.get("images", [])))
            self._seen = {"im": at, "it": record.get("image_tokens", [])} if at else {}
        return self._seen

    def _dialogue(self, record: Record) -> Record:
        """`dl`: its messages, each with role, content, calls and, for the policy's turns, start time, seconds,
        reward."""
        messages, turns = record.get("messages", []), list(record.get("turns", []))
        is_dialogue = isinstance(messages, list) and all(isinstance(message, dict) for message in messages)
        if not messages or not is_dialogue:
            return {}
        packed: list[Record] = []
        for message, images in reversed(list(zip(messages, self._shown(record, messages), strict=True))):
            entry: Record = {"r": str(message.get("role", "")), "c": self._cut(_said(message.get("content")))}
            calls = [call for call in message.get("tool_calls") or () if isinstance(call, dict)]
            functions = [f for call in calls if isinstance(f := call.get("function"), dict)]
            entry["k"] = [[self._cut(f.get(name)) for name in ("name", "arguments")] for f in functions]
            if images:
                entry["im"] = images
            if message.get("name"):
                entry["n"] = self._cut(message["name"])
            if entry["r"] == "assistant" and turns:
                turn = turns.pop()
                entry["v"] = [turn.get(name) for name in ("at", "seconds", "reward")]
            packed.append(entry)
        return {"dl": packed[::-1]}

    @staticmethod
    def _tree(record: Record) -> Record:
        """`sg`: of each segment its parent's number, tokens shared with it, all tokens, those of the policy."""
        segments = record.get("segments", [])
        whole = isinstance(segments, list) and all(isinstance(s, list) and len(s) == 4 for s in segments)
        return {"sg": segments[:_SEGMENTS]} if whole and segments else {}

    def _shown(self, record: Record, messages: list[Record]) -> list[list[int]]:
        """The numbers of each message's images: those of tools and environments, in the order of their places."""
        images = _uris(record.get("shown", []))
        out: list[list[int]] = []
        for message in messages:
            content = "" if message.get("role") == "assistant" else message.get("content")
            count = content.count(PLACEHOLDER) if isinstance(content, str) else 0
            out.append(self._numbers_of(images[:count]))
            del images[:count]
        return out

    def _numbers_of(self, uris: list[str]) -> list[int]:
        return [self._intern(uri, self._image_at, self.packed.images) for uri in uris]

    def _cut(self, value: Any) -> str:
        return text_of(value, self.limits.text, " … [more characters in the file]")

    def _intern(self, text: str, places: dict[str, int], strings: list[str]) -> int:
        if text not in places:
            places[text] = len(strings)
            strings.append(text)
            self.packed.bytes += len(text) + 3
        return places[text]


def _said(content: Any) -> Any:
    """The content of a message; of one in parts the text, with the kind of part in place of what is no text."""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return content
    return "".join(str(part.get("text") or f"<{part.get('type')}>") for part in content)


def _uris(images: list[str]) -> list[str]:
    return [uri for uri in images if uri.startswith("data:image/")]


def _short(value: Any) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return number(round(value, 6)) if number(value) is not None else str(value)
    return text_of(value, 400)


def _numbers(values: Any, count: int) -> list[float | None] | None:
    if not isinstance(values, list) or len(values) != count:
        return None
    return [number(v) for v in values]


def _units(values: list[float | None], unit: float) -> list[int | None]:
    scale = 1 / unit
    return [None if v is None else round(v * scale) for v in values]
