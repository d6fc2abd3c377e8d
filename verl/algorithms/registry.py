"""The two registries through which estimators and policy losses are found, and what each declares that it needs.

An algorithm is one function, one registration and the columns that it needs: `@register_adv_est("mine", needs={"ref_log_probs"})`.
The loop runs the passes that produce what is needed (`verl.algorithms.needs`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any, TypeVar

import numpy as np

from verl.config.schema.algorithm import ESTIMATORS as PUBLIC_ESTIMATORS
from verl.trajectory import COLUMNS

Algorithm = Callable[..., Any]
F = TypeVar("F", bound=Algorithm)
Name = str | Enum

AdvantageEstimator = StrEnum("AdvantageEstimator", [(n.upper(), n) for n in PUBLIC_ESTIMATORS])  # type: ignore[misc]
"""Names of the estimators of the public interface."""

_COLUMN_OF = {column.public: name for name, column in COLUMNS.items() if column.public}


@dataclass(frozen=True, slots=True)
class WholeMiniBatch:
    """A value per token that follows from all tokens of a mini-batch, on all ranks: the column `mini_batch_values`.

    compute        (MiniBatchTokens, actor config) → [ΣL], before the update and with the weights of that moment
    only_segments  it is needed only where a trajectory has several segments; otherwise its row says all
    """

    compute: Callable[[MiniBatchTokens, Any], np.ndarray]
    only_segments: bool = False


@dataclass(frozen=True, slots=True)
class MiniBatchTokens:
    """The response tokens of a mini-batch, segment after segment; float64 [ΣL].

    log_probs are those of the weights before the update; loss_mask (bool) is m; trajectory (int): which one a token is of;
    weights: importance weights of the correction, None without; seed of random draws.
    """

    log_probs: np.ndarray
    old_log_probs: np.ndarray
    advantages: np.ndarray
    loss_mask: np.ndarray
    trajectory: np.ndarray
    weights: np.ndarray | None = None
    seed: Sequence[int] = (0,)


@dataclass(frozen=True, slots=True)
class Declaration:
    """What a registration says of its function: columns it needs, what it has to know of a whole mini-batch, settings it reads."""

    needs: frozenset[str] = frozenset()
    whole: WholeMiniBatch | None = None
    keys: tuple[str, ...] = ()


class Registry:
    """Functions by name, and what each needs. `kind` is how errors call them, `decorator` the name of the user's decorator."""

    def __init__(self, kind: str, decorator: str):
        self.kind = kind
        self.decorator = decorator
        self.functions: dict[str, Algorithm] = {}
        self._own: dict[str, Algorithm] = {}
        self._declared: dict[str, Declaration] = {}

    def register(
        self,
        name: Name,
        needs: Collection[str] = (),
        whole: WholeMiniBatch | None = None,
        keys: Sequence[str] = (),
    ) -> Callable[[F], F]:
        """Decorator: make a function known under `name` (str, or an enum member with a str value).

        needs: names of columns that must be there when it is called, beside those that its required parameters name.
        whole: what a loss has to know of a whole mini-batch before its update. keys: settings that it reads, for the docs.
        ValueError if another function has the name already; the same function again is harmless.
        """
        key = _key(name)

        def add(function: F) -> F:
            taken = self.functions.setdefault(key, function)
            if taken is not function:
                raise ValueError(
                    f"{self.kind} {key!r} is already registered by {taken.__module__}.{taken.__qualname__}; "
                    f"choose another name for {function.__module__}.{function.__qualname__}"
                )
            self._declared[key] = Declaration(frozenset(needs), whole, tuple(keys))
            if function.__module__.startswith("verl."):
                self._own[key] = function
            return function

        return add

    def get(self, name: Name) -> Algorithm:
        """The function registered under `name`, ours also after a plug-in emptied the table. ValueError for an unknown one, which
        lists what is there."""
        key = _key(name)
        if found := self.functions.get(key) or self._own.get(key):
            return found
        there = f"There are: {', '.join(sorted(self.functions))}; your own can be added with @{self.decorator}(name)."
        raise ValueError(f"Unknown {self.kind} simply: {key}. {there}")

    def needs(self, name: Name) -> frozenset[str]:
        """Columns that the function must find: those declared, and those that its required parameters name."""
        parameters = inspect.signature(self.get(name)).parameters.values()
        required = {_COLUMN_OF.get(p.name, p.name) for p in parameters if p.default is p.empty}
        offered = {*_COLUMN_OF.values(), "reward_baselines"}
        return self.declared(name).needs | (required & offered)

    def declared(self, name: Name) -> Declaration:
        """What was said when the function was registered."""
        return self._declared.get(_key(name), Declaration())


def _key(name: Name) -> str:
    return str(name.value) if isinstance(name, Enum) else name


ESTIMATORS = Registry("advantage estimator", "register_adv_est")
LOSSES = Registry("policy loss", "register_policy_loss")
