"""A sequence classifier as a reward: dialogues in its own chat template, scored together in packed passes, or in
padded batches where the model cannot be packed (an encoder).

trajectory ──its template, its tokenizer──▶ segment ──scores, on the policy's devices──▶ the last token's value
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from verl.data.media import ImageProcessor, load_processor
from verl.data.rows import BadRow, ChatRenderer, as_messages
from verl.data.tokenizer import load_tokenizer
from verl.errors import UserError
from verl.reward.outcome import Outcome, failed, outcome_of
from verl.trajectory import Batch, Media, Prompt, Segment, Trajectory

if TYPE_CHECKING:
    from verl.config.schema.entries import Config


class RewardModel:
    """Scores responses by the sequence classifier `reward_model.model.path`.

    `scores` is set once the model is loaded: it fills the column of that name. UserError for a tokenizer without chat
    template, or one of another model.
    """

    def __init__(self, config: Config):
        from verl.models.pretrained import check_directory, load_config

        settings = config.reward_model
        path, trusted = settings.model.path, settings.model.trust_remote_code
        self.label = f"reward_model.model.path={path}"
        self.scores: Callable[[Batch], Awaitable[None]] | None = None
        text = load_config(check_directory(path), settings.model).get_text_config()
        tokenizer = load_tokenizer(path, trust_remote_code=trusted)
        self._renderer, self._limit = ChatRenderer(tokenizer), int(settings.rollout.max_model_len or 0)
        if getattr(text, "rope_parameters", None) is None:  # positions are a table of so many
            most = getattr(text, "max_position_embeddings", None) or self._limit
            self._limit = min(self._limit, most, tokenizer.model_max_length)
        processor = load_processor(path, tokenizer, {}, trust_remote_code=trusted)
        self._images = None if processor is None else ImageProcessor(processor)
        self._seen: WeakKeyDictionary[Media, Media] = WeakKeyDictionary()
        if self._images is not None and not config.reward_model.images:
            raise UserError(f"{self.label}: it sees images; set reward_model.images=True")
        self._padding = -1 if text.pad_token_id is None else text.pad_token_id
        if not self._renderer.has_template:
            raise UserError(f"{self.label}: its tokenizer has no chat template; add chat_template.jinja")
        if len(tokenizer) > text.vocab_size:
            sizes = f"its tokenizer has {len(tokenizer)} tokens, its vocabulary {text.vocab_size}"
            raise UserError(f"{self.label}: {sizes}; they do not belong together")

    def check(self, prompt: Prompt) -> None:
        """UserError where the template does not take this prompt and a response."""
        if isinstance(ids := self._ids(prompt, ""), Outcome):
            raise UserError(f"{self.label} cannot score row {prompt.row} of {prompt.file}: {ids.error}")

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Outcome]:
        """A score or a failure for each, in order. Those of a group share what their dialogues begin with."""
        assert self.scores is not None
        started = time.monotonic()
        prepared = [self._ids(t.prompt, t.text or "", t.fields.get("messages")) for t in trajectories]
        groups: dict[str, dict[int, np.ndarray]] = {}
        for i, ids in enumerate(prepared):
            if not isinstance(ids, Outcome):
                groups.setdefault(trajectories[i].uid, {})[i] = ids
        rows: dict[int, Trajectory] = {}
        for members in groups.values():
            prompt = trajectories[next(iter(members))].prompt
            media = None if prompt.media is None else self._seen.get(prompt.media)
            for i, segment in zip(members, _segments([*members.values()], media), strict=True):
                rows[i] = Trajectory(trajectories[i].prompt, trajectories[i].index, segments=[segment])
        if rows:
            await self.scores(Batch(rows.values()))
        seconds = (time.monotonic() - started) / max(1, len(trajectories))
        scored = {i: outcome_of(float(row.scores[-1]), seconds) for i, row in rows.items()}
        return [ids if isinstance(ids, Outcome) else scored[i] for i, ids in enumerate(prepared)]

    def _ids(self, prompt: Prompt, response: str, dialogue: Any = None) -> np.ndarray | Outcome:
        """Token ids of the dialogue in the model's template, or why it cannot be scored. dialogue: of an agent loop.

        transformers takes the score at the last token that is not padding, and padding may be an end token.
        """
        try:
            images = self._images is not None
            turns = [*as_messages(prompt.messages, images=images), {"role": "assistant", "content": response}]
            if isinstance(dialogue, list) and dialogue:
                turns = dialogue
            text = self._renderer.text(turns, generation=False)
            ids = self._renderer.ids(text)
            if self._images is not None:
                files = () if prompt.media is None else prompt.media.files
                if prompt.media is not None and prompt.media not in self._seen:
                    self._seen[prompt.media] = self._images(text, files, Path())[1]
                ids = np.repeat(ids, self._images.expanded(ids, files, Path()))
        except BadRow as error:
            return failed("exception", str(error))
        used = np.flatnonzero(ids != self._padding)
        ids = ids[: used[-1] + 1] if len(used) else ids[:0]
        if 0 < len(ids) <= self._limit:
            return ids
        limit = f"the limit is {self._limit} (reward_model.rollout.max_model_len, the model's)"
        return failed("value", f"{len(ids)} tokens; {limit}")


def _segments(sequences: Sequence[np.ndarray], media: Media | None) -> list[Segment]:
    """A segment for each sequence of a group, with one token more: a sequence is scored at the token after it."""
    length = min(map(len, sequences))
    same = np.logical_and.reduce([ids[:length] == sequences[0][:length] for ids in sequences])
    shared = length if same.all() else int(same.argmin())
    context, start = sequences[0][:shared], max(1, shared)
    rests = [np.append(ids[start:], 0) for ids in sequences]
    contexts = [context if shared else ids[:1] for ids in sequences]
    return [Segment(c, r, np.ones(len(r), bool), media=media) for c, r in zip(contexts, rests, strict=True)]
