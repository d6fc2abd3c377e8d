"""A session: the only writer of a trajectory's tokens.

`generate` samples a continuation of token ids, `chat` the next turn of a dialogue, `base_url` offers the same over HTTP
to any program. Whatever is sampled is recorded (`verl.rollout.record`): a call whose prompt goes on from recorded
tokens adds to their segment (tokens in between are not the policy's), any other opens a new segment. A token sampled
once stands in one segment once. A program that asks over HTTP may repeat a request after an error of its own: the new
answer then replaces the one that no call went on from.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from verl.config.schema.base import Map, select
from verl.config.schema.entries import Config
from verl.data.rows import media_part
from verl.engine.registry import capabilities
from verl.engine.rollout.base import Completion, OnTokens, SamplingParams
from verl.rollout import http_sessions
from verl.rollout.record import NO_IDS, Place, Record, SegmentRecord
from verl.rollout.tools.parsers import OWN_PARSERS, Stop, ToolCall, before_stop, parse
from verl.rollout.tools.toolbox import warn_once
from verl.rollout.turn_boundaries import Boundaries, Message, images_of, without_images
from verl.rollout.turn_text import TurnText
from verl.trajectory import Media

Settings = SamplingParams | Mapping[str, Any] | None

_FIELDS = {f.name for f in fields(SamplingParams)}
_OWN = ("max_tokens", "stop", "stop_token_ids", "grammar")
"""What a turn may say about its sampling: anything else would make the trainer's log-probs another distribution's."""
_ALIASES = {"max_new_tokens": "max_tokens", "max_completion_tokens": "max_tokens"}
_UNSEEN = ("input_audio", "audio", "audio_url", "video", "video_url", "file")
_UNUSED = ("logprobs", "prompt_logprobs", "detokenize", "n")


class LoopSetup:
    """What the loops of a process share: tokenizer, boundaries between turns, tools. config: the run's checked
    configuration.

    timeout: seconds of a trajectory. longest: tokens of context and response together. longest_turn: tokens of a turn
    of the model in a dialogue. tool_format: how the model writes calls. engine: the sampler's name. http_address: where
    sessions are served (port 0: a free one). as_inference: a turn sees the dialogue as the template writes it, in a new
    segment where that is not what was written so far.
    """

    def __init__(self, tokenizer: Any = None, config: Config | Map | None = None):
        self.tokenizer, self.config = tokenizer, config
        self.loops_file: str | None = self._key("agent.agent_loop_config_path")
        self.timeout: float | None = self._key("agent.trajectory_timeout")
        self.longest: int | None = self._key("max_model_len")
        self.longest_turn: int | None = self._key("single_turn_response_length")
        self.tool_format: str = self._key("multi_turn.format", "hermes")
        self.http_address: tuple[str, int] = (
            self._key("agent.http_host", "127.0.0.1"),
            self._key("agent.http_port", 0),
        )
        self.as_inference: bool = self._key("multi_turn.use_inference_chat_template", False)
        self.engine: str = self._key("name", "")

    def _key(self, name: str, default: Any = None) -> Any:
        return select(self.config, f"actor_rollout_ref.rollout.{name}", default)

    @cached_property
    def boundaries(self) -> Boundaries:
        """What comes between turns, with the run's template."""
        kwargs = select(self.config, "data.apply_chat_template_kwargs")
        return Boundaries(self.tokenizer, kwargs, self._open_images)

    def _open_images(self) -> Any:
        """What makes the images of tools and environments the model's; None for a model that sees none."""
        from verl.data.media import ImageProcessor, load_processor

        assert self.config is not None
        model, kwargs = self.config.actor_rollout_ref.model, self.config.data.mm_processor_kwargs
        trusted = model.trust_remote_code
        processor = load_processor(model.path, self.tokenizer, kwargs, trust_remote_code=trusted)
        scored = self.config.reward_model.images
        return None if processor is None else ImageProcessor(processor, scored=scored)

    @property
    def follows_grammars(self) -> bool:
        """Whether the run's engine can be held to a grammar."""
        return bool(self.engine) and capabilities(self.engine).grammars

    @cached_property
    def tools(self) -> Any:
        """The run's tools, or None where none is configured."""
        paths = [self._key(f"multi_turn.{name}") for name in ("tool_config_path", "function_tool_path")]
        if not any(paths):
            return None
        from verl.rollout.tools.toolbox import Toolbox

        return Toolbox.load(*paths)


class OutOfTokens(ValueError):
    """The next turn does not fit: data.max_response_length holds the tokens of all turns of a segment."""

    code = "context_length_exceeded"


