"""The two registries through which estimators and policy losses are found, and what each declares that it needs.

An estimator is a function of `EstimatorInputs`, a loss one of `LossInputs`, each with one registration that declares
what it needs: `@ESTIMATORS.register("mine", needs={"ref_log_probs"})`. Functions with the signatures of the public
system are registered through `verl.trainer.ppo.core_algos` (verl/compat/core_algos.py). The loop runs the passes that
produce what is needed (`verl.algorithms.needs`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any, TypeVar

import numpy as np

from verl.config.schema.algorithm import ESTIMATORS as PUBLIC_ESTIMATORS
from verl.plugins import REGISTRIES

Algorithm = Callable[..., Any]
F = TypeVar("F", bound=Algorithm)
Name = str | Enum

AdvantageEstimator = StrEnum("AdvantageEstimator", [(n.upper(), n) for n in PUBLIC_ESTIMATORS])  # type: ignore[misc]
"""Names of the estimators of the public interface."""


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

    log_probs are those of the weights before the update; loss_mask (bool) is m; trajectory, group (int): which ones a
    token is of, group None without a trainer; entropy of the weights before the step's updates, None where no pass gave
    it; weights: importance weights of the correction, None without; seed of random draws.
    """

    log_probs: np.ndarray
    old_log_probs: np.ndarray
    advantages: np.ndarray
    loss_mask: np.ndarray
    trajectory: np.ndarray
    group: np.ndarray | None = None
    entropy: np.ndarray | None = None
    weights: np.ndarray | None = None
    seed: Sequence[int] = (0,)


@dataclass(frozen=True, slots=True)
class Declaration:
    """What a registration says of its function.

    needs            columns that must be there
    compares_groups  an estimator compares the responses to one prompt, so that a response left alone has no baseline
    whole            what a loss has to know of a whole mini-batch before its update
    keys             settings that it reads, for the docs
    """

    needs: frozenset[str] = frozenset()
    compares_groups: bool = False
    whole: WholeMiniBatch | None = None
    keys: tuple[str, ...] = ()


class Registry:
    """Functions by name, and what each needs. `kind` is how errors call them, `decorator` the name of the user's
    decorator. A declaration belongs to the function, whatever happens to the table."""

    def __init__(self, kind: str, decorator: str):
        self.kind = kind
        self.decorator = decorator
        self.functions: dict[str, Algorithm] = {}
        self._own: dict[str, Algorithm] = {}
        self._declared: dict[int, tuple[Algorithm, Declaration]] = {}

    def register(
        self,
        name: Name,
        needs: Collection[str] = (),
        compares_groups: bool = False,
        whole: WholeMiniBatch | None = None,
        keys: Sequence[str] = (),
    ) -> Callable[[F], F]:
        """Decorator: make a function known under `name` (str, or an enum member with a str value). See `Declaration`
        for the rest.

        ValueError if another function has the name already; the same function again is harmless.
        """
        key = _key(name)

        def add(function: F) -> F:
            registered = self.functions.setdefault(key, function)
            if registered is not function:
                raise ValueError(
                    f"{self.kind} {key!r} is already registered by {_name_of(registered)}; "
                    f"choose another name for {_name_of(function)}"
                )
            declaration = Declaration(frozenset(needs), compares_groups, whole, tuple(keys))
            self._declared[id(function)] = (function, declaration)
            if getattr(function, "__module__", "").startswith("verl."):
                self._own[key] = function
            return function

        return add

    def get(self, name: Name) -> Algorithm:
        """The function registered under `name`, ours also after a plug-in emptied the table. ValueError for an unknown
        one, which lists what is there."""
        key = _key(name)
        if function := self.functions.get(key) or self._own.get(key):
            return function
        choices = f"There are: {', '.join(sorted(self.functions))}; your own can be added with @{self.decorator}(name)."
        raise ValueError(f"Unknown {self.kind} simply: {key}. {choices}")

    def needs(self, name: Name) -> frozenset[str]:
        """Columns that the function declared. ValueError for an unknown name."""
        self.get(name)
        return self.declared(name).needs

    def declared(self, name: Name) -> Declaration:
        """What was said when the function was registered."""
        key = _key(name)
        function = self.functions.get(key) or self._own.get(key)
        return self._declared.get(id(function), (function, Declaration()))[1]

    def declare(self, function: Algorithm, declaration: Declaration) -> None:
        """Say what holds for a function that is put into the table without a registration."""
        self._declared.setdefault(id(function), (function, declaration))


def _name_of(function: Algorithm) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', repr(function))}"


def _key(name: Name) -> str:
    return str(name.value) if isinstance(name, Enum) else name


ESTIMATORS = Registry("advantage estimator", "register_adv_est")
LOSSES = Registry("policy loss", "register_policy_loss")
REGISTRIES |= {"ESTIMATORS": ESTIMATORS, "LOSSES": LOSSES}
