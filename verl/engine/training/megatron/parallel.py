"""Which ranks share what: megatron-core's parallel groups, one layout for all roles of a process.

    rank order, innermost first:  tensor · context · expert · data · pipeline

Ranks of one data-parallel number have the same rows: tensor-parallel neighbours compute parts of the same products,
context-parallel ones parts of the same sequences, pipeline stages one after the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from verl.config.schema.base import setting
from verl.engine.registry import Placement
from verl.engine.training import process_group
from verl.errors import UserError


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """Parallel sizes of a role.

    tensor         ranks that share a layer's matrices
    pipeline       ranks that share the layers
    virtual        chunks of layers a rank has, None for one
    context        ranks that share a sequence
    expert         ranks that share the experts
    expert_tensor  ranks that share an expert's matrices
    """

    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1

    @classmethod
    def of(cls, placement: Placement, megatron: Any) -> ParallelSizes:
        """The sizes of a placement, and those that a role's `megatron.*` keys name beside it."""
        virtual = setting(megatron, "virtual_pipeline_model_parallel_size")
        return cls(
            placement.tensor,
            placement.pipeline,
            None if virtual in (None, 1) else int(virtual),
            placement.sequence,
            placement.expert,
            int(setting(megatron, "expert_tensor_parallel_size") or placement.tensor),
        )

    @property
    def ranks_per_row(self) -> int:
        """Ranks that have the same rows."""
        return self.tensor * self.pipeline * self.context


_joined: ParallelSizes | None = None


def join(sizes: ParallelSizes, *, follows: bool = False) -> ParallelSizes:
    """Make megatron-core's groups of this process's ranks; of a process that has joined no others, of it alone. The
    sizes in force: those of an earlier role of this process where this one `follows`.

    UserError where the sizes do not divide the ranks, or where another role of this process has other sizes:
    megatron-core has one layout in a process.
    """
    global _joined
    if _joined is not None:
        if sizes != _joined and not follows:
            raise UserError(f"megatron: {_differences(sizes, _joined)}: all roles of a process have one layout")
        return _joined
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ranks = dist.get_world_size()
    experts = sizes.expert_tensor * sizes.expert * sizes.pipeline
    for product, text in (
        (sizes.ranks_per_row, "tensor × pipeline × context"),
        (experts, "expert_tensor × expert × pipeline"),
    ):
        if ranks % product:
            raise UserError(f"megatron: {text} parallel sizes, {product} together, do not divide the {ranks} ranks")
    parallel_state.initialize_model_parallel(
        sizes.tensor,
        sizes.pipeline,
        sizes.virtual,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
        expert_tensor_parallel_size=sizes.expert_tensor,
        distributed_timeout_minutes=max(1, math.ceil(process_group.collective_limit().total_seconds() / 60)),
        create_gloo_process_groups=True,
    )
    _joined = sizes
    return sizes


def _differences(sizes: ParallelSizes, joined: ParallelSizes) -> str:
    changed = [f.name for f in fields(sizes) if getattr(sizes, f.name) != getattr(joined, f.name)]
    return ", ".join(f"{name} {getattr(sizes, name)} beside {getattr(joined, name)}" for name in changed)
