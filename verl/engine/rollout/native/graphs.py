"""Decode steps replayed from captured graphs: one for each batch size that is used often enough, and others where
tokens are penalised or their sets recorded.

On a GPU a decode step of a small batch costs more to launch than to compute. A step reads lengths, blocks and draws
from one matrix on the device, so a graph of a batch size serves all steps of it. To launch a step and capture it takes
as long as some twenty replays (0.6 B parameters on an H200: 65 ms against 3), and responses end one after another: a
batch that shrinks goes on in a larger size that is there, with rows that are empty.

A model whose step waits for the device cannot be captured and is sampled from without graphs. Of experts it is known
beforehand (`why_not`): their products in float32 look how many tokens each of them got.
"""

from __future__ import annotations

import warnings
from collections import Counter
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


_PATIENCE = 64
"""Steps in a larger size before a size gets a graph of its own: by the figures above about as many as it takes to pay,
where a smaller size saves a millisecond; not tuned."""


class DecodeGraphs:
    """Runs `step(rows, kind)`, from a graph where there is one. A step that runs twice must do the same."""

    def __init__(self, step: Callable[[int, Any], None], capture: GraphRecorder):
        self._step, self._capture = step, capture
        self._graphs: dict[tuple[int, Any], Callable[[], None]] = {}
        self._launched: set[tuple[int, Any]] = set()
        self._sizes: dict[Any, set[int]] = {}
        self._waited: Counter[tuple[int, Any]] = Counter()
        self._refused = False
        self.replays = 0

    def size_for(self, rows: int, kind: Any) -> int:
        """The batch size to run so many rows in: up to twice as large for the first steps, if one of these is in use.

        What was asked for since `begin_round` decides, not which graphs there are: a run that goes on from a checkpoint
        multiplies batches of the sizes that it would have had.
        """
        if self._refused:
            return rows
        sizes = self._sizes.setdefault(kind, set())
        larger = min((size for size in sizes if rows <= size <= 2 * rows), default=None)
        if larger is not None and (larger == rows or self._waited[rows, kind] < _PATIENCE):
            self._waited[rows, kind] += 1
            return larger
        sizes.add(rows)
        return rows

    def begin_round(self) -> None:
        """Forget which sizes are in use; their graphs stay."""
        self._sizes.clear()
        self._waited.clear()

    def run(self, rows: int, kind: Any) -> None:
        """One step of so many rows. The first of a size and kind is launched, the second captured, then replayed."""
        graph = self._graphs.get((rows, kind))
        if graph is None and (rows, kind) in self._launched and not self._refused:
            graph = self._captured(rows, kind)
        if graph is None:
            self._launched.add((rows, kind))
            self._step(rows, kind)
        else:
            graph()
            self.replays += 1

    def _captured(self, rows: int, kind: Any) -> Callable[[], None] | None:
        """A new graph; None, and never one again, where the step cannot be captured."""
        try:
            graph = self._graphs[rows, kind] = self._capture(partial(self._step, rows, kind))
        except RuntimeError as error:
            self._refused = True
            self.clear()
            warn_of((str(error).strip() or type(error).__name__).splitlines()[0])
            return None
        return graph

    def clear(self) -> None:
        """Give the graphs' memory back."""
        self._graphs.clear()
        self._launched.clear()
        self._capture.forget()
