"""One training rank: the engines of its roles, and the segments of the step.

Every rank of a group gets the same calls in the same order (SPMD), directly or from afar (`verl.workers.group`).
Arguments and results are arrays, JSON-like values and records of these. Knows nothing of how it is called.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from verl.algorithms.distillation import Distillation
from verl.algorithms.flat_tokens import LossDenominators
from verl.algorithms.objective import ActorObjective
from verl.algorithms.value_loss import ValueObjective
from verl.config import Config
from verl.config.schema.base import setting
from verl.engine.registry import placement
from verl.engine.rollout.settings import moving_adapter
from verl.engine.training.base import (
    LOG_PROBS_AND_ENTROPY,
    ON_ROWS,
    MicroBatch,
    MicroLoss,
    TrainingEngine,
    TrainStepResult,
)
from verl.engine.training.settings import compute_dtype, named_dtype
from verl.platform import Platform, detect, thread_stacks
from verl.platform.host_resources import raise_open_files, tune_allocator
from verl.platform.network import reserve
from verl.platform.processes import Identity
from verl.plugins import import_modules
from verl.tracking.timer import Profiled
from verl.trajectory import Segment, fill_flat
from verl.weight_sync.channel import BucketSender, Channel, offer
from verl.weight_sync.collective import DELTA, Rendezvous, broadcast
from verl.weight_sync.delta import SentBuckets
from verl.weight_sync.verify import SyncResult, digesting
from verl.workers import build, payloads

_OPEN_FILES = 65536
RECORDED = {"log_probs": "old_log_probs", "entropy": "entropy"}
"""Outputs of a step's first pass over a row, and the columns that they become where the row has none."""


