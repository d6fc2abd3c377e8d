"""The two registries through which estimators and policy losses are found: built-in ones and users' own.

An algorithm is one function under one name. Names of the public interface that this release does not have
are known, so that asking for one says so; a user may put a function of their own under them.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, StrEnum
from typing import Any, TypeVar

from verl.config.schema.actor import POLICY_LOSSES

Algorithm = Callable[..., Any]
F = TypeVar("F", bound=Algorithm)
Name = str | Enum


class AdvantageEstimator(StrEnum):
    """Names of the estimators of the public interface (spec: algorithms.md §3)."""

    GAE = "gae"
    GRPO = "grpo"
    GRPO_VECTORIZED = "grpo_vectorized"
    GRPO_PASSK = "grpo_passk"
    GDPO = "gdpo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    REMAX = "remax"
    RLOO = "rloo"
    RLOO_VECTORIZED = "rloo_vectorized"
    OPO = "opo"
    GPG = "gpg"
    OPTIMAL_TOKEN_BASELINE = "optimal_token_baseline"
    TIR_OPTIMAL_TOKEN_BASELINE = "tir_optimal_token_baseline"


class Registry:
    """Functions by name.

    `kind` is how errors call them, `decorator` the name of the user's decorator, `known` every name of the
    public interface, whether there is a function for it or not.
    """

    def __init__(self, kind: str, decorator: str, known: tuple[str, ...]):
        self.kind = kind
        self.decorator = decorator
        self.known = known
        self.functions: dict[str, Algorithm] = {}

    def register(self, name: Name, functions: dict[str, Algorithm] | None = None) -> Callable[[F], F]:
        """Decorator: make a function known under `name` (str, or an enum member with a str value).

        `functions`: the table to use instead of this registry's own. ValueError if another function has the
        name already; the same function again is harmless.
        """
        table = self.functions if functions is None else functions
        key = _key(name)

        def add(function: F) -> F:
            taken = table.setdefault(key, function)
            if taken is not function:
                raise ValueError(
                    f"{self.kind} {key!r} is already registered by {taken.__module__}.{taken.__qualname__}; "
                    f"choose another name for {function.__module__}.{function.__qualname__}"
                )
            return function

        return add

    def get(self, name: Name, functions: dict[str, Algorithm] | None = None) -> Algorithm:
        """The function registered under `name`.

        ValueError for an unknown name, and for one that this release does not have; both list what is there.
        """
        table = self.functions if functions is None else functions
        key = _key(name)
        if key in table:
            return table[key]
        there = f"There are: {', '.join(sorted(table))}; your own can be added with @{self.decorator}(name)."
        if key in self.known:
            raise ValueError(f"{self.kind} {key!r} is not in this release. {there}")
        raise ValueError(f"Unknown {self.kind} simply: {key}. {there}")


def _key(name: Name) -> str:
    return str(name.value) if isinstance(name, Enum) else name


ESTIMATORS = Registry("advantage estimator", "register_adv_est", tuple(e.value for e in AdvantageEstimator))
LOSSES = Registry("policy loss", "register_policy_loss", POLICY_LOSSES)


def not_in_release(name: str, instead: str) -> Algorithm:
    """A stand-in for a function of the public interface that this release lacks: calling it raises ValueError.

    It lets a plug-in module that imports the name next to others be imported; nothing is ever computed by it.
    """

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ValueError(f"{name} is not in this release. {instead}")

    refuse.__name__ = refuse.__qualname__ = name
    return refuse
