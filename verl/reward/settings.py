"""What the reward part reads of the configuration, checked, in one place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from verl.config.reward_weights import SCORES, weights_of
from verl.reward.managers import charges_overlong, load_class, manager_function, options_of
from verl.reward.pool import FunctionSpec, Rate

if TYPE_CHECKING:
    from verl.config.schema.entries import Config


@dataclass(frozen=True)
class Overlong:
    """Penalty on long responses (DAPO, arXiv 2503.14476, section 3.4). Lengths in tokens."""

    length: int
    factor: float
    limit: int
    log: bool = False

    def penalty(self, tokens: int) -> float:
        """min(0, -(tokens - E) / length · factor), E = limit - length: 0 up to E, -factor at the limit."""
        over = tokens - (self.limit - self.length)
        return min(0.0, -over / self.length * self.factor)


@dataclass(frozen=True)
class RewardSettings:
    """The resolved choices. `rate`: limits of calls; `weights`: see `weights_of`; `groups_metric`: the value that
    groups are filtered by, if it is not the score."""

    function: FunctionSpec = field(default_factory=FunctionSpec)
    num_workers: int = 8
    timeout: float = 300.0
    max_error_ratio: float = 0.1
    overlong: Overlong | None = None
    required_parts: tuple[str, ...] = ()
    groups_metric: tuple[str, ...] = ()
    rate: Rate | None = None
    weights: dict[str, float] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: Config, offered: dict[str, Any] | None = None) -> RewardSettings:
        """From the whole run's checked configuration; `offered` as in `FunctionSpec`. RewardLoadError for a manager
        class that cannot be used."""
        model = config.reward_model
        is_custom = config.reward_manager.source == "importlib"
        function = manager_function(config, offered or {}) if is_custom else _function(config, offered or {})
        kind = load_class(str(function.path), function.name) if is_custom else None
        manager = "" if is_custom else model.reward_manager
        limited = manager in ("rate_limited", "limited") or getattr(kind, "rate_limited", False)
        groups = config.algorithm.filter_groups
        counted_on = manager == "gdpo" or config.algorithm.adv_estimator in ("gdpo", "mo_grpo")
        parts = config.algorithm.gdpo_reward_keys or () if counted_on else ()
        sandboxes = model.sandbox_fusion.max_concurrent if function.path is None else model.num_workers
        limits = (model.max_concurrent, model.max_rpm, model.max_tpm, model.estimated_tokens_per_request)
        return cls(
            function=function,
            num_workers=min(model.num_workers, sandboxes),
            timeout=model.timeout,
            max_error_ratio=model.max_error_ratio,
            overlong=None if charges_overlong(kind) else _overlong(config),
            required_parts=tuple(part for part in parts if part not in ("score", "reward")),
            groups_metric=(groups.metric,) if groups.enable and groups.metric not in SCORES else (),
            rate=limits if limited else None,
            weights=weights_of(config),
        )


def _function(config: Config, offered: dict[str, Any]) -> FunctionSpec:
    """The custom function or the built-in table, as a built-in manager calls it."""
    custom, manager = config.custom_reward_function, config.reward_model.reward_manager
    path = custom.path or None
    return FunctionSpec(
        path=path,
        name=custom.name,
        kwargs=dict(custom.reward_kwargs) if path else options_of(config),
        batch=manager == "batch" and path is not None,
        positional=4 if manager == "prime" else 0,
        offered=offered,
    )


def _overlong(config: Config) -> Overlong | None:
    kwargs = config.reward_model.reward_kwargs
    buffer = kwargs.overlong_buffer_cfg
    if not buffer.enable:
        return None
    return Overlong(buffer.len, buffer.penalty_factor, kwargs.max_resp_len, buffer.log)