class Worker(Profiled):
    """`config` is the resolved configuration, typed or as the same keys in mappings; `rank` of `world`."""

    free_port = staticmethod(reserve)

    def __init__(self, config: Config, rank: int = 0, world: int = 1):
        self.config = config
        self.rank, self.world = rank, world
        self.engines: dict[str, TrainingEngine] = {}
        self._rows: list[Segment] = []
        self._remote = False
        self._sent = SentBuckets()
        self._temperature = float(config.actor_rollout_ref.rollout.temperature)

    @cached_property
    def platform(self) -> Platform:
        """The kind of device that it computes on."""
        return detect(self.config.trainer.device)

    def prepare(self) -> int:
        """Make a fresh process ready, see `prepare_process`. Returns its id."""
        thread_stacks.register()
        prepare_process(self.config)
        return os.getpid()

    def join(self, address: str, port: int) -> None:
        """Meet the other ranks. UserError if they do not come."""
        if self.world > 1:
            from verl.engine.training.process_group import init_process_group

            timeout = float(self.config.actor_rollout_ref.nccl_timeout)
            init_process_group(self.rank, self.world, address, port, self.platform, timeout)

    def build(self, total_steps: int, shared: bool = False, pool: str = "training") -> dict[str, Any]:
        """Load the models of a pool's roles. Returns the place of this rank: dp_rank, holds_outputs, the device in
        words, its id, its roles, in which data type each computes.

        shared: a sampler of this process works on the policy's tensors.
        """
        roles = build.roles_by_pool(self.config)[pool]
        self.engines = build.engines_of(self.config, roles, total_steps, self.platform, shared=shared)
        first = self.engines[roles[0]]
        of_policy = compute_dtype(placement(self.config.actor_rollout_ref.actor), self.platform)
        return {
            "dp_rank": first.dp_rank,
            "holds_outputs": first.holds_outputs,
            "device": self.platform.describe(),
            "device_id": self.platform.memory_id(self.platform.device()),
            "roles": list(self.engines),
            "compute_dtypes": {
                role: str(getattr(engine, "compute_dtype", of_policy)) for role, engine in self.engines.items()
            },
        }

    def engine(self, role: str = "actor") -> TrainingEngine:
        """The engine of a role. RuntimeError where this rank has none."""
        if role not in self.engines:
            raise RuntimeError(f"training rank {self.rank} has no engine for the role {role!r}")
        return self.engines[role]

    # -- a step ---------------------------------------------------------------------------------------------

    def take_rows(self, rows: Sequence[Segment]) -> None:
        """This rank's segments of the step; the calls that follow are about them."""
        self._rows = list(rows)

    def receive_rows(self, payload: Mapping[str, Any], *inputs: Mapping[str, np.ndarray]) -> None:
        """`take_rows` of what `payloads.encode` made, and the inputs of the rows' images."""
        self._rows, self._remote = payloads.decode(payload, inputs), True

    def forward(
        self, phase: str, role: str, outputs: Mapping[str, str], positions: Sequence[int] | None = None
    ) -> payloads.Payload:
        """A forward pass over the rows, or those at `positions`: fill and return the columns of `outputs` (output of
        the engine → column)."""
        engine = self.engine(role)
        rows = self._rows if positions is None else [self._rows[i] for i in positions]
        base = engine.without_adapter() if role == "ref" and engine.adapted else nullcontext()
        with self.span(phase), base:
            results = engine.forward(rows, tuple(outputs), temperature=self._temperature)
        columns = {outputs[name]: values for name, values in results.items()}
        for name, values in columns.items():
            fill_flat(rows, name, values)
        if self._remote:
            columns |= payloads.collect(rows, [name for name in ON_ROWS if name in outputs])
        return columns

    def update(
        self, role: str, columns: Mapping[str, np.ndarray], minis: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """One optimizer step of a role for each of `minis`: {"rows": positions, "denominators": counts of all ranks,
        "trajectory_tokens": T_i of the rows or None}.

        `columns` are those that came into being since the rows did. Returns {"results": a `TrainStepResult` for each,
        "columns": old_log_probs and entropy, each if rows were without}.
        """
        engine = self.engine(role)
        if columns:
            payloads.fill(self._rows, columns)
        recorded = RECORDED.values() if role == "actor" else ()
        fresh = [name for name in recorded if any(getattr(row, name) is None for row in self._rows)]
        with self.span(f"update_{role}"):
            results = [self._update(role, engine, mini) for mini in minis]
        return {
            "results": results,
            "columns": payloads.collect(self._rows, fresh) if self._remote else {},
        }

    def _update(self, role: str, engine: TrainingEngine, mini: Mapping[str, Any]) -> TrainStepResult:
        rows = [self._rows[i] for i in mini["rows"]]
        counts = mini["trajectory_tokens"]
        tokens_of = None if counts is None else dict(zip(map(id, rows), counts, strict=True))
        denominators: LossDenominators = mini["denominators"]
        if role == "critic":
            values = ValueObjective(self.config.critic, denominators, tokens_of)
            return engine.step(rows, values, ("values",), temperature=self._temperature)
        actor, correction = self.config.actor_rollout_ref.actor, self.config.algorithm.rollout_correction
        distillation = setting(self.config, "distillation")
        distilled = Distillation(distillation.distillation_loss) if setting(distillation, "enabled") else None
        by_source = setting(self.config.algorithm, "by_source")
        objective = ActorObjective(actor, denominators, correction, tokens_of, distilled, by_source)
        outputs = (*LOG_PROBS_AND_ENTROPY, *(distilled.outputs if distilled is not None else ()))
        return engine.step(rows, record_old_log_probs(objective), outputs, temperature=self._temperature)

    def follow(self, role: str, rate: float) -> None:
        """`TrainingEngine.follow` of a role, towards the policy."""
        self.engine(role).follow(self.engine(), rate)

    def log_probs_of(self, positions: Sequence[int]) -> np.ndarray:
        """Log-probs of some rows with the current weights, float32 [ΣL]; [0] where this rank holds no outputs."""
        rows, engine = [self._rows[i] for i in positions], self.engine()
        results = engine.forward(rows, temperature=self._temperature)
        return results.get("log_probs", np.zeros(0, np.float32))

    def onload(self, role: str, optimizer: bool) -> None:
        """`TrainingEngine.onload` of a role."""
        self.engine(role).onload(optimizer=optimizer)

    def run(self, role: str, method: str, *args: Any) -> Any:
        """A method of a role's engine that needs nothing else of this rank."""
        return getattr(self.engine(role), method)(*args)

    # -- weights and state ------------------------------------------------------------------------------------

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

        dtype: what floating point ones are converted to on the way (None: no conversion). on_device: the readers are on
        this rank's device, buckets stay there. With a rendezvous they are also broadcast to the relays that join it.
        Returns {"bytes", "seconds", "checksums"}; checksums only when `verify`, of the weights as they are sent.
        """
        engine, sums = self.engine(), dict[str, str]()
        kind = None if dtype is None else named_dtype(dtype, "rollout.dtype")
        weights = engine.adapter_weights() if moving_adapter(self.config) else engine.named_weights()
        result = SyncResult(0, 0.0)
        self._release_cached_memory()
        with self.span("update_weights"):
            try:
                if channel is not None or rendezvous is not None:
                    stream = digesting(weights, sums, verify, dtype=kind) if verify else weights
                    result = self._deliver(stream, version, kind, channel, readers, on_device, rendezvous)
            finally:
                # The other ranks gather all of it, whatever happened to this one.
                for _ in weights:
                    continue
        self._release_cached_memory()
        return {"bytes": result.bytes, "seconds": result.seconds, "checksums": sums}

    def _release_cached_memory(self) -> None:
        """Samplers of the same devices are about to wake, first their weights and then their cache."""
        rollout = self.config.actor_rollout_ref.rollout
        if not rollout.nnodes or rollout.trainer_memory_utilization:
            self.engine().release_cached_memory()

    def _deliver(
        self,
        weights: Any,
        version: int,
        dtype: Any,
        channel: str | None,
        readers: Sequence[Identity],
        on_device: bool,
        rendezvous: Any,
    ) -> SyncResult:
        """Write weights to the readers of this node, or broadcast them to those of other nodes, too."""
        settings = self.config.actor_rollout_ref.rollout.checkpoint_engine
        bucket = int(settings.update_weights_bucket_megabytes) << 20
        if rendezvous is None:
            assert channel is not None
            device = self.platform.device() if on_device else None
            of_this_node = {"dtype": dtype, "expected": readers, "device": device}
            return BucketSender(channel, len(readers), bucket, **of_this_node).send(weights, version)
        target = None if channel is None else Channel(channel, len(readers), expected=readers)
        with closing(Rendezvous(**rendezvous).join(0, settings.backend, self.platform)) as group:
            last = self._sent if settings.backend == DELTA else None
            return broadcast(group, weights, version, bucket_bytes=bucket, dtype=dtype, channel=target, last=last)

    def try_channel(self, channel: str | None, readers: Sequence[Identity], on_device: bool, timeout: float) -> str:
        """Write a first, small transfer (`channel.offer`); what went wrong, "" for nothing."""
        if channel is None:
            return ""
        device = self.platform.device() if on_device else None
        return offer(channel, len(readers), device, timeout, readers)

    def save(self, role: str, part: str, directory: str) -> None:
        """Write the `weights` (a Hugging Face directory) or the `optimizer` of a role, all ranks together."""
        engine = self.engine(role)
        with self.span("save_checkpoint"):
            (engine.save_weights if part == "weights" else engine.save_optimizer)(Path(directory))

    def peak_memory(self) -> dict[str, float]:
        """Most device memory `allocated` and `reserved`, GiB; {} on a CPU."""
        kinds = {} if self.platform.on_host else {"allocated": False, "reserved": True}
        return {kind: self.platform.peak_memory(reserved=whole) / 2**30 for kind, whole in kinds.items()}


def record_old_log_probs(objective: ActorObjective) -> MicroLoss:
    """Wraps an objective: keeps the first pass's log-probs and entropy of rows that have none yet.

    With one optimizer step per batch the old log-probs are the update's own, so no extra pass is needed.
    """

    def recording(micro: MicroBatch) -> tuple[torch.Tensor, dict[str, tuple[float, float]]]:
        result = objective(micro)
        sizes = [row.length for row in micro.rows]
        for output, column in RECORDED.items():
            flat = getattr(micro, output)
            if flat is None:
                continue
            parts = np.split(flat.detach().float().cpu().numpy(), np.cumsum(sizes)[:-1])
            for row, part in zip(micro.rows, parts, strict=True):
                if column not in row.columns:
                    row.put(column, part.copy())
        return result

    return recording


def prepare_process(config: Config) -> None:
    """What every worker process needs before it loads anything: allocator, open files, no progress bars, plug-ins."""
    tune_allocator()
    raise_open_files(_OPEN_FILES)
    logging.disable_progress_bar()
    import_modules(config.actor_rollout_ref.model.external_lib)
