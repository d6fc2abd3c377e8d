"""Importing this module fills the registries with the estimators and losses of the package."""

from verl.algorithms import advantage, covariance_loss, policy_loss, sequence_loss, token_advantage

__all__ = ["advantage", "covariance_loss", "policy_loss", "sequence_loss", "token_advantage"]