@dataclass(slots=True)
class Reply:
    """One turn of the model. message: as a dialogue holds it, with `tool_calls`; calls: the same, those that cannot be
    read too. prompt_tokens: how many it was sampled after."""

    message: dict[str, Any]
    calls: list[ToolCall]
    completion: Completion
    prompt_tokens: int


@dataclass(slots=True, eq=False)
class _Dialogue:
    """A dialogue up to a turn of the model: how many messages it has, that turn, and where its tokens end."""

    messages: int
    turn: Message
    segment: SegmentRecord
    length: int
    last_id: int | None


class Session:
    """What an agent loop writes its tokens through. record: of the trajectory, which makes the calls; sampling: of the
    run, with the seed of this trajectory; setup: what all sessions of a process share, for dialogues.

    latest: the segment that was written last. finish_reason: of the latest turn, "" before the first. full: there was
    no room for the latest turn, or for the rest of it. messages: the dialogue up to the latest turn of `chat`; turns:
    of each of those turns, `at` and `seconds` (when it was asked for, and how long it took), and what a loop notes of
    it (`reward`). counts: what the run logs of the session. responses: by their ids those that a program may go back to
    over HTTP, each with its dialogue.
    """

    def __init__(self, record: Record, sampling: SamplingParams, setup: LoopSetup):
        self.sampling, self.setup, self.record = sampling, setup, record
        self._dialogues: dict[int, _Dialogue] = {}
        self._opening: tuple[list[Message], list[Any], np.ndarray] | None = None
        self._call_ids: set[str] = set()
        self._images: list[Any] = []
        self._url: str | None = None
        self.latest: SegmentRecord | None = None
        self.finish_reason, self.full = "", False
        self.messages: list[dict[str, Any]] = []
        self.turns: list[dict[str, float]] = []
        self.counts: Counter[str] = Counter()
        self.responses: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {}
        self._began = time.monotonic()

    async def generate(self, prompt_ids: Any, sampling: Settings = None, media: Sequence[Media] = ()) -> Completion:
        """Sample a continuation of `prompt_ids`, int64 [P], with the run's settings or others. ValueError for an
        unknown one.

        media: the images that have tokens in `prompt_ids` behind those of the row's own images."""
        return (await self._call(self.place(prompt_ids, media), self.params(sampling)))[0]

    def place(self, prompt_ids: Any, media: Sequence[Media] = ()) -> Place:
        """Where a call with these ids goes. Over HTTP a program may ask again what it asked before."""
        ids = np.asarray(prompt_ids, np.int64)
        return self.record.place(ids, tuple(media), repeatable=self._url is not None)

    async def _call(
        self, place: Place, sampling: SamplingParams, on_tokens: OnTokens | None = None
    ) -> tuple[Completion, SegmentRecord]:
        completion, segment = await self.record.call(place, sampling, on_tokens)
        self.latest = segment
        self.finish_reason = completion.finish_reason
        self.full = self.finish_reason == "length" and self._room(_end_of(segment)) < 1
        return completion, segment

    def params(self, settings: Settings) -> SamplingParams:
        """The run's settings with what a mapping changes of them."""
        if settings is None or isinstance(settings, SamplingParams):
            return settings or self.sampling
        if settings.get("grammar") and self.setup.engine and not self.setup.follows_grammars:
            raise ValueError(f"rollout.name={self.setup.engine} cannot be held to a grammar")
        options = {_ALIASES.get(name, name): value for name, value in settings.items() if name not in _UNUSED}
        if unknown := [name for name in options if name not in _FIELDS]:
            raise ValueError(f"sampling parameters {', '.join(unknown)}; known: {', '.join(sorted(_FIELDS))}")
        for name in ("stop", "stop_token_ids"):
            if name in options:
                value = options[name]
                options[name] = (value,) if isinstance(value, str) else tuple(value or ())
        return replace(self.sampling, **{name: value for name, value in options.items() if value is not None})

    def begin(self, messages: Any, prompt_ids: np.ndarray, tools: Any = None) -> None:
        """Make known that a dialogue of these messages and tools is `prompt_ids`, as the data rendered it."""
        is_chat = isinstance(messages, list)
        self._opening = (list(messages), list(tools or ()), prompt_ids) if is_chat else None

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        on_text: Callable[[str], None] | None = None,
        **sampling: Any,
    ) -> Reply:
        """Sample the next turn of a dialogue. Where it goes on from turns of this session their tokens stay as they
        were sampled.

        sampling: max_tokens, stop, stop_token_ids, grammar (`SamplingParams`); over HTTP the message ends before the
        stop string. An image that a message holds (`{"type": "image", "image": …}`) begins a segment. on_text: gets the
        message's content in pieces, while it is sampled where the engine streams. OutOfTokens if there is no room,
        BadRow where the template refuses the messages or an image cannot be shown.
        """
        if wrong := [name for name in sampling if name not in _OWN]:
            raise ValueError(f"session.chat takes {', '.join(_OWN)}; the run sets {', '.join(wrong)}")
        start = time.monotonic()
        dialogue = [_normal(message) for message in messages]
        hashes = self._hashes(dialogue, tools)
        place = self._prompt(dialogue, hashes, tools)
        params, stop = self.fitting(place, sampling), sampling.get("stop") if self._url is not None else None
        text = None
        if on_text is not None:
            text = TurnText(self.setup.tokenizer, self._read_format(tools), params.stop if stop else (), on_text)
        completion, segment = await self._call(place, params, text.add if text else None)
        reply = await self._reply(place.total, completion, tools, stop)
        if text is not None:
            text.end(reply.message["content"])
        last = int(completion.token_ids[-1]) if len(completion.token_ids) else None
        if self.messages[:-1] == (before := without_images(dialogue)) and self._url is not None:
            del self.turns[-1:]  # the request is repeated
        self.messages = [*before, reply.message]
        after = hash((hashes[-1], self._key(reply.message)))
        self._dialogues[after] = _Dialogue(len(dialogue) + 1, reply.message, segment, segment.length, last)
        timing = {"at": start - self._began, "seconds": time.monotonic() - start}
        self.turns.append({name: round(value, 4) for name, value in timing.items()})
        return reply

    def prompt_ids(self, messages: Sequence[Message], tools: Any = None) -> np.ndarray:
        """What the next turn of a dialogue would be sampled after, int64 [P]. BadRow as of `chat`."""
        dialogue = [_normal(message) for message in messages]
        return self._prompt(dialogue, self._hashes(dialogue, tools), tools).ids()

    def _read_format(self, tools: Any) -> str:
        """The format of which calls and channels are read in a turn; "" if none are. The channels of gpt-oss are there
        without tools, too: its template takes no content that holds their marks."""
        return self.setup.tool_format if tools or self.setup.tool_format == "gpt-oss" else ""

    def fitting(self, place: Place, settings: Mapping[str, Any]) -> SamplingParams:
        """The settings of a turn at a place, with a budget of what a segment may still have behind its context, and the
        longest sequence. OutOfTokens if that is nothing."""
        params, room = self.params(settings), self._room(place)
        most, longest = self.sampling.max_tokens, self.setup.longest
        if room < 1:
            self.full = True
            limits = f"data.max_response_length={most}, rollout.max_model_len={longest}"
            raise OutOfTokens(f"the dialogue's {place.total} tokens leave no room for another turn ({limits})")
        if room < most and not self.segments():
            budget = f"rollout.max_model_len={longest} leaves {room} of data.max_response_length={most} for its turns"
            warn_once("first prompt", "long", f"it has {place.total} tokens: {budget}", of="dialogue")
        return replace(params, max_tokens=min(room, params.max_tokens, self.setup.longest_turn or room))

    def _room(self, place: Place) -> int:
        """How many tokens may be sampled at a place."""
        segment = place.segment if place.extends or place.replaces else None
        room = self.sampling.max_tokens - (place.total - len(segment.context) if segment else 0)
        return room if self.setup.longest is None else min(room, self.setup.longest - place.total)

    def segments(self) -> list[SegmentRecord]:
        """What was written so far."""
        return self.record.written

    @property
    def base_url(self) -> str:
        """This session over HTTP on loopback, as OpenAI's clients take a base URL; known to nobody else."""
        if self._url is None:
            self._url = http_sessions.open_session(self)
        return self._url

    def close(self) -> None:
        """No more calls come over HTTP."""
        if self._url is not None:
            http_sessions.close_session(self._url)
            self._url = None

    def _hashes(self, messages: Sequence[Message], tools: Any) -> list[int]:
        """Of each message a hash of the dialogue up to it: the same for the same dialogue and tools, whoever wrote it
        down."""
        hashes, before = list[int](), hash(json.dumps(list(tools or ()), sort_keys=True, default=str))
        for message in messages:
            before = hash((before, self._key(message)))
            hashes.append(before)
        return hashes

    def _key(self, message: Message) -> tuple[Any, ...]:
        """What makes two messages the same: role, text, images, calls."""
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        called = [(call["name"], call.get("arguments")) for call in calls]
        return (
            message["role"],
            _text(message.get("content")),
            message.get("tool_call_id"),
            json.dumps(called, sort_keys=True, default=str),
            *(self._image_key(part["image"]) for part in images_of(message)),
        )

    def _image_key(self, image: Any) -> int | str:
        """The same for equal images; the session holds on to them, so that no other one takes their place in memory."""
        if isinstance(image, str):
            return image
        for number, earlier in enumerate(self._images):
            if earlier is image or (type(earlier) is type(image) and np.all(earlier == image)):
                return number
        self._images.append(image)
        return len(self._images) - 1

    def _prompt(self, messages: Sequence[Message], hashes: list[int], tools: Any) -> Place:
        """Where the dialogue's next turn goes: behind the longest dialogue of this session that the messages go on
        from, if there is a boundary; else the whole dialogue is rendered."""
        boundaries = self.setup.boundaries
        earlier = next((self._dialogues[h] for h in reversed(hashes[:-1]) if h in self._dialogues), None)
        followed = None
        if earlier is not None:
            followed = earlier.segment if earlier.length == earlier.segment.length else None
            following = messages[earlier.messages :]
            between = boundaries.between(earlier.turn, following, tools, earlier.last_id)
            if between is not None:
                place = replace(self._after(earlier, *between), follows=followed)
                if not self.setup.as_inference or boundaries.keeps(place.ids(), messages, tools):
                    return place
        if self._opening is not None:
            opening, offered, ids = self._opening
            if self._hashes(opening, offered) == hashes:
                return replace(self.place(ids), follows=followed)
        return replace(self.place(*boundaries.whole(messages, tools)), follows=followed)

    def _after(self, dialogue: _Dialogue, ids: np.ndarray, media: tuple[Media, ...]) -> Place:
        """The place behind a dialogue's tokens and these. New images open a segment: images are in contexts alone."""
        segment, shown = dialogue.segment, dialogue.segment.shown + media
        place = Place(segment, dialogue.length, ids, shown)
        return place if place.extends else self.place(place.ids(), shown)

    async def _reply(self, prompt_tokens: int, completion: Completion, tools: Any, stop: Stop) -> Reply:
        ids, tokenizer = completion.token_ids.tolist(), self.setup.tokenizer
        calls: list[ToolCall] = []
        ended = ids and completion.finish_reason == "stop" and ids[-1] in tokenizer.added_tokens_decoder
        text = tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False)
        content = text = before_stop(text, completion, stop)
        if tools and self.setup.tool_format in OWN_PARSERS:
            content, calls = await OWN_PARSERS[self.setup.tool_format](tokenizer, ids, tools)
            content = content.removesuffix(tokenizer.decode(ids[-1:]) if ended else "").strip()
            content = before_stop(content, completion, stop)
        elif tool_format := self._read_format(tools):
            content, parsed_calls = parse(tool_format, text, tools)
            calls = parsed_calls if tools else []
        calls = [replace(call, id=self._unique(call.id)) for call in calls]
        read = [call for call in calls if not call.error]
        if calls and self._url is not None:
            self.counts.update(calls=len(calls), invalid=len(calls) - len(read))
            if not read:  # the dialects have no place for its error: the program sees what the model wrote
                content = text
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if read:
            message["tool_calls"] = [call.message() for call in read]
        return Reply(message, calls, completion, prompt_tokens)

    def _unique(self, call_id: str) -> str:
        """The id of a call of a tool; one that the session has had gets another number at its end."""
        stem, number = call_id.rstrip("0123456789"), len(self._call_ids)
        while call_id in self._call_ids:
            call_id, number = f"{stem}{number}", number + 1
        self._call_ids.add(call_id)
        return call_id


