"""What a session records, and the boundaries between turns: token for token those of a full rendering, for each
family."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from tests.scripted_record import ScriptedRecord, written
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer
from verl.data.rows import BadRow
from verl.engine.rollout.base import Completion, SamplingParams
from verl.rollout.record import Place, Record
from verl.rollout.session import LoopSetup, OutOfTokens, Session
from verl.rollout.turn_boundaries import Boundaries

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
# Thinking of turns before the last question is dropped, in front of whose replies the generation prompt opens a new
# one.
_MINIMAX = (
    "{%- set last = namespace(user=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{{ ']~!b[]~b]system\nHelp.' + (tools | tojson if tools else '') + '[e~[\n' }}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}{{ ']~b]ai\n' }}"
    "{%- set thought, content = ('</think>' in m.content and m.content.split('</think>')[0]), m.content.split('</think>')[-1].strip('\n') %}"
    "{%- if thought and %KEPT% %}{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{% endif %}{{ content }}"
    "{%- if m.tool_calls %}{{ '\n<minimax:tool_call>\n' }}{% for call in m.tool_calls %}{{ '<invoke name=\"' + call.function.name + '\">\n' }}"
    "{%- for k, v in call.function.arguments | items %}{{ '<parameter name=\"' + k + '\">' + (v if v is string else v | tojson) + '</parameter>\n' }}{% endfor %}"
    "{{ '</invoke>\n' }}{% endfor %}{{ '</minimax:tool_call>' }}{% endif %}{{ '[e~[\n' }}"
    "{%- elif m.role == 'tool' %}{%- if messages[loop.index0 - 1].role != 'tool' %}{{ ']~b]tool' }}{% endif %}"
    "{{ '\n<response>' + m.content + '</response>' }}{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '[e~[\n' }}{% endif %}"
    "{%- else %}{{ ']~b]' + m.role + '\n' + m.content + '[e~[\n' }}{% endif %}"
    "{%- endfor %}{% if add_generation_prompt %}{{ ']~b]ai\n<think>\n' }}{% endif %}"
)
_KIMI = (
    "{%- if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' }}{% endif %}"
    "{%- for m in messages %}"
    "{%- if loop.first %}{{ '<|im_system|>system<|im_middle|>Help.<|im_end|>' }}{% endif %}"
    "{{ {'user': '<|im_user|>', 'assistant': '<|im_assistant|>'}.get(m.role, '<|im_system|>') + (m.name or m.role) + '<|im_middle|>' }}"
    "{%- if m.role == 'tool' %}{{ '## Return of ' + m.tool_call_id + '\n' }}{% endif %}"
    "{%- if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{{ part.text or '<|media_start|>image<|media_content|><|media_pad|><|media_end|>' }}{% endfor %}{% endif %}"
    "{%- if m.tool_calls %}{{ '<|tool_calls_section_begin|>' }}{% for call in m.tool_calls %}"
    "{{ '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' + (call.function.arguments if call.function.arguments is string else call.function.arguments | tojson) + '<|tool_call_end|>' }}"
    "{%- endfor %}{{ '<|tool_calls_section_end|>' }}{% endif %}{{ '<|im_end|>' }}"
    "{%- endfor %}{% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"
)
# The last turn of all ends as the model ends it, with <|return|>; once others follow it is written with <|end|>.
_HARMONY = (
    "{{ '<|start|>system<|message|>Help.<|end|>' + ('<|start|>developer<|message|>' + tools | tojson + '<|end|>' if tools else '') }}"
    "{%- set last = namespace(call=none) %}{%- for m in messages %}"
    "{%- if m.tool_calls %}{%- if m.content %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{%- set last.call = m.tool_calls[0].function.name %}"
    "{{ '<|start|>assistant to=functions.' + last.call + '<|channel|>commentary json<|message|>' + m.tool_calls[0].function.arguments | tojson + '<|call|>' }}"
    "{%- elif m.role == 'assistant' %}{%- set last.call = none %}"
    "{%- if '<|channel|>' in m.content %}{{ raise_exception('channels in content') }}{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last and not add_generation_prompt else '<|end|>') }}"
    "{%- elif m.role == 'tool' %}{%- if last.call is none %}{{ raise_exception('no call before') }}{% endif %}"
    "{{ '<|start|>functions.' + last.call + ' to=assistant<|channel|>commentary<|message|>' + m.content | tojson + '<|end|>' }}"
    "{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{%- endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
_SEED = (
    "{%- if tools %}{{ '<seed:bos>system\n' + tools | tojson + '<seed:eos>' }}{% endif %}"
    "{%- for m in messages %}{{ '<seed:bos>' + m.role }}"
    "{%- if m.tool_calls %}{%- if m.content | trim %}{{ '\n' + m.content | trim + '\n' }}{% endif %}"
    "{%- for call in m.tool_calls %}{{ '\n<seed:tool_call>\n<function=' + call.function.name + '>\n' }}"
    "{%- for k, v in call.function.arguments | items %}{{ '<parameter=' + k + '>' + v | string + '</parameter>\n' }}{% endfor %}"
    "{{ '</function>\n</seed:tool_call>' }}{% endfor %}{{ '<seed:eos>' }}"
    "{%- else %}{{ '\n' + m.content + '<seed:eos>' }}{% endif %}"
    "{%- endfor %}{% if add_generation_prompt %}{{ '<seed:bos>assistant\n' }}{% endif %}"
)


class Family(NamedTuple):
    """template; the token that ends a turn, and a turn with a call; other special tokens; format of calls; a turn that
    calls `add`, in front of which is what the generation prompt left to the model; what stands before its answers; how
    its template ends them once others follow; the tokenizer's end token; the template of a full rendering that drops
    nothing."""

    template: str
    end: str
    special: tuple[str, ...] = ()
    tool_format: str = "hermes"
    call: str = ""
    call_end: str = ""
    before: str = ""
    history_end: str = ""
    eos: str = ""
    full: str = ""


_SEED_CALL = "<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n<parameter=b>2</parameter>\n</function>\n</seed:tool_call>"
_MINIMAX_CALL = (
    'Add?\n</think>\n\n\n<minimax:tool_call>\n<invoke name="add">\n'
    '<parameter name="a">1</parameter>\n<parameter name="b">2</parameter>\n</invoke>\n</minimax:tool_call>'
)
_KIMI_CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    '{"a": 1, "b": 2}<|tool_call_end|><|tool_calls_section_end|>'
)
_KIMI_TOKENS = (
    *(f"<|im_{of}|>" for of in ("system", "user", "assistant", "middle")), "[EOS]", "<|media_start|>", "<|media_content|>", "<|media_pad|>",
    "<|media_end|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>",
)  # fmt: skip
FAMILIES = {
    "chatml": Family(CHAT_TEMPLATE, "<|im_end|>"),
    "qwen2.5": Family(_QWEN.replace("%THINK%", ""), "<|im_end|>", call=CALL),
    "qwen3": Family(_QWEN.replace("%THINK%", _LAST_THINKS), "<|im_end|>", call=CALL),
    "llama3": Family(
        _LLAMA, "<|eot|>", ("<|bos|>", "<|head|>", "<|/head|>"), "llama3_json",
        '{"name": "add", "parameters": {"a": 1, "b": 2}}',
    ),
    "gemma": Family(_GEMMA, "</turn>", ("<turn>", "<eos>"), "gemma4", eos="<eos>"),
    "glm": Family(  # whose turns end with the next one's first token, and not with its end token
        _GLM, "<|user|>", ("[gMASK]", "<|assistant|>", "<|observation|>"), "glm",
        "\n<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key><arg_value>2</arg_value></tool_call>",
        call_end="<|observation|>", eos="<|endoftext|>",
    ),
    "deepseek": Family(_DEEPSEEK, "<|end|>", ("<|U|>", "<|A|>", "<|out|>", "<|/out|>"), "deepseek"),
    "kimi": Family(_KIMI, "<|im_end|>", _KIMI_TOKENS, "kimi", _KIMI_CALL, eos="[EOS]"),
    "gpt-oss": Family(
        _HARMONY, "<|return|>", ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>"), "gpt-oss",
        ' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": 2}',
        call_end="<|call|>", before="<|channel|>final<|message|>", history_end="<|end|>",
    ),
    "minimax": Family(
        _MINIMAX.replace("%KEPT%", "loop.index0 > last.user"), "[e~[", ("]~!b[", "]~b]"), "minimax", _MINIMAX_CALL,
        before="Well.\n</think>\n\n", full=_MINIMAX.replace("%KEPT%", "true"),
    ),
    "seed": Family(_SEED, "<seed:eos>", ("<seed:bos>",), "seed", _SEED_CALL),
}  # fmt: skip


def tokenizer_of(name: str) -> Any:
    family = FAMILIES[name]
    tokenizer = tiny_tokenizer(template=family.template)
    tokenizer.add_special_tokens({"additional_special_tokens": [*family.special, family.end]})
    tokenizer.eos_token = family.eos or family.end
    return tokenizer


def script(tokenizer: Any, *texts: str, reason: str = "stop"):
    """A sampler that says these texts, and the prompts that it saw."""
    seen: list[np.ndarray] = []

    async def send(ids: Any, sampling: SamplingParams, media: Any) -> Completion:
        said = np.array(tokenizer(texts[len(seen)], add_special_tokens=False)["input_ids"], np.int64)
        seen.append(np.asarray(ids))
        await asyncio.sleep(0)
        return Completion(said, np.full(len(said), -0.5, np.float32), reason)

    return send, seen


def session_of(tokenizer: Any, send: Any, budget: int = 4000, **how: Any) -> Session:
    sampling = SamplingParams(max_tokens=budget)
    runner = LoopSetup(tokenizer)
    vars(runner).update(how)
    return Session(ScriptedRecord(send), sampling, runner)


def rendered(name: str, tokenizer: Any, messages: list[dict[str, Any]], tools: Any) -> str:
    """The whole dialogue as the family's template writes it, but for what the model writes its own way."""
    family = FAMILIES[name]
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, tools=tools, add_generation_prompt=True, chat_template=family.full or None
    )
    for message in messages if family.history_end else ():
        text = text.replace(
            f">{message['content']}{family.history_end}<|start|>user",
            f">{message['content']}{family.end}<|start|>user",
        )
    return text


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_of_a_dialogue_are_those_of_its_full_rendering(family: str) -> None:
    tokenizer = tokenizer_of(family)
    _, end, _, tool_format, call, call_end, before, *_ = FAMILIES[family]
    tools = TOOLS if call else None
    first = call + (call_end or end) if call else f"{before}Hm.{end}"
    send, seen = script(tokenizer, first, f"{before}It is 3.{end}", f"{before}Bye.{end}")
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
    (segment,) = written(session)
    whole = np.concatenate([segment.context, segment.tokens])
    expected = rendered(family, tokenizer, messages, tools)
    assert expected.startswith(tokenizer.decode(whole))
    assert np.array_equal(whole, tokenizer(expected, add_special_tokens=False)["input_ids"][: len(whole)])
    assert tokenizer.decode(segment.tokens[segment.mask]).count(end) in (2, 3)
    assert len(seen) == 3 and all(np.array_equal(prompt, whole[: len(prompt)]) for prompt in seen)
    assert (segment.log_probs != 0).tolist() == segment.mask.tolist()


