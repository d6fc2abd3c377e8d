"""Decode steps replayed from captured graphs.

On a GPU a decode step of a small batch costs more to launch than to compute. A step whose signature (shapes and
blocks) has been seen before is captured, and later ones with the same signature only refill its inputs and replay.
Responses that grow together change their signature once per block, every 128 tokens. Rows are padded to whole
block_rows and responses per prompt to powers of two, so that finished responses rarely change it.

A model whose step waits for the device cannot be captured and is sampled from without graphs. Of experts it is known
beforehand (`why_not`): their products in float32 look how many tokens each of them got.

The bookkeeping is tested on CPU with a recorder that runs the step again; tests/gpu runs the platform's own.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from verl.engine.rollout.native.decode_plan import DecodePlan, Name

if TYPE_CHECKING:
    from verl.platform.cuda_graphs import GraphRecorder

_MOST = 64  # graphs kept


def why_not(model: nn.Module) -> str:
    """Why a step of the model is known to wait for the device, "" if that is not known."""
    experts = [kind for module in model.modules() if (kind := type(module).__name__).endswith("Experts")]
    return f"{experts[0]} ask the device how many tokens each expert got" if experts else ""


def warn_of(reason: str) -> None:
    """Say that sampling is slower, and why."""
    slower = "sampling is slower (rollout.enforce_eager=True does not try)"
    text = f"this model's decode steps cannot be captured as graphs, so {slower}: {reason}"
    warnings.warn(text, RuntimeWarning, stacklevel=2)


@dataclass(frozen=True, slots=True)
class _Graph:
    ids: Tensor
    positions: Tensor
    tensors: dict[Name, Tensor]
    replay: Callable[[], None]
    logits: Tensor


class DecodeGraphs:
    """The captured steps, the least recently used dropped first. They write their logits to one place."""

    def __init__(self, forward: Callable[[Tensor, Tensor], Tensor], plan: DecodePlan, capture: GraphRecorder):
        self._forward, self._plan, self._capture = forward, plan, capture
        self._graphs: OrderedDict[Hashable, _Graph | None] = OrderedDict()
        self._logits: Tensor | None = None
        self._refused = False
        self.replays = 0

    def run(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Logits [B, V] of the step that the plan was prepared for. Overwritten by the next call."""
        if self._refused:
            return self._forward(ids, positions)
        signature = self._plan.signature()
        graph = self._graphs.get(signature)
        if graph is not None:
            self._graphs.move_to_end(signature)
            graph.ids.copy_(ids)
            graph.positions.copy_(positions)
            self._plan.refill(graph.tensors)
            graph.replay()
            self.replays += 1
            return graph.logits
        logits = self._forward(ids, positions)
        repeated = signature in self._graphs
        self._graphs[signature] = self._captured(ids, positions, logits) if repeated else None
        if len(self._graphs) > _MOST:
            self._graphs.popitem(last=False)
        return logits

    def _captured(self, ids: Tensor, positions: Tensor, logits: Tensor) -> _Graph | None:
        """The step that was just made, which has made every tensor that the capture will read. None if it cannot be."""
        room = self._room(logits)

        def step() -> None:
            room.copy_(self._forward(ids, positions))

        try:
            replay = self._capture(step)
        except RuntimeError as error:
            self._refused = True
            self.clear()
            warn_of((str(error).strip() or type(error).__name__).splitlines()[0])
            return None
        return _Graph(ids, positions, self._plan.tensors, replay, room)

    def _room(self, logits: Tensor) -> Tensor:
        """Where all steps with as many rows write: each graph's own logits would add up to gigabytes."""
        rows = len(logits)
        if self._logits is None or len(self._logits) < rows:
            self._logits = torch.empty_like(logits)
        return self._logits[:rows]

    def clear(self) -> None:
        """Give the graphs' memory back."""
        self._graphs.clear()
        self._logits = None
        self._capture.forget()
