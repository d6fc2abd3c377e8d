"""A session: the only writer of a trajectory's tokens.

`generate` samples a continuation of token ids, `chat` the next turn of a dialogue, `base_url` offers the same over HTTP to any
program. Whatever is sampled is recorded: a call whose prompt goes on from tokens that are recorded adds to their segment (what was
put in between is not the policy's), any other opens a new segment. A token sampled once stands in one segment once. A program that
asks over HTTP may repeat a request after an error of its own: the new answer then replaces the one that no call went on from.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.engine.rollout.base import Completion, SamplingParams
from verl.rollout.agent_loop import AgentLoopOutput
from verl.rollout.boundary import Message, Rendered, images_of, without_images
from verl.rollout.requests import Images
from verl.rollout.tools.parsers import OWN_PARSERS, ToolCall, parse
from verl.trajectory import Media

if TYPE_CHECKING:
    from verl.rollout.loop_runner import LoopRunner

Given = SamplingParams | Mapping[str, Any] | None
Stop = str | Sequence[str] | None
Send = Callable[[Any, SamplingParams, Any], Awaitable[Completion]]

_FIELDS = {f.name for f in fields(SamplingParams)}
_OWN = ("max_tokens", "stop", "stop_token_ids")
"""What a turn may say about its sampling: anything else would make the trainer's log-probs another distribution's."""
_ALIASES = {"max_new_tokens": "max_tokens", "max_completion_tokens": "max_tokens"}
_UNUSED = ("logprobs", "prompt_logprobs", "detokenize", "n")


class OutOfTokens(ValueError):
    """The next turn does not fit: data.max_response_length holds the tokens of all turns of a segment."""

    code = "context_length_exceeded"


@dataclass(slots=True, eq=False)
class Recorded:
    """One segment. context int64 [P]; tokens int64, mask bool and log_probs float32, each [L]: what follows the context. media: the
    images in the context, but for the row's own. answer: where the tokens of the last call begin; continued: a call goes on from
    it in another segment."""

    context: np.ndarray
    media: tuple[Media, ...] = ()
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    mask: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    log_probs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    answer: int = 0
    continued: bool = False

    def is_prefix_of(self, ids: np.ndarray) -> bool:
        """True if `ids` begin with this segment."""
        known = np.concatenate([self.context, self.tokens])
        return np.array_equal(ids[: len(known)], known)

    def add(self, ids: np.ndarray, log_probs: np.ndarray | None = None) -> None:
        """Append ids: sampled ones with their log-probs, or those of others."""
        sampled = np.full(len(ids), log_probs is not None)
        values = np.zeros(len(ids), np.float32) if log_probs is None else log_probs
        if log_probs is not None:
            self.answer, self.continued = len(self.tokens), False
        if not len(self.tokens):  # the arrays as they came: most segments have one call
            self.tokens, self.mask, self.log_probs = ids, sampled, values
        elif len(ids):
            self.tokens = np.concatenate([self.tokens, ids])
            self.mask = np.concatenate([self.mask, sampled])
            self.log_probs = np.concatenate([self.log_probs, values])

    def answers(self, ids: np.ndarray) -> bool:
        """True if the last call was asked with these ids, and no call goes on from its answer."""
        asked = np.concatenate([self.context, self.tokens[: self.answer]])
        return not self.continued and np.array_equal(asked, ids)

    def withdraw(self) -> Recorded:
        """Take the answer of the last call off; returns it as a segment."""
        at = self.answer
        asked = np.concatenate([self.context, self.tokens[:at]])
        answer = Recorded(asked, self.media, self.tokens[at:], self.mask[at:], self.log_probs[at:])
        self.tokens, self.mask, self.log_probs = self.tokens[:at], self.mask[:at], self.log_probs[:at]
        return answer


@dataclass(slots=True)
class Reply:
    """One turn of the model. message: as a dialogue holds it, with `tool_calls`; calls: the same, those that cannot be read
    too. prompt_tokens: how many it was sampled after."""

    message: dict[str, Any]
    calls: list[ToolCall]
    completion: Completion
    prompt_tokens: int


@dataclass(slots=True, eq=False)
class _Dialogue:
    """A dialogue up to a turn of the model: its messages (see `_keys`), that turn, and its ids."""

    messages: list[tuple[Any, ...]]
    turn: Message
    ids: np.ndarray
    media: tuple[Media, ...]
    last_id: int | None


class Session:
    """What an agent loop writes its tokens through. send: one request to the sampler; sampling: of the run, with the seed of this
    trajectory; runner: what all sessions of a process share, for dialogues.

    latest: the segment that was written last. full: a turn was refused because it had no room. messages: the dialogue up to the
    latest turn of `chat`; turns: of each of those turns, `at` and `seconds` (when it was asked for, and how long it took), and
    what a loop notes of it (`reward`). counts: what the run logs of the session: `repeated_requests`, whose first answers are in no
    segment.
    """

    def __init__(self, send: Send, sampling: SamplingParams, runner: LoopRunner):
        self.sampling, self.runner = sampling, runner
        self._send = send
        self._segments: list[Recorded] = []
        self._withdrawn: list[Recorded] = []
        self._dialogues: list[_Dialogue] = []
        self._opening: tuple[list[Message], list[Any], np.ndarray] | None = None
        self._call_ids: set[str] = set()
        self._url: str | None = None
        self.latest: Recorded | None = None
        self.full = False
        self.messages: list[dict[str, Any]] = []
        self.turns: list[dict[str, float]] = []
        self.counts: Counter[str] = Counter()
        self._began = time.monotonic()

    async def generate(self, prompt_ids: Any, sampling: Given = None, media: Images = ()) -> Completion:
        """Sample a continuation of `prompt_ids`, int64 [P], with the run's settings or others. ValueError for an unknown one.

        media: the images that have tokens in `prompt_ids` behind those of the row's own images."""
        ids, shown = np.asarray(prompt_ids, np.int64), tuple(media)
        repeated = self._segment_answering(ids, shown)
        answered = None if repeated is None else repeated.tokens
        completion = await self._send(prompt_ids, self.params(sampling), media)
        if repeated is not None and repeated.tokens is answered and not repeated.continued:
            self._withdrawn.append(repeated.withdraw())
        self._record(ids, shown, completion)
        return completion

    def params(self, given: Given) -> SamplingParams:
        """The run's settings with what a mapping changes of them."""
        if given is None or isinstance(given, SamplingParams):
            return given or self.sampling
        named = {_ALIASES.get(name, name): value for name, value in given.items() if name not in _UNUSED}
        if unknown := [name for name in named if name not in _FIELDS]:
            raise ValueError(f"sampling parameters {', '.join(unknown)}; known: {', '.join(sorted(_FIELDS))}")
        for name in ("stop", "stop_token_ids"):
            if name in named:
                value = named[name]
                named[name] = (value,) if isinstance(value, str) else tuple(value or ())
        return replace(self.sampling, **{name: value for name, value in named.items() if value is not None})

    def begin(self, messages: Any, prompt_ids: np.ndarray, tools: Any = None) -> None:
        """Make known that a dialogue of these messages and tools is `prompt_ids`, as the data rendered it."""
        listed = isinstance(messages, list)
        self._opening = (list(messages), list(tools or ()), prompt_ids) if listed else None

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, **sampling: Any
    ) -> Reply:
        """Sample the next turn of a dialogue. Where it goes on from turns of this session their tokens stay as they were sampled.

        sampling: max_tokens, stop, stop_token_ids; over HTTP the message ends before the stop string. An image that a message holds
        (`{"type": "image", "image": …}`) begins a segment. OutOfTokens if there is no room, BadRow where the template refuses the
        messages or an image cannot be shown.
        """
        if wrong := [name for name in sampling if name not in _OWN]:
            raise ValueError(f"session.chat takes {', '.join(_OWN)}; the run sets {', '.join(wrong)}")
        asked = time.monotonic()
        said = [_normal(message) for message in messages]
        ids, media = self._prompt(said, tools)
        completion = await self.generate(ids, self.fitting(ids, sampling, media), media)
        stop = sampling.get("stop") if self._url is not None else None
        reply = await self._reply(len(ids), completion, tools, stop)
        last = int(completion.token_ids[-1]) if len(completion.token_ids) else None
        full = np.concatenate([ids, completion.token_ids])
        if self.messages[:-1] == (before := without_images(said)) and self._url is not None:
            del self.turns[-1:]  # the request is repeated
        self.messages = [*before, reply.message]
        self._dialogues.append(_Dialogue(_keys([*said, reply.message]), reply.message, full, media, last))
        taken = {"at": asked - self._began, "seconds": time.monotonic() - asked}
        self.turns.append({name: round(value, 4) for name, value in taken.items()})
        return reply

    def fitting(self, ids: np.ndarray, given: Mapping[str, Any], media: Images = ()) -> SamplingParams:
        """The settings of a turn after `ids`, with a budget of what a segment may still have behind its context, and the longest
        sequence. OutOfTokens if that is nothing."""
        segment, params = self._segment_of(ids, tuple(media)), self.params(given)
        segment = segment or self._segment_answering(ids, tuple(media))
        room = self.sampling.max_tokens - (len(ids) - len(segment.context) if segment else 0)
        if self.runner.longest is not None:
            room = min(room, self.runner.longest - len(ids))
        if room < 1:
            self.full = True
            raise OutOfTokens(f"the dialogue's {len(ids)} tokens leave no room for another turn")
        return replace(params, max_tokens=min(room, params.max_tokens))

    def segments(self) -> list[Recorded]:
        """What was written so far."""
        return list(self._segments)

    def outputs(self, **about: Any) -> list[AgentLoopOutput]:
        """An output for each segment, an empty one if there is none; `about`: what is said of the trajectory, on the last of them."""
        segments = self._segments or [Recorded(np.zeros(0, np.int64))]
        *earlier, last = [AgentLoopOutput(s.context, s.tokens, s.mask, s.log_probs) for s in segments]
        return [*earlier, replace(last, **about)]

    @property
    def base_url(self) -> str:
        """This session over HTTP on loopback, as OpenAI's clients take a base URL; known to nobody else."""
        from verl.rollout import http_sessions

        if self._url is None:
            self._url = http_sessions.open_session(self)
        return self._url

    def close(self) -> None:
        """No more calls come over HTTP."""
        if self._url is not None:
            from verl.rollout import http_sessions

            http_sessions.close_session(self._url)
            self._url = None

    def _segment_of(self, ids: np.ndarray, media: tuple[Media, ...]) -> Recorded | None:
        """The segment that ids go on from: images are in contexts alone."""
        segments = reversed([*self._withdrawn, *self._segments])
        return next((s for s in segments if s.media == media and s.is_prefix_of(ids)), None)

    def _segment_answering(self, ids: np.ndarray, media: tuple[Media, ...]) -> Recorded | None:
        """The segment whose last answer is replaced when these ids are asked again, which counts only over HTTP."""
        segments = reversed(self._segments if self._url is not None else ())
        return next((s for s in segments if s.media == media and s.answers(ids)), None)

    def _include(self, segment: Recorded) -> None:
        """Make a segment, a new one or one that was withdrawn, one of the trajectory's."""
        if segment not in self._segments:
            self._segments.append(segment)
        self._withdrawn = [other for other in self._withdrawn if other is not segment]
        self.counts["repeated_requests"] = len(self._withdrawn)

    def _record(self, ids: np.ndarray, media: tuple[Media, ...], completion: Completion) -> None:
        segment = self._segment_of(ids, media) or Recorded(ids, media)
        self._include(segment)
        segment.add(ids[len(segment.context) + len(segment.tokens) :])
        segment.add(completion.token_ids, completion.log_probs)
        self.latest = segment

    def _earlier(self, messages: Sequence[Message]) -> _Dialogue | None:
        """The longest dialogue of this session that the messages go on from."""
        before = _keys(messages)[:-1]
        found = [d for d in reversed(self._dialogues) if d.messages == before[: len(d.messages)]]
        return max(found, key=lambda d: len(d.messages), default=None)

    def _prompt(self, messages: Sequence[Message], tools: Any) -> Rendered:
        """The ids to sample after, and the images in them but for the row's own."""
        boundaries = self.runner.boundaries
        if (earlier := self._earlier(messages)) is not None:
            if (segment := self._segment_of(earlier.ids, earlier.media)) is not None:
                segment.continued = True
                self._include(segment)
            following = messages[len(earlier.messages) :]
            between = boundaries.between(earlier.turn, following, tools, earlier.last_id)
            if between is not None:
                ids = np.concatenate([earlier.ids, between[0]])
                if not self.runner.as_inference or boundaries.keeps(ids, messages, tools):
                    return ids, earlier.media + between[1]
        if self._opening is not None:
            opening, offered, ids = self._opening
            if offered == list(tools or ()) and _keys(opening) == _keys(messages):
                return ids, ()
        return boundaries.whole(messages, tools)

    async def _reply(self, prompt_tokens: int, completion: Completion, tools: Any, stop: Stop) -> Reply:
        ids, tokenizer = completion.token_ids.tolist(), self.runner.tokenizer
        calls: list[ToolCall] = []
        ended = ids and completion.finish_reason == "stop" and ids[-1] in tokenizer.added_tokens_decoder
        if tools and self.runner.tool_format in OWN_PARSERS:
            from verl.rollout.tools.public_parsers import read_with_own

            content, calls = await read_with_own(self.runner.tool_format, tokenizer, ids, tools)
            content = content.removesuffix(tokenizer.decode(ids[-1:]) if ended else "").strip()
            content = before_stop(content, completion, stop)
        else:
            content = tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False)
            content = before_stop(content, completion, stop)
            # The channels of gpt-oss are there without tools, too: its template takes no content that holds their marks.
            if tools or self.runner.tool_format == "gpt-oss":
                content, found = parse(self.runner.tool_format, content, tools)
                calls = found if tools else []
        calls = [replace(call, id=self._unique(call.id)) for call in calls]
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if read := [call for call in calls if not call.error]:
            message["tool_calls"] = [call.message() for call in read]
        return Reply(message, calls, completion, prompt_tokens)

    def _unique(self, call_id: str) -> str:
        """The id of a call of a tool; one that the session has had gets another number at its end."""
        stem, number = call_id.rstrip("0123456789"), len(self._call_ids)
        while call_id in self._call_ids:
            call_id, number = f"{stem}{number}", number + 1
        self._call_ids.add(call_id)
        return call_id


