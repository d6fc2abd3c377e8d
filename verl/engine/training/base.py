"""What every training engine offers. Packing, micro-batching, sharding and precision are its own business.

The engine never learns which algorithm runs: `step` receives a loss as a callable on flat response tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.errors import UserError

if TYPE_CHECKING:
    import torch

    from verl.models.layers import ModelCost
    from verl.platform import Platform
    from verl.trajectory import Segment

LOG_PROBS = ("log_probs",)
FURTHER = "further_log_probs"
"""Of tokens by the layer that predicts a token further (`verl.models.mtp`), at temperature 1; 0 where it has none
before it."""
ROUTES, SAMPLING_MASK = "routed_experts", "sampling_mask"
ON_ROWS = (ROUTES, SAMPLING_MASK)
"""Outputs that an engine puts on the rows instead of returning them."""
LOG_PROBS_AND_ENTROPY = ("log_probs", "entropy")


@dataclass(slots=True)
class MicroBatch:
    """The rows of one forward/backward, and what the loss sees of them.

    The outputs of the pass: float32 [ΣL] (of candidates [ΣL, k]) over the rows' response tokens, row after row, with
    grad; None for those that were not requested. Scratch for the loss lives in `cache`.
    """

    rows: Sequence[Segment]
    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    sum_pi_squared: torch.Tensor | None = None
    values: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    candidate_log_probs: torch.Tensor | None = None
    candidates_in_topk: torch.Tensor | None = None
    further_log_probs: torch.Tensor | None = None
    cache: dict[str, Any] = field(default_factory=dict)


# Loss of a micro-batch: returns the scalar to differentiate (already divided by the global counts, so that
# micro-batches add up) and metrics as name → (sum, weight): the logged number is Σsum / Σweight; for names that end in
# _min or _max the least or the largest sum / weight of all micro-batches.
MicroLoss = Callable[[MicroBatch], "tuple[torch.Tensor, dict[str, tuple[float, float]]]"]


@dataclass(slots=True)
class TrainStepResult:
    """Outcome of one optimizer step. `refused` says why the optimizer did not move ("" if it did).

    scale_derivative: dL/ds at s = 1, where s multiplies the head's output (logits or values); None where the engine
    cannot tell it from its gradients.
    """

    metrics: dict[str, float]
    grad_norm: float
    refused: str = ""
    tokens: int = 0
    scale_derivative: float | None = None


class TrainingEngine(ABC):
    """A model with (or, for a reference, without) an optimizer. `platform` is the kind of device it runs on.

    On several ranks every method is collective: each rank calls it, with its own rows, possibly none. A loss is
    divided by counts of the whole mini-batch, so gradients are summed over ranks, and every rank returns the same
    `TrainStepResult`.
    """

    platform: Platform
    #: The model. On one rank a sampler of this process may read its tensors.
    module: torch.nn.Module
    #: What computes outputs of hidden states: "lm" (log_probs, entropy, sum_pi_squared), "value" (values) or
    #: "score" (scores).
    head: str = "lm"
    #: Whether `forward` returns outputs on this rank. Under pipeline parallelism only the last stage's ranks do.
    holds_outputs: bool = True
    #: This rank's number among those that hold different rows, and how many they are. Ranks that share the work on
    #: the same rows (sequence parallel) have the same number.
    dp_rank: int = 0
    dp_size: int = 1

    @abstractmethod
    def forward(
        self, rows: Sequence[Segment], outputs: Collection[str] = LOG_PROBS, *, temperature: float
    ) -> dict[str, np.ndarray]:
        """Name → float32 [ΣL] over the response tokens in the order of the rows, without gradient; topk_… [ΣL, k].

        outputs: of the head's: log_probs, entropy, sum_pi_squared, and log-probs and ids of the k most likely tokens
        under softmax(logits / temperature), over the tokens of a row's sampling_mask where it has one. KeyError for one
        that the head does not have. ON_ROWS, the experts that the tokens went to and the sets that they were drawn from
        by the engine's logits, are not in the result: they are put on the rows.
        """

    @abstractmethod
    def step(
        self,
        rows: Sequence[Segment],
        loss: MicroLoss,
        outputs: Collection[str] = LOG_PROBS,
        *,
        temperature: float,
    ) -> TrainStepResult:
        """Forward and backward over micro-batches, clip, and one optimizer step. `loss` sees the `outputs`.

        Rows of a group are adjacent and their prompt is computed once where that pays. Non-finite loss or
        gradient norm: gradients are dropped, the optimizer does not move, the result says so.
        """

    @abstractmethod
    def schedule(self, total_steps: int) -> None:
        """Build the learning-rate schedule over that many training steps. Call once, before `load`."""

    @abstractmethod
    def advance(self) -> float:
        """End of a training step: move the learning-rate schedule on; returns the rate that was used."""

    @abstractmethod
    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Full tensors under Hugging Face names (tied ones too), adapters merged, streamed: the peak is one bucket."""

    @property
    def adapted(self) -> bool:
        """True where adapters are trained and the weights below them stay."""
        return False

    def without_adapter(self) -> AbstractContextManager[None]:
        """In this block the engine computes with the base: the weights that the adapter was added to.

        RuntimeError for an engine without adapters.
        """
        raise RuntimeError(f"{type(self).__name__} has no adapter to switch off")

    def fill_adapter(self, value: float, layers: Collection[str] | None = None) -> list[str]:
        """Set the second factor B of the adapters of these layers (None: of all), which begins as 0, to one value, and
        that of others to 0: a known adapter for a probe of the sampler. The names of all layers with an adapter; empty
        where the engine has none."""
        return []

    def adapter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors of the adapter under the names of peft's files (without their prefix). Empty without one."""
        return iter(())

    @abstractmethod
    def save_weights(self, directory: Path) -> None:
        """Write a Hugging Face directory that `from_pretrained` loads (weights, config, generation config).

        With an adapter: its weights merged, and itself in `lora_adapter/`, as peft loads it.
        """

    def optimizer_norm(self) -> float | None:
        """L2 norm of the optimizer's state: what a checkpoint must give back. None: not known here."""
        return None

    @abstractmethod
    def save_optimizer(self, directory: Path) -> None:
        """Write optimizer and schedule state (torch.distributed.checkpoint)."""

    @abstractmethod
    def load_weights(self, directory: Path) -> None:
        """Inverse of `save_weights`, bit for bit."""

    @abstractmethod
    def load_optimizer(self, directory: Path) -> None:
        """Inverse of `save_optimizer`, bit for bit."""

    def images(self) -> dict[str, int]:
        """Since the last call: images encoded, and how many were distinct within a pass. Empty: not counted."""
        return {}

    def cost(self) -> ModelCost | None:
        """What a forward pass takes, and the peak of all of this engine's devices together, if it is known."""
        return None

    def follow(self, other: TrainingEngine, rate: float) -> None:
        """Move the weights towards those of another engine of the same model and layout: w ← w + rate·(other − w).
        UserError where an engine cannot."""
        raise UserError(f"{type(self).__name__} cannot follow another model (update_rate of a teacher)")

    def offload(self) -> None:  # noqa: B027
        """The role is idle now: what the configuration names goes to host memory. Before it and again: nothing."""

    def onload(self, *, optimizer: bool = False) -> None:  # noqa: B027
        """Bring the weights back, and the optimizer's state too where it is wanted: `forward` needs the weights, `step`
        both; everything else works from wherever they are."""

    def release_cached_memory(self) -> None:  # noqa: B027
        """Return a device's memory that is kept for reuse, and that of gradients, to it: a sampler is about to take it.
        Not between a backward pass and its update."""
