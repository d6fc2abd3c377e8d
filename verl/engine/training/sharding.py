"""How a model is cut over ranks: torch's `fully_shard` over layers and the rest.

A unit (one decoder layer, or several merged) is the piece whose weights are gathered on_all_ranks. Units are filled
and sharded one after the other; what is in no layer (embedding, last normalisation, head) is the root's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from verl.engine.training.process_group import waiting
from verl.engine.training.settings import named_dtype, read
from verl.models import load as models
from verl.platform import platform_of

if TYPE_CHECKING:
    from verl.engine.training.fuse import FusedForwards
    from verl.engine.training.heads import OutputHead
    from verl.engine.training.layout import Layout
    from verl.engine.training.tensor_parallel import TensorParallel
    from verl.engine.training.weight_source import WeightSource


@dataclass(frozen=True, slots=True)
class Policy:
    """How units are kept and gathered; see `fsdp_config`."""

    mixed: MixedPrecisionPolicy
    offload: OffloadPolicy
    reshard_after_forward: bool = True
    forward_prefetch: bool = False
    min_num_params: int = 0
    buffer_dtype: torch.dtype | None = None

    @classmethod
    def of(cls, role_cfg: Any, compute: torch.dtype, device: torch.device) -> Policy:
        """From the role's `fsdp_config`; gradients are added over ranks in float32 unless it says otherwise."""
        cfg = read(role_cfg, "fsdp_config")
        where = "fsdp_config.mixed_precision."
        reduce = named_dtype(read(cfg, "mixed_precision.reduce_dtype", "float32"), where + "reduce_dtype")
        buffers = read(cfg, "mixed_precision.buffer_dtype")
        pinned = not platform_of(device).on_host
        return cls(
            MixedPrecisionPolicy(
                param_dtype=None if compute == torch.float32 else compute, reduce_dtype=reduce
            ),
            CPUOffloadPolicy(pin_memory=pinned) if read(cfg, "offload_policy", False) else OffloadPolicy(),
            bool(read(cfg, "reshard_after_forward", True)),
            bool(read(cfg, "forward_prefetch", False)),
            int(read(cfg, "wrap_policy.min_num_params", 0)),
            None if buffers is None else named_dtype(buffers, where + "buffer_dtype"),
        )


def shard(
    head: OutputHead,
    source: WeightSource,
    where: Layout,
    policy: Policy,
    fused: FusedForwards,
    *,
    trainable: bool,
    tensor: TensorParallel | None = None,
) -> None:
    """Fill the meta parameters of the head's model from `source`, unit by unit, and cut each over the ranks.

    While a unit's weights are whole, `fused` looks which of its modules it can stand in for.
    """
    module = head.module
    names = {id(p): name for name, p in module.named_parameters()}
    places = {id(part): name for name, part in module.named_modules()}
    options: dict[str, Any] = {
        "mesh": where.mesh,
        "mp_policy": policy.mixed,
        "offload_policy": policy.offload,
    }
    units = _units(models.checkpoint_layers(module), policy.min_num_params)
    inside: set[int] = set()
    for unit in units:
        parts = [part for layer in unit for part in layer.modules()]
        inside |= {id(part) for part in parts}
        source.fill(parts, names, trainable=trainable)
        fused.add(parts, gated=tensor is None)
        _cast_buffers(parts, policy.buffer_dtype)
        if tensor is not None:
            for layer in unit:
                tensor.apply(places[id(layer)], layer)
        fully_shard(unit, reshard_after_forward=policy.reshard_after_forward, **options)
    rest = [part for part in module.modules() if id(part) not in inside]
    source.fill(rest, names, trainable=trainable)
    fused.add(rest)
    _cast_buffers(rest, policy.buffer_dtype)
    # Not freed after the forward pass: the backward pass begins with it.
    fully_shard(head, reshard_after_forward=False, **options)
    # A loss is divided by global counts already: gradients are summed over ranks, not averaged.
    for part in sharded_modules(head):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    if policy.forward_prefetch:
        first = [unit[0] for unit in units]
        for one, following in pairwise(first):
            one.set_modules_to_forward_prefetch([following])  # type: ignore[operator]


def sharded_modules(module: torch.nn.Module) -> list[FSDPModule]:
    """The roots of the units inside, itself included."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def _units(layers: Sequence[torch.nn.Module], least: int) -> list[list[torch.nn.Module]]:
    """Layers, neighbours merged until a unit has `least` parameters."""
    units: list[list[torch.nn.Module]] = []
    size = 0
    for layer in layers:
        if units and size < least:
            units[-1].append(layer)
        else:
            units.append([layer])
            size = 0
        size += sum(p.numel() for p in layer.parameters())
    return units


def _cast_buffers(parts: Iterable[torch.nn.Module], dtype: torch.dtype | None) -> None:
    for part in parts if dtype is not None else ():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                part._buffers[name] = buffer.to(dtype)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's share of a sharded tensor; any other as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor; collective for a sharded one."""
    if not isinstance(tensor, DTensor):
        return tensor
    with waiting("gathering a weight"):
        return _gathered(_on_mesh(tensor))


def _gathered(tensor: DTensor) -> torch.Tensor:
    mesh, last = tensor.device_mesh, tensor.placements[-1]
    names = mesh.mesh_dim_names or ()
    if "tensor" not in names or not isinstance(last, Shard):
        return tensor.full_tensor()
    # In the reverse of the order in which it was cut.
    shape = list(tensor.shape)
    shape[last.dim] //= mesh.size(mesh.ndim - 1)
    like = torch.empty(shape, device="meta")
    part = DTensor.from_local(
        tensor._local_tensor,
        mesh["shard"],
        [Shard(0)],
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    ).full_tensor()
    return DTensor.from_local(part, mesh["tensor"], [last], run_check=False).full_tensor()


def _on_mesh(tensor: DTensor) -> DTensor:
    """The tensor with its share on the device that its ranks talk over: an offloaded one is brought there by itself."""
    mesh = tensor.device_mesh
    if tensor._local_tensor.device.type == mesh.device_type:
        return tensor
    share = tensor._local_tensor.to(mesh.device_type)
    shape, stride = tensor.shape, tensor.stride()
    return DTensor.from_local(share, mesh, tensor.placements, run_check=False, shape=shape, stride=stride)


def take_share(target: torch.Tensor, full: torch.Tensor) -> None:
    """Copy this rank's share of a full tensor into a sharded one; the whole into any other."""
    if not isinstance(target, DTensor):
        target.copy_(full)
        return
    mesh = target.device_mesh
    place = mesh.get_coordinate()
    assert place is not None
    # Tensor parallelism, the last dimension of the mesh, cuts first.
    for number in reversed(range(mesh.ndim)):
        cut = getattr(target.placements[number], "dim", None)
        if cut is not None:
            pieces = full.chunk(mesh.size(number), cut)
            full = pieces[place[number]] if place[number] < len(pieces) else full.narrow(cut, 0, 0)
    target._local_tensor.copy_(full)
