"""Which ranks hold which rows and which parts of the weights.

    rank = ((replica × shards + shard) … ) with sequence- and tensor-parallel neighbours next to each other

Tensor-parallel neighbours compute parts of the same products, sequence-parallel ones parts of the same packs: both
get the same rows. Weights are cut over all ranks that are no tensor-parallel neighbours, whatever rows they have.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from verl.config.layout import Sizes, rank_problems
from verl.engine.training import process_group
from verl.errors import UserError


@dataclass(frozen=True, slots=True)
class Layout:
    """The ranks of one engine.

    mesh      (shard) or (replicate, shard): weights are cut over the last dimension, whole over the first; None in one
              process, where nothing is cut
    tensor    mesh of the ranks that share products, None for one
    sequence  group of the ranks that share packs, None for one
    """

    mesh: DeviceMesh | None = None
    tensor: DeviceMesh | None = None
    sequence: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    tensor_size: int = 1
    sequence_size: int = 1

    @property
    def dp_rank(self) -> int:
        return self.rank // (self.tensor_size * self.sequence_size)

    @property
    def dp_size(self) -> int:
        return self.size // (self.tensor_size * self.sequence_size)

    @property
    def speaks(self) -> bool:
        """True on one of the ranks that have the same rows: what counts rows is counted once."""
        return self.rank % (self.tensor_size * self.sequence_size) == 0

    @property
    def hybrid(self) -> bool:
        return self.mesh is not None and self.mesh.ndim > 1

    @property
    def counts(self) -> bool:
        """True on one of the ranks that hold the same shards: what is summed over weights is summed once."""
        return self.mesh is None or not self.hybrid or self.mesh.get_local_rank(0) == 0

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor_size

    def groups(self) -> str:
        """This rank's groups in words: what it may wait for in a pass."""
        if self.mesh is None:
            return ""
        found = {name: self.mesh.get_group(name) for name in self.mesh.mesh_dim_names or ()}
        found |= {"tensor": self.tensor.get_group()} if self.tensor is not None else {}
        found |= {"sequence": self.sequence} if self.sequence is not None else {}
        ranks = {name: dist.get_process_group_ranks(group) for name, group in found.items()}
        return "; ".join(f"{name} group: ranks {_short(r)}" for name, r in ranks.items() if len(r) > 1)


def _short(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks if len(ranks) <= 8 else [*ranks[:4], "…", ranks[-1]]))


def layout(device_type: str, fsdp_size: int, sequence_size: int, tensor_size: int = 1) -> Layout:
    """The layout of the default process group, or of one process. UserError for sizes that do not divide its ranks.

    fsdp_size: ranks that share one copy of the weights; ≤ 0 or as many as there are: all.
    """
    if not dist.is_initialized():
        return Layout()
    size, rank = dist.get_world_size(), dist.get_rank()
    both = tensor_size * sequence_size
    for text, problem in rank_problems(Sizes(sequence_size, tensor_size, fsdp_size), size):
        raise UserError(f"{text}: {problem}")
    cut = size // tensor_size
    shard = cut if fsdp_size <= 0 or fsdp_size >= cut else fsdp_size
    shape, names = ((shard,), ("shard",)) if shard == cut else ((cut // shard, shard), ("replicate", "shard"))
    tensor = None
    if tensor_size > 1:
        whole = process_group.mesh(device_type, (*shape, tensor_size), (*names, "tensor"))
        mesh, tensor = whole[names if len(names) > 1 else names[0]], whole["tensor"]
    else:
        mesh = process_group.mesh(device_type, shape, names)
    sequence = None
    if sequence_size > 1:
        # Neighbours of one sequence are a tensor-parallel group apart.
        sequences = [
            list(range(first + neighbour, first + both, tensor_size))
            for first in range(0, size, both)
            for neighbour in range(tensor_size)
        ]
        sequence = process_group.split(sequences, "sequence")
    return Layout(mesh, tensor, sequence, rank, size, tensor_size, sequence_size)
