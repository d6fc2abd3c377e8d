"""Decode steps replayed from captured graphs: one for each batch size that `verl.engine.rollout.native.step.bucket` knows,
and others where tokens are penalised or their sets recorded.

On a GPU a decode step of a small batch costs more to launch than to compute. A step reads lengths, blocks and draws
from one matrix on the device, so a graph of a batch size serves all steps of it.

A model whose step waits for the device cannot be captured and is sampled from without graphs. Of experts it is known
beforehand (`why_not`): their products in float32 look how many tokens each of them got.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from verl.platform.cuda_graphs import GraphRecorder


def why_not(model: nn.Module) -> str:
    """Why a step of the model is known to wait for the device, "" if that is not known."""
    experts = [kind for module in model.modules() if (kind := type(module).__name__).endswith("Experts")]
    return f"{experts[0]} ask the device how many tokens each expert got" if experts else ""


def warn_of(reason: str) -> None:
    """Say that sampling is slower, and why."""
    slower = "sampling is slower (rollout.enforce_eager=True does not try)"
    text = f"this model's decode steps cannot be captured as graphs, so {slower}: {reason}"
    warnings.warn(text, RuntimeWarning, stacklevel=2)


class DecodeGraphs:
    """Runs `step(rows, kind)`, from a graph where there is one. A step that runs twice must do the same."""

    def __init__(self, step: Callable[[int, Any], None], capture: GraphRecorder):
        self._step, self._capture = step, capture
        self._graphs: dict[tuple[int, Any], Callable[[], None]] = {}
        self._refused = False
        self.replays = 0

    def run(self, rows: int, kind: Any) -> None:
        """One step of so many rows. The first of a kind is launched, then captured for those to come."""
        graph = self._graphs.get((rows, kind))
        if graph is not None:
            graph()
            self.replays += 1
            return
        self._step(rows, kind)
        if self._refused:
            return
        try:
            self._graphs[rows, kind] = self._capture(partial(self._step, rows, kind))
        except RuntimeError as error:
            self._refused = True
            self.clear()
            warn_of((str(error).strip() or type(error).__name__).splitlines()[0])

    def clear(self) -> None:
        """Give the graphs' memory back."""
        self._graphs.clear()
        self._capture.forget()
