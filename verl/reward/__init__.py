"""Scores for sampled responses: built-in rules, custom functions, a pool of scoring processes, checks.

A scoring process imports this package: it loads only the rule that it runs, and torch only for a manager class.
"""

from verl.reward.rules import default_compute_score, known_sources

__all__ = ["default_compute_score", "known_sources"]
