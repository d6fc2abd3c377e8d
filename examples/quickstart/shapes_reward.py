"""1.0 for the right number after `#### `, as for GSM8K."""

from typing import Any

from verl.utils.reward_score import default_compute_score


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **kwargs: Any
) -> float:
    """The score of one response, whichever image its question had."""
    return float(default_compute_score("openai/gsm8k", solution_str, ground_truth))
