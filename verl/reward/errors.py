"""What can go wrong with a reward, as exceptions. A failed score is never turned into a number."""

from __future__ import annotations

from verl.errors import UserError


class RewardError(Exception):
    """Base of all errors of this package."""


class RewardLoadError(UserError, RewardError, ValueError):
    """The reward function cannot be used as configured: no such file, no such name, wrong arguments."""


class BadScore(RewardError, ValueError):
    """A reward function returned something that is not a score."""


class UnknownSource(RewardError, ValueError):
    """No built-in rule for a data_source."""


class VerifyFailed(RewardError, RuntimeError):
    """math-verify could not decide (time limit, crash, an error of its own): the response is failed, not wrong."""


class RewardPrecheckError(UserError, RewardError, ValueError):
    """The reward function failed on the first rows, before the run."""


class RewardErrorLimit(RewardError, UserError, RuntimeError):
    """More responses of a step failed to score than `reward_model.max_error_ratio` allows."""
