"""Tokenizers and templates: what is loaded, what is rendered, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_tokenizer
from verl.data.files import DataError
from verl.data.rows import BadRow, ChatRenderer, as_messages
from verl.data.tokenizer import load_tokenizer


def test_load_with_own_template_from_text_and_file(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path / "m")
    (tmp_path / "t.jinja").write_text("{{ messages[0]['content'] }}!")
    for template in ("{{ messages[0]['content'] }}!", str(tmp_path / "t.jinja")):
        tokenizer = load_tokenizer(tmp_path / "m", chat_template=template)
        assert ChatRenderer(tokenizer).text([{"role": "user", "content": "a"}]) == "a!"
    assert load_tokenizer("ignored", tokenizer_path=tmp_path / "m").eos_token == "<|im_end|>"
    with pytest.raises(DataError, match="custom_chat_template"):
        load_tokenizer(tmp_path / "m", chat_template=str(tmp_path / "none.jinja"))


def test_padding_token_is_the_end_token_where_none_is(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings.pop("pad_token")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_tokenizer(tmp_path).pad_token_id == 258


def test_what_cannot_be_loaded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for path, words in [
        (tmp_path / "none", "no such model directory"),
        (tmp_path / "empty", "the directory holds nothing"),
        (tmp_path / "file", "this is a file"),
    ]:
        with pytest.raises(DataError, match=words):
            load_tokenizer(path)


def test_rendering_adds_no_special_tokens_of_its_own() -> None:
    tokenizer: Any = tiny_tokenizer()
    renderer = ChatRenderer(tokenizer, {})
    text = renderer.text(as_messages("a"))
    assert tokenizer.decode(renderer.ids(text)) == text
    both = [ids.tolist() for ids in renderer.batch_ids([text, "b"])]
    assert both == [renderer.ids(text).tolist(), [ord("b") - 33]] and renderer.batch_ids([]) == []
    off = ChatRenderer(tokenizer, {"enable_thinking": False}).text(as_messages("a"))
    assert off == text + "<think>\n\n</think>\n\n"


def test_raw_text_gets_the_begin_token_that_the_tokenizer_would_put() -> None:
    tokenizer: Any = tiny_tokenizer(template=None)
    assert ChatRenderer(tokenizer).ids("ab").tolist() == tokenizer("ab")["input_ids"]
    tokenizer = tiny_tokenizer(template=None, begin=True)
    assert ChatRenderer(tokenizer).ids("ab")[0] == 257 and len(ChatRenderer(tokenizer).ids("ab")) == 3


def test_system_keys_and_failing_templates() -> None:
    tokenizer: Any = tiny_tokenizer(template="{{ raise_exception('no') }}")
    with pytest.raises(DataError, match="tokenize is set by the system"):
        ChatRenderer(tokenizer, {"tokenize": True})
    with pytest.raises(BadRow, match="no"):
        ChatRenderer(tokenizer).text(as_messages("a"))


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        ('[{"role": "user", "content": "a"}]', "messages stored as text"),
        ("[{'content': 'a', 'role': 'user'}]", "messages stored as text"),
        ([{"role": "user", "content": " "}], "prompt empty"),
        ([{"role": "user", "content": []}], "prompt empty"),
    ],
)
def test_what_is_no_prompt(cell: Any, problem: str) -> None:
    with pytest.raises(BadRow, match=problem):
        as_messages(cell)
    assert as_messages('[{"a": 1}] is JSON: why?')[0]["role"] == "user"


def test_messages_keep_other_keys_and_drop_nulls() -> None:
    calls = [{"function": {"name": "f", "arguments": {"city": "Paris", "expr": None}}}]
    call = {"role": "assistant", "content": None, "tool_calls": calls, "name": None}
    calls = [{"function": {"name": "f", "arguments": {"city": "Paris"}}}]
    assert as_messages([call]) == [{"role": "assistant", "content": "", "tool_calls": calls}]
