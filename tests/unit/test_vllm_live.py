"""What vLLM says of a response: log-probs as flat lists, or one dict per token."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from verl.engine.rollout.vllm.live import Live

IDS = [5, 9, 5]


class Flat:
    """Lists over all positions, and a sequence of dicts for those who want that."""

    def __init__(self, positions: list[dict[int, float]]):
        self.positions = positions
        self.token_ids = [token for found in positions for token in found]
        self.logprobs = [value for found in positions for value in found.values()]

    def __iter__(self) -> Iterator[Any]:
        for found in self.positions:
            yield {token: SimpleNamespace(logprob=value) for token, value in found.items()}


@pytest.mark.parametrize(
    "rows",
    [
        [{5: SimpleNamespace(logprob=-1.0)}, {9: SimpleNamespace(logprob=-2.0)}, {5: SimpleNamespace(logprob=-3.0)}],
        Flat([{5: -1.0}, {9: -2.0}, {5: -3.0}]),
        Flat([{7: -0.1, 5: -1.0}, {9: -2.0}, {5: -3.0, 8: -4.0}]),
        Flat([{5: -1.0, 9: -7.0}, {9: -2.0}, {5: -3.0}]),
    ],
    ids=["dicts", "flat", "flat with others before", "flat with others after"],
)  # fmt: skip
def test_log_probs_are_the_sampled_tokens(rows: Any) -> None:
    response = SimpleNamespace(token_ids=IDS, logprobs=rows, finish_reason="length")
    done = Live("a", [1], [0]).completion(SimpleNamespace(outputs=[response]))
    assert done.token_ids.tolist() == IDS and done.log_probs.tolist() == [-1.0, -2.0, -3.0]


def test_tokens_without_log_probs_are_an_error() -> None:
    response = SimpleNamespace(token_ids=IDS, logprobs=None, finish_reason="stop")
    with pytest.raises(RuntimeError, match="without their log-probs"):
        Live("a", [1], [0]).completion(SimpleNamespace(outputs=[response]))
