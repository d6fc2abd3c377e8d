"""What vLLM's final output says of a request."""

from __future__ import annotations

from typing import Any

from verl.engine.rollout.base import Completion
from verl.engine.rollout.hosted import Live


def completion(live: Live, output: Any) -> Completion:
    """See `Live.completion`. output: vLLM's last of the request; None: it was aborted before it began."""
    if output is None:
        return live.completion("vLLM", "abort", [], [])
    response, metrics = output.outputs[0], getattr(output, "metrics", None)
    return live.completion(
        "vLLM",
        response.finish_reason or "abort",
        list(response.token_ids),
        response.logprobs.logprobs if response.logprobs is not None else [],
        num_preempted=int(getattr(metrics, "num_preemptions", 0) or 0),
        prefilled=len(live.prompt) - int(getattr(output, "num_cached_tokens", 0) or 0),
    )
