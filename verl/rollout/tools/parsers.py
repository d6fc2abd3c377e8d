"""How models write tool calls: one small reader for each format, in one table.

A reader takes the text of a turn, special tokens in it, and gives what was said besides the calls, and the calls. A
call that cannot be read is a `ToolCall` with an error, which the model is told: nothing that looks like a call is
dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from verl.engine.rollout.base import Completion

INVALID_TURNS = 3
"""A trajectory ends after so many turns in a row whose calls are all invalid."""

Types = Mapping[str, Mapping[str, Any]]
"""Tool → its parameters' schemas, by name: formats without types need them."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. error: why it could not be read; then the name may be empty. id: as the model or we numbered it
    in its turn; a session makes it unique."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    id: str = ""

    def message(self) -> dict[str, Any]:
        """As `tool_calls` of a message hold it; the arguments are a mapping, as templates take them."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


Read = Callable[[str, Types], tuple[str, list[ToolCall]]]
ReadBody = Callable[[str, Types], list[ToolCall]]


def parse(tool_format: str, text: str, tools: Sequence[Mapping[str, Any]] | None = None) -> tuple[str, list[ToolCall]]:
    """(text without the calls, the calls in order) of a turn of the model. Calls inside its thinking are none.

    tools: OpenAI schemas, from which formats without types take those of the arguments. KeyError for an unknown format.
    """
    thought, answer = _split_thinking(tool_format, text)
    types = {
        tool["function"]["name"]: tool["function"].get("parameters", {}).get("properties", {}) for tool in tools or ()
    }
    content, calls = PARSERS[tool_format](answer, types)
    numbered = [replace(call, id=call.id or f"call_{number}") for number, call in enumerate(calls)]
    return thought + content.strip(), numbered


_THOUGHT = re.compile("</(?:seed:)?think>")


def _split_thinking(tool_format: str, text: str) -> tuple[str, str]:
    """The text up to its last `</think>`, and what follows; one in the arguments of a call is the call's."""
    whole = _WHOLE_CALLS.get(tool_format)
    blanked = whole.sub(lambda match: " " * len(match[0]), text) if whole else text
    at = max((match.end() for match in _THOUGHT.finditer(blanked)), default=0)
    return text[:at], text[at:]


# ------------------------------------------------------------------------------------------- bodies of single calls


def _json(text: str, types: Types) -> list[ToolCall]:
    """{"name": …, "arguments": {…}}, or a list of them."""
    try:
        value = json.loads(text, strict=False)
    except ValueError as error:
        return [ToolCall("", error=f"the call is no valid JSON: {error}")]
    return [_from_json(call) for call in (value if isinstance(value, list) else [value])]


def _from_json(value: Any) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall("", error='the call must be a JSON object with "name" and "arguments"')
    return with_arguments(value["name"], value.get("arguments", value.get("parameters", {})))


