"""Which experts each token of a mixture-of-experts model goes to: recorded in a forward pass, or replayed in one.

    scores [S, experts] ── torch.topk ──▶ the router's own experts [S, k] ──┬─ recorded
                                          experts of an earlier pass ───────┴─▶ their scores, gathered with gradient

Hugging Face's routers differ in their scores and weights, but all choose by the same call. `Routing` intercepts it
during a pass, so no architecture is patched: weights follow from the current scores, whatever the architecture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from verl.errors import UserError
from verl.models.layers import expert_count
from verl.trajectory import UNKNOWN_EXPERT

_CHOICES = (torch.topk, torch.Tensor.topk)


class Routing(TorchFunctionMode):
    """In this block, one forward pass, the routers' choices are recorded, and replaced where others are given.

    model  of the pass, for its configuration and its name
    given  int64 [S, layers, k]: experts of the pass's S tokens in each layer that has experts, or UNKNOWN_EXPERT
    passed layers with experts that came before the block

    `changed`, float32 [S] where experts are given: 1 for a token for which some layer would have chosen others, 0 where
    all agree, -1 where nothing is known.
    """

    def __init__(self, model: torch.nn.Module, given: torch.Tensor | None = None, passed: int = 0):
        super().__init__()
        self._model, self._given, self._passed = model, given, passed
        self._experts = expert_count(model.config)  # type: ignore[arg-type]
        self._found: list[torch.Tensor] = []
        self.changed = None if given is None else given[:, 0, 0].clamp(max=0).float()

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls `func`; of a choice among experts returns the one to use."""
        result = func(*args, **(kwargs or {}))
        if func not in _CHOICES or not args or args[0].shape[-1] != self._experts:
            return result
        if self._given is not None:
            result = self._replaced(args[0], result.indices, self._given)
        self._found.append(result.indices.detach())
        return result

    def _replaced(self, scores: torch.Tensor, chosen: torch.Tensor, replayed: torch.Tensor) -> Any:
        layer = self._passed + len(self._found)
        if layer >= replayed.shape[1] or chosen.numel() != replayed[:, layer].numel():
            raise UserError(self._misfit("the recorded routes are those of another model"))
        recorded = replayed[:, layer].view(chosen.shape)
        used = torch.where(recorded == UNKNOWN_EXPERT, chosen, recorded)
        differs = (chosen.sort(-1).values != used.sort(-1).values).any(-1)
        assert self.changed is not None
        self.changed.masked_fill_(differs.view(-1), 1.0)
        return torch.return_types.topk((scores.gather(-1, used), used))

    def again(self) -> Routing:
        """The same from this moment of the pass on: for layers that are computed once more in the backward pass."""
        return Routing(self._model, self._given, self._passed + len(self._found))

    def recorded(self) -> torch.Tensor:
        """The experts that were used, int64 [S, layers, k]. UserError for a model whose routers choose differently."""
        text: Any = self._model.config.get_text_config()  # type: ignore[operator, union-attr]
        if getattr(text, "topk_method", "") == "group_limited_greedy":
            raise UserError(self._misfit("it hides the scores of experts outside of the chosen groups"))
        if not self._found or (self._given is not None and len(self._found) != self._given.shape[1]):
            raise UserError(self._misfit(f"{len(self._found)} layers choose experts through torch.topk"))
        return torch.stack([experts.reshape(-1, experts.shape[-1]) for experts in self._found], 1)

    def _misfit(self, why: str) -> str:
        return (
            f"router replay does not fit {type(self._model).__name__}: {why}; set "
            "actor_rollout_ref.actor.router_replay.mode=disabled and rollout.enable_rollout_routing_replay=False"
        )
