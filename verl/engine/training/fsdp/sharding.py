"""Which ranks hold which rows and which parts of the weights.

    rank = ((replica × shards + shard) … ) with sequence- and tensor-parallel neighbours next to each other

Tensor-parallel neighbours compute parts of the same products, sequence-parallel ones parts of the same packs: both
get the same rows. Weights are cut over all ranks that are no tensor-parallel neighbours, whatever rows they have.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from verl.config.layout import rank_problems
from verl.config.schema.base import setting
from verl.engine.registry import Placement
from verl.engine.training import process_group
from verl.errors import UserError
from verl.platform import platform_of


@dataclass(frozen=True, slots=True)
class Layout:
    """The ranks of one engine.

    mesh      (shard) or (replicate, shard): weights are cut over the last dimension, whole over the first; None in one
              process, where nothing is cut
    tensor    mesh of the ranks that share products, None for one
    expert    (shard, expert) or (replicate, shard, expert): the same ranks as `mesh`, experts spread over the last
              dimension; None where every rank works with all
    sequence  group of the ranks that share packs, None for one
    """

    mesh: DeviceMesh | None = None
    tensor: DeviceMesh | None = None
    expert: DeviceMesh | None = None
    sequence: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    placement: Placement = field(default_factory=Placement)

    @property
    def ranks_per_row(self) -> int:
        """Ranks that have the same rows."""
        return self.placement.ranks_per_row

    @property
    def counts_rows(self) -> bool:
        """True on one of the ranks that have the same rows: what counts rows is counted once."""
        return self.rank % self.ranks_per_row == 0

    @property
    def hybrid(self) -> bool:
        """True where the weights are there more than once."""
        return self.mesh is not None and self.mesh.ndim > 1

    @property
    def counts(self) -> bool:
        """True on one of the ranks that hold the same shards: what is summed over weights is summed once."""
        return self.mesh is None or not self.hybrid or self.mesh.get_local_rank(0) == 0


def layout(device_type: str, placement: Placement) -> Layout:
    """The layout of the default process group, or of one process. UserError for sizes that do not divide its ranks."""
    if not dist.is_initialized():
        return Layout()
    size, rank = dist.get_world_size(), dist.get_rank()
    for text, problem in rank_problems(placement, size):
        raise UserError(f"{text}: {problem}")
    sequence_size, tensor_size = placement.sequence, placement.tensor
    cut = size // tensor_size
    shard = placement.shard if 0 < placement.shard < cut else cut
    sizes = {"replicate": cut // shard, "shard": shard, "tensor": tensor_size}
    sizes = {name: count for name, count in sizes.items() if count > 1 or name == "shard"}
    every = process_group.mesh(device_type, tuple(sizes.values()), tuple(sizes))
    mesh = every[tuple(name for name in sizes if name != "tensor")]
    tensor = every["tensor"] if tensor_size > 1 else None
    sequence = expert = None
    if placement.expert > 1:
        sizes = {"replicate": cut // shard, "shard": shard // placement.expert, "expert": placement.expert}
        sizes = {name: count for name, count in sizes.items() if count > 1 or name != "replicate"}
        expert = process_group.mesh(device_type, tuple(sizes.values()), tuple(sizes))
    if sequence_size > 1:
        # Neighbours of one sequence are a tensor-parallel group apart.
        places = torch.arange(size).view(-1, sequence_size, tensor_size).movedim(1, -1)
        sequence = process_group.split(places.reshape(-1, sequence_size).tolist(), "sequence")
    return Layout(mesh, tensor, expert, sequence, rank, size, placement)


def sharded_modules(module: torch.nn.Module) -> list[FSDPModule]:
    """The roots of the units inside, itself included."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


_WHOLE_SHARE = 0.1


class MicroBatchSharding:
    """When the units of a sharded model gather weights and reduce gradients over the micro-batches of a step.

    Where gathered weights and whole float32 gradients take at most a tenth of the memory of each rank, they stay for
    all micro-batches: weights are gathered once a step and gradients reduced once. Elsewhere each pass gathers and
    reduces. All the memory there is decides, not what is free: a resumed run adds gradients in the same order.
    Collective. settings: the `ModelSettings` of the model; index: of the rank's device.
    """

    def __init__(self, root: torch.nn.Module, layout: Layout, settings: Any, index: int):
        self._root: Any = root
        self._units, self._hybrid = sharded_modules(root), layout.hybrid
        self._reshards = bool(setting(settings.fsdp, "reshard_after_forward", True))
        platform = platform_of(settings.device)
        total = platform.memory(index)[1] // (layout.size if platform.on_host else 1)
        needed = sum(p.numel() for p in root.parameters()) * (settings.compute_dtype.itemsize + 4)
        plain = not settings.streams and layout.tensor is None and layout.expert is None
        self._keeps = all(process_group.all_gather_json(plain and needed <= _WHOLE_SHARE * total))

    def begin(self) -> None:
        """Before the micro-batches of a step."""
        self._reshard_after_forward(not self._keeps and self._reshards)

    def before(self, last: bool) -> None:
        """Before each micro-batch."""
        self._root.set_is_last_backward(last)
        self._root.set_requires_all_reduce(last or not self._hybrid)
        if self._keeps:
            self._root.set_requires_gradient_sync(last)
            self._root.set_reshard_after_backward(last)

    def end(self) -> None:
        """After passes of any kind: what is whole is freed. A pass without a backward pass leaves the root's weights
        whole, and they would outlive the next update."""
        for unit in self._units:
            unit.reshard()
        self._reshard_after_forward(self._reshards)

    def _reshard_after_forward(self, on: bool) -> None:
        for unit in self._units if self._keeps else ():
            if unit is not self._root:
                unit.set_reshard_after_forward(on, recurse=False)
