"""What vLLM's final output says of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from verl.engine.rollout.base import Completion
from verl.engine.rollout.hosted import Live


def completion(live: Live, output: Any, routed: Sequence[int] = ()) -> Completion:
    """See `Live.completion`. output: vLLM's last of the request; None: it was aborted before it began. routed: the
    layers with experts, where their routes were asked for."""
    if output is None:
        return live.completion("vLLM", "abort", [], [])
    response, metrics = output.outputs[0], getattr(output, "metrics", None)
    ids, routes = list(response.token_ids), None
    if routed and ids:
        routes = np.asarray(response.routed_experts)  # of all layers: rows of zeros for those without experts
        if routes.shape[:1] != (len(live.prompt) + len(ids) - 1,):
            raise RuntimeError(f"vLLM returned routes {routes.shape} of {len(live.prompt)} + {len(ids)} tokens")
        routes = routes[:, routed].astype(np.int16)
    return live.completion(
        "vLLM",
        response.finish_reason or "abort",
        ids,
        response.logprobs.logprobs if response.logprobs is not None else [],
        num_preempted=int(getattr(metrics, "num_preemptions", 0) or 0),
        prefilled=len(live.prompt) - int(getattr(output, "num_cached_tokens", 0) or 0),
        routed_experts=routes,
    )
