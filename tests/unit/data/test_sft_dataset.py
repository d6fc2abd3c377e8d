"""SFT rows: exactly the assistant's text and its end token are learned, whatever the template does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer
from verl.config import load
from verl.data.files import DataError
from verl.data.sft import SFTDataset

# Drops thoughts from earlier turns and writes an empty one into the last, as thinking models' templates do.
THINKING = (
    "{%- for m in messages -%}"
    "{%- set c = m['content'].split('</think>')[-1].lstrip() -%}"
    "{%- if m['role'] != 'assistant' -%}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{%- elif not loop.last -%}{{ '<|im_start|>assistant\n' + c + '<|im_end|>\n' }}"
    "{%- else -%}{%- set t = m['content'].split('</think>')[0].split('<think>')[-1].strip() "
    "if '</think>' in m['content'] else '' -%}"
    "{{ '<|im_start|>assistant\n<think>\n' + t + '\n</think>\n\n' + c + '<|im_end|>\n' }}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking -%}{{ '<think>\n\n</think>\n\n' }}{%- endif -%}"
    "{%- endif -%}"
)
# The generation prompt begins the thought (QwQ, Qwen3's thinking models).
THINKS = THINKING.partition("{%- if add_generation_prompt -%}")[0] + (
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n<think>\n' }}{%- endif -%}"
)
# Where no generation prompt follows, the text ends (Phi).
ENDS = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- else -%}{{ eos_token }}{%- endif -%}"
)
# What the model writes begins with a channel (gpt-oss).
CHANNELS = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m['role'] }}"
    "{%- if m['role'] == 'assistant' -%}{{ '<|channel|>final' }}{%- endif -%}"
    "{{ '<|message|>' + m['content'] + '<|im_end|>' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant' }}{%- endif -%}"
)
# No generation prompt at all, alternating turns enforced, the end token after a blank.
INST = (
    "{%- for m in messages -%}"
    "{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('must alternate') }}{%- endif -%}"
    "{%- if m['role'] == 'user' -%}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{%- else -%}{{ ' ' + m['content'] | trim + ' <|im_end|>' }}{%- endif -%}"
    "{%- endfor -%}"
)
# Only the header of the next turn ends a turn.
NO_END = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
# Shouts everything but the last turn: rendered alone and together differ beyond what can be found.
SHOUTS = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m['role'] + '\n' "
    "+ (m['content'] if loop.last else m['content'] | upper) + '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def dataset(
    tmp_path: Path,
    rows: list[dict[str, Any]],
    *more: str,
    template: str | None = CHAT_TEMPLATE,
    samples: int = -1,
    begin: bool = False,
) -> SFTDataset:
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    words = [f"data.train_files={path}", "model.path=x", "data.max_bad_row_ratio=0.9", *more]
    data = load(words, entry="sft").data
    return SFTDataset(data.train_files, tiny_tokenizer(template=template, begin=begin), data, max_samples=samples)


def learned(data: SFTDataset, row: int = 0) -> list[str]:
    """The runs of learned tokens, decoded."""
    one = data[row]
    assert one.ids.dtype == np.int64 and one.mask.dtype == bool and one.ids.shape == one.mask.shape
    edges = np.flatnonzero(np.diff(np.concatenate([[0], one.mask.astype(int), [0]])))
    return [data.tokenizer.decode(one.ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def test_messages(tmp_path: Path) -> None:
    data = dataset(tmp_path, [{"messages": turns("hi", "hé  llo\n", "assistant\nmore", "a")}])
    assert learned(data) == ["hé  llo\n<|im_end|>", "a<|im_end|>"]
    turned = turns("hi", "hé  llo\n", "assistant\nmore", "a")
    whole = data.tokenizer.apply_chat_template(turned, tokenize=False)
    assert data.tokenizer.decode(data[0].ids) == whole


@pytest.mark.parametrize(
    "content", ["t", "assistant", "<|im_start|>x", "think", " spaces ", "<think>a</think>b", "é🙂"]
)
def test_awkward_contents(tmp_path: Path, content: str) -> None:
    data = dataset(tmp_path, [{"messages": turns("t", content, content, content)}])
    assert learned(data) == [content + "<|im_end|>"] * 2


def test_system_and_assistant_first(tmp_path: Path) -> None:
    first = [{"role": role, "content": role[0]} for role in ("system", "assistant", "user")]
    assert learned(dataset(tmp_path, [{"messages": first}])) == ["a<|im_end|>"]


def test_thinking_template_whole_rendering_wins(tmp_path: Path) -> None:
    row = {"messages": turns("q", "<think>long</think>one", "r", "<think>short</think>two")}
    data = dataset(tmp_path, [row], template=THINKING)
    assert learned(data) == ["one<|im_end|>", "<think>\nshort\n</think>\n\ntwo<|im_end|>"]
    assert "long" not in data.tokenizer.decode(data[0].ids)
    plain = dataset(tmp_path, [{"messages": turns("q", "one", "r", "two")}], template=THINKING)
    assert learned(plain) == ["one<|im_end|>", "<think>\n\n</think>\n\ntwo<|im_end|>"]


@pytest.mark.parametrize("alone", [[], ["data.ignore_input_ids_mismatch=True"]])
@pytest.mark.parametrize(
    ("template", "answers", "expected"),
    [
        (THINKS, ("one", "two"), ["one<|im_end|>", "\n</think>\n\ntwo<|im_end|>"]),
        (THINKS, ("<think>a</think>one", "<think>b</think>two"), ["one<|im_end|>", "b\n</think>\n\ntwo<|im_end|>"]),
        (THINKS, ("", "two"), ["<|im_end|>", "\n</think>\n\ntwo<|im_end|>"]),
        (ENDS, ("one", "two"), ["one<|im_end|>", "two<|im_end|>"]),
        (ENDS, ("<think>a</think>one", ""), ["<think>a</think>one<|im_end|>", "<|im_end|>"]),
        (CHANNELS, ("one", "two"), [f"<|channel|>final<|message|>{c}<|im_end|>" for c in ("one", "two")]),
    ],
)
def test_generation_prompts_that_differ_from_the_header_of_a_turn(
    tmp_path: Path, template: str, answers: tuple[str, str], expected: list[str], alone: list[str]
) -> None:
    data = dataset(tmp_path, [{"messages": turns("q", answers[0], "r", answers[1])}], *alone, template=template)
    assert learned(data) == expected
    once = dataset(tmp_path, [{"messages": turns("q", answers[1])}], *alone, template=template)
    assert learned(once) == expected[1:]


def test_thinking_switched_off_by_row_and_by_default(tmp_path: Path) -> None:
    messages = turns("q", "one", "r", "two")
    rows = [{"messages": messages, "enable_thinking": flag} for flag in (False, True, None)]
    data = dataset(tmp_path, rows, "data.enable_thinking_default=False", template=THINKING)
    plain, thought = "two<|im_end|>", "<think>\n\n</think>\n\ntwo<|im_end|>"
    assert [learned(data, i)[1] for i in range(3)] == [plain, thought, plain]


@pytest.mark.parametrize(
    ("template", "expected"),
    [(INST, [" one <|im_end|>", " two <|im_end|>"]), (NO_END, ["one", "two"])],
    ids=["no generation prompt", "the next header is no end token"],
)
def test_templates_of_other_kinds(tmp_path: Path, template: str, expected: list[str]) -> None:
    data = dataset(tmp_path, [{"messages": turns("q", "one", "r", "two")}], template=template)
    assert learned(data) == expected


def test_span_not_found_is_a_bad_row_unless_told_otherwise(tmp_path: Path) -> None:
    rows = [{"messages": turns("q", "one", "r", "two")}, {"messages": turns("q", "one")}]
    data = dataset(tmp_path, rows, template=SHOUTS)
    assert [r["problem"] for r in data.bad_rows] == ["assistant span not found"] and len(data) == 1
    data = dataset(tmp_path, rows, "data.ignore_input_ids_mismatch=True", template=SHOUTS)
    assert learned(data) == ["one<|im_end|>", "two<|im_end|>"]


def test_tool_calls_are_learned(tmp_path: Path) -> None:
    template = CHAT_TEMPLATE.replace(
        "message['content'] +",
        "message['content'] + (message.tool_calls | tojson if message.tool_calls else '') +",
    )
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    row = {"messages": [*turns("q"), call, {"role": "tool", "content": "3"}, *turns("", "a")[1:]]}
    found = learned(dataset(tmp_path, [row], template=template))
    assert found == ['[{"name": "f"}]<|im_end|>', "a<|im_end|>"]


# ------------------------------------------------------------------------------------------- question / answer


NESTED = ["prompt_key=extra_info", "prompt_dict_keys=[question]", "response_key=extra_info"]


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        ({"prompt": "q", "response": "a"}, ["prompt_key=prompt", "response_key=response"]),
        ({"extra_info": {"question": "q", "answer": "a"}}, [*NESTED, "response_dict_keys=[answer]"]),
    ],
)
def test_question_and_answer(tmp_path: Path, row: dict[str, Any], keys: list[str]) -> None:
    data = dataset(tmp_path, [row], *(f"data.{key}" for key in keys))
    assert learned(data) == ["a<|im_end|>"]
    text = data.tokenizer.decode(data[0].ids)
    assert text.startswith("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na")


def test_question_and_answer_without_template(tmp_path: Path) -> None:
    keys = ("data.prompt_key=p", "data.response_key=r")
    data = dataset(tmp_path, [{"p": "1+1=", "r": "2"}], *keys, template=None)
    assert learned(data) == ["2<|im_end|>"] and data.tokenizer.decode(data[0].ids) == "1+1=2<|im_end|>"
    data = dataset(tmp_path, [{"p": "1+1=", "r": "2"}], *keys, template=None, begin=True)
    assert data[0].ids.tolist() == data.tokenizer("1+1=2<|im_end|>")["input_ids"], "as prompts begin"
    assert learned(data) == ["2<|im_end|>"] and data.lengths[0] == 7


@pytest.mark.parametrize(
    ("row", "keys", "words"),
    [
        ({"prompt": "q", "response": "a"}, [], ["'messages'", "key=prompt data.response_key=response"]),
        ({"mesages": []}, [], ["nearest: mesages "]),
        ({"extra_info": {"a": 1}}, [], ["data.prompt_dict_keys=[question]"]),
        ({"prompt": "q", "response": "a"}, ["data.prompt_key=prompt"], ["data.response_key"]),
        (
            {"p": "q", "Response": "a"},
            ["data.prompt_key=p", "data.response_key=response"],
            ["nearest: Response "],
        ),
    ],
)
def test_absent_columns(tmp_path: Path, row: dict[str, Any], keys: list[str], words: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        dataset(tmp_path, [row], *keys)
    for word in words:
        assert word in str(caught.value)


# ------------------------------------------------------------------------------------------ lengths, bad rows

ROWS = [{"messages": turns("q" * 30, "a" * size)} for size in (3, 40, 5)]
EMPTY = "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
FIXED = len(tiny_tokenizer()(EMPTY)["input_ids"]) + 30


def test_too_long_is_refused_with_the_ways_out(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        dataset(tmp_path, ROWS, f"data.max_length={FIXED + 10}")
    ways = (f"data.max_length={FIXED + 40}", "data.truncation=left|right")
    for word in ("1 of 3 rows", f"row 1: {FIXED + 40}", *ways):
        assert word in str(caught.value)


def test_cutting(tmp_path: Path) -> None:
    limit = f"data.max_length={FIXED + 10}"
    left = dataset(tmp_path, ROWS, limit, "data.truncation=left")
    right = dataset(tmp_path, ROWS, limit, "data.truncation=right")
    assert learned(left, 1) == ["a" * 40 + "<|im_end|>"] and learned(right, 1) == ["a" * 12]
    assert len(left[1].ids) == len(right[1].ids) == FIXED + 10
    assert any("1 rows are cut" in s for s in left.describe())
    with pytest.raises(DataError, match="no usable row") as caught:
        dataset(tmp_path, ROWS, "data.max_length=20", "data.truncation=right", "data.max_bad_row_ratio=1")
    assert [r["problem"] for r in caught.value.records] == ["no trained token"] * 3


def called(calls: Any, role: str = "assistant") -> list[dict[str, Any]]:
    return [*turns("q"), {"role": role, "content": "a", "tool_calls": calls}, *turns("q", "a")[1:]]


UNUSABLE_CALLS: list[Any] = [
    *(
        "f()",
        3,
        {"name": "f"},
        ["f"],
        [[]],
        [{"function": "f"}],
        [{"id": "1"}],
        [{"name": ""}],
        [{"name": 3}],
    ),
    *([{"function": {"name": "f", "arguments": text}}] for text in ("x=1", "[1]", [1], 3)),
]


@pytest.mark.parametrize("form", [dict, json.dumps])
def test_usable_tool_calls(tmp_path: Path, form: Any) -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": form({"x": 1})}}]
    rows = [{"messages": called(calls)}, {"messages": called([])}]
    assert len(dataset(tmp_path, rows)) == 2


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": turns("q")}, "no assistant turn"),
        ({"messages": []}, "prompt empty"),
        ({"messages": "text"}, "prompt is not messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "unknown role"),
        ({"messages": turns("q", "a"), "images": ["x"]}, "media"),
        *(({"messages": turns("q", "a"), "tools": t}, "wrong column type") for t in ("{", "[1]", [{"type": "x"}])),
        *(({"messages": called(calls)}, "unusable tool call") for calls in UNUSABLE_CALLS),
        ({"messages": called([{"name": "f"}], role="user")}, "unusable tool call"),
    ],
)
def test_bad_rows(tmp_path: Path, row: dict[str, Any], problem: str) -> None:
    data = dataset(tmp_path, [{"messages": turns("q", "ok")}, row])
    assert [(r["row"], r["problem"]) for r in data.bad_rows] == [(1, problem)] and len(data) == 1
    with pytest.raises(DataError, match=r"1 of 2 rows.*50|1 of 2 rows"):
        dataset(tmp_path, [{"messages": turns("q", "ok")}, row], "data.max_bad_row_ratio=0.01")


def test_rows_encoded_again_equal_rows_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = dataset(tmp_path, ROWS, samples=2)
    monkeypatch.setattr("verl.data.sft.KEPT_TOKENS", 1)
    again = dataset(tmp_path, ROWS, samples=2)
    assert len(kept) == len(again) == 2
    for i in range(2):
        assert (kept[i].ids == again[i].ids).all() and (kept[i].mask == again[i].mask).all()
