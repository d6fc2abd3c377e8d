"""Supervised learning beside reinforcement learning in one step: the demonstration of each prompt joins its group."""

from __future__ import annotations

from typing import Any

import numpy as np

from verl.config.schema.actor import DemonstrationsConfig
from verl.errors import UserError
from verl.trajectory import COLUMNS, Batch, Prompt, Segment, Trajectory


def share(config: DemonstrationsConfig, step: int) -> float:
    """μ of a step (from 1): up to `mu` over `warmup_steps`, then in a line down to `final_mu` over `decay_steps`."""
    if step <= config.warmup_steps:
        return config.mu * step / config.warmup_steps
    if not config.decay_steps:
        return config.mu
    progress = min(1.0, (step - config.warmup_steps) / config.decay_steps)
    return config.mu + progress * (config.final_mu - config.mu)


class Demonstrations:
    """The rows' demonstrations as responses: loss = (1 − μ)·policy loss + μ·cross-entropy of the demonstrations.

    Advantages are multiplied by 1 − μ; the column `demonstration_weights` is μ on a demonstration's tokens. Source:
    CHORD, arXiv 2508.11408.
    """

    def __init__(self, config: DemonstrationsConfig, tokenizer: Any):
        self._config, self._tokenizer = config, tokenizer

    def __call__(self, batch: Batch, step: int) -> Batch:
        """The batch with a demonstration at the end of each group; itself where μ is 0."""
        mu = share(self._config, step)
        if not mu or not len(batch):
            return batch
        for t in batch:
            t.advantages = (t.advantages * np.float32(1 - mu)).astype(np.float32)
        like = batch[0].segments[0]
        rows = [
            t for group in batch.groups() for t in [*group, self._demonstration(group[0].prompt, len(group), like, mu)]
        ]
        for t in rows:
            for segment in t.segments:
                if segment.column("demonstration_weights") is None:
                    segment.put("demonstration_weights", np.zeros(segment.length, np.float32))
        return Batch(rows, batch.meta)

    def _demonstration(self, prompt: Prompt, index: int, like: Segment, mu: float) -> Trajectory:
        """Its columns are those of `like`, 0."""
        text = self._text(prompt)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if self._tokenizer.eos_token_id is not None:
            ids = [*ids, self._tokenizer.eos_token_id]
        none = np.zeros(len(ids), bool)
        segment = Segment(prompt.ids, np.array(ids, np.int64), none, media=prompt.media)
        for name, values in like.columns.items():
            if name not in segment.columns:
                segment.put(name, np.zeros((len(ids), *np.shape(values)[1:]), COLUMNS[name].dtype))
        segment.put("loss_mask", none)
        segment.put("demonstration_weights", np.full(len(ids), mu, np.float32))
        return Trajectory(prompt, index, segments=[segment], text=text)

    def _text(self, prompt: Prompt) -> str:
        key = str(self._config.column)
        text = (prompt.extra_info or {}).get(key, prompt.columns.get(key))
        if key == "ground_truth" and text is None:
            text = prompt.ground_truth
        if not isinstance(text, str) or not text:
            raise UserError(
                f"actor_rollout_ref.actor.demonstrations.column={key}: {prompt.file} row {prompt.row} has no text "
                "there, in extra_info or in a column of that name"
            )
        return text