def before_stop(text: str, completion: Completion, stop: Stop) -> str:
    """The text of a completion up to the stop string that ended it."""
    stops = (stop,) if isinstance(stop, str) else stop or ()
    ends = [text.index(end) for end in stops if end in text and completion.finish_reason == "stop"]
    return text[: min(ends, default=None)]


def _keys(messages: Sequence[Message]) -> list[tuple[Any, ...]]:
    """What makes two messages the same, whoever wrote them down: role, text, calls."""
    return [
        (
            m["role"],
            _text(m.get("content")),
            m.get("tool_call_id"),
            *(part["image"] for part in images_of(m)),
            *((c["function"]["name"], c["function"].get("arguments")) for c in m.get("tool_calls") or ()),
        )
        for m in messages
    ]


def _text(content: Any) -> str:
    if isinstance(content, list):
        content = "".join(part if isinstance(part, str) else part.get("text", "") for part in content)
    return (content or "").strip()


def _normal(message: Message) -> dict[str, Any]:
    """As templates take it, from what OpenAI's clients send: arguments of calls are mappings, content is there, parts of text are
    one text, an image is its URL, and nothing is null."""
    content = message.get("content") or ""
    if isinstance(content, list):
        parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
        content = [_image(part) if part.get("type") == "image_url" else part for part in parts]
        if all(part.get("type") == "text" for part in parts):
            content = "".join(part["text"] for part in parts)
    out = {name: value for name, value in message.items() if value is not None} | {"content": content}
    if calls := message.get("tool_calls"):
        out["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call["function"])}}
            for call in calls
        ]
    return out


def _image(part: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "image", "image": part["image_url"]["url"]}


def _arguments(function: Mapping[str, Any]) -> Any:
    arguments = function.get("arguments") or {}
    return json.loads(arguments) if isinstance(arguments, str) else arguments
