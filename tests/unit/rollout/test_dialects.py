"""Dialects over one session: translation there and back, streams, and the native engine's tokens as they are
sampled."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.scripted_record import written
from tests.tiny import SPECIAL, tiny_model, tiny_tokenizer
from tests.unit.rollout.test_http_sessions import END, HI, Client, serve
from tests.unit.rollout.test_session import _QWEN, CALL, TOOLS, session_of
from verl.engine.rollout.base import SamplingParams
from verl.engine.rollout.grammars import Grammars
from verl.rollout.dialects.demands import grammar_of
from verl.rollout.turn_text import Thinking, TurnText, joined

THOUGHT = "<think>\nOne and two.\n</think>\n\nSo:"
ANTHROPIC_TOOLS = [{"name": "add", "input_schema": TOOLS[0]["function"]["parameters"]}]
RESPONSES_TOOLS = [{"type": "function", **TOOLS[0]["function"]}]


def ask(client: Client, path: str, **body: Any) -> Any:
    status, answer = client.ask(path, body)
    assert status == 200, answer
    return answer


def anthropic(client: Client, messages: list, stream: bool) -> list[dict]:
    """The content blocks of a turn; of a stream as its events build them."""
    body = {"model": "m", "max_tokens": 100, "messages": messages, "tools": ANTHROPIC_TOOLS, "stream": stream}
    answer = ask(client, "/messages", **body)
    if not stream:
        return answer["content"]
    blocks: list[dict] = []
    for event in answer:
        match event:
            case {"content_block": block}:
                blocks.append(dict(block))
            case {"delta": {"type": "input_json_delta", "partial_json": text}}:
                blocks[-1]["input"] = json.loads(text)
            case {"delta": {"type": _, **delta}, "index": index}:
                assert index == len(blocks) - 1
                ((name, text),) = delta.items()
                blocks[-1][name] += text
    kinds = [event["type"] for event in answer]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(blocks)
    return blocks


@pytest.mark.parametrize("stream", [False, True])
def test_messages_there_and_back(stream: bool) -> None:
    def check(client: Client) -> None:
        thought, text, use = blocks = anthropic(client, HI, stream)
        assert (thought["type"], thought["thinking"]) == ("thinking", "\nOne and two.\n")
        assert (text["text"].strip(), use["name"], use["input"]) == ("So:", "add", {"a": 1, "b": 2})
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "3"}]}
        following = [{"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
        counted = ask(client, "/messages/count_tokens", messages=HI + following, tools=ANTHROPIC_TOOLS)
        (last,) = anthropic(client, HI + following, stream)
        assert last == {"type": "text", "text": "3."}
        (segment,) = written(client.session)
        assert counted["input_tokens"] + len("3.") + 1 == len(segment.context) + len(segment.tokens)
        answer = ask(client, "/messages", max_tokens=9, system="Be brief.", messages=HI, stop_sequences=["STOP"])
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "STOP")

    serve(check, THOUGHT + CALL + END, "3." + END, "Fine STOP")


def items_of(client: Client, stream: bool, **body: Any) -> dict:
    """A response; of a stream the one that ends it, whose deltas are checked."""
    answer = ask(client, "/responses", tools=RESPONSES_TOOLS, stream=stream, **body)
    if not stream:
        return answer
    assert [event["sequence_number"] for event in answer] == list(range(len(answer)))
    for item, part in ((i, p) for i in answer[-1]["response"]["output"] for p in i.get("content") or ()):
        deltas = [e["delta"] for e in answer if e.get("item_id") == item["id"] and e["type"].endswith(".delta")]
        assert "".join(deltas) == part["text"] and len(deltas) > 1
    return answer[-1]["response"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stored", [False, True])
def test_responses_by_items_and_by_their_state(stored: bool, stream: bool) -> None:
    def check(client: Client) -> None:
        first = items_of(client, stream, instructions="Add.", input="1 and 2?")
        reasoning, message, call = first["output"]
        assert reasoning["content"][0]["text"] == "\nOne and two.\n" and message["content"][0]["text"].strip() == "So:"
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}
        before = [] if stored else [{"role": "user", "content": "1 and 2?"}, *first["output"]]
        how = {"previous_response_id": first["id"]} if stored else {}
        second = items_of(client, stream, instructions="Add.", input=[*before, output], **how)
        assert second["output"][0]["content"][0]["text"] == "3." and len(written(client.session)) == 1
        assert client.ask(f"/responses/{second['id']}")[1]["output"] == second["output"]
        assert client.ask("/responses/resp_0")[0] == 404

    serve(check, THOUGHT + CALL + END, "3." + END)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_cannot_be_read_is_text(stream: bool) -> None:
    broken = '<tool_call>{"name": "add", "arguments": {"a": 1,}}</tool_call>'

    def check(client: Client) -> None:
        answer = client.chat(tools=TOOLS, stream=stream)
        choices = [c for part in answer for c in part["choices"]] if stream else answer["choices"]
        messages = [choice["delta" if stream else "message"] for choice in choices]
        content = "".join(message.get("content") or "" for message in messages)
        assert content == "Well: " + broken and not any(message.get("tool_calls") for message in messages)
        assert choices[-1]["finish_reason"] == "stop"
        turn = {"role": "assistant", "content": content}
        client.chat([*HI, turn, {"role": "user", "content": "That is no JSON."}], tools=TOOLS)
        assert len(written(client.session)) == 1
        assert client.session.counts == {"calls": 1, "invalid": 1}

    serve(check, f"Well: {broken}{END}", "Oh." + END)


def test_other_tools_begin_another_segment() -> None:
    other = [{"type": "function", "function": {"name": "other", "parameters": {}}}]

    def check(client: Client) -> None:
        messages = list(HI)
        for tools in (TOOLS, TOOLS, other, []):
            message = client.chat(messages, tools=tools)["choices"][0]["message"]
            messages += [message, {"role": "user", "content": "And?"}]
        segments = written(client.session)
        decode = client.session.setup.tokenizer.decode
        assert [part in decode(s.context) for s in segments for part in ("add", "other")] == [
            True, False, False, True, False, False
        ]  # fmt: skip

    serve(check, *["Fine." + END] * 4)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"tools": [{"name": "x"}]}, "tools must be like"),
        ({"functions": [{"name": "x"}]}, "give tools"),
        ({"max_tokens": -5}, "a number above 0, not -5"),
        ({"messages": [{"content": "Hi"}]}, "each with a role"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "a part of type input_audio"),
    ],
)
def test_requests_that_cannot_be_sampled_are_refused_before(body: dict, problem: str) -> None:
    def check(client: Client) -> None:
        status, answer = client.ask("/chat/completions", {"messages": HI, **body})
        assert status == 400 and problem in answer["error"]["message"] and not written(client.session)

    serve(check, "Fine." + END)


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices_are_branches(stream: bool) -> None:
    def check(client: Client) -> None:
        answer = client.chat(n=3, stream=stream)
        texts = ["", "", ""]
        for choice in [c for part in answer for c in part["choices"]] if stream else answer["choices"]:
            texts[choice["index"]] += choice["delta" if stream else "message"].get("content") or ""
        assert texts == ["One", "Two", "Three"]
        client.chat([*HI, {"role": "assistant", "content": "Two"}, {"role": "user", "content": "Go on."}])

    session = serve(check, *(text + END for text in ("One", "Two", "Three", "Well.")))
    tails = [session.setup.tokenizer.decode(segment.tokens[segment.mask]) for segment in written(session)]
    assert tails == ["One" + END, f"Two{END}Well.{END}", "Three" + END]


FUNCTIONS = [
    {"name": "pick", "parameters": {"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"],
                                    "additionalProperties": False}},
    {"name": "stop", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
]  # fmt: skip
PICKED = {
    "type": "object",
    "properties": {"way": {"enum": ["a", "b"]}},
    "required": ["way"],
    "additionalProperties": False,
}
PICKED["x-guidance"] = {"whitespace_flexible": False, "key_separator": ": "}  # random models would write spaces


def demanding(client: Client, path: str, **body: Any) -> tuple[list[tuple[str, Any]], str]:
    """Calls, each (name, arguments), and text of a turn of functions that must have a form."""
    wrapped: list = [{"type": "function", "function": f} for f in FUNCTIONS]
    if path == "/responses":
        wrapped, body["input"] = [{"type": "function", **f} for f in FUNCTIONS], "Hi"
    if path == "/messages":
        wrapped = [{"name": f["name"], "input_schema": f["parameters"]} for f in FUNCTIONS]
    answer = ask(client, path, messages=HI, tools=wrapped, max_tokens=400, max_completion_tokens=400, **body)
    if path == "/responses":
        calls = [(i["name"], json.loads(i["arguments"])) for i in answer["output"] if i["type"] == "function_call"]
        return calls, "".join(i["content"][0]["text"] for i in answer["output"] if i["type"] == "message")
    if path == "/messages":
        calls = [(block["name"], block["input"]) for block in answer["content"] if block["type"] == "tool_use"]
        return calls, "".join(block["text"] for block in answer["content"] if block["type"] == "text")
    message = answer["choices"][0]["message"]
    made = [call["function"] for call in message.get("tool_calls") or ()]
    return [(f["name"], json.loads(f["arguments"])) for f in made], message["content"]


def test_demanded_calls_and_answers(tmp_path: Any) -> None:
    """By a model of random weights: what it writes has the demanded form, and its log-probs are of what that left."""
    pytest.importorskip("llguidance")
    import torch
    from transformers import AutoModelForCausalLM

    from verl.engine.rollout.native.engine import NativeEngine
    from verl.models.sampling_mask import LOWEST, SamplingMask

    module = AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path))
    tokenizer = tiny_tokenizer(template=_QWEN.replace("%THINK%", ""), special=SPECIAL[:3])  # it does not think
    engine, numbers = (
        NativeEngine(module, eos_token_ids=[258], max_model_len=2000, tokenizer=tokenizer),
        itertools.count(),
    )

    async def send(ids: Any, params: Any, shown: Any) -> Any:
        number = next(numbers)
        return await engine.generate(ids, replace(params, seed=number), request_id=str(number))

    def check(client: Client) -> None:
        chat, named = "/chat/completions", {"name": "pick"}
        ((name, arguments),), _ = demanding(client, chat, tool_choice={"type": "function", "function": named})
        assert name == "pick" and arguments["n"] in (1, 22)
        calls, text = demanding(client, "/responses", tool_choice="required")
        assert calls and {name for name, _ in calls} <= {"pick", "stop"} and not text.strip()
        ((name, arguments),), _ = demanding(client, "/messages", tool_choice={"type": "tool", **named})
        assert name == "pick" and arguments["n"] in (1, 22)
        schema = {"type": "json_schema", "json_schema": {"name": "p", "schema": PICKED}}
        answer = ask(client, chat, messages=HI, response_format=schema, max_tokens=400)
        assert json.loads(answer["choices"][0]["message"]["content"]) in ({"way": "a"}, {"way": "b"})
        form = {"format": {"type": "json_schema", "schema": PICKED}}
        calls, text = demanding(client, "/responses", text=form)
        assert calls or json.loads(text) in ({"way": "a"}, {"way": "b"})
        refused = client.ask(chat, {"messages": HI, "tools": TOOLS, "tool_choice": {"function": {"name": "none"}}})
        assert refused[0] == 400 and "none of the tools" in refused[1]["error"]["message"]
        unfit = {"type": "json_schema", "json_schema": {"schema": {"type": "no such"}}}
        assert client.ask(chat, {"messages": HI, "response_format": unfit})[0] == 400

    session = serve(check, send=send, tokenizer=tokenizer, engine="native")
    for segment in session.segments():
        ids, mask, log_probs = segment.response()
        whole, start = torch.from_numpy(segment.ids()), len(segment.context)
        with torch.no_grad():
            logits = module(whole[None]).logits[0, start - 1 : -1].float()
        sets = SamplingMask(list(segment.sampling_mask()), "cpu")
        assert not (sets.bar(logits, slice(0, len(ids))) == LOWEST).all(1).any()
        expected = logits.log_softmax(-1).gather(1, torch.from_numpy(ids)[:, None])[:, 0].numpy()
        assert mask.all() and np.abs(expected - log_probs).max() < 1e-4


@pytest.mark.parametrize("opened", [False, True])
def test_a_model_may_think_before_what_is_demanded(opened: bool) -> None:
    """The tokens of these texts one by one, of a tokenizer that has tokens for the marks, as Qwen3's has."""
    pytest.importorskip("llguidance")
    tokenizer = tiny_tokenizer(template=_QWEN.replace("%THINK%", ""))
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    session = session_of(tokenizer, None, engine="native")
    vars(session.setup.boundaries)["opens_thinking"] = opened  # what the generation prompt ends with
    call = '<tool_call>\n{"name": "pick", "arguments": {"n": 22}}\n</tool_call>'
    tools = [{"type": "function", "function": function} for function in FUNCTIONS]
    thought = "1 < 2\n</think>\n\n" if opened else "<think>\n1 < 2\n</think>\n\n"
    form = {"type": "json_schema", "schema": PICKED}
    cases = [
        (True, "required", None, thought + call + END),
        (True, "required", None, thought + call + "\n" + call + END),
        (not opened, "required", None, call + END),
        (opened, "required", None, "Well.\n" + thought + call + END),
        (False, "required", None, thought + "Well." + END),
        (False, {"name": "stop"}, None, thought + call + END),
        (True, "auto", form, thought + call + END),
        (True, "auto", form, thought + '{"way": "b"}' + END),
        (False, "auto", form, thought + '{"way": "c"}' + END),
        (False, "auto", form, thought + '{"way": "b"' + END),
    ]
    grammars = Grammars(tokenizer)
    for fits, choice, demanded, text in cases:
        progress, taken = grammars.begin(grammar_of(session, choice, demanded, tools)), []
        for token in tokenizer(text)["input_ids"]:
            taken.append(bool(progress.allowed(len(tokenizer))[token]))
            if not taken[-1]:
                break
            progress.take(token)
        assert all(taken) == fits, text
    session.setup.tool_format = "glm"
    with pytest.raises(ValueError, match="in the format glm"):
        grammar_of(session, {"name": "pick"}, None, tools)
    session.setup.engine = "sglang"
    with pytest.raises(ValueError, match=r"this run \(sglang\) does not"):
        grammar_of(session, "auto", form, None)


