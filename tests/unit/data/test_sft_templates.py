"""Loss masks of supervised rows and of pairs, with the chat templates of models that are often trained.

The templates are written after the published ones, without the texts of their system messages.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny import SPECIAL, tiny_tokenizer
from verl.config import load
from verl.data.pairs import PairDataset
from verl.data.rows import BadRow, ChatRenderer
from verl.data.sft import SFTDataset, SFTRow
from verl.data.sft_mask import TurnFinder

# The generation prompt begins a think block; all turns but the last lose theirs.
QWQ = r"""
{%- for m in messages -%}
{%- set c = m.content if loop.last else m.content.split('</think>')[-1].lstrip('\n') -%}
{%- if m.role == 'tool' -%}
{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' -}}
{%- elif m.tool_calls -%}
{{- '<|im_start|>' + m.role -}}{%- if m.content -%}{{- '\n' + c -}}{%- endif -%}
{%- for t in m.tool_calls -%}
{{- '\n<tool_call>\n{"name": "' + t.function.name + '", "arguments": ' + t.function.arguments | tojson -}}
{{- '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- else -%}{{- '<|im_start|>' + m.role + '\n' + (c if m.role == 'assistant' else m.content) + '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n<think>\n' -}}{%- endif -%}
"""
# As Qwen3's, turns after the last question keep their think block, which the last one always has.
THINKING_2507 = r"""
{%- set ns = namespace(last=messages | length - 1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set c, thought = m.content, m.reasoning_content or '' -%}
{%- if not thought and '</think>' in c -%}
{%- set thought = c.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') -%}
{%- set c = c.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\n' -}}
{%- if loop.index0 > ns.last and (loop.last or thought) -%}
{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + c.lstrip('\n') -}}
{%- else -%}{{- c -}}{%- endif -%}
{%- for t in m.tool_calls or [] -%}
{%- if c or not loop.first -%}{{- '\n' -}}{%- endif -%}
{{- '<tool_call>\n{"name": "' + t.function.name + '", "arguments": ' + t.function.arguments | tojson -}}
{{- '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- elif m.role == 'tool' -%}
{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' -}}
{%- else -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n<think>\n' -}}{%- endif -%}
"""
# Every turn after the last question has a think block, and thinking can be switched off.
QWEN35 = THINKING_2507.replace("loop.index0 > ns.last and (loop.last or thought)", "loop.index0 > ns.last").replace(
    "{{- '<|im_start|>assistant\\n<think>\\n' -}}",
    "{{- '<|im_start|>assistant\\n<think>\\n' -}}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}{{- '\\n</think>\\n\\n' -}}{%- endif -%}",
)
# The end of text is written unless there is a generation prompt.
PHI3 = r"""
{%- for m in messages -%}{{- '<|' + m.role + '|>\n' + m.content + '<|end|>\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- else -%}{{- eos_token -}}{%- endif -%}
"""
PHI4_MINI = r"""
{%- for m in messages -%}
{{- '<|' + m.role + '|>' + m.content -}}
{%- if m.role == 'system' and m.tools -%}{{- '<|tool|>' + m.tools + '<|/tool|>' -}}{%- endif -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- else -%}{{- eos_token -}}{%- endif -%}
"""
# Thoughts are a message of their own, only before the last answer, or before calls that no answer follows.
GPT_OSS = r"""
{{- '<|start|>system<|message|>Valid channels: analysis, commentary, final.<|end|>' -}}
{%- if tools -%}{{- '<|start|>developer<|message|># Tools ' + tools | tojson + '<|end|>' -}}{%- endif -%}
{%- set call = namespace(name=none) -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' and m.tool_calls -%}
{%- set later = namespace(answer=false) -%}
{%- for n in messages[loop.index:] -%}
{%- if n.role == 'assistant' and not n.tool_calls -%}{%- set later.answer = true -%}{%- endif -%}
{%- endfor -%}
{%- set t = m.tool_calls[0].function -%}
{%- set thought = m.content or m.thinking -%}
{%- if thought and not later.answer -%}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + thought + '<|end|>' -}}
{%- endif -%}
{{- '<|start|>assistant to=functions.' + t.name + '<|channel|>commentary json<|message|>' -}}
{{- t.arguments | tojson + '<|call|>' -}}
{%- set call.name = t.name -%}
{%- elif m.role == 'assistant' and loop.last and not add_generation_prompt -%}
{%- if m.thinking -%}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' -}}{%- endif -%}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' -}}
{%- elif m.role == 'assistant' -%}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' -}}
{%- set call.name = none -%}
{%- elif m.role == 'tool' -%}
{%- if call.name is none -%}{{- raise_exception('no call') -}}{%- endif -%}
{{- '<|start|>functions.' + call.name + ' to=assistant<|channel|>commentary<|message|>' + m.content | tojson -}}
{{- '<|end|>' -}}
{%- else -%}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}
"""
PHI_TOKENS = ("<|end|>", "<|assistant|>", "<|user|>", "<|system|>", "<|tool|>", "<|/tool|>")
OSS_TOKENS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>")
TEMPLATES = {
    "qwq": (QWQ, "<|im_end|>"),
    "2507": (THINKING_2507, "<|im_end|>"),
    "qwen3.5": (QWEN35, "<|im_end|>"),
    "phi3": (PHI3, "<|endoftext|>"),
    "phi4": (PHI4_MINI, "<|endoftext|>"),
    "oss": (GPT_OSS, "<|return|>"),
}
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>'
OSS_CALL = ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>'
FINAL = "<|channel|>final<|message|>"


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content} | more


def thought(content: str, reason: str) -> dict[str, Any]:
    return answer(f"<think>\n{reason}\n</think>\n\n{content}")


def called(content: str = "", **more: Any) -> list[dict[str, Any]]:
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    return [answer(content, tool_calls=calls, **more), {"role": "tool", "content": "7"}]


def tokenizer_of(name: str) -> Any:
    template, eos = TEMPLATES[name]
    tokenizer = tiny_tokenizer(template=template, special=SPECIAL + PHI_TOKENS + OSS_TOKENS[:1] + OSS_TOKENS[2:])
    tokenizer.eos_token = eos
    return tokenizer


def dataset(tmp_path: Path, name: str, rows: list[dict[str, Any]], *more: str, kind: Any = SFTDataset) -> Any:
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    words = [f"data.train_files={path}", "model.path=x", "data.max_bad_row_ratio=0", *more]
    return kind(path, tokenizer_of(name), load(words, entry="sft").data)


def learned(tokenizer: Any, row: SFTRow) -> list[str]:
    """The runs of learned tokens, decoded."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], row.mask.astype(int), [0]])))
    return [tokenizer.decode(row.ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


THOUGHTS = [user("q"), thought("one", "r1"), user("r"), thought("two", "r2")]
PLAIN = [user("q"), answer("one"), user("r"), answer("two")]
FIELDS = [user("q"), answer("one", reasoning_content="r1"), user("r"), answer("two", reasoning_content="two, so")]
OSS_THOUGHTS = [user("q"), answer("one", thinking="r1"), user("r"), answer("two", thinking="two, so")]
TOOLS = [user("q"), *called("<think>\nr1\n</think>\n\n"), thought("one", "r2")]
MORE_TOOLS = [*TOOLS, user("r"), *called("<think>\nr3\n</think>\n\n"), *called("so"), answer("two")]
ASKS = [{"role": "system", "content": "s", "tools": '[{"name": "f"}]'}, *PLAIN]
OSS_TOOLS = [user("q"), *called(thinking="r1"), *called("r2"), answer("one", thinking="r3")]
OSS_MORE_TOOLS = [*OSS_TOOLS, user("r"), *called(thinking="r4"), answer("two", thinking="r5")]
OPEN = [user("q"), *called(thinking="r1"), *called("r2")]


@pytest.mark.parametrize(
    ("name", "messages", "expected"),
    [
        ("qwq", THOUGHTS, ["one<|im_end|>", "r2\n</think>\n\ntwo<|im_end|>"]),
        ("qwq", PLAIN, ["one<|im_end|>", "two<|im_end|>"]),
        ("qwq", TOOLS, ["\n" + CALL, "r2\n</think>\n\none<|im_end|>"]),
        ("qwq", MORE_TOOLS, ["\n" + CALL, "one<|im_end|>", "\n" + CALL, "so\n" + CALL, "two<|im_end|>"]),
        ("2507", THOUGHTS, ["one<|im_end|>", "r2\n</think>\n\ntwo<|im_end|>"]),
        ("2507", FIELDS, ["one<|im_end|>", "two, so\n</think>\n\ntwo<|im_end|>"]),
        ("2507", PLAIN, ["one<|im_end|>", "\n</think>\n\ntwo<|im_end|>"]),
        ("2507", TOOLS, ["r1\n</think>\n\n" + CALL, "r2\n</think>\n\none<|im_end|>"]),
        (
            "2507",
            MORE_TOOLS,
            [CALL, "one<|im_end|>", "r3\n</think>\n\n" + CALL, "so\n" + CALL, "\n</think>\n\ntwo<|im_end|>"],
        ),
        ("qwen3.5", THOUGHTS, ["one<|im_end|>", "r2\n</think>\n\ntwo<|im_end|>"]),
        ("qwen3.5", FIELDS, ["one<|im_end|>", "two, so\n</think>\n\ntwo<|im_end|>"]),
        ("qwen3.5", MORE_TOOLS[:3], ["r1\n</think>\n\n" + CALL]),
        ("phi3", THOUGHTS, [f"<think>\nr{n}\n</think>\n\n{word}<|end|>" for n, word in ((1, "one"), (2, "two"))]),
        ("phi3", PLAIN, ["one<|end|>", "two<|end|>"]),
        ("phi4", PLAIN, ["one<|end|>", "two<|end|>"]),
        ("phi4", ASKS, ["one<|end|>", "two<|end|>"]),
        ("phi4", PLAIN[:3], ["one<|end|>"]),
        ("oss", PLAIN, [f"{FINAL}one<|end|>", f"{FINAL}two<|return|>"]),
        (
            "oss",
            OSS_THOUGHTS,
            [
                f"{FINAL}one<|end|>",
                f"<|channel|>analysis<|message|>two, so<|end|><|start|>assistant{FINAL}two<|return|>",
            ],
        ),
        (
            "oss",
            OSS_TOOLS,
            [OSS_CALL] * 2 + [f"<|channel|>analysis<|message|>r3<|end|><|start|>assistant{FINAL}one<|return|>"],
        ),
        (
            "oss",
            OSS_MORE_TOOLS,
            [
                *(OSS_CALL, OSS_CALL, f"{FINAL}one<|end|>", OSS_CALL),
                f"<|channel|>analysis<|message|>r5<|end|><|start|>assistant{FINAL}two<|return|>",
            ],
        ),
        ("oss", OPEN, [f"<|channel|>analysis<|message|>r{n}<|end|><|start|>assistant{OSS_CALL}" for n in (1, 2)]),
    ],
)
def test_learned(tmp_path: Path, name: str, messages: list[dict[str, Any]], expected: list[str]) -> None:
    data = dataset(tmp_path, name, [{"messages": messages}])
    assert learned(data.tokenizer, data[0]) == expected
    whole = ChatRenderer(data.tokenizer).text(messages, generation=False)
    assert data.tokenizer.decode(data[0].ids) == whole


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        *((name, THOUGHTS) for name in ("qwq", "2507", "qwen3.5", "phi3", "phi4")),
        *(("2507", FIELDS), ("2507", PLAIN), ("qwen3.5", TOOLS), ("oss", PLAIN), ("oss", OSS_THOUGHTS)),
    ],
)
def test_what_precedes_the_last_turn_is_what_is_sampled_from(
    tmp_path: Path, name: str, messages: list[dict[str, Any]]
) -> None:
    data = dataset(tmp_path, name, [{"messages": messages}])
    prompt = ChatRenderer(data.tokenizer).text(messages[:-1], generation=True)
    row, last = data[0], learned(data.tokenizer, data[0])[-1]
    assert data.tokenizer.decode(row.ids).startswith(prompt + last)


def test_thinking_switched_off(tmp_path: Path) -> None:
    rows = [{"messages": PLAIN, "enable_thinking": flag} for flag in (False, True)]
    data = dataset(tmp_path, "qwen3.5", rows)
    assert learned(data.tokenizer, data[0])[1] == "two<|im_end|>"
    assert learned(data.tokenizer, data[1])[1] == "\n</think>\n\ntwo<|im_end|>"


@pytest.mark.parametrize("name", ["qwq", "2507"])
@pytest.mark.parametrize("content", ["", "t", "<", "<think", "think", " a ", "<|im_end|>", "assistant\n"])
def test_awkward_answers(tmp_path: Path, name: str, content: str) -> None:
    """Thoughts that begin as the answer does, or that hold what ends a turn."""
    data = dataset(tmp_path, name, [{"messages": [user("q"), thought(content, f"{content} so")]}])
    assert learned(data.tokenizer, data[0]) == [f"{content} so\n</think>\n\n{content}<|im_end|>"]


@pytest.mark.parametrize(
    ("name", "chosen", "rejected", "expected"),
    [
        ("qwq", thought("a", "x"), thought("b", "y"), ("x\n</think>\n\na<|im_end|>", "y\n</think>\n\nb<|im_end|>")),
        ("2507", thought("a", "x"), answer("b"), ("x\n</think>\n\na<|im_end|>", "\n</think>\n\nb<|im_end|>")),
        ("phi3", answer("a"), answer("b"), ("a<|end|>", "b<|end|>")),
        ("phi4", answer("a"), answer("b"), ("a<|end|>", "b<|end|>")),
        (
            "oss",
            answer("a", thinking="x"),
            answer("b"),
            (
                f"<|channel|>analysis<|message|>x<|end|><|start|>assistant{FINAL}a<|return|>",
                f"{FINAL}b<|return|>",
            ),
        ),
    ],
)
def test_pairs(tmp_path: Path, name: str, chosen: Any, rejected: Any, expected: tuple[str, str]) -> None:
    prompt = [user("q"), thought("one", "r1") if name in ("qwq", "2507") else answer("one"), user("r")]
    row = {"prompt": prompt, "chosen": [chosen], "rejected": [rejected]}
    data = dataset(tmp_path, name, [row], kind=PairDataset)
    pair = data[0]
    assert learned(data.tokenizer, pair.chosen) == [expected[0]]
    assert learned(data.tokenizer, pair.rejected) == [expected[1]]


@pytest.mark.parametrize(
    ("name", "messages", "expected"),
    [
        ("qwq", THOUGHTS, ["r1\n</think>\n\none<|im_end|>", "r2\n</think>\n\ntwo<|im_end|>"]),
        ("2507", PLAIN, ["one<|im_end|>", "two<|im_end|>"]),
        ("phi3", PLAIN, ["one<|end|>", "two<|end|>"]),
        ("oss", PLAIN, [f"{FINAL}one<|return|>", f"{FINAL}two<|return|>"]),
    ],
)
def test_turns_rendered_alone(tmp_path: Path, name: str, messages: Any, expected: list[str]) -> None:
    """What `data.ignore_input_ids_mismatch=True` does with turns that are not found in the whole dialogue."""
    data = dataset(tmp_path, name, [{"messages": messages}], "data.ignore_input_ids_mismatch=True")
    text, spans = data._finder.turns_alone(messages)
    assert [text[start : text.index("|>", end) + 2] for start, end in spans] == expected


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (PHI4_MINI.replace("m.content", "m.content if loop.last else m.content | upper"), "turn 1 is rendered diff"),
        (PHI4_MINI.replace("'<|assistant|>'", "'<|bot|>'"), "the generation prompt, '<|bot|>', is not before turn 1"),
    ],
    ids=["other content", "other header"],
)
def test_what_cannot_be_masked_says_why(template: str, words: str) -> None:
    renderer = ChatRenderer(tiny_tokenizer(template=template, special=SPECIAL + PHI_TOKENS))
    renderer.tokenizer.eos_token = "<|endoftext|>"
    finder = TurnFinder(renderer)
    with pytest.raises(BadRow, match="assistant span not found") as caught:
        finder.spans(PLAIN, renderer.text(PLAIN, generation=False))
    assert words in str(caught.value) and "data.ignore_input_ids_mismatch=True" in str(caught.value)
    if "<|bot|>" in template:
        with pytest.raises(BadRow, match=r"turn 1, rendered alone.*chat_template\.jinja"):
            finder.turns_alone(PLAIN)
    else:
        assert len(finder.turns_alone(PLAIN)[1]) == 2
