"""Expert parallelism: each rank of a group has whole experts, and the tokens go to them and back.

    hidden, experts of each token ── sorted by rank ── all to all ──▶ rows of this rank's experts ── their products
    output ◀── weighted, added up per token ◀── all to all ◀──────────────────────────────────────────┘

What is left of an expert's weights is cut over the other ranks that share a copy of the model, as all weights are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from verl.errors import UserError
from verl.models.layers import expert_count

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ExpertParallel:
    """Spreads the experts of `module` over the last dimension of `mesh`, "expert"; the others are those of FSDP.

    Takes experts as transformers has them: a module whose parameters have one entry per expert, called with hidden
    states [S, H], experts [S, k] and their weights [S, k]. UserError for a model without such.
    """

    def __init__(self, module: PreTrainedModel, mesh: DeviceMesh, option: str):
        self._mesh, self._rest = mesh["expert"], mesh[mesh.mesh_dim_names[:-1]]  # type: ignore[index]
        self._count = expert_count(module.config)  # type: ignore[arg-type]
        if max(1, self._count) % self._mesh.size():
            raise UserError(f"{option}: does not divide the model's {self._count} experts")
        if not any(map(self._holds_experts, module.modules())):
            raise UserError(f"{option}: {type(module).__name__} does not have its experts in one module; set it to 1")

    def _holds_experts(self, module: torch.nn.Module) -> bool:
        """A router has a row of weights for each expert, too; it is called with hidden states alone."""
        stacked = [len(parameter) == self._count for parameter in module.parameters(recurse=False)]
        counted = getattr(module, "num_experts", None) == self._count and stacked and all(stacked)
        return bool(counted) and len(inspect.signature(module.forward).parameters) == 3

    def cut(self, modules: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
        """Leave this rank its experts of those modules that hold some, with whole weights; returns these modules."""
        holders = [module for module in modules if self._holds_experts(module)]
        for holder in holders:
            for name, parameter in holder._parameters.items():
                share = distribute_tensor(parameter, self._mesh, [Shard(0)], src_data_rank=None)  # type: ignore[arg-type]
                holder._parameters[name] = torch.nn.Parameter(share, requires_grad=parameter.requires_grad)  # type: ignore[union-attr]
            holder.num_experts = self._count // self._mesh.size()  # type: ignore[assignment]
            holder.forward = self._dispatching(holder, holder.forward)  # type: ignore[method-assign]
        return holders

    def options(self, of_layers: dict[str, Any]) -> dict[str, Any]:
        """Arguments of `fully_shard` for such a module: its inputs have the types that the layer gives them."""
        return of_layers | {"mesh": self._rest, "mp_policy": replace(of_layers["mp_policy"], cast_forward_inputs=False)}

    def _dispatching(
        self, holder: torch.nn.Module, compute: Callable[..., torch.Tensor]
    ) -> Callable[..., torch.Tensor]:
        group, ranks, here = self._mesh.get_group(), self._mesh.size(), self._count // self._mesh.size()

        def forward(hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            rows, chosen = hidden.reshape(-1, hidden.shape[-1]), experts.reshape(-1)
            owners = chosen // here
            order = owners.argsort(stable=True)
            tokens = order // experts.shape[-1]
            leaving = torch.bincount(owners, minlength=ranks)
            arriving = torch.empty_like(leaving)
            dist.all_to_all_single(arriving, leaving, group=group)
            there, back = leaving.tolist(), arriving.tolist()
            arrived = _Exchange.apply(rows[tokens], there, back, group)
            numbers = _Exchange.apply((chosen % here)[order], there, back, group)
            computed = self._computed(holder, compute, arrived, numbers)
            returned = _Exchange.apply(computed, back, there, group)
            weighted = returned * weights.reshape(-1)[order, None]
            out = torch.zeros_like(rows).index_add(0, tokens, weighted.to(rows.dtype))
            # No view to autograd: some architectures add to it in place, which would lose FSDP's hook on it.
            return torch.ops.aten._unsafe_view(out, hidden.shape)

        return forward

    @staticmethod
    def _computed(
        holder: torch.nn.Module, compute: Callable[..., torch.Tensor], rows: torch.Tensor, numbers: torch.Tensor
    ) -> torch.Tensor:
        """Outputs of this rank's experts `numbers`, one for each row."""
        count, whole = len(rows), dict(holder._parameters)
        if not count:  # the weights' gradients are added over ranks: each has one
            rows, numbers = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), numbers.new_zeros(1)
        # The module's own code knows nothing of ranks.
        holder._parameters.update({name: p.to_local() for name, p in whole.items() if p is not None})
        try:
            return compute(rows, numbers[:, None], rows.new_ones(len(rows), 1))[:count]
        finally:
            holder._parameters.update(whole)


class _Exchange(torch.autograd.Function):
    """Rows to the ranks of a group, `leaving[r]` of them to rank r, `arriving[r]` from there; their gradients back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, leaving: Sequence[int], arriving: Sequence[int], group: Any
    ) -> torch.Tensor:
        ctx.sizes = leaving, arriving, group
        out = rows.new_empty(sum(arriving), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), list(arriving), list(leaving), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        leaving, arriving, group = ctx.sizes
        return _Exchange.apply(gradient, arriving, leaving, group), None, None, None
