"""Capturing a step as a CUDA graph.

Never run so far: no GPU was at hand. What calls it is tested on CPU with a stand-in.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def capture(step: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """Record the device work of `step` → (replay, output). Each replay overwrites the output.

    `step` must have run before with the same tensors, allocate nothing that outlives it except its output, and
    must not wait for the device.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()
    return graph.replay, output
