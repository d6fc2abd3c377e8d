"""What the reward part reads of the configuration, checked, in one place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from verl.reward.errors import RewardLoadError
from verl.reward.pool import FunctionSpec
from verl.reward.rate import RateGate

PER_ANSWER = ("naive", "dapo", "prime", "rate_limited", "limited", "gdpo", "remote")


@dataclass(frozen=True)
class Overlong:
    """Penalty on long answers (DAPO, arXiv 2503.14476, section 3.4). Lengths in tokens."""

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
    """The resolved choices. `manager` is one of PER_ANSWER or "batch"."""

    function: FunctionSpec = field(default_factory=FunctionSpec)
    manager: str = "naive"
    num_workers: int = 8
    timeout: float = 300.0
    max_error_ratio: float = 0.1
    overlong: Overlong | None = None
    required_parts: tuple[str, ...] = ()
    rate: tuple[int | None, int | None, int | None, int] | None = None

    @classmethod
    def from_config(cls, config: Any) -> RewardSettings:
        """From the whole run's configuration. RewardLoadError for what cannot work or is not in this release."""
        model, custom = config.reward_model, config.custom_reward_function
        manager = str(model.reward_manager)
        own = _get(_get(config, "reward_manager"), "source") == "importlib"
        if own:
            function, manager = _own_manager(config)
            return cls(
                function=function,
                manager=manager,
                num_workers=int(model.num_workers),
                timeout=float(model.timeout),
                max_error_ratio=float(model.max_error_ratio),
                overlong=_overlong(config),
            )
        _refuse_later(config, manager)
        path = custom.path or None
        function = FunctionSpec(
            path=str(path) if path else None,
            name=str(custom.name),
            kwargs=_plain_dict(custom.reward_kwargs),
            batch=manager == "batch" and bool(path),
            positional=manager == "prime",
        )
        keys = _get(_get(config, "algorithm"), "gdpo_reward_keys") if manager == "gdpo" else None
        limited = manager in ("rate_limited", "limited")
        return cls(
            function=function,
            manager="batch" if function.batch else ("naive" if manager == "batch" else manager),
            num_workers=int(model.num_workers),
            timeout=float(model.timeout),
            max_error_ratio=float(model.max_error_ratio),
            overlong=_overlong(config),
            required_parts=tuple(keys or ()),
            rate=(model.max_concurrent, model.max_rpm, model.max_tpm, model.estimated_tokens_per_request)
            if limited
            else None,
        )

    def gate(self) -> RateGate | None:
        """A fresh limiter for the rate_limited manager, else None."""
        return RateGate(*self.rate) if self.rate is not None else None


def _get(group: Any, key: str) -> Any:
    """Attribute or item, None if absent."""
    if isinstance(group, dict):
        return group.get(key)
    return getattr(group, key, None)


def _plain_dict(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    return dict(value.to_dict() if hasattr(value, "to_dict") else value)


def _own_manager(config: Any) -> tuple[FunctionSpec, str]:
    """`reward_manager.source=importlib`: the class as the function of the pool, and how it is called."""
    from verl.reward.manager_class import description, load_class, one_by_one

    group = config.reward_manager
    path = _get(_get(group, "module"), "path")
    if not path:
        raise RewardLoadError(
            "reward_manager.source=importlib needs reward_manager.module.path=FILE.py and reward_manager.name=CLASS"
        )
    single = one_by_one(load_class(str(path), str(group.name)))
    spec = FunctionSpec(str(path), str(group.name), batch=not single, manager=description(config))
    return spec, "naive" if single else "batch"


def _refuse_later(config: Any, manager: str) -> None:
    if manager not in (*PER_ANSWER, "batch"):
        raise RewardLoadError(
            f"reward_model.reward_manager={manager}: managers of your own are not in this release; built in: "
            f"{', '.join((*PER_ANSWER, 'batch'))}. A custom function (custom_reward_function.path) works with each"
        )
    if _get(config.reward_model, "enable") and not config.custom_reward_function.path:
        raise RewardLoadError(
            "reward_model.enable=True: reward models are not in this release; score with custom_reward_function.path"
        )


def _overlong(config: Any) -> Overlong | None:
    kwargs = _get(config.reward_model, "reward_kwargs")
    buffer = _get(kwargs, "overlong_buffer_cfg")
    if not buffer or not _get(buffer, "enable"):
        return None
    length = int(_get(buffer, "len") or 0)
    limit = int(_get(kwargs, "max_resp_len") or _get(config.data, "max_response_length"))
    prefix = "reward_model.reward_kwargs.overlong_buffer_cfg"
    if length < 1:
        raise RewardLoadError(f"{prefix}.enable=True needs {prefix}.len of at least 1 token, it is {length}")
    if length > limit:
        raise RewardLoadError(
            f"{prefix}.len={length} is more than max_resp_len={limit}: every answer would be charged; lower len"
        )
    factor = _get(buffer, "penalty_factor")
    return Overlong(length, 1.0 if factor is None else float(factor), limit, bool(_get(buffer, "log")))
