"""Weights into vLLM's workers: from a channel of another process, from this process, or as an adapter's files."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from verl.config.model_facts import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from verl.engine.rollout.hosted import RPC_TIMEOUT, LoopThread
from verl.platform import platform_of
from verl.platform.processes import namespace
from verl.weight_sync.channel import BucketSender, called_off, offer
from verl.weight_sync.verify import WeightSyncError, checksums

_LOAD_TIMEOUT = 300.0
_TRIAL_TIMEOUT = 60.0
_PREFIX = "base_model.model."
_SHARED = Path("/dev/shm")
_FOLDER = "verl-vllm-adapter-"
Places = Sequence[tuple[str, int]]


class WorkerChannel:
    """The workers as readers of weights. `rpc(method, args)` calls every worker (`verl.engine.rollout.vllm.worker`), on
    the loop of `host`; `devices[i]` is the id of worker i's device, "" for one whose memory has no handles.
    bucket_bytes: size of one bucket of `send`."""

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

    def receive(self, places: Places, version: int, timeout: float, verify: str) -> dict[str, str]:
        """Make worker i load what arrives at places[i]; returns checksums with `verify`. WeightSyncError with a
        worker's message when one cannot.

        No limit of its own: a worker gives up when nothing has come for `timeout` seconds, and all of a large model may
        take longer than any limit that helps.
        """
        return _loaded(self._begin(places, version, timeout, verify), None)

    def try_channel(self, places: Places, timeout: float) -> concurrent.futures.Future[list[str]]:
        """See `WeightReceiver.try_channel`."""
        return self._host.submit(self._rpc("verl_try_channel", args=(list(places), timeout)))

    def send(
        self, weights: Iterable[tuple[str, Any]], version: int, dtype: torch.dtype | None, verify: str
    ) -> dict[str, str]:
        """From this process to every worker; returns checksums with `verify`."""
        weights = iter(weights)
        first = list(itertools.islice(weights, 1))
        device = self._direct(first[0][1].device) if first else None
        channel, places = self._channel()
        loading = self._begin(places, version, _LOAD_TIMEOUT, verify)
        limits: dict[str, Any] = {"timeout": _LOAD_TIMEOUT, "over": loading.done}
        sender = BucketSender(channel, len(places), self._bucket_bytes, dtype=dtype, device=device, **limits)
        try:
            sender.send(itertools.chain(first, weights), version)
        except WeightSyncError as error:
            with called_off(places, version, str(error)):
                _loaded(loading, RPC_TIMEOUT)  # a worker's own words come first
            raise
        return _loaded(loading, RPC_TIMEOUT)

    def _begin(self, places: Places, version: int, timeout: float, verify: str) -> concurrent.futures.Future[list[Any]]:
        arguments = list(places), version, timeout, verify
        return self._host.submit(self._rpc("verl_load_weights", args=arguments))

    def _channel(self) -> tuple[str, Places]:
        """A fresh one, and every worker's place on it."""
        channel = f"vllm-{uuid.uuid4().hex[:16]}"
        return channel, [(channel, reader) for reader in range(len(self.devices))]

    def _direct(self, device: torch.device) -> torch.device | None:
        """`device` if all workers are on it and a trial has shown that they can read its memory."""
        memory_id = platform_of(device).memory_id(device)
        if not memory_id or set(self.devices) != {memory_id}:
            return None
        if self._by_device is None:
            channel, places = self._channel()
            trying = self.try_channel(places, _TRIAL_TIMEOUT)
            problems = [offer(channel, len(places), device, _TRIAL_TIMEOUT), *trying.result(RPC_TIMEOUT)]
            self._by_device = not any(problems)
            if failed := next(filter(None, problems), ""):
                self._notice(f"weights go to vLLM through host memory: device handles failed ({failed})")
        return device if self._by_device else None


def _loaded(loading: concurrent.futures.Future[list[Any]], limit: float | None) -> dict[str, str]:
    """Checksums of what the workers hold, once they are done. WeightSyncError with what one of them raised."""
    try:
        sums = loading.result(limit)
    except Exception as error:
        reason = str(error) or f"{type(error).__name__} after {limit} s"
        raise WeightSyncError(f"vLLM could not load the weights: {reason}") from error
    if any(other != sums[0] for other in sums[1:]):
        raise WeightSyncError("two workers of vLLM received different weights")
    return dict(sums[0])


class AdapterFolder:
    """A peft adapter where vLLM's processes find it: in a folder of shared memory, written anew for each version.

    vLLM takes adapters by path alone. The files are small (two thin matrices a layer) and never touch a disk.
    `described` is what adapter_config.json says: at least r, lora_alpha, target_modules.
    """

    def __init__(self, described: Mapping[str, Any]):
        self._described = {"peft_type": "LORA", **described}
        self._root: Path | None = None

    def write(self, tensors: Iterable[tuple[str, Any]], version: int, dtype: Any) -> Path:
        """(name less peft's prefix, tensor) of an adapter, floating point converted to `dtype` unless None. Returns the
        folder to load it from, good until the next `write`."""
        if self._root is None or not self._root.exists():
            _sweep()
            self._root = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{namespace()}-{os.getpid()}-", dir=_SHARED))
        stored = {
            _PREFIX + name: tensor.detach().to(device="cpu", dtype=dtype or tensor.dtype).contiguous().clone()
            for name, tensor in tensors
        }
        for old in self._root.iterdir():
            shutil.rmtree(old)
        folder = self._root / str(version)
        folder.mkdir()
        save_file(stored, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        (folder / ADAPTER_CONFIG).write_text(json.dumps(self._described), encoding="utf-8")
        return folder

    def checksums(self, folder: Path, verify: str) -> dict[str, str]:
        """Checksum of each tensor in the file that vLLM loads, by name less peft's prefix."""
        tensors = load_file(folder / ADAPTER_WEIGHTS)
        return checksums(((name.removeprefix(_PREFIX), tensor) for name, tensor in tensors.items()), verify)

    def remove(self) -> None:
        """Remove the files."""
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
            self._root = None


def _sweep() -> None:
    """Remove what engines that were killed have left."""
    start = f"{_FOLDER}{namespace()}-"
    for folder in _SHARED.glob(f"{start}*"):
        pid = folder.name.removeprefix(start).partition("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)