def _end_of(segment: SegmentRecord) -> Place:
    """The place behind all tokens of a segment."""
    return Place(segment, segment.length, NO_IDS, segment.shown)


def _text(content: Any) -> str:
    if isinstance(content, list):
        content = "".join(part if isinstance(part, str) else part.get("text", "") for part in content)
    return (content or "").strip()


def _normal(message: Message) -> dict[str, Any]:
    """As templates take it, from what OpenAI's clients send: arguments of calls are mappings, content is there, parts
    of text are one text, an image is its URL, and nothing is null."""
    content = message.get("content") or ""
    if isinstance(content, list):
        parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
        if unseen := [part["type"] for part in parts if part.get("type") in _UNSEEN]:
            raise ValueError(f"a message has a part of type {unseen[0]}: only text and image_url are supported")
        content = [media_part(part) for part in parts]
        if all(part.get("type") == "text" for part in parts):
            content = "".join(part["text"] for part in parts)
    out = {name: value for name, value in message.items() if value is not None} | {"content": content}
    if calls := message.get("tool_calls"):
        out["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call["function"])}} for call in calls
        ]
    return out


def _arguments(function: Mapping[str, Any]) -> Any:
    arguments = function.get("arguments") or {}
    return json.loads(arguments) if isinstance(arguments, str) else arguments
