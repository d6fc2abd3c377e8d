"""The two registries through which estimators and policy losses are found, and what each declares that it needs.

An algorithm is one function, one registration and the columns that it needs: `@register_adv_est("mine", needs={"ref_log_probs"})`.
The loop runs the passes that produce what is needed (`verl.algorithms.needs`). Names of the public interface that this
release does not have are known, so that asking for one says so; a user may put a function of their own under them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from enum import Enum, StrEnum
from typing import Any, TypeVar

from verl.config.schema.actor import POLICY_LOSSES
from verl.config.schema.algorithm import ESTIMATORS as PUBLIC_ESTIMATORS
from verl.trajectory import COLUMNS

Algorithm = Callable[..., Any]
F = TypeVar("F", bound=Algorithm)
Name = str | Enum

AdvantageEstimator = StrEnum("AdvantageEstimator", [(n.upper(), n) for n in PUBLIC_ESTIMATORS])  # type: ignore[misc]
"""Names of the estimators of the public interface."""

_COLUMN_OF = {column.public: name for name, column in COLUMNS.items() if column.public}


class Registry:
    """Functions by name, and the columns that each needs.

    `kind` is how errors call them, `decorator` the name of the user's decorator, `known` every name of the
    public interface, whether there is a function for it or not.
    """

    def __init__(self, kind: str, decorator: str, known: tuple[str, ...]):
        self.kind = kind
        self.decorator = decorator
        self.known = known
        self.functions: dict[str, Algorithm] = {}
        self._needs: dict[str, frozenset[str]] = {}

    def register(self, name: Name, needs: Collection[str] = ()) -> Callable[[F], F]:
        """Decorator: make a function known under `name` (str, or an enum member with a str value).

        needs: names of columns that must be there when it is called, beside those that its required parameters name.
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
            self._needs[key] = frozenset(needs)
            return function

        return add

    def get(self, name: Name) -> Algorithm:
        """The function registered under `name`.

        ValueError for an unknown name, and for one that this release does not have; both list what is there.
        """
        key = _key(name)
        if key in self.functions:
            return self.functions[key]
        there = f"There are: {', '.join(sorted(self.functions))}; your own can be added with @{self.decorator}(name)."
        if key in self.known:
            raise ValueError(f"{self.kind} {key!r} is not in this release. {there}")
        raise ValueError(f"Unknown {self.kind} simply: {key}. {there}")

    def needs(self, name: Name) -> frozenset[str]:
        """Columns that the function must find: those declared, and those that its required parameters name."""
        parameters = inspect.signature(self.get(name)).parameters.values()
        required = {_COLUMN_OF.get(p.name, p.name) for p in parameters if p.default is p.empty}
        offered = {*_COLUMN_OF.values(), "reward_baselines"}
        return self._needs.get(_key(name), frozenset()) | (required & offered)


def _key(name: Name) -> str:
    return str(name.value) if isinstance(name, Enum) else name


ESTIMATORS = Registry("advantage estimator", "register_adv_est", PUBLIC_ESTIMATORS)
LOSSES = Registry("policy loss", "register_policy_loss", POLICY_LOSSES)


def not_in_release(name: str, instead: str) -> Algorithm:
    """A stand-in for a function of the public interface that this release lacks: calling it raises ValueError.

    It lets a plug-in module that imports the name next to others be imported; nothing is ever computed by it.
    """

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ValueError(f"{name} is not in this release. {instead}")

    refuse.__name__ = refuse.__qualname__ = name
    return refuse