@pytest.mark.parametrize("family", ["qwen2.5", "glm", "kimi", "minimax", "seed"])
def test_the_results_of_several_calls_of_a_turn_are_those_of_a_full_rendering(family: str) -> None:
    tokenizer = tokenizer_of(family)
    _, end, _, tool_format, _, call_end, before, *_ = FAMILIES[family]
    calls = [
        {"id": f"functions.add:{a}", "type": "function", "function": {"name": "add", "arguments": {"a": a}}}
        for a in (0, 1)
    ]
    question = [{"role": "user", "content": "1+2?"}]
    asked = [*question, {"role": "assistant", "content": "", "tool_calls": calls}]
    prompt, turn = (
        tokenizer.apply_chat_template(m, tokenize=False, tools=TOOLS, add_generation_prompt=m is question)
        for m in (question, asked)
    )
    said = turn.removeprefix(prompt) if turn.startswith(prompt) else before + turn.partition("]~b]ai\n")[2]
    send, _ = script(tokenizer, said.rstrip("\n") + call_end, f"{before}Done.{end}")
    session = session_of(tokenizer, send, tool_format=tool_format)

    async def talk() -> list[dict[str, Any]]:
        reply = await session.chat(question, TOOLS)
        answers = [
            {"role": "tool", "content": str(n), "tool_call_id": c.id, "name": "add"} for n, c in enumerate(reply.calls)
        ]
        assert [c.arguments for c in reply.calls] == [{"a": 0}, {"a": 1}]
        last = await session.chat([*question, reply.message, *answers], TOOLS)
        return [*question, reply.message, *answers, last.message, {"role": "user", "content": "And?"}]

    expected = rendered(family, tokenizer, asyncio.run(talk()), TOOLS)
    (segment,) = written(session)
    assert expected.startswith(tokenizer.decode(np.concatenate([segment.context, segment.tokens])))


