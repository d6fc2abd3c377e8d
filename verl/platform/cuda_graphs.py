"""Recorded device work of NVIDIA and AMD devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch


class GraphRecorder:
    """CUDA graphs whose working memory is one pool for all: one of them runs at a time, and what a step made on its
    way is overwritten by the next.

    Nothing limits a graph's nodes: a graph has as many as its step has launches, which tests bound (tests/pretend), and
    the callers limit how many graphs there are.

    `torch.cuda.graph` would give each graph a pool of its own, and the device's free memory back before each.
    """

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: Any = None

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        """Record the device work of `step`; returns what replays it.

        `step` must have run before with the same tensors, must write its results to memory that existed before, and
        must not wait for the device: RuntimeError if it does; the device then goes on as if nothing had been tried.
        """
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = self._stream or torch.cuda.Stream()
        torch.cuda.synchronize()
        before, place = torch.cuda.current_stream(), torch.cuda.current_device()
        random = torch.cuda.default_generators[place]
        drawn = random.clone_state()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.set_stream(self._stream)
        try:
            # Other threads may use the device meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                step()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # it repeats that the capture went wrong
                    graph.capture_end()
                # Some versions of torch end it for the allocator too, and say so here; in others the allocator and the
                # generator would take all that follows for a part of it.
                with contextlib.suppress(RuntimeError):
                    torch._C._cuda_endAllocateToPool(place, self._pool)
                    torch._C._cuda_releasePool(place, self._pool)
                random.graphsafe_set_state(drawn)
                raise
            graph.capture_end()
        finally:
            torch.cuda.set_stream(before)
        return graph.replay

    def forget(self) -> None:
        """All graphs are gone: their pool goes with them, and torch takes no new graph into a pool without graphs.

        So does the workspace that cuBLAS took from the pool for the graphs' stream: later graphs would use it, and
        whoever clears workspaces would free it under them.
        """
        if self._pool is not None:
            torch._C._cuda_clearCublasWorkspaces()
        self._pool = None
