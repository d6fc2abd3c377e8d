"""A first, small transfer over a channel: does this way of moving weights work between these processes?

Handles of device memory depend on drivers, containers and which devices a process sees; a trial finds out before a
model's weights are half loaded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from verl.platform.processes import Identity
from verl.weight_sync.shared_memory import BucketSender, receive

_NAME, _BYTES = "trial", 256


def offer(
    channel: str,
    readers: int,
    device: torch.device | None,
    timeout: float,
    expected: Sequence[Identity] = (),
) -> str:
    """The sender's side, see `BucketSender`; what went wrong, "" for nothing."""
    try:
        sender = BucketSender(channel, readers, 4096, timeout=timeout, expected=expected, device=device)
        sender.send([(_NAME, torch.arange(_BYTES, dtype=torch.uint8, device=device))], 0)
    except (
        Exception
    ) as error:  # whatever it is, this way does not work here; the caller says so and takes another
        return f"{type(error).__name__}: {error}"
    return ""


def attempt(channel: str, reader: int, timeout: float) -> str:
    """A reader's side; what went wrong, "" for nothing."""
    try:
        found = {name: tensor.cpu().clone() for name, tensor in receive(channel, reader, timeout=timeout)}
    except Exception as error:  # as above
        return f"{type(error).__name__}: {error}"
    expected = torch.arange(_BYTES, dtype=torch.uint8)
    return (
        ""
        if set(found) == {_NAME} and torch.equal(found[_NAME], expected)
        else "other bytes came than were sent"
    )
