"""Gathering and copying at the same time, and gathering to the end whatever happens to the copying."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator

import torch

from verl.weight_sync import buckets


class Copier:
    """Packs tensors in a thread while the caller's thread gathers the next ones.

    budget: most bytes of gathered tensors that wait (at least one tensor does). threaded: False packs each tensor in the
    caller's thread, for sinks that use a device's collectives.
    """

    def __init__(self, sink: buckets.Sink, dtype: torch.dtype | None, budget: int, *, threaded: bool = True):
        self._sink, self._dtype, self._budget, self._threaded = sink, dtype, budget, threaded
        self._queue: deque[tuple[str, torch.Tensor]] = deque()
        self._waiting_bytes = 0
        self._ended = False
        self._changed = threading.Condition()
        self._moved = 0
        self._error: BaseException | None = None

    def run(self, weights: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Pack all weights; returns their bytes. Raises what packing raised, after `weights` is used up."""
        if not self._threaded:
            return self._inline(weights)
        thread = threading.Thread(target=self._pack, name="weight-sync-copy", daemon=True)
        thread.start()
        try:
            for name, tensor in weights:
                self._put(name, tensor)
        except BaseException:
            with self._changed:
                self._queue.clear()
                self._error = self._error or _Stopped()
            raise
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()
            thread.join()
        if self._error is not None:
            raise self._error
        return self._moved

    def _inline(self, weights: Iterable[tuple[str, torch.Tensor]]) -> int:
        rest = iter(weights)
        try:
            return buckets.pack(rest, self._sink, dtype=self._dtype)
        except Exception:
            for _ in rest:
                pass
            raise

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._error is not None or not self._queue or self._waiting_bytes + size <= self._budget
                )
            )
            if self._error is None:
                self._queue.append((name, tensor))
                self._waiting_bytes += size
                self._changed.notify_all()

    def _pack(self) -> None:
        try:
            self._moved = buckets.pack(self._take(), self._sink, dtype=self._dtype)
        except BaseException as error:  # carried to the caller's thread
            with self._changed:
                self._error = self._error or error
                self._queue.clear()
                self._changed.notify_all()

    def _take(self) -> Iterator[tuple[str, torch.Tensor]]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue) or self._ended)
                if self._error is not None:
                    raise self._error
                if not self._queue:
                    return
                name, tensor = self._queue.popleft()
                self._waiting_bytes -= tensor.numel() * tensor.element_size()
                self._changed.notify_all()
            yield name, tensor
            del tensor


class _Stopped(Exception):
    """The caller's iterator raised; the thread only has to end."""