@pytest.mark.parametrize(
    ("family", "expected"),
    [("qwen2.5", ["call_0", "call_1", "call_2"]), ("kimi", [f"functions.add:{n}" for n in (0, 1, 2)])],
)
def test_the_ids_of_calls_are_unique_in_a_session(family: str, expected: list[str]) -> None:
    tokenizer = tokenizer_of(family)
    turn = FAMILIES[family].call + FAMILIES[family].end

    async def ids() -> list[str]:
        session = session_of(tokenizer, script(tokenizer, *[turn] * 3)[0], tool_format=FAMILIES[family].tool_format)
        messages: list[dict[str, Any]] = [{"role": "user", "content": "1+2?"}]
        for _ in range(3):
            reply = await session.chat(messages, TOOLS)
            messages += [reply.message, {"role": "tool", "content": "3", "tool_call_id": reply.calls[0].id}]
        assert len(written(session)) == 1
        return [m["tool_calls"][0]["id"] for m in messages if "tool_calls" in m]

    assert asyncio.run(ids()) == asyncio.run(ids()) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_that_was_cut_is_closed_before_the_next(family: str) -> None:
    tokenizer = tokenizer_of(family)
    _, end, *_, before, history_end, _, _ = FAMILIES[family]
    send, _ = script(tokenizer, f"{before}I was say", f"{before}Yes.{end}", reason="length")
    session = session_of(tokenizer, send, tool_format=FAMILIES[family].tool_format)
    first = {"role": "user", "content": "Hi"}

    async def talk() -> list[dict[str, Any]]:
        reply = await session.chat([first])
        following = [first, reply.message, {"role": "user", "content": "Go on"}]
        return [*following, (await session.chat(following)).message, {"role": "user", "content": "And?"}]

    messages = asyncio.run(talk())
    (segment,) = written(session)
    closed = rendered(family, tokenizer, messages, None).replace(f"say{end}", f"say{history_end or end}")
    assert closed.startswith(tokenizer.decode(np.concatenate([segment.context, segment.tokens])))