def test_models_and_tokens() -> None:
    def check(client: Client) -> None:
        assert client.ask("/models/policy")[1]["id"] == "policy" and client.ask("/models/gpt")[0] == 404
        root = client.url.path.removesuffix("/v1")
        told = client.ask("/tokenize", {"messages": HI}, base=root)[1]
        assert told["count"] == client.chat()["usage"]["prompt_tokens"] == len(told["tokens"])
        text = client.ask("/detokenize", {"tokens": told["tokens"]}, base=root)[1]["prompt"]
        assert text.endswith("<|im_start|>assistant\n")

    serve(check, "Yes." + END)


@pytest.mark.parametrize(
    ("text", "opened", "pieces"),
    [
        ("<think>a</think>b", False, {"thinking": "a", "text": "b"}),
        ("a</think>b", True, {"thinking": "a", "text": "b"}),
        ("<think>cut", False, {"thinking": "cut"}),
        ("<thin", False, {"text": "<thin"}),
        ("1 < 2</think>", False, {"text": "1 < 2</think>"}),
        ("", False, {}),
    ],
)
def test_thinking_apart_from_the_answer(text: str, opened: bool, pieces: dict[str, str]) -> None:
    for size in (1, 3, 99):
        split, said = Thinking(open=opened), dict[str, str]()
        parts = [text[i : i + size] for i in range(0, len(text), size)]
        for kind, piece in [p for part in parts for p in split.feed(part)] + split.feed("", last=True):
            said[kind] = said.get(kind, "") + piece
        assert said == pieces
        thought = joined(said["thinking"], split.form) if "thinking" in said else ""
        assert thought + said.get("text", "") == text


