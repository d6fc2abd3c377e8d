"""Requests under way in vLLM, and for how long there were any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl.engine.rollout.base import Completion, not_finite
from verl.trajectory import Media


@dataclass(slots=True)
class Live:
    """One request: the weight versions it has lived under, its images, whether it was aborted, and the number of the copy
    of the model that samples it."""

    id: str
    prompt: list[int]
    versions: list[int]
    media: Media | None = None
    aborted: bool = False
    copy: int = 0

    def completion(self, output: Any, routed: Sequence[int] = ()) -> Completion:
        """What vLLM's final output says. None: it was aborted before it began. routed: the layers with experts, where
        their routes were asked for.

        RuntimeError when vLLM gave the request up; FloatingPointError when a log-prob is not a number.
        """
        response = output.outputs[0] if output is not None else None
        ids = np.asarray(list(response.token_ids) if response else [], np.int64)
        reason = (response.finish_reason if response else None) or "abort"
        if reason not in ("stop", "length", "abort"):
            raise RuntimeError(f"vLLM gave up request {self.id!r} after {len(ids)} tokens: {reason}")
        values = response.logprobs.logprobs if response is not None and len(ids) else []
        log_probs = np.asarray(values, np.float32)
        if len(log_probs) != len(ids):
            raise RuntimeError(f"vLLM returned {len(log_probs)} log-probs for {len(ids)} tokens")
        if np.isnan(log_probs).any():
            raise not_finite(int(np.isnan(log_probs).argmax()), self.versions[-1])
        metrics = getattr(output, "metrics", None)
        routes = None
        if routed and len(ids):
            routes = np.asarray(response.routed_experts)  # of all layers: rows of zeros for those without experts
            if routes.shape[:1] != (len(self.prompt) + len(ids) - 1,):
                raise RuntimeError(f"vLLM returned routes {routes.shape} of {len(self.prompt)} + {len(ids)} tokens")
            routes = routes[:, routed].astype(np.int16)
        return Completion(
            token_ids=ids,
            log_probs=log_probs,
            finish_reason=reason,
            versions=tuple(self.versions),
            num_preempted=int(getattr(metrics, "num_preemptions", 0) or 0),
            routed_experts=routes,
        )
