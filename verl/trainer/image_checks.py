"""Proof that a run with images sees them: one check at its first step, and counts of what was done to each image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.tracking.names import Number
from verl.trajectory import Batch, Media, Prompt, Segment, Trajectory

if TYPE_CHECKING:
    from verl.trainer.colocation import Colocation
    from verl.trainer.parts import Parts


# So much more than rounding does a seen image change.
_CLEARLY = 3


class ImagesUnseen(RuntimeError):
    """What the policy says of a response does not depend on the images in front of it."""

    explained = True


class ImageRecord:
    """Of one run of a model that sees images."""

    def __init__(self, parts: Parts):
        self._parts = parts
        self._checked = False
        self._before = self._counts()

    def _counts(self) -> dict[str, int]:
        return dict(self._parts.stream.dataset.images.counts)

    def check(self, step: int, batch: Batch, colocation: Colocation) -> None:
        """At the first step with images: ImagesUnseen if one response's log-probs stay the same with blank images."""
        rows = (s for s in batch.segments if s.media is not None and s.length) if not self._checked else ()
        row = next(iter(rows), None)
        if row is None or row.media is None:
            return
        self._checked = True
        policy, probes = self._parts.workers.policy, probes_of(row, row.media)
        with colocation.computing(policy):
            policy.forward(Batch(probes), "images", {"log_probs": "old_log_probs"})
        changes = changes_of([probe.old_log_probs for probe in probes])
        refuse_unseen(step, row.uid, changes, self._parts.tracking)

    def metrics(self, batch: Batch, sampler: dict[str, float]) -> dict[str, Number]:
        """perf/images/* of a step; {} without images. sampler: its `stats()`."""
        prompts = {id(t.prompt): t.prompt for t in batch if t.prompt.media is not None}
        media = [prompt.media for prompt in prompts.values() if prompt.media is not None]
        if not media:
            return {}
        count = sum(item.images for item in media)
        now = self._counts()
        since, self._before = {name: total - self._before[name] for name, total in now.items()}, now
        out: dict[str, Number] = {"perf/images/count": count}
        out["training/images_dropped"] = images_dropped(batch)
        out["perf/images/sent_per_node"] = sum(item.images * item.puts for item in media) / count
        # Not `count`: images are drawn ahead, and for groups that are then left out of the batch.
        if drawn := since.pop("drawn"):
            out |= {f"perf/images/{name}_per_image": total / drawn for name, total in since.items()}
        if "images" in sampler:
            contexts = (s.media for t in batch for s in t.segments if s.media is not None)
            of_tools = {leaf for item in contexts for leaf in item.leaves}.difference(media)
            requested = (drawn or count) + sum(leaf.images for leaf in of_tools)
            out["perf/images/encoded_per_image/sampler"] = sampler["images"] / requested
        trained = self._parts.workers.policy.images()
        if trained.get("distinct"):
            out["perf/images/encoded_per_image/trainer"] = trained["encoded"] / trained["distinct"]
        return out


def images_dropped(batch: Batch) -> int:
    """Images of prompts that no segment of the trajectory has: an agent loop of the user's own may leave them out."""

    def most(t: Trajectory) -> int:
        return max((s.media.images for s in t.segments if s.media is not None), default=0)

    pairs = ((t, t.prompt.media) for t in batch if t.length)
    return sum(max(media.images - most(t), 0) for t, media in pairs if media is not None)


def probes_of(row: Segment, media: Media) -> list[Trajectory]:
    """The response again, alone: in front of its images, of blank ones, and of its images."""
    again = Media(media.inputs, media.tokens)  # counted as an image of its own
    return [_probe(row, shown) for shown in (media, media.blanked(), again)]


def changes_of(log_probs: Sequence[np.ndarray]) -> tuple[float, float]:
    """Of the log-probs of `probes_of`: the largest change of a token's by blank images, and by its place in a pack."""
    original, blank, again = log_probs
    return float(np.abs(original - blank).max()), float(np.abs(original - again).max())


def refuse_unseen(step: int, uid: str, changes: Sequence[float], tracking: Any) -> None:
    """An event that says that images are seen; ImagesUnseen where blank ones change no more than rounding does."""
    difference, rounding = changes
    if difference <= _CLEARLY * rounding:
        raise ImagesUnseen(
            f"step {step}: the log-probs of the response to {uid} are the same with its images blanked: the model does "
            "not see them. Is its vision tower in the checkpoint, and its processor the model's own?"
        )
    message = f"images are seen: blanked, they change a token's log-prob by up to {difference:.3g}"
    tracking.event("images_seen", step=step, uid=uid, log_prob_diff=difference, message=message)


def _probe(row: Segment, media: Media) -> Trajectory:
    """The response again, alone, in front of these images."""
    bare = Segment(row.context_ids, row.response_ids, row.response_mask, media=media)
    return Trajectory(Prompt(row.uid, row.context_ids, None, media=media), row.index, segments=[bare])