def with_arguments(name: str, arguments: Any) -> ToolCall:
    """A call whose arguments are a mapping, or its JSON."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, strict=False) if arguments.strip() else {}
        except ValueError as error:
            return ToolCall(name, error=f"the arguments are no valid JSON: {error}")
    if arguments is not None and not isinstance(arguments, dict):
        return ToolCall(name, error="the arguments must be a JSON object")
    return ToolCall(name, arguments or {})


def _typed(name: str, pairs: Iterable[tuple[str, str]], types: Types) -> ToolCall:
    """A call whose arguments are text: what its schema says is no string is read as JSON."""
    arguments: dict[str, Any] = {}
    for key, value in pairs:
        arguments[key] = value
        if not _takes_text(types.get(name, {}).get(key, {"type": "string"})):
            with suppress(ValueError):
                arguments[key] = json.loads({"True": "true", "False": "false"}.get(value.strip(), value))
    return ToolCall(name, arguments)


def _takes_text(schema: Mapping[str, Any]) -> bool:
    """True if a parameter may be a string. One whose schema does not say it may not."""
    branches = [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
    return "string" in (schema.get("type") or ()) or any(_takes_text(branch) for branch in branches)


_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|\Z)", re.S)
_PARAMETER = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.S)


def _function_tags(text: str, types: Types) -> list[ToolCall]:
    """<function=name><parameter=key>value</parameter></function>."""
    matches = _FUNCTION.findall(text)
    if not matches:
        return [ToolCall("", error="the call has no <function=NAME>")]
    return [_typed(name, _PARAMETER.findall(body), types) for name, body in matches]


_INVOKE = re.compile(r'<(?:｜DSML｜)?invoke name="?([^">]+)"?>(.*?)(?:</(?:｜DSML｜)?invoke>|\Z)', re.S)
_INVOKED = re.compile(
    r'<(?:｜DSML｜)?parameter name="?([^">]+)"?(?: string="(true|false)")?>(.*?)(?:</(?:｜DSML｜)?parameter>|\Z)',
    re.S,
)


def _invoke_tags(text: str, types: Types) -> list[ToolCall]:
    """<invoke name="…"><parameter name="…">value</parameter></invoke>; where a parameter says that it is no string, it
    is JSON."""
    calls = []
    for name, body in _INVOKE.findall(text):
        param_types, pairs = dict(types.get(name, {})), []
        for key, string, value in _INVOKED.findall(body):
            if string:
                param_types[key] = {"type": "object" if string == "false" else "string"}
            pairs.append((key, value.strip("\n")))
        calls.append(_typed(name, pairs, {name: param_types}))
    return calls or [ToolCall("", error='the call has no <invoke name="NAME">')]


_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)(?:</arg_value>|\Z)", re.S)


def _argument_pairs(text: str, types: Types) -> list[ToolCall]:
    """name, then <arg_key>…</arg_key><arg_value>…</arg_value>."""
    name = text.partition("<arg_key>")[0].strip()
    if not re.fullmatch(r"[\w.-]+", name):
        return [ToolCall("", error="the call does not begin with a tool's name")]
    if "<arg_key>" in _PAIR.sub("", text):
        return [ToolCall(name, error="an <arg_key> has no <arg_value>")]
    return [_typed(name, ((key.strip(), value) for key, value in _PAIR.findall(text)), types)]


def _kimi(text: str, types: Types) -> list[ToolCall]:
    """functions.name:0<|tool_call_argument_begin|>{…}."""
    head, begin, arguments = text.partition("<|tool_call_argument_begin|>")
    head = head.strip()
    name = head.removeprefix("functions.").rpartition(":")[0]
    name = name or max((tool for tool in types if tool in head), key=len, default="")
    if not begin or not name:
        return [ToolCall("", error="the call is not functions.NAME:NUMBER<|tool_call_argument_begin|>{…}")]
    return [replace(with_arguments(name, arguments), id=head)]


def _deepseek(text: str, types: Types) -> list[ToolCall]:
    """function<｜tool▁sep｜>name and a JSON block, or name<｜tool▁sep｜>{…}."""
    head, separator, tail = text.partition("<｜tool▁sep｜>")
    if not separator:
        return [ToolCall("", error="the call has no <｜tool▁sep｜>")]
    if head.strip() != "function":
        return [with_arguments(head.strip(), tail)]
    name, _, body = tail.strip().partition("\n")
    return [with_arguments(name.strip(), re.sub(r"^\s*```(?:json)?|```\s*$", "", body))]


def _gemma(text: str, types: Types) -> list[ToolCall]:
    """call:name{key:<|"|>text<|"|>,other:3}."""
    match = re.fullmatch(r"\s*call:([\w.-]+)\s*(\{.*\})\s*", text, re.S)
    if not match:
        return [ToolCall("", error="the call is not call:NAME{key:value}")]
    parts = match[2].split('<|"|>')
    keyed = (re.sub(r"([{,]\s*)([A-Za-z_][\w-]*)\s*:", r'\1"\2":', part) for part in parts[::2])
    strings = [json.dumps(part) for part in parts[1::2]] + [""]
    return [with_arguments(match[1], "".join(a + b for a, b in zip(keyed, strings, strict=False)))]


# ------------------------------------------------------------------------------------------------- texts of a turn


def _between(begin: str, end: str, read: ReadBody, section: str = "") -> Read:
    """Calls between two marks, or from the first to the text's end; `section`: what may stand before the first."""
    pattern = re.compile(f"{re.escape(begin)}(.*?)(?:{re.escape(end)}|\\Z)", re.S)

    def reader(text: str, types: Types) -> tuple[str, list[ToolCall]]:
        content = text.partition(section)[0] if section else text
        calls = [call for body in pattern.findall(text) for call in read(body.strip(), types)]
        return content.partition(begin)[0], calls

    return reader


_LLAMA_CALL = re.compile(r"""\{\s*["'].*\bname\b""", re.S)


