"""Weights into vLLM's workers: from a channel that somebody else writes, or from this process."""

from __future__ import annotations

import concurrent.futures
import itertools
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from verl.engine.rollout.vllm.host import LoopThread
    from verl.weight_sync.base import SyncResult
    from verl.weight_sync.shared_memory import SharedMemorySink

RPC_TIMEOUT = 600.0
"""Seconds that a call of the workers may take."""

_LOAD_TIMEOUT = 300.0
_TRIAL_TIMEOUT = 60.0


class Loading:
    """`rpc(method, args)` calls every worker (`verl.engine.rollout.vllm.worker`), on the loop of `host`; `devices[i]` is
    the id of worker i's device, "" for one whose memory has no handles. bucket_bytes: size of one bucket of `send`."""

    def __init__(
        self,
        host: LoopThread,
        rpc: Callable[..., Coroutine[Any, Any, list[Any]]],
        devices: Sequence[str],
        bucket_bytes: int,
        notice: Callable[[str], None],
    ):
        self._host, self._rpc, self._notice = host, rpc, notice
        self.devices, self._bucket_bytes = list(devices), bucket_bytes
        self._by_device: bool | None = None

    def from_channel(
        self, places: Sequence[tuple[str, int]], version: int, timeout: float, checksums: bool
    ) -> None:
        """Have worker i load what comes to places[i]. WeightSyncError with a worker's words when one cannot.

        No limit of its own: a worker gives up when nothing has come for `timeout` seconds, and all of a large model may
        take longer than any limit that helps.
        """
        if failure := _failure(self._begin(places, version, timeout, checksums), None):
            raise failure

    def try_channel(
        self, places: Sequence[tuple[str, int]], timeout: float
    ) -> concurrent.futures.Future[list[str]]:
        """See `RolloutEngine.try_channel`."""
        return self._host.submit(self._rpc("verl_try_channel", args=(list(places), timeout)))

    def send(
        self, weights: Iterable[tuple[str, Any]], version: int, dtype: torch.dtype | None, checksums: bool
    ) -> SyncResult:
        """From this process to every worker. A tensor is copied before the next is asked for: it may be a view."""
        from verl.weight_sync.base import SyncResult, WeightSyncError
        from verl.weight_sync.buckets import pack

        started, weights = time.monotonic(), iter(weights)
        first = list(itertools.islice(weights, 1))
        direct = self._direct(first[0][1].device) if first else None
        channel, places = self._channel()
        loading = self._begin(places, version, _LOAD_TIMEOUT, checksums)
        try:
            with self._sink(channel, version, direct) as sink:
                moved = pack(itertools.chain(first, weights), sink, dtype=dtype)
                sink.finish()
        except WeightSyncError as error:
            raise _failure(loading) or error from error
        if failure := _failure(loading):
            raise failure
        return SyncResult(bytes=moved, seconds=time.monotonic() - started)

    def _begin(
        self, places: Sequence[tuple[str, int]], version: int, timeout: float, checksums: bool
    ) -> concurrent.futures.Future[Any]:
        arguments = (list(places), version, timeout, checksums)
        return self._host.submit(self._rpc("verl_load_weights", args=arguments))

    def _channel(self) -> tuple[str, list[tuple[str, int]]]:
        """A fresh one, and every worker's place on it."""
        channel = f"vllm-{uuid.uuid4().hex[:16]}"
        return channel, [(channel, reader) for reader in range(len(self.devices))]

    def _sink(self, channel: str, version: int, device: torch.device | None) -> SharedMemorySink:
        from verl.weight_sync.device_handles import HandleSink
        from verl.weight_sync.shared_memory import SharedMemorySink, device_bucket, host_bucket

        readers, wanted, options = len(self.devices), self._bucket_bytes, {"timeout": _LOAD_TIMEOUT}
        if device is None:
            return SharedMemorySink(channel, readers, host_bucket(wanted), version, **options)
        return HandleSink(channel, readers, device_bucket(wanted), version, device=device, **options)

    def _direct(self, device: torch.device) -> torch.device | None:
        """`device` if all workers are on it and a trial has shown that they can read its memory."""
        from verl.platform import platform_of
        from verl.weight_sync.trial import offer

        found = platform_of(device).memory_id(device)
        if not found or set(self.devices) != {found}:
            return None
        if self._by_device is None:
            channel, places = self._channel()
            trying = self.try_channel(places, _TRIAL_TIMEOUT)
            said = [offer(channel, len(places), device, _TRIAL_TIMEOUT), *trying.result(RPC_TIMEOUT)]
            failed = next((text for text in said if text), "")
            self._by_device = not failed
            if failed:
                self._notice(
                    f"weights go to vLLM through host memory: handles of the device failed ({failed})"
                )
        return device if self._by_device else None


def _failure(loading: concurrent.futures.Future[Any], limit: float | None = RPC_TIMEOUT) -> Exception | None:
    """What a worker raised, as WeightSyncError, once the workers are done."""
    from verl.weight_sync.base import WeightSyncError

    try:
        loading.result(limit)
    except concurrent.futures.TimeoutError:
        return WeightSyncError(f"vLLM's workers did not come back within {limit:g} s of loading weights")
    except Exception as error:
        said = WeightSyncError(f"vLLM could not load the weights: {error}")
        said.__cause__ = error
        return said
    return None
