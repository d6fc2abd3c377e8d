"""What stands between two turns of the model, as token ids: sampled tokens are never decoded and encoded again.

The chat template is rendered twice for a dialogue of dummies, up to the model's turn and with the messages that follow
it:

    [user, assistant MARK]              …MARK<end of turn>
    [user, assistant MARK, tool …]      …MARK<end of turn><the tool's message><generation prompt>

What follows the model's turn is the difference, where the second text goes on from the first behind MARK, and where the
difference is the same in a longer dialogue. It is tokenised alone and stands behind the sampled ids. A template that
fails this (one that rewrites the turns before) has no boundary: the dialogue is then rendered as a whole and opens a
new segment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from verl.data.media import decoded, open_image
from verl.data.rows import PLACEHOLDER, BadRow, ChatRenderer
from verl.trajectory import Media

Message = Mapping[str, Any]
Rendered = tuple[np.ndarray, tuple[Media, ...]]
"""Token ids int64 [N], and the images that have a part of them."""

_MARK = "verlTurnEndsHere"
_SHORT: list[Message] = [{"role": "user", "content": "Hello."}]
_LONG: list[Message] = [
    {"role": "user", "content": "First question"},
    {"role": "assistant", "content": "An answer"},
    {"role": "user", "content": "Another question"},
]


class Boundaries:
    """Renders dialogues and what stands between turns for one tokenizer; made once in a process.

    kwargs: data.apply_chat_template_kwargs. open_images: gives the model's `verl.data.media.ImageProcessor`, None where
    it sees none.
    """

    def __init__(self, tokenizer: Any, kwargs: Mapping[str, Any] | None = None, open_images: Any = None):
        self.chat = ChatRenderer(tokenizer, kwargs)
        self._tokenizer = tokenizer
        self._pure: dict[str, bool] = {}
        self._open_images = open_images

    @cached_property
    def _images(self) -> Any:
        if self._open_images is None or (images := self._open_images()) is None:
            raise BadRow("this model sees no images", "use a vision-language model")
        return images

    @cached_property
    def opens_thinking(self) -> bool:
        """True if the generation prompt begins the model's thinking."""
        return self.chat.text(_SHORT).rstrip().endswith("<think>")

    def image_parts(self, cells: Sequence[Any]) -> list[dict[str, Any]]:
        """Images as parts of a message, decoded. BadRow where the model cannot see them."""
        images = [decoded(open_image(cell, Path())) for cell in cells]
        self._images.tokens(images)
        return [{"type": "image", "image": image} for image in images]

    def whole(self, messages: Sequence[Message], tools: Any = None) -> Rendered:
        """A whole dialogue with the generation prompt. BadRow where the template refuses it, or an image cannot be
        shown."""
        if any(map(images_of, messages)):
            self._images  # noqa: B018  (BadRow for a model without, before its template meets an image)
        return self._rendered(self.chat.text(messages, **_with(tools)), messages)

    def _rendered(self, text: str, messages: Sequence[Message]) -> Rendered:
        """The ids of a text that the template wrote of these messages, and the images in them."""
        text = text.encode(errors="replace").decode()  # half a surrogate pair is no text for a tokenizer
        cells = [part["image"] for message in messages for part in images_of(message)]
        if any(part.get("type") == "image" and part.get("image") is None for part in _parts_of(messages)):
            raise BadRow(
                "images of the row",
                "they stand in the context that the data rendered, from which the dialogue must go on: "
                "keep its messages as they are, use a chat template that leaves earlier turns alone, "
                "and no multi_turn.use_inference_chat_template",
            )
        if not cells:
            return self.chat.ids(text), ()
        ids, media = self._images(text, cells, Path())
        return ids, (media,)

    def keeps(self, ids: np.ndarray, messages: Sequence[Message], tools: Any = None) -> bool:
        """True if these ids are what the template writes of the whole dialogue."""
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        return bool(text == self.chat.text(messages, **_with(tools)))

    def between(self, turn: Message, following: Sequence[Message], tools: Any, last_id: int | None) -> Rendered | None:
        """What comes after the model's `turn` (its message) when `following` are said, the generation prompt at its
        end. last_id: the last sampled token. None where the template has no boundary here."""
        kind = f"{following[0]['role']} {bool(turn.get('tool_calls'))}"
        if kind not in self._pure:
            short, long = (self._difference(history, turn, following, tools) for history in (_SHORT, _LONG))
            self._pure[kind] = short is not None and long is not None and short[1] == long[1]
        difference = self._difference(_SHORT, turn, following, tools) if self._pure[kind] else None
        return None if difference is None else self._rendered(self._after(*difference, last_id), following)

    def _difference(
        self, history: list[Message], turn: Message, following: Sequence[Message], tools: Any
    ) -> tuple[str, str] | None:
        """(what the template writes after the turn's text, what the messages that follow add to it)."""
        for dummy in _dummies(turn):
            try:
                before = self.chat.text([*history, dummy], generation=False, **_with(tools))
                after = self.chat.text([*history, dummy, *following], **_with(tools))
                ending, further = before.rpartition(_MARK)[2], after.rpartition(_MARK)[2]
                if not further.startswith(ending):
                    ending = self._ending_in_history(history, dummy, _with(tools))
            except BadRow:
                continue
            if _MARK in before and _MARK in after and further.startswith(ending):
                return ending, further[len(ending) :]
        return None

    def _ending_in_history(self, history: list[Message], dummy: Message, tools: dict[str, Any]) -> str:
        """What follows the text of a turn that is not the last: gpt-oss writes <|return|> after the last one, <|end|>
        after others."""
        bare, prompted = (self.chat.text(history, generation=g, **tools) for g in (False, True))
        ending = self.chat.text([*history, dummy], **tools).rpartition(_MARK)[2]
        return ending.removesuffix(prompted.removeprefix(bare))

    def _after(self, ending: str, further: str, last_id: int | None) -> str:
        """The text that has to follow the sampled tokens, without what the model wrote of the turn's end itself."""
        last_token = ""
        if last_id is not None and last_id in self._tokenizer.added_tokens_decoder:
            last_token = self._tokenizer.added_tokens_decoder[last_id].content
        if last_token and last_token in ending:
            return ending.rpartition(last_token)[2] + further
        if last_token and further.startswith(last_token):  # the model opens the next message to end its turn
            return further[len(last_token) :]
        if last_token and last_token == self._tokenizer.eos_token:
            return further
        # The turn was cut. The token that ends it is the last special one: for Kimi and Gemma that is not the
        # tokenizer's eos.
        special = [str(t) for t in self._tokenizer.added_tokens_decoder.values() if t.special]
        at = max((ending.rfind(token) for token in special), default=-1)
        return (ending[at:] if at >= 0 else "") + further


