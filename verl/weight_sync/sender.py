"""What a push of weights is, and the two of one process: nothing moves, or one stream of full tensors.

After a push both sides hold the same weights under one version.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from verl.weight_sync.buckets import Weights, converted
from verl.weight_sync.verify import FULL, SAMPLED, UNVERIFIED, compare, digesting

if TYPE_CHECKING:
    import torch

    from verl.engine.training.base import TrainingEngine
    from verl.weight_sync.receiver import WeightReceiver


@dataclass(frozen=True, slots=True)
class SyncResult:
    """bytes moved, seconds taken, and of how many weights it was verified that both sides have the same."""

    bytes: int
    seconds: float
    verified: int = 0


class WeightSync(ABC):
    """Moves weights from a training engine to a sampling engine."""

    _proven = False

    def push(self, version: int, *, verify: bool = False) -> SyncResult:
        """Make the sampler hold the trainer's current weights. Raises WeightSyncError when it does not.

        verify: compare everything afterwards. The first push compares a sample of every weight without being asked.
        """
        result = self._push(version, FULL if verify else UNVERIFIED if self._proven else SAMPLED)
        self._proven = True
        return result

    @abstractmethod
    def _push(self, version: int, verify: str) -> SyncResult:
        """`push`, verified as `FULL`, `SAMPLED` or `UNVERIFIED` says."""


class SharesWeights(Protocol):
    """A sampler that works on the trainer's tensors."""

    def weights_updated(self, version: int) -> None:
        """Refresh what was derived from the weights."""

    def check_shared(self, module: torch.nn.Module, verify: str) -> None:
        """WeightSyncError if `module` is not the sampler's own, or a derived copy does not have its values."""


class InProcessSync(WeightSync):
    """The sampler reads the trainer's own tensors; nothing is copied. A push tells it that the values changed (it
    refreshes what it derived from them) and names the version."""

    def __init__(self, trainer: TrainingEngine, sampler: SharesWeights):
        self._trainer, self._sampler = trainer, sampler

    def _push(self, version: int, verify: str) -> SyncResult:
        started = time.monotonic()
        self._trainer.release_cached_memory()
        self._sampler.weights_updated(version)
        module, verified = self._trainer.module, 0
        if verify:
            self._sampler.check_shared(module, verify)
            verified = len(module.state_dict())
        return SyncResult(bytes=0, seconds=time.monotonic() - started, verified=verified)


class StreamedSync(WeightSync):
    """Streams the trainer's weights into a `WeightReceiver`, one tensor at a time.

    adapter: the receiver holds the base already and is sent the adapter alone.
    """

    def __init__(self, trainer: TrainingEngine, receiver: WeightReceiver, *, adapter: bool = False):
        self._trainer, self._receiver, self._adapter = trainer, receiver, adapter

    def _push(self, version: int, verify: str) -> SyncResult:
        started = time.monotonic()
        self._trainer.release_cached_memory()  # the sampler is about to wake, first its weights and then its cache
        weights = self._trainer.adapter_weights() if self._adapter else self._trainer.named_weights()
        moved, sent, dtype = [0], dict[str, str](), self._receiver.weights_dtype
        if verify:
            weights = digesting(weights, sent, verify, dtype=dtype)
        received = self._receiver.load_weights(_counted(weights, dtype, moved), version, verify=verify)
        if verify:
            compare(sent, received)
        self._trainer.release_cached_memory()
        return SyncResult(moved[0], time.monotonic() - started, len(sent))


def _counted(weights: Weights, dtype: torch.dtype | None, moved: list[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass weights on and add up their bytes as they travel."""
    for name, tensor in weights:
        moved[0] += tensor.numel() * converted(tensor, dtype).itemsize
        yield name, tensor