@pytest.mark.parametrize(
    ("text", "tools", "stop", "content", "least"),
    [
        ("Añ b <tool_call>{}</tool_call>", True, (), "Añ b", 3),
        ("a <tool_ b", True, (), "a <tool_ b", 3),
        ("ab STOP", False, ("STOP",), "ab ", 2),
        ("code```", False, ("```", "x`"), "code", 2),
        ("ab\n\n", True, ("\n\n",), "ab", 2),
        ("  é\n", False, (), "  é\n", 3),
    ],
)
def test_pieces_of_a_turn_are_its_content(text: str, tools: bool, stop: tuple, content: str, least: int) -> None:
    tokenizer, said = tiny_tokenizer(), []
    turn = TurnText(tokenizer, "hermes" if tools else "", stop, said.append)
    for token in tokenizer(text + END)["input_ids"]:
        turn.add([token])
    turn.end(content)
    assert "".join(said) == content and len(said) >= least


def test_the_native_engine_streams_what_it_samples(tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM

    from verl.engine.rollout.native.engine import NativeEngine

    module = AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path))
    engine = NativeEngine(module, eos_token_ids=[], max_model_len=32, max_num_seqs=2)

    async def go() -> None:
        parts: list[list[int]] = [[], []]
        asked = [
            engine.generate(np.arange(3, 8), SamplingParams(8, seed=i), request_id=str(i), on_tokens=parts[i].extend)
            for i in range(2)
        ]
        running = [asyncio.ensure_future(one) for one in asked]
        while len(parts[0]) < 3:
            await asyncio.sleep(0)
        assert not running[0].done()
        engine.weights_updated(1)  # what is under way is computed again, and said once
        for done, part in zip(await asyncio.gather(*running), parts, strict=True):
            assert done.token_ids.tolist() == part and len(part) == 8

    asyncio.run(go())
