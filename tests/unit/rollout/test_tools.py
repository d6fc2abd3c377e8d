"""Tool calls as models write them, tools as users do, and what becomes of calls that go wrong."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from verl.config import Map
from verl.data.rows import BadRow, tools_of_row
from verl.rollout import event_loop
from verl.rollout.tools.parsers import PARSERS, ToolCall, parse
from verl.rollout.tools.tool import BaseTool, ToolError, ToolResponse, function_tool
from verl.rollout.tools.toolbox import Toolbox, ToolRun, truncated

SCHEMA = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {
    "text": {"type": "string"}, "count": {"type": "integer"}, "deep": {"type": "boolean"},
    "any": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "not": {}}}}}  # fmt: skip
ONE = {"text": "1, {a}", "count": 2}
XML = "<function=find>\n<parameter=text>\n1, {a}\n</parameter>\n<parameter=count>\n2\n</parameter>\n</function>"
INVOKE = (
    '<invoke name="find">\n<parameter name="text">1, {a}</parameter>\n<parameter name="count">2</parameter>\n</invoke>'
)
DSML = '<｜DSML｜invoke name="find"><｜DSML｜parameter name="text" string="true">1, {a}</｜DSML｜parameter><｜DSML｜parameter name="count" string="false">2</｜DSML｜parameter></｜DSML｜invoke>'
JSON = '{"name": "find", "arguments": {"text": "1, {a}", "count": 2}}'
JSON_CALL = f"<tool_call>{JSON}</tool_call>"
ENDS = '<tool_call>{"name": "find", "arguments": {"text": "</think>"}}</tool_call>'
ARGUMENTS = '{"text": "1, {a}", "count": 2}'
# Format → a call of `find` as the model writes it, and one that is broken.
WRITTEN = {
    "hermes": (f"<tool_call>\n{JSON}\n</tool_call>", '<tool_call>\n{"name": "find", "argum'),
    "qwen3_coder": (f"<tool_call>\n{XML}\n</tool_call>", "<tool_call>\nfind(text)\n</tool_call>"),
    "seed": (f"<seed:tool_call>\n{XML}\n</seed:tool_call>", "<seed:tool_call>find</seed:tool_call>"),
    "glm": (
        "<tool_call>find\n<arg_key>text</arg_key>\n<arg_value>1, {a}</arg_value>\n<arg_key>count</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        "<tool_call>let me find<arg_key>text</arg_key>",
    ),
    "minimax": (f"<minimax:tool_call>\n{INVOKE}\n</minimax:tool_call>", "<minimax:tool_call>\nfind\n</minimax:tool_call>"),
    "deepseek_v4": (f"<｜DSML｜tool_calls>\n{DSML}\n</｜DSML｜tool_calls>", "<｜DSML｜tool_calls>find"),
    "kimi": (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>find<|tool_call_end|>",
    ),
    "deepseek": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁call▁end｜>",
    ),
    "gemma4": ('<|tool_call>call:find{text:<|"|>1, {a}<|"|>,count:2}<tool_call|>', "<|tool_call>find{}<tool_call|>"),
    "llama3_json": (JSON.replace("arguments", "parameters"), '{"name": "find", "parameters": {'),
    "gpt-oss": (
        f"<|channel|>commentary to=functions.find <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
        "<|channel|>commentary to=functions.find json",
    ),
}  # fmt: skip


@pytest.mark.parametrize("tool_format", sorted(PARSERS))
def test_each_format_reads_its_calls(tool_format: str) -> None:
    call, broken = WRITTEN[{"qwen": "hermes"}.get(tool_format, tool_format)]
    before = "" if tool_format in ("llama3_json", "gpt-oss") else "I look.\n"
    content, (read,) = parse(tool_format, f"<think>a {call}</think>{before}{call}", [SCHEMA])
    assert (read.name, read.arguments, read.error) == ("find", ONE, "") and read.id
    assert content == f"<think>a {call}</think>{before.strip()}"
    _, (bad,) = parse(tool_format, broken, [SCHEMA])
    assert bad.error and not bad.arguments
    for answer in ("The answer is {4}.", "{1, 2} is the set", "{'a', 'b'} too"):
        assert parse(tool_format, answer, [SCHEMA]) == (answer, [])


@pytest.mark.parametrize(
    ("tool_format", "text", "expected"),
    [
        ("hermes", f"<tool_call>{JSON}</tool_call>\n<tool_call>{JSON}</tool_call>", [("find", ONE)] * 2),
        ("hermes", '<tool_call>{"name": "find", "arguments": "{\\"count\\": 1}"}</tool_call>', [("find", {"count": 1})]),
        ("llama3_json", f"<|python_tag|>{JSON}; {JSON}", [("find", ONE)] * 2),
        ("llama3_json", '{"answer": 4}', []),
        ("qwen3_coder", "<tool_call><function=find><parameter=deep>True</parameter>", [("find", {"deep": True})]),
        ("llama3_json", '{"name": "find", "parameters": {"text": "</think>"}}', [("find", {"text": "</think>"})]),
        ("hermes", f"<think>a <tool_call> or {ENDS}</think>{ENDS}{JSON_CALL}", [("find", {"text": "</think>"}), ("find", ONE)]),
        ("qwen3_coder", "<think>Hm</think><tool_call><function=find><parameter=text></think></function></tool_call>",
         [("find", {"text": "</think>"})]),
        ("qwen3_coder", f"<tool_call><function=find>{''.join(f'<parameter={k}>5</parameter>' for k in ('text', 'any', 'maybe', 'not', 'free'))}",
         [("find", {"text": "5", "any": 5, "maybe": "5", "not": 5, "free": "5"})]),
        ("gpt-oss", "<|channel|>final<|message|>4", []),
    ],
)  # fmt: skip
def test_several_calls_and_odd_ones(tool_format: str, text: str, expected: list) -> None:
    assert [(c.name, c.arguments) for c in parse(tool_format, text, [SCHEMA])[1] if not c.error] == expected


# As the models of each family write two calls of one turn; llama3_json and gpt-oss have a test of their own.
TWO = {
    "hermes": f"<tool_call>\n{JSON}\n</tool_call>\n<tool_call>\n{JSON}\n</tool_call>",
    "qwen3_coder": f"<tool_call>\n{XML}\n</tool_call>\n<tool_call>\n{XML}\n</tool_call>",
    "seed": f"<seed:tool_call>\n{XML}\n</seed:tool_call>\n<seed:tool_call>\n{XML}\n</seed:tool_call>",
    "glm": "\n" + "\n".join([WRITTEN["glm"][0].replace("\n", "")] * 2),  # GLM-4.7 writes no line breaks in a call
    "minimax": f"<minimax:tool_call>\n{INVOKE}\n{INVOKE}\n</minimax:tool_call>",
    "deepseek_v4": f"<｜DSML｜tool_calls>\n{DSML}\n{DSML}\n</｜DSML｜tool_calls>",
    "kimi": "<|tool_calls_section_begin|>" + "".join(
        f"<|tool_call_begin|>functions.find:{n}<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>" for n in (0, 1)
    ) + "<|tool_calls_section_end|>",
    # DeepSeek-V3.1
    "deepseek": "<｜tool▁calls▁begin｜>" + f"<｜tool▁call▁begin｜>find<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>" * 2 + "<｜tool▁calls▁end｜>",
    "gemma4": WRITTEN["gemma4"][0] * 2,
}  # fmt: skip


@pytest.mark.parametrize("tool_format", TWO)
def test_two_calls_of_a_turn(tool_format: str) -> None:
    content, calls = parse(tool_format, "Both." + TWO[tool_format], [SCHEMA])
    assert content == "Both." and [(c.name, c.arguments, c.error) for c in calls] == [("find", ONE, "")] * 2
    assert calls[0].id != calls[1].id


@pytest.mark.parametrize(
    ("tool_format", "text", "error"),
    [
        ("hermes", "<tool_call>\n{'name': 'find', 'arguments': {}}\n</tool_call>", "no valid JSON"),
        ("hermes", '<tool_call>\n{"name": "find", "arguments": {"text": "1"}\n</tool_call>', "no valid JSON"),
        ("hermes", '<tool_call>{"find": {"text": "1"}}</tool_call>', '"name" and "arguments"'),
        ("hermes", '<tool_call>{"name": "find", "arguments": ["1", 2]}</tool_call>', "must be a JSON object"),
        ("qwen3_coder", f"<tool_call>\n{JSON}\n</tool_call>", "no <function=NAME>"),
        ("seed", f"<seed:tool_call>{JSON}</seed:tool_call>", "no <function=NAME>"),
        ("glm", f"<tool_call>find\n{ARGUMENTS}\n</tool_call>", "does not begin with a tool's name"),
        ("glm", "<tool_call>find<arg_key>text</arg_key>1, {a}</tool_call>", "no <arg_value>"),
        ("minimax", f"<minimax:tool_call>\n{JSON}\n</minimax:tool_call>", "no <invoke name="),
        ("kimi", "<|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>{'text': '1'}<|tool_call_end|>", "no valid JSON"),
        ("kimi", '<|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>{"text": "1', "no valid JSON"),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n{'text'}\n```<｜tool▁call▁end｜>", "no valid JSON"),
        ("deepseek", '<｜tool▁call▁begin｜>find<｜tool▁sep｜>{"text": "1', "no valid JSON"),
        ("deepseek_v4", '<｜DSML｜tool_calls>\n{"name": "find"}\n</｜DSML｜tool_calls>', "no <invoke name="),
        ("gemma4", '<|tool_call>call:find{text:<|"|>1', "not call:NAME"),
        ("gemma4", "<|tool_call>call:find{text:no marks}<tool_call|>", "no valid JSON"),
        ("llama3_json", '<|python_tag|>find.call(text="1")', "no valid JSON"),
        ("llama3_json", f"{JSON}; and then", "no valid JSON"),
        ("gpt-oss", '<|channel|>commentary to=functions.find <|constrain|>json<|message|>{"text": "1<|call|>', "no valid JSON"),
        ("gpt-oss", "<|channel|>analysis to=python code<|message|>print(1)<|call|>", "no valid JSON"),
        ("gpt-oss", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.find<|channel|>commentary", "no <|message|>"),
    ],
)  # fmt: skip
def test_a_broken_call_is_told_to_the_model(tool_format: str, text: str, error: str) -> None:
    *_, last = parse(tool_format, text, [SCHEMA])[1]
    assert error in last.error and not last.arguments


@pytest.mark.parametrize(
    ("tool_format", "text", "content", "expected"),
    [
        # A turn that was cut in an argument has what is there of it.
        ("minimax", '<minimax:tool_call>\n<invoke name="find">\n<parameter name="text">1, {', "", [{"text": "1, {"}]),
        ("seed", "<seed:tool_call>\n<function=find>\n<parameter=text>1, {", "", [{"text": "1, {"}]),
        ("glm", "<tool_call>find\n<arg_key>text</arg_key>\n<arg_value>1, {", "", [{"text": "1, {"}]),
        # What a model thinks of calls is none.
        ("seed", f"<seed:think>so {TWO['seed']}?</seed:think>4", f"<seed:think>so {TWO['seed']}?</seed:think>4", []),
        ("gpt-oss", "<|channel|>analysis<|message|>I might say to=functions.find now.<|end|><|start|>assistant<|channel|>final<|message|>4", "4", []),
        ("gpt-oss", f"<|channel|>analysis<|message|>Look.<|end|><|start|>assistant to=functions.find<|channel|>commentary json<|message|>{ARGUMENTS}", "", [ONE]),
    ],
)  # fmt: skip
def test_what_a_turn_says_besides(tool_format: str, text: str, content: str, expected: list) -> None:
    said, calls = parse(tool_format, text, [SCHEMA])
    assert said == content and [(c.arguments, c.error) for c in calls] == [(one, "") for one in expected]


CLASSES = '''
import asyncio
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import function_tool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op

class Counter(BaseTool):
    """Counts its calls; released instances are noted."""

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.counts, self.released = {}, []

    async def create(self, instance_id=None, start=0, **kwargs):
        instance_id = instance_id or str(len(self.counts))
        self.counts[instance_id] = start
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id, parameters, **kwargs):
        self.counts[instance_id] += parameters["by"]
        return ToolResponse(text=str(self.counts[instance_id])), 0.5, {"by": parameters["by"]}

    async def calc_reward(self, instance_id, **kwargs):
        return float(self.counts[instance_id])

    async def release(self, instance_id, **kwargs):
        self.released.append(instance_id)

@function_tool
def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: First.
        b: Second.
    """
    return {"sum": a + b}

