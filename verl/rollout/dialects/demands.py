"""What a request demands of the form of a turn, as a grammar that the sampler follows (`verl.engine.rollout.grammars`):
an answer of a JSON schema, or calls of tools. The model may think before, where it has tokens for that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from verl.engine.rollout import grammars
from verl.rollout.session import LoopSetup, Session
from verl.rollout.tools.toolbox import warn_once

_HERMES = ("<tool_call>", "</tool_call>", "arguments")
_AS_TEMPLATES = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
"""Arguments are written as chat templates write them."""
_FORMATS = {"hermes": _HERMES, "qwen": _HERMES, "llama3_json": ("", "", "parameters")}
"""How a call begins and ends, and what it names its arguments, in the formats in which calls can be demanded."""


def grammar_of(session: Session, choice: Any, form: Mapping[str, Any] | None, tools: Any, several: bool = True) -> str:
    """The grammar of a turn, "" where nothing is demanded. choice: of tools, a word or a mapping that names one; form:
    {type, schema} of the answer; several: a turn may hold more than one call.

    ValueError for what the run's sampler cannot be held to; `required` is then taken as auto, and counted."""
    setup, kind = session.setup, (form or {}).get("type") or "text"
    tool_name = _name(choice)
    must_call = choice == "required" or bool(tool_name)
    if kind not in ("text", "json_object", "json_schema"):
        raise ValueError(f"response_format {kind} is not supported: use text, json_object or json_schema")
    if must_call and not tools:
        raise ValueError(f"tool_choice {json.dumps(choice)} needs tools")
    if kind == "text" and not must_call:
        return ""
    problem = _problem(setup, called=bool(tools))
    if problem and choice == "required" and kind == "text":
        session.counts["required_tool_choices"] += 1
        effect = "taken as auto: the policy decides whether it calls (counted in agent/required_tool_choices)"
        warn_once("tool_choice=required", "auto", effect, of="request")
        return ""
    if problem:
        demand = f"tool_choice {json.dumps(choice)}" if must_call else f"response_format {kind}"
        raise ValueError(f"{demand} is not supported: {problem}")
    offered = [tool["function"] for tool in tools or () if not tool_name or tool["function"]["name"] == tool_name]
    if must_call and not offered:
        raise ValueError(f"tool_choice names {tool_name!r}, which is none of the tools")
    schema = (form or {}).get("schema") or {"type": "object"}
    text = _lark(setup, offered, None if must_call else schema, several and not tool_name)
    grammars.check(text)
    return text


def _name(choice: Any) -> str:
    """The tool that a choice names. ValueError for a choice of another kind."""
    if choice in (None, "auto", "none", "required"):
        return ""
    name = (choice.get("function") or choice).get("name") if isinstance(choice, Mapping) else None
    if not name:
        raise ValueError(
            f"tool_choice {json.dumps(choice)} is not supported: use auto, required, none or a tool's name"
        )
    return str(name)


def _problem(setup: LoopSetup, *, called: bool) -> str:
    """Why turns of the run cannot be held to a grammar; "" if they can. called: there are tools."""
    if not setup.follows_grammars:
        return f"the engine of this run ({setup.engine}) does not constrain what is written"
    if not grammars.installed():
        return "constrained decoding needs llguidance: pip install 'verl[grammar]'"
    if called and setup.tool_format not in _FORMATS:
        formats = ", ".join(_FORMATS)
        return f"calls in the format {setup.tool_format} cannot be demanded, those of {formats} can (multi_turn.format)"
    return ""


def _lark(setup: LoopSetup, tools: Sequence[Mapping[str, Any]], schema: Any, several: bool) -> str:
    """The grammar of a turn of calls, or of an answer where there is a schema, or of either."""
    kinds = ["calls"] * bool(tools) + ["answer"] * (schema is not None)
    thought = _thought(setup)
    lines = [f"start: {thought} turn", f"turn: {' | '.join(kinds)}"]
    if thought:
        lines += [r"THOUGHT: /(.|\n)*/", r"SPACE: /\s*/"]
    if schema is not None:
        lines.append(f"answer: %json {json.dumps(schema)}")
    if tools:
        begin, end, arguments = _FORMATS[setup.tool_format]
        many = several and bool(begin)
        marked = f'{_mark(setup, begin)} "\\n" function "\\n" {_mark(setup, end)}' if begin else "function"
        lines += ['calls: call ("\\n" call)*' if many else "calls: call", f"call: {marked}"]
        lines.append(f"function: {' | '.join(f'f{number}' for number in range(len(tools)))}")
        for number, tool in enumerate(tools):
            before = json.dumps(f'{{"name": {json.dumps(tool["name"])}, "{arguments}": ')
            parameters = json.dumps((tool.get("parameters") or {"type": "object"}) | _AS_TEMPLATES)
            lines += [f'f{number}: {before} a{number} "}}"', f"a{number}: %json {parameters}"]
    return "\n".join(lines)


def _thought(setup: LoopSetup) -> str:
    vocabulary = setup.tokenizer.get_vocab()
    if "<think>" not in vocabulary or "</think>" not in vocabulary:
        return ""
    thought = "THOUGHT </think> SPACE"
    return thought if setup.boundaries.opens_thinking else f"(<think> {thought})?"


def _mark(setup: LoopSetup, mark: str) -> str:
    """A mark as the grammar names it: a token of its own, or text."""
    return mark if mark in setup.tokenizer.get_vocab() else json.dumps(mark)
