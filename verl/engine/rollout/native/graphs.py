"""Decode steps replayed from captured graphs.

On a GPU a decode step of a small batch costs more to launch than to compute. A step whose signature (shapes and
tiles) has been seen before is captured, and later ones with the same signature only refill its inputs and replay.
Answers that grow together change their signature once per tile, every 128 tokens. Rows are padded to whole banks
and answers per prompt to powers of two, so that finished answers rarely change it.

The bookkeeping is tested on CPU with a capture that re-runs the step. `verl.platform.graphs.capture`, which
records the real graph, has never run: no GPU was at hand when it was written.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from verl.engine.rollout.native.decode_plan import DecodePlan, Name

#: Runs a step for capture: returns what replays it, and its output, which each replay overwrites.
Capture = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _Graph:
    ids: torch.Tensor
    positions: torch.Tensor
    tensors: dict[Name, torch.Tensor]
    replay: Callable[[], None]
    logits: torch.Tensor


class DecodeGraphs:
    """The captured steps, the least recently used dropped first."""

    def __init__(
        self,
        forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        plan: DecodePlan,
        capture: Capture,
        most: int = 64,
    ):
        self._forward, self._plan, self._capture, self._most = forward, plan, capture, most
        self._graphs: OrderedDict[Hashable, _Graph | None] = OrderedDict()
        self.replays = 0

    def run(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits [B, V] of the step that the plan was prepared for. Overwritten by the next call."""
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
        if signature in self._graphs:
            # the step above has made every tensor that the capture will read
            replay, output = self._capture(lambda: self._forward(ids, positions))
            self._graphs[signature] = _Graph(ids, positions, self._plan.tensors, replay, output)
        else:
            self._graphs[signature] = None
        if len(self._graphs) > self._most:
            self._graphs.popitem(last=False)
        return logits

    def clear(self) -> None:
        self._graphs.clear()
