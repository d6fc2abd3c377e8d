"""Tensor parallelism inside of layers, after the plan that transformers has for an architecture.

    x ── q, k, v (columns cut: heads) ── attention ── o (rows cut) ── add over ranks ──▶ y
    x ── gate, up (columns cut) ────────────────────── down (rows cut) ── add over ranks ──▶ y

Embedding, head and normalisations stay whole. A weight that is whole and is used on a rank's own heads alone (the
normalisation of queries and keys) has only a part of its gradient on each rank: those parts are added at the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from verl.engine.training.process_group import local
from verl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
_PARTIAL = "replicated_with_grad_allreduce"


class TensorParallel:
    """The plan of `module` over the ranks of `mesh`. UserError for a model without a plan that fits."""

    def __init__(self, module: PreTrainedModel, mesh: DeviceMesh):
        self._mesh, self._size = mesh, mesh.size()
        kind = type(module).__name__
        # What is outside of layers is the root's, and stays whole.
        plan = {name: style for name, style in (module.tp_plan or {}).items() if "*" in name}
        self._plan = [(re.escape(name).replace(r"\*", r"\d+"), style) for name, style in plan.items()]
        option = f"fsdp_config.tensor_parallel_size={self._size}"
        if not plan:
            raise UserError(f"{option}: transformers has no plan for {kind}; set it to 1")
        for name, part in module.named_modules():
            style = self._style(name)
            fits = isinstance(part, torch.nn.Linear) if style in _STYLES else style in (None, _PARTIAL)
            if not fits:
                raise UserError(f"{option}: {name} of {kind} cannot be cut ({style}); set it to 1")
        for name in self._unplanned(module):
            raise UserError(
                f"{option}: {name} of {kind} works on parts of what is cut, and its plan says nothing of it; "
                "set it to 1"
            )

    def _unplanned(self, module: PreTrainedModel) -> Iterator[str]:
        """Weights beside cut ones, without a style: each rank would have a part of their gradient and make its own of
        them (the learned activation between Apertus's cut layers)."""
        cut = [name for name, _ in module.named_modules() if self._style(name) in _STYLES]
        for parent in dict.fromkeys(name.rpartition(".")[0] for name in cut):
            for name, _ in module.get_submodule(parent).named_parameters(parent):
                if self._style(name.rpartition(".")[0]) is None:
                    yield name

    def _style(self, name: str) -> str | None:
        return next((style for pattern, style in self._plan if re.fullmatch(pattern, name)), None)

    def apply(self, name: str, layer: torch.nn.Module) -> None:
        """Cut the weights of a layer, which are whole and the same on every rank, and make it compute with them."""
        styles = {inner: self._style(f"{name}.{inner}") for inner, _ in layer.named_modules()}
        plan = {inner: _STYLES[style]() for inner, style in styles.items() if style in _STYLES}
        parallelize_module(layer, self._mesh, plan, src_data_rank=None)

    def complete(self, parameters: dict[str, torch.nn.Parameter]) -> None:
        """Add up the gradients that each rank has a part of. Collective."""
        group = self._mesh.get_group()
        for name, parameter in parameters.items():
            if self._style(name.rpartition(".")[0]) == _PARTIAL and parameter.grad is not None:
                dist.all_reduce(local(parameter.grad), group=group)

    def own(self, parameter: torch.Tensor) -> bool:
        """True if this parameter is cut over the mesh, or this rank is the one to count it."""
        if self._mesh.get_local_rank() == 0:
            return True
        if not isinstance(parameter, DTensor):
            return False
        places = zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True)
        return any(name == "tensor" and isinstance(place, Shard) for name, place in places)
