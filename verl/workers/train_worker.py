"""One training rank in a process of its own: engines of the actor and the reference, and the rows of the step.

Every rank of a group gets the same calls in the same order (SPMD). Arguments and results are arrays and JSON-like
values, see `verl.workers.codec`. Knows nothing of how it is called from afar.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.config import Map
from verl.engine.training.base import StepResult, TrainingEngine
from verl.platform import stacks
from verl.platform.processes import Identity
from verl.plugins import import_modules
from verl.profiling.profiler import Profiled, open_profiler, spanned
from verl.trajectory import Trajectory
from verl.weight_sync.base import SyncResult
from verl.workers import codec
from verl.workers.codec import Payload

if TYPE_CHECKING:
    import torch


class TrainWorker(Profiled):
    """`config` is the resolved configuration as plain data; `rank` of `world`."""

    def __init__(self, config: dict[str, Any], rank: int, world: int):
        self.config = Map.of(config)
        self.rank, self.world = rank, world
        self.actor: TrainingEngine | None = None
        self.reference: TrainingEngine | None = None
        self._rows: list[Trajectory] = []
        stacks.register()

    def free_port(self, address: str) -> int:
        """A port at this address of this machine, kept free for rank 0 to meet the others at."""
        from verl.platform.network import reserve

        return reserve(address)

    def join(self, address: str, port: int) -> None:
        """Meet the other ranks. UserError if they do not come."""
        from verl.platform import detect
        from verl.platform.allocator import tune_allocator

        tune_allocator()
        quiet_libraries()
        import_modules(self.config.actor_rollout_ref.model.external_lib)
        self.platform = detect(self.config.trainer.device)
        if self.world > 1:
            from verl.engine.training.process_group import init_process_group

            timeout = float(self.config.actor_rollout_ref.nccl_timeout)
            init_process_group(self.rank, self.world, address, port, self.platform, timeout)

    def build(self, total_steps: int) -> dict[str, Any]:
        """Load the models. Returns where this rank stands: dp_rank, dp_size, the device in words."""
        from verl.platform.handles import device_id
        from verl.workers import build

        self.actor = build.actor_engine(self.config, total_steps, world=self.world, platform=self.platform)
        if build.wants_reference(self.config):
            self.reference = build.reference_engine(
                self.config, self.actor, world=self.world, platform=self.platform
            )
        played = ("actor", "ref") if self.reference is not None else ("actor",)
        self.profiler = open_profiler(self.config, roles=played, rank=self.rank, device=self.platform.name)
        return {
            "dp_rank": int(getattr(self.actor, "dp_rank", self.rank)),
            "dp_size": int(getattr(self.actor, "dp_size", self.world)),
            "device": self.platform.describe(),
            "device_id": device_id(self.platform.device()),
        }

    def _trained(self) -> TrainingEngine:
        if self.actor is None:
            raise RuntimeError(f"training rank {self.rank}: build() comes before any other call")
        return self.actor

    # -- a step ---------------------------------------------------------------------------------------------

    def take_rows(self, payload: Mapping[str, np.ndarray]) -> None:
        """This rank's answers of the step; the calls that follow are about them."""
        self._rows = codec.decode(payload)

    @spanned("old_log_prob")
    def old_log_probs(self, temperature: float) -> Payload:
        """Fill and return `old_log_probs` and `entropy`."""
        engine = self._trained()
        with engine.on_device():
            stats = engine.log_probs(self._rows, temperature=temperature, entropy=True)
        columns = {"old_log_probs": stats.log_probs}
        if stats.entropy is not None:
            columns["entropy"] = stats.entropy
        codec.fill(self._rows, columns)
        return columns

    @spanned("ref")
    def reference_log_probs(self, temperature: float) -> Payload:
        """Fill and return `ref_log_probs`."""
        if self.reference is None:
            raise RuntimeError(
                "no reference was built: neither use_kl_loss nor use_kl_in_reward asks for one"
            )
        from verl.workers import execute

        found = execute.reference_log_probs(self.reference, self._rows, temperature=temperature)
        columns = {"ref_log_probs": found}
        codec.fill(self._rows, columns)
        return columns

    @spanned("update_actor")
    def update(
        self, columns: Mapping[str, np.ndarray], minis: Sequence[Mapping[str, Any]], temperature: float
    ) -> dict[str, Any]:
        """One optimizer step for each of `minis`: {"rows": positions, "denominators": counts of all ranks}.

        `columns` are those that came into being since the rows did. Returns {"results": one mapping for each,
        "columns": old_log_probs and entropy, each if rows were without}.
        """
        from verl.algorithms.objective import LossDenominators
        from verl.workers import execute

        engine, cfg = self._trained(), self.config.actor_rollout_ref.actor
        correction = self.config.algorithm.rollout_correction
        codec.fill(self._rows, columns)
        fresh = [
            name for name in ("old_log_probs", "entropy") if any(getattr(r, name) is None for r in self._rows)
        ]
        results: list[StepResult] = []
        with engine.on_device(optimizer=True):
            for mini in minis:
                rows = [self._rows[i] for i in mini["rows"]]
                counts = LossDenominators(**mini["denominators"])
                results.append(execute.update(engine, cfg, rows, counts, temperature, correction))
        return {
            "results": [asdict(result) for result in results],
            "columns": codec.collect(self._rows, fresh),
        }

    def log_probs_of(self, positions: Sequence[int], temperature: float) -> np.ndarray:
        """Log-probs of some of the rows with the weights of this moment, float32 [ΣL]."""
        rows, engine = [self._rows[i] for i in positions], self._trained()
        with engine.on_device():
            return engine.log_probs(rows, temperature=temperature).log_probs

    def advance(self) -> float:
        """End of a training step: the learning-rate schedule moves on; returns the rate that was used."""
        return self._trained().advance()

    # -- weights and state ------------------------------------------------------------------------------------

    @spanned("update_weights")
    def send_weights(
        self,
        channel: str | None,
        readers: Sequence[Identity],
        version: int,
        verify: str,
        dtype: str | None = None,
        on_device: bool = False,
        rendezvous: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Gather the weights together with the other ranks and, with a channel, write them to its readers.

        dtype: what floating point ones are converted to on the way (None: as they are). on_device: the readers are on this
        rank's device, buckets stay there. With a rendezvous they are broadcast to the relays that come there, too.
        Returns {"bytes", "seconds", "checksums"}; checksums only when `verify`, of the weights as they travel.
        """
        from verl.engine.training.settings import named_dtype
        from verl.weight_sync.verify import digesting
        from verl.workers import build

        engine, sums = self._trained(), dict[str, str]()
        kind = None if dtype is None else named_dtype(dtype, "rollout.dtype")
        weights = engine.adapter_weights() if build.adapter_moves(self.config) else engine.named_weights()
        result = SyncResult(0, 0.0)
        self._release_cached_memory()
        try:
            if channel is not None or rendezvous is not None:
                stream = digesting(weights, sums, verify, dtype=kind) if verify else weights
                where = self.platform.device() if on_device else None
                result = self._deliver(stream, version, kind, channel or "", readers, where, rendezvous)
        finally:
            # The other ranks gather all of it, whatever befell this one.
            for _ in weights:
                continue
        self._release_cached_memory()
        return {"bytes": result.bytes, "seconds": result.seconds, "checksums": sums}

    def _release_cached_memory(self) -> None:
        """Samplers of the same devices are about to wake, first their weights and then their cache."""
        if not self.config.actor_rollout_ref.rollout.nnodes:
            self._trained().release_cached_memory()

    def _deliver(
        self,
        weights: Any,
        version: int,
        dtype: torch.dtype | None,
        channel: str,
        readers: Sequence[Identity],
        device: torch.device | None,
        rendezvous: dict[str, Any] | None,
    ) -> SyncResult:
        from verl.weight_sync.collective import Rendezvous, broadcast
        from verl.weight_sync.shared_memory import TIMEOUT, BucketSender

        settings = self.config.actor_rollout_ref.rollout.checkpoint_engine
        bucket = int(settings.update_weights_bucket_megabytes) << 20
        if rendezvous is None:
            sender = BucketSender(channel, len(readers), bucket, dtype=dtype, expected=readers, device=device)
            return sender.send(weights, version)
        group = Rendezvous(**rendezvous).join(0, settings.backend, self.platform, TIMEOUT)
        try:
            return broadcast(
                group,
                weights,
                version,
                bucket_bytes=bucket,
                dtype=dtype,
                channel=channel,
                readers=len(readers),
                expected=readers,
            )
        finally:
            group.close()

    def try_channel(
        self, channel: str | None, readers: Sequence[Identity], on_device: bool, timeout: float
    ) -> str:
        """Write a first, small transfer (`shared_memory.offer`); what went wrong, "" for nothing."""
        from verl.weight_sync.shared_memory import offer

        if channel is None:
            return ""
        device = self.platform.device() if on_device else None
        return offer(channel, len(readers), device, timeout, readers)

    @spanned("save_checkpoint")
    def save_weights(self, directory: str) -> None:
        """Hugging Face directory of the policy, written by all ranks."""
        self._trained().save_weights(Path(directory))

    @spanned("save_checkpoint")
    def save_optimizer(self, directory: str) -> None:
        """Optimizer and schedule, written by all ranks."""
        self._trained().save_optimizer(Path(directory))

    def load_weights(self, directory: str) -> None:
        """Inverse of `save_weights`."""
        self._trained().load_weights(Path(directory))

    def load_optimizer(self, directory: str) -> None:
        """Inverse of `save_optimizer`."""
        self._trained().load_optimizer(Path(directory))

    def peak_memory(self) -> float | None:
        """Most device memory in use, GiB; None on a CPU."""
        return None if self.platform.name == "cpu" else self.platform.peak_memory() / 2**30

    def facts(self) -> dict[str, Any]:
        """Process id, for the watchdog and for messages."""
        return {"pid": os.getpid()}


def quiet_libraries() -> None:
    """No progress bars from a worker."""
    from transformers.utils import logging

    logging.disable_progress_bar()
