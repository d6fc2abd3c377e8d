"""Parsers of tool calls under the names of the public system: for loops that parse turns themselves, and those that
users register."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from verl.errors import UserError
from verl.rollout.tools.parsers import OWN_PARSERS, PARSERS, ToolCall, parse, with_arguments
from verl.rollout.tools.tool import OpenAIFunctionToolSchema, plain


@dataclass
class FunctionCall:
    """A call of a tool: arguments as JSON; tool_call_id: the model's own, None without."""

    name: str
    arguments: str
    tool_call_id: str | None = None


Found = tuple[str, list[FunctionCall]]


_CLASSES: dict[str, type[ToolParser]] = {}
"""Name → the user's class that is registered under it."""


class ToolParser:
    """Reads the calls of a sampled turn, in one of the formats of `PARSERS`; base of the user's own."""

    tool_format: str = ""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    @staticmethod
    def register(name: str) -> Callable[[type[ToolParser]], type[ToolParser]]:
        """Class decorator: make a parser known as `multi_turn.format=name`."""

        def add(cls: type[ToolParser]) -> type[ToolParser]:
            _CLASSES[name], OWN_PARSERS[name] = cls, functools.partial(_read_turn, name)
            return cls

        return add

    @staticmethod
    def get_tool_parser(name: str, tokenizer: Any) -> ToolParser:
        """The parser of `multi_turn.format`. ValueError for an unknown one."""
        names = PARSERS.keys() | _CLASSES.keys()
        if name not in names:
            raise ValueError(f"unknown tool parser {name!r}; known: {', '.join(sorted(names))}")
        classes = (cls for cls in ToolParser.__subclasses__() if cls.tool_format == name)
        parser = (_CLASSES.get(name) or next(classes, ToolParser))(tokenizer)
        parser.tool_format = parser.tool_format or name
        return parser

    async def extract_tool_calls(self, responses_ids: Any, tools: Any = None) -> Found:
        """(what was said besides the calls, the calls that could be read) of sampled ids; tools: schemas, for formats
        without types."""
        return self._read(self.tokenizer.decode(responses_ids, skip_special_tokens=False), tools)

    def _read(self, text: str, tools: Any) -> Found:
        content, calls = parse(self.tool_format, text, plain(tools or []))
        return content, [_call(call, number) for number, call in enumerate(calls) if not call.error]


async def _read_turn(name: str, tokenizer: Any, ids: list[int], tools: Any) -> tuple[str, list[ToolCall]]:
    """(text, calls) of a sampled turn, its end token with it, as the user's parser `name` reads it. UserError where it
    raises or returns anything else."""
    parser = ToolParser.get_tool_parser(name, tokenizer)
    schemas = [OpenAIFunctionToolSchema.model_validate(tool) for tool in tools]
    takes_tools = len(inspect.signature(parser.extract_tool_calls).parameters) > 1
    try:
        text, parsed = await parser.extract_tool_calls(ids, *([schemas] if takes_tools else []))
        calls = [_tool_call(call, number) for number, call in enumerate(parsed)]
    except Exception as error:
        source = f"multi_turn.format={name}: {type(parser).__name__}.extract_tool_calls"
        raise UserError(f"{source} gives no (text, calls): {type(error).__name__}: {error}") from error
    return str(text or ""), calls


def _tool_call(call: Any, number: int) -> ToolCall:
    call_id = getattr(call, "tool_call_id", None) or f"call_{number}"
    return replace(with_arguments(call.name, call.arguments), id=call_id)


def _call(call: ToolCall, number: int) -> FunctionCall:
    call_id = None if call.id == f"call_{number}" else call.id
    return FunctionCall(call.name, json.dumps(call.arguments, ensure_ascii=False), call_id)


class HermesToolParser(ToolParser):
    """JSON between <tool_call> and </tool_call>."""

    tool_format = "hermes"


class Qwen3XMLToolParser(ToolParser):
    """<function=…><parameter=…> between <tool_call> and </tool_call>."""

    tool_format = "qwen3_coder"

    def _parse_xml_function_call(self, text: str, tools: Any) -> FunctionCall | None:
        """The call of the text behind `<function=`; None if it is none."""
        return next(iter(self._read(f"<tool_call><function={text}", tools)[1]), None)


class KimiToolParser(ToolParser):
    """<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}."""

    tool_format = "kimi"


class Gemma4ToolParser(ToolParser):
    """<|tool_call>call:name{…}<tool_call|>."""

    tool_format = "gemma4"


class GptOssToolParser(ToolParser):
    """Messages to functions.name on the commentary channel."""

    tool_format = "gpt-oss"
