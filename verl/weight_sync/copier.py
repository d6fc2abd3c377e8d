"""Gathering and copying at the same time, and gathering to the end whatever happens to the copying."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from verl.weight_sync import buckets


class Copier:
    """Packs tensors in a thread while the caller's thread gathers the next ones.

    budget: most bytes of gathered tensors that wait (at least one tensor does). threaded: False packs each tensor in the
    caller's thread, for sinks that use a device's collectives.
    """

    def __init__(self, sink: buckets.Sink, dtype: torch.dtype | None, budget: int, *, threaded: bool = True):
        self._sink, self._dtype, self._budget, self._threaded = sink, dtype, budget, threaded
        self._queue: deque[tuple[str, torch.Tensor] | None] = deque()  # None: no more
        self._waiting_bytes = 0
        self._changed = threading.Condition()

    def run(self, weights: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Pack all weights; returns their bytes. Raises what packing raised, after `weights` is used up."""
        if not self._threaded:
            return self._inline(iter(weights))
        with ThreadPoolExecutor(1, "weight-sync-copy") as pool:
            packing = pool.submit(buckets.pack, self._take(), self._sink, dtype=self._dtype)
            packing.add_done_callback(self._notify)
            try:
                for item in weights:
                    self._put(packing, item)
            finally:
                with self._changed:
                    self._queue.append(None)
                    self._changed.notify_all()
        return packing.result()

    def _inline(self, weights: Iterator[tuple[str, torch.Tensor]]) -> int:
        try:
            return buckets.pack(weights, self._sink, dtype=self._dtype)
        finally:
            for _ in weights:  # after a failure
                pass

    def _notify(self, packing: Future[int]) -> None:
        with self._changed:
            self._changed.notify_all()

    def _put(self, packing: Future[int], item: tuple[str, torch.Tensor]) -> None:
        size = item[1].numel() * item[1].element_size()

        def room() -> bool:
            return packing.done() or not self._queue or self._waiting_bytes + size <= self._budget

        with self._changed:
            self._changed.wait_for(room)
            if not packing.done():
                self._queue.append(item)
                self._waiting_bytes += size
                self._changed.notify_all()

    def _take(self) -> Iterator[tuple[str, torch.Tensor]]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue))
                item = self._queue.popleft()
                if item is None:
                    return
                self._waiting_bytes -= item[1].numel() * item[1].element_size()
                self._changed.notify_all()
            yield item
            del item
