"""The receiving side of a weight transfer: what a sampling engine with weights of its own offers next to sampling."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any


class WeightReceiver(ABC):
    """Replaces the weights that an engine samples with. Calls block, come from any thread, one at a time."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Any]], version: int, *, verify: str = "") -> dict[str, str]:
        """Replace weights from (Hugging Face name, full tensor) pairs, asleep or not; those of the adapter if the
        engine has one of its own. With `verify` (`verl.weight_sync.verify`) returns checksums by name of what the
        engine then holds, or of what it received where that cannot be compared.

        Raises on unknown or missing names; the engine then refuses to sample. A tensor must stay unchanged until the
        call returns.
        """

    @property
    def weights_dtype(self) -> Any:
        """The torch data type that floating point weights may be converted to before the transfer, or None."""
        return None

    @property
    def readers(self) -> list[str]:
        """The processes that read for `receive_weights`: for each the id of the device it loads to
        (`Platform.memory_id`)."""
        return [""]

    def try_channel(self, places: Sequence[tuple[str, int]], timeout: float) -> list[str]:
        """Read a first, small transfer (`channel.offer`); what went wrong in each reader, "" for nothing."""
        from verl.weight_sync.channel import attempt

        return [attempt(*places[0], timeout)]

    def receive_weights(
        self, places: Sequence[tuple[str, int]], version: int, *, timeout: float, verify: str = ""
    ) -> dict[str, str]:
        """`load_weights` from a transfer. `places`: for each of `readers` the channel and its number there."""
        from verl.weight_sync.channel import receive

        stream = receive(*places[0], timeout=timeout, version=version)
        return self.load_weights(stream, version, verify=verify)
