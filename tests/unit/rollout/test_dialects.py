"""Dialects over one session: translation there and back, streams, and the native engine's tokens as they are sampled."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from tests.scripted_record import written
from tests.tiny import tiny_model, tiny_tokenizer
from tests.unit.rollout.test_http_sessions import END, HI, Client, serve
from tests.unit.rollout.test_session import CALL, TOOLS
from verl.engine.rollout.base import SamplingParams
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
