"""Experts of an earlier pass, replayed in megatron-core's routers, or recorded there.

Each router has an object that chooses for it in the place of megatron-core's `RouterReplay`, which takes no tokens
whose experts are unknown and records one micro-batch. Layers that are computed again in the backward pass choose as
they did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import unwrap_model
from torch import Tensor

from verl.engine.training.megatron.micro_batches import ModelBatch, Turns
from verl.engine.training.megatron.model import MegatronModel
from verl.engine.training.packing import keep_routes
from verl.engine.training.process_group import all_gather_json
from verl.errors import UserError
from verl.trajectory import UNKNOWN_EXPERT


class Routes:
    """The routers of this rank's chunks of layers. UserError for a model without any."""

    def __init__(self, model: MegatronModel):
        self.batch: ModelBatch | None = None  # whose first pass is being computed
        self.trains = False
        self._name = type(model.outline).__name__
        routers = [
            part for chunk in model.chunks for part in unwrap_model(chunk).modules() if isinstance(part, TopKRouter)
        ]
        numbers = sorted({n for part in all_gather_json([router.layer_number for router in routers]) for n in part})
        self._layers, self._choices = len(numbers), []
        if not numbers or any(router.config.moe_router_fusion for router in routers):
            raise self._misfit(f"{len(numbers)} layers choose experts, moe_router_fusion must be off")
        self._sequence = routers[0].config.sequence_parallel if routers else False
        for router in routers:
            router.router_replay = _Choice(self, numbers.index(router.layer_number), router.topk)
            self._choices.append(router.router_replay)

    def _misfit(self, why: str) -> UserError:
        return UserError(f"router replay does not fit {self._name}: {why}; set router_replay.mode=disabled")

    def begin(self, batches: Sequence[ModelBatch], *, trains: bool, replays: bool) -> None:
        """Before all passes over these micro-batches: what is to be chosen for their tokens."""
        self.trains = trains
        for choice in self._choices:
            choice.turns.clear()
        for batch in batches:
            routes, k = batch.pack.routes if replays else None, self._choices[0].topk if self._choices else 0
            batch.seen = self._seen(batch)
            batch.used, batch.given = {}, None
            if routes is None:
                continue
            if routes.shape[1] != self._layers or (k and routes.shape[2] != k):
                raise self._misfit("the recorded routes are those of another model")
            batch.given = routes.new_full((batch.size, *routes.shape[1:]), UNKNOWN_EXPERT)
            batch.given[batch.place] = routes

    def _seen(self, batch: ModelBatch) -> Tensor:
        """The tokens of the whole layout that this rank's routers see, in their order."""
        rows, device = batch.input_ids.shape[0], batch.input_ids.device
        tokens = torch.arange(batch.size, device=device) if batch.share is None else batch.share
        tokens = tokens.view(rows, -1).t()
        if self._sequence:
            ranks = parallel_state.get_tensor_model_parallel_world_size()
            tokens = tokens.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
        return tokens.reshape(-1)

    def changed(self, batch: ModelBatch) -> Tensor | None:
        """float32 [R]: 1 for a response token whose predecessor some layer would have sent elsewhere, -1 where nothing
        is known; None where nothing was replayed. Collective."""
        if batch.given is None:
            return None
        flags = torch.full((batch.size,), -1.0, device=batch.input_ids.device)
        for index, (chosen, used) in batch.used.items():
            differs = (chosen.sort(-1).values != used.sort(-1).values).any(-1).float()
            known = batch.given[batch.seen, index, 0] != UNKNOWN_EXPERT
            flags[batch.seen] = torch.maximum(flags[batch.seen], torch.where(known, differs, -1.0))
        return _largest(flags)[batch.source]

    def keep(self, batch: ModelBatch) -> None:
        """Put the experts that the tokens went to on their rows. Collective."""
        k = next((used.shape[1] for _, used in batch.used.values()), 0)
        k = max(all_gather_json(k))
        routes = torch.full((batch.size, self._layers, k), UNKNOWN_EXPERT, device=batch.input_ids.device)
        for index, (_, used) in batch.used.items():
            routes[batch.seen, index] = used
        keep_routes(batch.pack, _largest(routes)[batch.place].cpu().numpy().astype(np.int16))


def _largest(tensor: Tensor) -> Tensor:
    """Of all ranks that have the same rows: each filled in its own layers and tokens."""
    for group in (parallel_state.get_model_parallel_group(), parallel_state.get_context_parallel_group()):
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return tensor


class _Choice:
    """One router's; `index` among all layers with experts."""

    def __init__(self, routes: Routes, index: int, topk: int):
        self.index, self.topk, self._routes = index, topk, routes
        self.turns = Turns()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        groups: Any = None,
        group_topk: Any = None,
        choose: Callable[..., Any] = torch.topk,
    ) -> tuple[Tensor, Tensor]:
        """What megatron-core's routers call: the chosen experts of each token and their scores."""
        values, chosen = choose(scores, topk, groups, group_topk)
        assert self._routes.batch is not None
        batch, computes_again = self.turns.take(self._routes.batch, trains=self._routes.trains)
        if batch.given is not None:
            given = batch.given[batch.seen, self.index]
            used = torch.where(given == UNKNOWN_EXPERT, chosen, given)
            values = scores.gather(1, used)
        else:
            used = chosen
        if not computes_again:
            batch.used[self.index] = chosen.detach(), used.detach()
        return values, used