@function_tool("sleep", schema={"type": "function", "function": {"name": "sleep"}})
def nap(seconds: float = 30):
    import time
    time.sleep(seconds)
    return "awake", 1.0, {"naps": 1}

@function_tool("cancels", schema={"type": "function", "function": {"name": "cancels"}})
async def cancels():
    import asyncio
    asyncio.current_task().cancel()
    await asyncio.sleep(0)
'''
ENTRY = """
tools:
  - class_name: {module}:Counter
    config: {{type: native, lifetime: {lifetime}}}
    tool_schema: {{type: function, function: {{name: count, description: c, parameters: {{type: object, properties: {{by: {{type: {kind}}}}}, required: [by]}}}}}}
"""


def multi_turn(folder: Path, yaml: str | None = None, functions: str | None = CLASSES) -> Any:
    (folder / "my_tools.py").write_text(CLASSES if functions is None else functions)
    (folder / "tools.yaml").write_text(yaml or "")
    return Map.of(
        {
            "tool_config_path": str(folder / "tools.yaml") if yaml else None,
            "function_tool_path": str(folder / "my_tools.py") if functions else None,
        }
    )


def entry(folder: Path, lifetime: str = "call", kind: str = "integer") -> str:
    return ENTRY.format(module=folder / "my_tools.py", lifetime=lifetime, kind=kind)


def run_of(box: Toolbox, kwargs: Any = None, **how: Any) -> ToolRun:
    return ToolRun(box.by_name, kwargs, **({"timeout": 5.0, "longest": 20, "side": "middle"} | how))


@pytest.mark.parametrize(
    ("lifetime", "texts", "rewards"),
    [("call", ["7", "8"], [0.5, 0.5]), ("trajectory", ["7", "10"], [0.5, 0.5, 10.0])],
)
def test_a_tool_with_state_lives_as_long_as_its_config_says(
    tmp_path: Path, lifetime: str, texts: list, rewards: list
) -> None:
    box = Toolbox.load(**multi_turn(tmp_path, entry(tmp_path, lifetime)))
    run = run_of(box, {"count": {"create_kwargs": {"start": 5, "unused": None}}})

    async def go() -> list[str]:
        said = [await run.call(ToolCall("count", {"by": by})) for by in (2, 3)]
        await run.close()
        return said

    assert asyncio.run(go()) == texts and run.rewards == rewards
    assert run.metrics == [{"tool": "count", "by": 2}, {"tool": "count", "by": 3}]
    assert box.by_name["count"].released == (["0", "1"] if lifetime == "call" else ["0"])


class Faulty(BaseTool):
    """Is wrong in one of its methods: raises, hangs, or gives a text."""

    done: list[str]

    async def execute(self, instance_id, parameters, **kwargs):
        return await self._do("execute", (ToolResponse(text="ok"), 0.5, {}))

    async def calc_reward(self, instance_id, **kwargs):
        return await self._do("calc_reward", 1.0)

    async def release(self, instance_id, **kwargs):
        await self._do("release", None)

    async def _do(self, method: str, gives: Any) -> Any:
        wrong = self.config.get(method)
        if wrong == "raises":
            raise KeyError(method)
        if wrong == "hangs":
            await asyncio.sleep(60)
        self.done.append(method)
        return "much" if wrong == "text" else gives


@pytest.mark.parametrize(
    ("config", "said", "rewards", "done"),
    [
        ({"release": "hangs"}, "ok", [0.5], ["execute"]),
        ({"release": "raises"}, "ok", [0.5], ["execute"]),
        ({"execute": "hangs", "release": "hangs"}, "0.1 s", [], []),
        ({"lifetime": "trajectory", "calc_reward": "raises"}, "ok", [0.5], ["execute", "release"]),
        ({"lifetime": "trajectory", "calc_reward": "text"}, "ok", [0.5], ["execute", "calc_reward", "release"]),
        ({"lifetime": "trajectory", "calc_reward": "hangs"}, "ok", [0.5], ["execute", "release"]),
        ({"lifetime": "trajectory", "release": "hangs"}, "ok", [0.5, 1.0], ["execute", "calc_reward"]),
    ],
)  # fmt: skip
def test_a_tool_that_is_wrong_when_it_is_asked_for_its_end(
    config: dict, said: str, rewards: list, done: list, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("verl.rollout.tools.toolbox._WARNED", set())
    tool = Faulty(config, SCHEMA)
    tool.done = []
    run = run_of(Toolbox([("here", tool)]), timeout=0.1)

    async def go() -> Any:
        answer = await run.call(ToolCall("find", {}))
        await run.close()
        return answer

    assert said in asyncio.run(asyncio.wait_for(go(), 10)) and (run.rewards, tool.done) == (rewards, done)
    assert run.counts["errors"] == 1 and any("find" in record.getMessage() for record in caplog.records)


def test_a_row_that_means_another_tool_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    box = Toolbox.load(**multi_turn(tmp_path))
    for _ in range(2):
        box.warn_of_unknown({"add": {}, "adds": {"create_kwargs": {"ground_truth": "3"}}, "other": None})
    assert [record.getMessage() for record in caplog.records] == [
        "tool 'adds': is in a row's tools_kwargs; the run has no such tool (add, sleep, cancels)"
    ]


def test_function_tools_and_calls_that_go_wrong(tmp_path: Path) -> None:
    box = Toolbox.load(**multi_turn(tmp_path))
    assert list(box.schemas) == ["add", "sleep", "cancels"] and box.schemas["add"]["function"]["parameters"][
        "required"
    ] == ["a", "b"]
    run = run_of(box, timeout=0.2, longest=60)
    calls = [
        ToolCall("add", {"a": 1, "b": 2}), ToolCall("add", {"a": 1}), ToolCall("sub", {}),
        ToolCall("", error="no JSON"), ToolCall("sleep", {}), ToolCall("sleep", {"seconds": 0}),
        ToolCall("cancels", {}),
    ]  # fmt: skip

    async def go() -> list[str]:
        return await asyncio.gather(*map(run.call, calls))

    started = time.monotonic()
    good, missing, unknown, unread, late, awake, cancelled = asyncio.run(go())
    assert good == '{"sum": 3}' and awake == "awake" and run.rewards == [0.0, 1.0]
    assert "missing" in missing or "TypeError" in missing
    assert "add, sleep" in unknown and unread == "Error: no JSON" and "0.2 s" in late
    assert time.monotonic() - started < 25 and "CancelledError" in cancelled
    assert dict(run.counts) == {"calls": 7, "invalid": 2, "errors": 2, "timeouts": 1}


def test_functions_share_threads_and_one_that_hangs_gives_its_room_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_loop, "MOST_THREADS", 2)
    most, running, end = [], set(), threading.Event()

    def work(hang: bool) -> str:
        """Works.

        Args:
            hang: For ever.
        """
        running.add(threading.get_ident())
        most.append(len(running))
        end.wait(60 if hang else 0.1)
        running.discard(threading.get_ident())
        return "done"

    run = run_of(Toolbox([("here", function_tool(work).function_tool)]), timeout=0.5)

    async def go(*hang: bool) -> list[str]:
        return await asyncio.gather(*(run.call(ToolCall("work", {"hang": h})) for h in hang))

    assert asyncio.run(go(*[False] * 12)) == ["done"] * 12 and max(most) == 2
    assert asyncio.run(go(True, True, False))[2] == "done" and run.counts["timeouts"] == 2
    end.set()


@pytest.mark.parametrize(
    ("side", "text"),
    [("left", "(truncated)...6789"), ("right", "0123...(truncated)"), ("middle", "01...(truncated)...89")],
)
def test_long_responses_are_cut(side: str, text: str) -> None:
    assert truncated("0123456789", 4, side) == text


def test_tools_that_cannot_be_used_are_refused_with_what_to_change(tmp_path: Path) -> None:
    module = tmp_path / "my_tools.py"
    wrong = {
        "no_such": f"tools:\n  - class_name: {module}:NoSuch",
        "no module": "tools:\n  - class_name: nowhere.tools.Class",
        "no JSON schema.*'numeral'": entry(tmp_path, kind="numeral"),
        "lifetime is 'ever'": entry(tmp_path, "ever"),
        "3 tools are called .*entry 0 and in .*entry 1 and in .*entry 2": "tools:"
        + entry(tmp_path).partition("tools:")[2] * 3,
        "list `tools:`": "tool: []",
        "MCP": "tools:\n  - {config: {type: mcp}}",
        "config is no key.*known: tools": "tools: []\nconfig: {}",
        "entry 0: tool_shema is no key": "tools: [{class_name: x.Y, tool_shema: {}}]",
        "must derive from .*BaseTool": "tools: [{class_name: builtins.dict}]",
        "'properties' of tool 'x' is not where it belongs": "tools: [{class_name: builtins.dict, tool_schema: {function: {name: x, properties: {}}}}]",
        "required is True": entry(tmp_path, kind="integer, required: true"),
    }
    for words, yaml in wrong.items():
        with pytest.raises(ToolError, match=f"(?is){words.replace('no_such', 'NoSuch')}"):
            Toolbox.load(**multi_turn(tmp_path, yaml, functions=None))
    with pytest.raises(ToolError, match="no schema can be made"):
        function_tool(lambda x: x)


def test_rows_choose_their_tools() -> None:
    schemas = {name: {"name": name} for name in "abc"}
    assert [t["name"] for t in tools_of_row(schemas, {}, None)] == ["a", "b", "c"]
    assert [t["name"] for t in tools_of_row(schemas, {"tool_selection": ["b"]}, None)] == ["b"]
    assert [t["name"] for t in tools_of_row(schemas, {"tool_selection": ["b"]}, ["c"])] == ["c"]
    kwargs = {"need_tools_kwargs": True, "tools_kwargs": {"a": {"create_kwargs": {}}, "b": None}}
    assert [t["name"] for t in tools_of_row(schemas, kwargs, None)] == ["a"]
    with pytest.raises(BadRow, match="'d'"):
        tools_of_row(schemas, {}, ["d"])