def _llama(text: str, types: Types) -> tuple[str, list[ToolCall]]:
    """The whole text is JSON objects, `;` between them, perhaps after <|python_tag|>."""
    content, tag, body = text.rpartition("<|python_tag|>")
    body = body.strip()
    if not tag and not _LLAMA_CALL.match(body):
        return text, []
    calls, decoder = [], json.JSONDecoder(strict=False)
    while body:
        try:
            value, end = decoder.raw_decode(body)
        except ValueError as error:
            calls.append(ToolCall("", error=f"the call is no valid JSON: {error}"))
            break
        if not tag and not calls and not (isinstance(value, dict) and "name" in value):
            return text, []  # an answer in JSON
        calls.append(_from_json(value))
        body = body[end:].lstrip("; \n")
    return content, calls


_END_OF_BODY = re.compile(r"<\|(?:call|end|return|start)\|>")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")


def _harmony(text: str, types: Types) -> tuple[str, list[ToolCall]]:
    """Messages with a recipient are calls; the answer is on the final channel, what is on others is thinking."""
    messages, (unread, *parts) = [], text.split("<|message|>")
    for part in parts:
        body, *after = _END_OF_BODY.split(part, maxsplit=1)
        messages.append((unread, body))
        unread = "".join(after)
    calls = [with_arguments(to[1], body) for header, body in messages if (to := _RECIPIENT.search(header))]
    if _RECIPIENT.search(unread) and (messages or "<|channel|>" in unread):
        calls.append(ToolCall("", error="the call has no <|message|>{…}"))
    final = next((body for header, body in messages if "<|channel|>final" in header), None)
    return final if final is not None else ("" if calls or "<|channel|>" in text else text), calls


_MARKED: dict[str, tuple[str, str, ReadBody, str]] = {
    "hermes": ("<tool_call>", "</tool_call>", _json, ""),
    "qwen3_coder": ("<tool_call>", "</tool_call>", _function_tags, ""),
    "seed": ("<seed:tool_call>", "</seed:tool_call>", _function_tags, ""),
    "glm": ("<tool_call>", "</tool_call>", _argument_pairs, ""),
    "minimax": ("<minimax:tool_call>", "</minimax:tool_call>", _invoke_tags, ""),
    "kimi": ("<|tool_call_begin|>", "<|tool_call_end|>", _kimi, "<|tool_calls_section_begin|>"),
    "deepseek": ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", _deepseek, "<｜tool▁calls▁begin｜>"),
    "deepseek_v4": ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", _invoke_tags, ""),
    "gemma4": ("<|tool_call>", "<tool_call|>", _gemma, ""),
}
"""Format → what a call stands between, its reader, and what may stand before the first."""
_MARKED["qwen"] = _MARKED["hermes"]


def marks(tool_format: str) -> tuple[str, ...] | None:
    """What calls and thinking of a format begin or end with, the beginning of a call first: text before them is the
    message's, whatever follows. None where only a whole turn can be read."""
    if tool_format in OWN_PARSERS or tool_format not in _MARKED:
        return None
    begin, _, _, section = _MARKED[tool_format]
    return tuple(mark for mark in (begin, section, "</think>", "</seed:think>") if mark)


PARSERS: dict[str, Read] = {
    **{name: _between(*marked) for name, marked in _MARKED.items()},
    "llama3_json": _llama,
    "gpt-oss": _harmony,
}

_WHOLE_CALLS = {
    name: re.compile(f"{re.escape(begin)}(?:(?!{re.escape(begin)}).)*?{re.escape(end)}", re.S)
    for name, (begin, end, _, _) in _MARKED.items()
}
_WHOLE_CALLS["llama3_json"] = re.compile(r"(?:\A|<\|python_tag\|>)\s*\{(?:(?!<\|python_tag\|>).)*\Z", re.S)
"""Format → one call that is there from mark to mark."""

OWN_PARSERS: dict[str, Callable[[Any, list[int], Any], Awaitable[tuple[str, list[ToolCall]]]]] = {}
"""Name → a reader that a module of the user's registered: (tokenizer, ids of a sampled turn, schemas) → (text, calls).
It takes the place of a format of that name."""


Stop = str | Sequence[str] | None


def before_stop(text: str, completion: Completion, stop: Stop) -> str:
    """The text of a completion up to the stop string that ended it."""
    stops = (stop,) if isinstance(stop, str) else stop or ()
    ends = [text.index(end) for end in stops if end in text and completion.finish_reason == "stop"]
    return text[: min(ends, default=None)]
