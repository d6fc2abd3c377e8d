"""Device memory that another process of this host may look at: CUDA's interprocess handles as plain data.

torch offers them as a function to call and its arguments, meant to be pickled. Here only the arguments travel, as
JSON: the receiving side calls a function of its own choice and nothing is unpickled. Never run: no machine with a
CUDA device was at hand.
"""

from __future__ import annotations

import base64
from typing import Any

import torch

_BYTES = ("handle", "ref_counter_handle", "event_handle")


def share(buffer: torch.Tensor) -> dict[str, Any]:
    """Handle of a uint8 CUDA tensor for ONE other process; the tensor must live until that one has let go."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

    rebuild, arguments = reduce_tensor(buffer)
    if rebuild is not rebuild_cuda_tensor or buffer.dtype != torch.uint8:
        raise ValueError(
            f"only uint8 tensors on a CUDA device have handles, not {buffer.dtype} on {buffer.device}"
        )
    _, size, _, offset, _, _, device, handle, nbytes, at, _, counter, counter_at, event, wait = arguments
    return {
        "uuid": _uuid(device),
        "size": int(size[0]),
        "offset": int(offset),
        "handle": base64.b64encode(handle).decode(),
        "storage_size": int(nbytes),
        "storage_offset": int(at),
        "ref_counter_handle": base64.b64encode(counter).decode(),
        "ref_counter_offset": int(counter_at),
        "event_handle": base64.b64encode(event).decode(),
        "event_sync_required": bool(wait),
    }


def open_shared(handle: dict[str, Any]) -> torch.Tensor:
    """The uint8 tensor of a handle. ValueError if its device is not among those this process can see."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    raw = {name: base64.b64decode(handle[name]) for name in _BYTES}
    return rebuild_cuda_tensor(
        torch.Tensor,
        torch.Size([handle["size"]]),
        (1,),
        handle["offset"],
        torch.storage.TypedStorage,
        torch.uint8,
        _index(handle["uuid"]),
        raw["handle"],
        handle["storage_size"],
        handle["storage_offset"],
        False,
        raw["ref_counter_handle"],
        handle["ref_counter_offset"],
        raw["event_handle"],
        handle["event_sync_required"],
    )


def synchronize(tensor: torch.Tensor) -> None:
    """Wait for everything that was asked of the tensor's device."""
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)


def device_id(device: torch.device | str) -> str:
    """What the whole machine calls a device whose memory has handles; "" for one whose memory has none."""
    found = torch.device(device)
    if found.type != "cuda":
        return ""
    return _uuid(torch.cuda.current_device() if found.index is None else found.index)


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _index(uuid: str) -> int:
    for index in range(torch.cuda.device_count()):
        if _uuid(index) == uuid:
            return index
    raise ValueError(
        f"the weights are on device {uuid}, which this process cannot see: place sampler and trainer on the same devices, "
        "or send through shared memory"
    )
