"""The Megatron training engine: megatron-core's model, data parallelism, optimizer and pipeline schedules.

    rows ── split_rows ──▶ micro-batches ──▶ stage 0 ──▶ … ──▶ last stage: hidden ──▶ outputs ──▶ loss ──▶ backward
                                             tensor, context and expert parallel inside of each stage
    all ranks: gradients added over data-parallel ranks; norm, finiteness; clip; one optimizer step or none

The loss arrives divided by counts of the whole mini-batch, so gradients are summed over ranks and micro-batches.
The number of micro-batches is the same on all ranks, so that none waits in a collective that another never enters.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model

from verl.config.schema.base import setting
from verl.engine.registry import Placement
from verl.engine.training.base import LOG_PROBS, ROUTES, MicroLoss
from verl.engine.training.megatron import ENGINE
from verl.engine.training.megatron import bridge as weights
from verl.engine.training.megatron import model as models
from verl.engine.training.megatron.micro_batches import ModelBatch, packed, padded
from verl.engine.training.megatron.optimizer import (
    build_optimizer,
    build_schedule,
    load_state,
    save_state,
    scale_derivative,
    scale_gradients,
)
from verl.engine.training.megatron.parallel import ParallelSizes, join
from verl.engine.training.megatron.passes import Passes
from verl.engine.training.optimizer import StepAccumulator, optim_config
from verl.engine.training.packing import MicroBatching, pack, split_rows
from verl.engine.training.process_group import all_gather_json, on_all_ranks
from verl.engine.training.scheduled import ScheduledEngine
from verl.engine.training.settings import compute_dtype, micro_batching
from verl.errors import UserError
from verl.models.inputs import VisionInputs
from verl.models.pretrained import serving_dtype
from verl.platform import Platform
from verl.trajectory import Segment

_ROLES = ("actor", "ref", "critic")
"""Roles with a `megatron` group of their own. Teachers and reward models have the layout of their process."""


class MegatronEngine(ScheduledEngine):
    """See the module; parameters as of `FSDPEngine`. All roles of a process have one parallel layout."""

    _build_schedule = staticmethod(build_schedule)

    def __init__(
        self,
        model_path: str | Path,
        *,
        model_cfg: Any = None,
        role_cfg: Any = None,
        placement: Placement | None = None,
        log_prob_cfg: Any = None,
        device: str | Platform = "auto",
        device_index: int = 0,
        trainable: bool = True,
        seed: int = 0,
        role: str = "actor",
        longest: int | None = None,
        idles: bool = True,
        shared: bool = False,
        head: str = "lm",
        topk: int = 0,
    ):
        self.role, self.head, self.trainable = role, head, trainable
        self._take_device(device, device_index, seed)
        placement = placement or ENGINE.placement(role_cfg or {})
        self.megatron = setting(role_cfg, "megatron") or role_cfg
        sizes = ParallelSizes.of(placement, self.megatron)
        if sizes.context > 1 and not weights.FUSED_KERNELS:
            raise UserError(f"{placement.at('sequence')} needs TransformerEngine, which is not installed")
        if follows := role not in _ROLES:
            self.megatron = {**self.megatron, "use_dist_checkpointing": False}
        self.sizes = join(sizes, follows=follows)
        self.holds_outputs = weights.is_last_stage()
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.dp_size = parallel_state.get_data_parallel_world_size()
        self.compute_dtype = compute_dtype(placement, self.platform)
        self._model = models.build(
            model_path,
            model_cfg,
            self.megatron,
            head,
            seed,
            self.device,
            self.compute_dtype,
            trainable,
            freezes_vision=bool(setting(role_cfg, "freeze_vision_tower", False)),
        )
        self._vision = VisionInputs.of(self._model.outline)
        self._images = {"encoded": 0, "distinct": 0}
        if self._vision is not None and self.sizes.context > 1:
            raise UserError(
                f"{placement.at('sequence')}: models that see images have no context parallelism here; set 1"
            )
        self.module = unwrap_model(self._model.chunks[0])
        self._serving_dtype = serving_dtype(model_path, model_cfg)
        self._read_settings(role_cfg, log_prob_cfg)
        self._passes = Passes(self._model, head, topk=topk, replays=self._replays)
        self._at_home = True
        self._weights_leave, self._state_leaves = (
            placement.param_offload and idles,
            placement.optimizer_offload and idles,
        )
        self._gradients_leave = idles and (placement.param_offload or placement.grad_offload)
        if trainable:
            self._optim = optim_config(setting(role_cfg, "optim"))
            self._optimizer = build_optimizer(self._model.chunks, self._optim, self.megatron, self._model.dtype)
            self.schedule(1)

    def _micro_batching(self, role_cfg: Any, group: Any, prefix: str) -> MicroBatching:
        batching = micro_batching(group, prefix, share_prompt=False)
        size = self.sizes.context
        return MicroBatching(batching.tokens * size, batching.rows, False, limit=batching.limit * size)

    # -- passes ----------------------------------------------------------------------------------------------

    def _batches(self, rows: Sequence[Segment], batching: MicroBatching) -> list[ModelBatch]:
        """As many on every rank, without rows where this one has fewer."""
        batching = replace(batching, replay=self._follows_routes())
        chunks = split_rows(rows, batching)
        distinct = {row.media for row in rows if row.media is not None and row.length}
        self._images["distinct"] += sum(media.images for media in distinct)
        count = max(1, *all_gather_json(len(chunks)))
        stages = self.sizes.pipeline if self.sizes.virtual else 1
        count = -(-count // stages) * stages  # the interleaved schedule takes micro-batches in rounds of all stages
        chunks += [[] for _ in range(count - len(chunks))]
        return [self._batch(chunk, batching) for chunk in chunks]

    def _batch(self, rows: Sequence[Segment], batching: MicroBatching) -> ModelBatch:
        laid = pack(rows, batching, self.device, self._vision)
        multiple = self.sizes.tensor if self.sizes.tensor > 1 else 1
        if not weights.FUSED_KERNELS:
            return self._positioned(padded(laid, multiple))
        if self.sizes.context > 1:
            multiple *= 2 * self.sizes.context
        rank = parallel_state.get_context_parallel_rank()
        return self._positioned(packed(laid, multiple, self.sizes.context, rank))

    def _positioned(self, batch: ModelBatch) -> ModelBatch:
        """The micro-batch with the positions that a model that sees images takes, its images counted."""
        if self._vision is not None:
            batch.positions = batch.axes()
            self._images["encoded"] += sum(media.images for media in dict.fromkeys(batch.pack.media))
        return batch

    def images(self) -> dict[str, int]:
        """See `TrainingEngine.images`."""
        counts, self._images = self._images, dict.fromkeys(self._images, 0)
        return counts

    @torch.no_grad()
    def forward(
        self, rows: Sequence[Segment], outputs: Collection[str] = LOG_PROBS, *, temperature: float
    ) -> dict[str, np.ndarray]:
        """See `TrainingEngine.forward`. Empty on ranks without the last stage."""
        for chunk in self._model.chunks:
            chunk.eval()
        batches, names = self._batches(rows, self.forward_batching), [name for name in outputs if name != ROUTES]
        results = self._passes.run(batches, outputs, temperature, None)
        for batch in batches if ROUTES in outputs else ():
            self._passes.routes.keep(batch)
        if not self.holds_outputs:
            return {}
        return {name: torch.cat([result[name] for result in results]).cpu().numpy() for name in names}

    # -- update ----------------------------------------------------------------------------------------------

    def _accumulate(
        self, rows: Sequence[Segment], loss: MicroLoss, outputs: Collection[str], temperature: float, scale: float
    ) -> tuple[StepAccumulator, float]:
        """See `ScheduledEngine._accumulate`."""
        for chunk in self._model.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        batches = self._batches(rows, self.update_batching)
        total = self._conclude(batches, self._passes.run(batches, outputs, temperature, loss, scale))
        self._optimizer.prepare_grads()
        return total, math.nan if total.refused else float(self._optimizer.get_grad_norm())

    def _multiply_gradients(self, factor: float) -> None:
        scale_gradients(self._optimizer, factor)

    def _update_weights(self) -> None:
        self._optimizer.step_with_ready_grads()

    def _conclude(self, batches: Sequence[ModelBatch], results: Sequence[Any]) -> StepAccumulator:
        """What all ranks' micro-batches came to."""
        mine, counts = StepAccumulator(), self.holds_outputs and self._speaks()
        for number, (value, metrics, names) in enumerate(results if counts else []):
            if not math.isfinite(value):
                mine.refused = mine.refused or f"the loss of micro-batch {number} is {value} ({names})"
            else:
                mine.add(metrics)
        for batch in batches if self._replays else ():
            changed = self._passes.routes.changed(batch)
            if counts and changed is not None:
                self._count_changed_routes(mine, changed)
        mine.tokens = sum(batch.pack.size for batch in batches) if counts else 0
        merged = StepAccumulator()
        derivative = scale_derivative(self._optimizer, self._model.chunks[-1]) if self.holds_outputs else 0.0
        reports = all_gather_json([mine.sums, mine.tokens, mine.refused, derivative])
        for sums, tokens, refused, _ in reports:
            merged.add(sums)
            merged.tokens += tokens
            merged.refused = merged.refused or refused
        derivatives = [derivative for *_, derivative in reports]
        merged.scale_derivative = None if None in derivatives else sum(derivatives)
        return merged

    def _speaks(self) -> bool:
        """One rank of those that have the same rows and outputs."""
        alone = parallel_state.get_tensor_model_parallel_rank() == 0
        return alone and parallel_state.get_context_parallel_rank() == 0

    # -- the device's memory -----------------------------------------------------------------------------------

    def offload(self) -> None:
        """See `TrainingEngine.offload`; gradients are let go, not kept."""
        if self._gradients_leave and self.trainable:
            for chunk in self._model.chunks:
                chunk.offload_grad_buffers()
        if self._state_leaves and self._optimizer is not None:
            self._optimizer.offload_to_cpu()
        if self._weights_leave and self._at_home:
            models.move_weights(self._model.chunks, torch.device("cpu"))
            self._at_home = False
        self.platform.empty_cache()

    def onload(self, *, optimizer: bool = False) -> None:
        """See `TrainingEngine.onload`."""
        if self._weights_leave and not self._at_home:
            models.move_weights(self._model.chunks, self.device)
            self._at_home = True
        if optimizer and self.trainable:
            if self._gradients_leave:
                for chunk in self._model.chunks:
                    chunk.restore_grad_buffers()
            if self._state_leaves:
                self._require_optimizer().restore_from_cpu()

    def release_cached_memory(self) -> None:
        """See `TrainingEngine.release_cached_memory`."""
        self.platform.empty_cache()

    # -- weights and state -----------------------------------------------------------------------------------

    @torch.no_grad()
    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `TrainingEngine.named_weights`; float32, every rank gets every tensor."""
        for name, exported in self._model.exported():
            tensor = exported.float()
            yield name, tensor
            if name.endswith(".embed_tokens.weight") and self._model.tied:
                yield "lm_head.weight", tensor

    def _modules(self) -> Sequence[torch.nn.Module]:
        return self._model.chunks

    def _write_weights(self, directory: Path) -> None:
        models.save(self._model, directory, self._serving_dtype)

    def load_weights(self, directory: Path) -> None:
        """See `TrainingEngine.load_weights`."""
        super().load_weights(directory)
        if self._optimizer is not None:
            self._optimizer.reload_model_params()

    def _read_weights(self, directory: Path) -> None:
        on_all_ranks(lambda: models.load(self._model, directory))

    def save_optimizer(self, directory: Path) -> None:
        """See `TrainingEngine.save_optimizer`; megatron-core's distributed checkpoint."""
        save_state(Path(directory), self._require_optimizer(), self._model.chunks, self._schedule)

    def load_optimizer(self, directory: Path) -> None:
        """See `TrainingEngine.load_optimizer`."""
        load_state(Path(directory), self._require_optimizer(), self._model.chunks, self._schedule)