def images_of(message: Message) -> list[Message]:
    """The parts of a message that hold an image (`image`: what `verl.data.media.open_image` takes)."""
    return [part for part in _parts_of([message]) if part.get("image") is not None]


def _parts_of(messages: Sequence[Message]) -> list[Message]:
    contents = [message.get("content") for message in messages]
    lists = [content for content in contents if isinstance(content, list)]
    return [part for content in lists for part in content if isinstance(part, Mapping)]


def without_images(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages with <image> where one holds an image, for what reads dialogues as text."""
    return [{**m, "content": _as_text(m["content"])} if images_of(m) else dict(m) for m in messages]


def _as_text(parts: list[dict[str, Any]]) -> str:
    return "".join(PLACEHOLDER if part["type"] == "image" else part.get("text", "") for part in parts)


def _with(tools: Any) -> dict[str, Any]:
    return {"tools": list(tools)} if tools else {}


def _dummies(turn: Message) -> list[Message]:
    """The model's turn with the mark for its text; arguments of calls as a mapping, then as the text that some
    templates want."""
    dummy = {"role": "assistant", "content": _MARK}
    if not turn.get("tool_calls"):
        return [dummy]
    dummies: list[Message] = []
    for form in ({"text": _MARK}, json.dumps({"text": _MARK})):
        calls = [call | {"function": call["function"] | {"arguments": form}} for call in turn["tool_calls"]]
        dummies.append(dummy | {"tool_calls": calls})
    return dummies