@pytest.mark.parametrize("change", ["drops a turn", "other text", "a template that rewrites"])
def test_history_that_changes_opens_a_segment(change: str) -> None:
    template = CHAT_TEMPLATE
    if change == "a template that rewrites":  # every message says how many there are
        template = template.replace("message['content'] +", "message['content'] + (messages | length) | string +")
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
    first, second = written(session)
    assert tokenizer.decode(first.tokens) == "One.<|im_end|>" and tokenizer.decode(second.tokens) == "Two.<|im_end|>"
    assert first.mask.all() and second.mask.all()


@pytest.mark.parametrize(
    ("asked", "expected", "repeated"),
    [
        (["Hi", "Hi"], ["1"], 1),  # the texts of the segments, and how many answers were replaced
        (["Hi", "Hi 0 More", "Hi 0 More", "Hi 0 More", "Hi 0 More 3 Go"], ["0 3 4"], 2),
        (["Hi", "Hi", "Hi 1 More", "Hi"], ["1 2", "3"], 1),
        (["Hi", "Hi", "Hi 0 More", "Hi 1 More"], ["1 3", "0 2"], 0),  # the program goes on from both
    ],
)
def test_a_repeated_request_replaces_the_answer_that_no_call_goes_on_from(asked, expected, repeated) -> None:
    tokenizer = tiny_tokenizer()
    send, _ = script(tokenizer, *(f"{number}<|im_end|>" for number in range(len(asked))))
    rooms: list[int] = []

    async def note(ids: Any, sampling: SamplingParams, media: Any) -> Completion:
        rooms.append(sampling.max_tokens)
        return await send(ids, sampling, media)

    session = session_of(tokenizer, note, budget=150)

    async def talk() -> None:
        assert session.base_url  # repeated requests of a loop in the process are meant
        for dialogue in asked:
            words = dialogue.split()
            said = [{"role": "assistant" if w.isdigit() else "user", "content": w} for w in words]
            await session.chat(said)
        session.close()

    asyncio.run(talk())
    texts = [tokenizer.decode(s.tokens[s.mask]).replace("<|im_end|>", " ").strip() for s in written(session)]
    assert texts == expected and session.record.replaced == repeated
    assert all((s.log_probs != 0).tolist() == s.mask.tolist() for s in written(session))
    again = [number for number in range(1, len(asked)) if asked[number] == asked[number - 1]]
    assert len(session.turns) == len(asked) - len(again)
    assert [rooms[number] for number in again] == [rooms[number - 1] for number in again]


