"""What a session records, and the boundaries between turns: token for token those of a full rendering, for each family."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer
from verl.engine.rollout.base import Completion, SamplingParams
from verl.rollout.loop_runner import LoopRunner
from verl.rollout.session import OutOfTokens, Session

TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {
        "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}},
]  # fmt: skip
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'

# What templates of these families do, reduced to what is between turns.
_QWEN = (
    "{%- if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}%THINK%{{ m.content }}"
    "{%- for call in m.tool_calls or [] %}{{ '\n' if m.content or not loop.first else '' }}"
    "{{ '<tool_call>\n{\"name\": \"' + call.function.name + '\", \"arguments\": ' + call.function.arguments | tojson + '}\n</tool_call>' }}"
    "{%- endfor %}{{ '<|im_end|>\n' }}"
    "{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}"
    "{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_LAST_THINKS = "{% if loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
_LLAMA = (
    "{{ '<|bos|>' }}{%- for m in messages %}"
    "{%- if m.tool_calls %}{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}"
    "{{ '<|head|>assistant<|/head|>\n\n{\"name\": \"' + m.tool_calls[0].function.name + '\", \"parameters\": ' + m.tool_calls[0].function.arguments | tojson + '}<|eot|>' }}"
    "{%- else %}{{ '<|head|>' + ('ipython' if m.role == 'tool' else m.role) + '<|/head|>\n\n' + m.content | trim + '<|eot|>' }}{% endif %}"
    "{%- endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
_GEMMA = (
    "{%- for m in messages %}{{ '<turn>' + ('model' if m.role == 'assistant' else 'user') + '\n' + m.content | trim + '</turn>\n' }}"
    "{%- endfor %}{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
)
_GLM = (
    "{{ '[gMASK]' }}{%- for m in messages %}"
    "{%- if m.role == 'user' %}{{ '<|user|>\n' + m.content }}"
    "{%- elif m.role == 'assistant' %}{{ '<|assistant|>\n' + m.content }}"
    "{%- for call in m.tool_calls or [] %}{{ '\n<tool_call>' + call.function.name }}"
    "{%- for k, v in call.function.arguments.items() %}{{ '<arg_key>' + k + '</arg_key><arg_value>' + v | string + '</arg_value>' }}{% endfor %}"
    "{{ '</tool_call>' }}{% endfor %}"
    "{%- else %}{{ '<|observation|>\n<tool_response>\n' + m.content + '\n</tool_response>' }}{% endif %}"
    "{%- endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
_DEEPSEEK = (
    "{%- for m in messages %}{%- if m.role == 'user' %}{{ '<|U|>' + m.content }}"
    "{%- elif m.role == 'assistant' %}{{ '<|A|>' + m.content }}"
    "{%- for call in m.tool_calls or [] %}{{ '<|call|>function<|sep|>' + call.function.name + '\n```json\n' + call.function.arguments + '\n```<|/call|>' }}{% endfor %}"
    "{{ '<|end|>' }}{%- else %}{{ '<|out|>' + m.content + '<|/out|>' }}{% endif %}"
    "{%- endfor %}{% if add_generation_prompt %}{{ '<|A|>' }}{% endif %}"
)
# name → template, end of a turn, its special tokens, how calls are written, a turn that calls
FAMILIES: dict[str, tuple[str, str, tuple[str, ...], str, str]] = {
    "chatml": (CHAT_TEMPLATE, "<|im_end|>", (), "hermes", ""),
    "qwen2.5": (_QWEN.replace("%THINK%", ""), "<|im_end|>", (), "hermes", CALL),
    "qwen3": (_QWEN.replace("%THINK%", _LAST_THINKS), "<|im_end|>", (), "hermes", CALL),
    "llama3": (
        _LLAMA, "<|eot|>", ("<|bos|>", "<|head|>", "<|/head|>"), "llama3_json",
        '{"name": "add", "parameters": {"a": 1, "b": 2}}',
    ),
    "gemma": (_GEMMA, "</turn>", ("<turn>",), "gemma4", ""),
    "glm": (
        _GLM, "<|user|>", ("[gMASK]", "<|assistant|>", "<|observation|>"), "glm",
        "\n<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key><arg_value>2</arg_value></tool_call>",
    ),
    "deepseek": (_DEEPSEEK, "<|end|>", ("<|U|>", "<|A|>", "<|out|>", "<|/out|>"), "deepseek", ""),
}  # fmt: skip


def tokenizer_of(family: str) -> Any:
    template, end, special, _, _ = FAMILIES[family]
    tokenizer = tiny_tokenizer(template=template)
    tokenizer.add_special_tokens({"additional_special_tokens": [*special, end]})
    if family != "glm":  # whose turns end with the next one's first token, and not with its end token
        tokenizer.eos_token = end
    return tokenizer


def script(tokenizer: Any, *texts: str, reason: str = "stop"):
    """A sampler that says these texts, and the prompts that it saw."""
    seen: list[np.ndarray] = []

    async def send(ids: Any, sampling: SamplingParams, media: Any) -> Completion:
        said = np.array(tokenizer(texts[len(seen)], add_special_tokens=False)["input_ids"], np.int64)
        seen.append(np.asarray(ids))
        return Completion(said, np.full(len(said), -0.5, np.float32), reason)

    return send, seen


def session_of(tokenizer: Any, send: Any, budget: int = 4000, **how: Any) -> Session:
    sampling = SamplingParams(max_tokens=budget)
    runner = LoopRunner(tokenizer)
    vars(runner).update(how)
    return Session(send, sampling, runner)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_of_a_dialogue_are_those_of_its_full_rendering(family: str) -> None:
    tokenizer = tokenizer_of(family)
    _, end, _, tool_format, call = FAMILIES[family]
    tools = TOOLS if call else None
    ends = [end.replace("user", "observation") if call else end, end, end]
    send, seen = script(
        tokenizer, *(text + e for text, e in zip([call or "Hm.", "It is 3.", "Bye."], ends, strict=True))
    )
    session = session_of(tokenizer, send, tool_format=tool_format)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "1+2?"}]

    async def talk() -> None:
        for number in range(3):
            reply = await session.chat(messages, tools)
            messages.append(reply.message)
            if number == 0 and call:
                (asked,) = reply.calls
                assert (asked.name, asked.arguments, asked.error) == ("add", {"a": 1, "b": 2}, "")
                messages.append({"role": "tool", "content": "3", "tool_call_id": asked.id, "name": "add"})
            else:
                messages.append({"role": "user", "content": "And then?"})

    asyncio.run(talk())
    (segment,) = session.segments()
    whole = np.concatenate([segment.context, segment.tokens])
    text = tokenizer.apply_chat_template(messages, tokenize=False, tools=tools, add_generation_prompt=True)
    expected = np.array(tokenizer(text, add_special_tokens=False)["input_ids"])
    if family == "glm":
        expected = expected[: len(whole)]
    assert np.array_equal(whole, expected[: len(whole)])
    assert tokenizer.decode(segment.tokens[segment.mask]).count(end) in (2, 3)
    assert len(seen) == 3 and all(np.array_equal(prompt, whole[: len(prompt)]) for prompt in seen)
    assert (segment.log_probs != 0).tolist() == segment.mask.tolist()


def test_a_turn_that_was_cut_is_closed_before_the_next() -> None:
    tokenizer = tiny_tokenizer()
    send, seen = script(tokenizer, "I was say", "Yes.", reason="length")
    session = session_of(tokenizer, send)

    async def talk() -> None:
        reply = await session.chat([{"role": "user", "content": "Hi"}])
        await session.chat(
            [{"role": "user", "content": "Hi"}, reply.message, {"role": "user", "content": "Go on"}]
        )

    asyncio.run(talk())
    assert "I was say<|im_end|>\n<|im_start|>user\nGo on<|im_end|>" in tokenizer.decode(seen[1])
    assert len(session.segments()) == 1


@pytest.mark.parametrize("change", ["drops a turn", "other text", "a template that rewrites"])
def test_history_that_changes_opens_a_segment(change: str) -> None:
    template = CHAT_TEMPLATE
    if change == "a template that rewrites":  # every message says how many there are
        template = template.replace(
            "message['content'] +", "message['content'] + (messages | length) | string +"
        )
    tokenizer = tiny_tokenizer(template=template)
    send, _ = script(tokenizer, "One.<|im_end|>", "Two.<|im_end|>")
    session = session_of(tokenizer, send)

    async def talk() -> None:
        first = [{"role": "user", "content": "Hi"}]
        reply = await session.chat(first)
        said = reply.message | ({"content": "Uno."} if change == "other text" else {})
        history = [] if change == "drops a turn" else [*first, said]
        await session.chat([*history, {"role": "user", "content": "More"}])

    asyncio.run(talk())
    first, second = session.segments()
    assert (
        tokenizer.decode(first.tokens) == "One.<|im_end|>"
        and tokenizer.decode(second.tokens) == "Two.<|im_end|>"
    )
    assert first.mask.all() and second.mask.all()


@pytest.mark.parametrize(
    ("thinks", "as_inference", "segments"), [(True, True, 2), (True, False, 1), (False, True, 1)]
)
def test_thinking_that_the_template_drops(thinks: bool, as_inference: bool, segments: int) -> None:
    drops = "message['content'].split('</think>')[-1] if not loop.last else message['content']"
    tokenizer = tiny_tokenizer(template=CHAT_TEMPLATE.replace("message['content']", f"({drops})"))
    send, seen = script(tokenizer, "<think>Hm</think>" * thinks + "One.<|im_end|>", "Two.<|im_end|>")
    session = session_of(tokenizer, send, as_inference=as_inference)

    async def talk() -> None:
        first = [{"role": "user", "content": "Hi"}]
        reply = await session.chat(first)
        await session.chat([*first, reply.message, {"role": "user", "content": "More"}])

    asyncio.run(talk())
    assert len(session.segments()) == segments
    assert ("Hm" in tokenizer.decode(seen[1])) is (thinks and not as_inference)


@pytest.mark.parametrize(
    ("said", "content"),
    [
        ("<|channel|>analysis<|message|>Hm.<|end|><|channel|>final<|message|>north", "north"),
        ("<|channel|>commentary to=functions.go<|message|>{}<|call|>", ""),
        ("<|channel|>analysis<|message|>Hm.", ""),
        ("north", "north"),
    ],
)
def test_the_channels_of_gpt_oss_are_no_content_without_tools_either(said: str, content: str) -> None:
    tokenizer = tiny_tokenizer()
    send, _ = script(tokenizer, said + "<|im_end|>")
    session = session_of(tokenizer, send, tool_format="gpt-oss")
    reply = asyncio.run(session.chat([{"role": "user", "content": "Where?"}]))
    assert reply.message == {"role": "assistant", "content": content} and not reply.calls


def test_generate_records_what_goes_on_and_what_does_not() -> None:
    async def send(ids: Any, sampling: SamplingParams, media: Any) -> Completion:
        return Completion(np.array([len(ids), 9]), np.full(2, -1.0, np.float32), "stop")

    session = Session(send, SamplingParams(max_tokens=8), LoopRunner())

    async def go() -> None:
        await session.generate([1, 2])
        await session.generate(np.array([1, 2, 2, 9, 5]), {"max_new_tokens": 3, "logprobs": True})
        await session.generate([1, 2], {"temperature": 0.5})
        with pytest.raises(ValueError, match="warmth"):
            await session.generate([1], {"warmth": 1})

    asyncio.run(go())
    first, second = session.segments()
    assert first.tokens.tolist() == [2, 9, 5, 5, 9] and first.mask.tolist() == [True, True, False, True, True]
    assert second.context.tolist() == [1, 2] and second.tokens.tolist() == [2, 9]


def test_a_message_that_does_not_fit_ends_the_dialogue_before_it() -> None:
    tokenizer = tiny_tokenizer()
    send, seen = script(tokenizer, "Hm.<|im_end|>", "no")
    session = session_of(tokenizer, send, budget=40)

    async def talk() -> None:
        reply = await session.chat([{"role": "user", "content": "Hi"}])
        with pytest.raises(OutOfTokens):
            await session.chat(
                [{"role": "user", "content": "Hi"}, reply.message, {"role": "user", "content": "x" * 40}]
            )
        with pytest.raises(ValueError, match="temperature"):
            await session.chat([{"role": "user", "content": "Hi"}], temperature=0.1)

    asyncio.run(talk())
    assert len(seen) == 1 and session.segments()[0].mask.all()
