# ruff: noqa: F401  (everything here is for others to import)
"""Groups of the configuration under the names that plug-ins and tests of the public system make them by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from verl.config.schema.actor import ActorConfig as _ActorConfig
from verl.config.schema.actor import CriticConfig, PolicyLossConfig
from verl.config.schema.algorithm import AlgorithmConfig as AlgoConfig
from verl.config.schema.algorithm import RolloutCorrectionConfig as _RolloutCorrectionConfig
from verl.config.schema.fields import fields_of
from verl.config.schema.training import CheckpointConfig


@dataclass
class BaseConfig(Mapping[str, Any]):
    """Base of plug-ins' own dataclasses of keys: fields as attributes and as a mapping."""

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self))

    def __len__(self) -> int:
        return len(fields(self))


class ActorConfig(_ActorConfig):
    """The policy update, with keys that are set by the system here (`rollout_n`, …)."""

    def __init__(self, **keys: Any):
        fields = fields_of(_ActorConfig)
        super().__init__(**{name: value for name, value in keys.items() if name in fields})
        self._extra.update({name: value for name, value in keys.items() if name not in fields})


class RolloutCorrectionConfig(_RolloutCorrectionConfig):
    """Rollout correction, with presets."""

    @classmethod
    def decoupled_token_icepop(cls, threshold: str = "0.5_5.0") -> RolloutCorrectionConfig:
        """Three policies, weights per token that are 0 outside the bounds."""
        return cls(rollout_is="token", rollout_is_threshold=threshold)

    @classmethod
    def decoupled_geo_rs_seq_tis(
        cls, is_threshold: float = 2.0, rs_threshold: float | str = "0.999_1.001"
    ) -> RolloutCorrectionConfig:
        """Three policies, truncated weights per response, responses rejected by their mean ratio."""
        weights: dict[str, Any] = {"rollout_is": "sequence", "rollout_is_threshold": is_threshold}
        return cls(**weights, rollout_rs="seq_mean_k1", rollout_rs_threshold=rs_threshold)