def test_requests_that_are_repeated_at_once_and_answers_of_one_text() -> None:
    tokenizer = tiny_tokenizer()
    send, _ = script(tokenizer, "0", "1<|im_end|>", " 1<|im_end|>", "2")
    session = session_of(tokenizer, send)
    first = [{"role": "user", "content": "Hi"}]

    async def talk() -> None:
        assert session.base_url
        await session.chat(first)
        _, reply = await asyncio.gather(session.chat(first), session.chat(first))
        await session.chat([*first, reply.message, {"role": "user", "content": "More"}])

    asyncio.run(talk())  # of the two the later one is gone on from; each has its segment
    texts = [tokenizer.decode(s.tokens[s.mask]) for s in written(session)]
    assert texts == ["1<|im_end|>", " 1<|im_end|>2"] and session.record.replaced == 1


@pytest.mark.parametrize("over_http", [True, False])
def test_a_repeated_request_replaces_no_answer_that_is_history(over_http: bool) -> None:
    counts = "message['content'] + (messages | length) | string +"
    tokenizer = tiny_tokenizer(template=CHAT_TEMPLATE.replace("message['content'] +", counts))
    send, _ = script(tokenizer, *["One.<|im_end|>"] * 3)
    session = session_of(tokenizer, send)

    async def talk() -> None:
        assert not over_http or session.base_url
        first = [{"role": "user", "content": "Hi"}]
        reply = await session.chat(first)
        if over_http:  # in a segment of its own: the template rewrites earlier turns
            await session.chat([*first, reply.message, {"role": "user", "content": "More"}])
        await session.chat(first)

    asyncio.run(talk())
    assert len(written(session)) == 2 + over_http and not session.record.replaced


