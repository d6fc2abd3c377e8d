"""Parsers of tool calls under the names of the public system, for loops that parse turns themselves: `verl.rollout.tools.parsers`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from verl.rollout.tools.base import plain
from verl.rollout.tools.parsers import PARSERS, ToolCall, parse


@dataclass
class FunctionCall:
    """A call of a tool: arguments as JSON; tool_call_id: the model's own, None without."""

    name: str
    arguments: str
    tool_call_id: str | None = None


Found = tuple[str, list[FunctionCall]]


class ToolParser:
    """Reads the calls of a sampled turn, in one of the formats of `PARSERS`."""

    tool_format: str = ""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    @staticmethod
    def get_tool_parser(name: str, tokenizer: Any) -> ToolParser:
        """The parser of `multi_turn.format`. ValueError for an unknown one."""
        if name not in PARSERS:
            raise ValueError(f"unknown tool parser {name!r}; known: {', '.join(sorted(PARSERS))}")
        named = (cls for cls in ToolParser.__subclasses__() if cls.tool_format == name)
        parser = next(named, ToolParser)(tokenizer)
        parser.tool_format = name
        return parser

    async def extract_tool_calls(self, responses_ids: Any, tools: Any = None) -> Found:
        """(what was said besides the calls, the calls that could be read) of sampled ids; tools: schemas, for formats without types."""
        return self._read(self.tokenizer.decode(responses_ids, skip_special_tokens=False), tools)

    def _read(self, text: str, tools: Any) -> Found:
        content, calls = parse(self.tool_format, text, plain(tools or []))
        return content, [_call(call, number) for number, call in enumerate(calls) if not call.error]


def _call(call: ToolCall, number: int) -> FunctionCall:
    own = None if call.id == f"call_{number}" else call.id
    return FunctionCall(call.name, json.dumps(call.arguments, ensure_ascii=False), own)


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


class GptOssToolParser(ToolParser):
    """Messages to functions.name on the commentary channel."""

    tool_format = "gpt-oss"