@pytest.mark.parametrize(("thinks", "as_inference", "segments"), [(True, True, 2), (True, False, 1), (False, True, 1)])
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
    assert len(written(session)) == segments
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

    session = Session(ScriptedRecord(send), SamplingParams(max_tokens=8), LoopSetup())

    async def go() -> None:
        await session.generate([1, 2])
        await session.generate(np.array([1, 2, 2, 9, 5]), {"max_new_tokens": 3, "logprobs": True})
        await session.generate([1, 2], {"temperature": 0.5})
        with pytest.raises(ValueError, match="warmth"):
            await session.generate([1], {"warmth": 1})

    asyncio.run(go())
    first, second = written(session)
    assert first.tokens.tolist() == [2, 9, 5, 5, 9] and first.mask.tolist() == [True, True, False, True, True]
    assert second.context.tolist() == [1, 2] and second.tokens.tolist() == [2, 9]


def test_a_record_keeps_nothing_of_the_callers_arrays() -> None:
    async def send(ids: Any, sampling: SamplingParams, media: Any) -> Completion:
        return Completion(np.array([8, 9]), np.full(2, -1.0, np.float32), "stop")

    session, buffer = Session(ScriptedRecord(send), SamplingParams(max_tokens=8), LoopSetup()), np.arange(9)

    async def go() -> None:
        await session.generate(buffer[:2])
        buffer[2:4] = 8, 9
        await session.generate(buffer[:6])
        buffer[:] = -5

    asyncio.run(go())
    (segment,) = written(session)
    assert segment.context.tolist() == [0, 1] and segment.tokens.tolist() == [8, 9, 4, 5, 8, 9]


def test_images_are_the_same_where_they_are_equal_and_no_other_ones() -> None:
    session = Session(ScriptedRecord(None), SamplingParams(max_tokens=8), LoopSetup())  # type: ignore[arg-type]

    def key(image: Any) -> Any:
        return session._key({"role": "user", "content": [{"type": "image", "image": image}]})

    keys = [key(Image.new("RGB", (1, 1), (number, 0, 0))) for number in range(50)]  # each freed before the next
    assert len(set(keys)) == 50 and key(Image.new("RGB", (1, 1), (7, 0, 0))) == keys[7]


def test_a_copy_of_a_record_follows_the_driver_where_calls_cross() -> None:
    """The process goes on from an answer while the driver has replaced it already."""

    def completion(*ids: int) -> Completion:
        return Completion(np.array(ids), np.full(len(ids), -1.0, np.float32), "stop")

    driver, copy = Record(), Record()
    for record in (driver, copy):
        record.add(record.place(np.array([1, 2])), completion(10))
    again = [record.place(np.array([1, 2]), repeatable=True) for record in (driver, copy)]
    further = [Place(record.segments[0], 3, np.array([5])) for record in (driver, copy)]
    driver.begin(again[0])
    copy.begin(again[1])
    copy.begin(further[1])
    replaced = driver.add(again[0], completion(11))
    driver.begin(further[0])
    copy.add(again[1], completion(11), again[0].segment.parent is replaced)
    for record, place in zip((driver, copy), further, strict=True):
        record.add(place, completion(12))
    for record in (driver, copy):
        assert [s.ids().tolist() for s in record.segments] == [[1, 2, 10, 5, 12], [1, 2, 11]]
        assert [(s.number, s.start) for s in record.written] == [(1, 2), (0, 2)] and record.replaced == 0


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
    assert len(seen) == 1 and written(session)[0].mask.all()


def test_images_for_a_model_that_sees_none_are_refused_before_its_template_meets_them() -> None:
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image", "image": "data:,"}]
    with pytest.raises(BadRow, match="this model sees no images"):
        Boundaries(tiny_tokenizer()).whole([{"role": "user", "content": parts}])
