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
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model

from verl.config.schema.base import setting
from verl.engine.registry import Placement
from verl.engine.training import lora
from verl.engine.training.base import LOG_PROBS, ROUTES, MicroLoss, TrainStepResult
from verl.engine.training.megatron import ENGINE
from verl.engine.training.megatron import bridge as weights
from verl.engine.training.megatron import model as models
from verl.engine.training.megatron.micro_batches import ModelBatch, packed, padded
from verl.engine.training.megatron.optimizer import (
    build_optimizer,
    build_schedule,
    clip_gradients,
    load_state,
    save_state,
    scale_gradients,
)
from verl.engine.training.megatron.parallel import ParallelSizes, join
from verl.engine.training.megatron.passes import Passes
from verl.engine.training.optimizer import LOSS_SCALES, StepAccumulator, optim_config
from verl.engine.training.packing import MicroBatching, pack, split_rows
from verl.engine.training.process_group import all_gather_json, on_all_ranks
from verl.engine.training.scheduled import ScheduledEngine
from verl.engine.training.settings import compute_dtype, micro_batching
from verl.engine.training.weight_files import refuse_non_finite
from verl.errors import UserError
from verl.models.pretrained import serving_dtype
from verl.platform import Platform, detect
from verl.trajectory import Segment


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
        self.role, self.head, self.trainable, self.topk = role, head, trainable, topk
        self.platform = detect(device) if isinstance(device, str) else device
        self.platform.prepare()
        self.device = self.platform.device(device_index)
        self.platform.select(device_index)
        self.platform.seed(seed)
        placement = placement or ENGINE.placement(role_cfg or {})
        self.megatron = setting(role_cfg, "megatron") or role_cfg
        self.sizes = ParallelSizes.of(placement, self.megatron)
        if self.sizes.context > 1 and not weights.FUSED_KERNELS:
            raise UserError(f"{placement.at('sequence')} needs TransformerEngine, which is not installed")
        join(self.sizes)
        self.holds_outputs = weights.is_last_stage()
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.dp_size = parallel_state.get_data_parallel_world_size()
        self._model = models.build(
            model_path,
            model_cfg,
            self.megatron,
            head,
            seed,
            self.device,
            compute_dtype(placement, self.platform),
            trainable,
        )
        self.module = unwrap_model(self._model.chunks[0])
        self._serving_dtype = serving_dtype(model_path, model_cfg)
        self._read_settings(role_cfg, log_prob_cfg)
        self._weights_leave, self._state_leaves = (
            placement.param_offload and idles,
            placement.optimizer_offload and idles,
        )
        self._gradients_leave = idles and (placement.param_offload or placement.grad_offload)
        if trainable:
            self._optim = optim_config(setting(role_cfg, "optim"))
            self._optimizer = build_optimizer(self._model.chunks, self._optim, self.megatron, self._model.dtype)
            self.schedule(1)

    def _read_settings(self, role_cfg: Any, log_prob_cfg: Any) -> None:
        self.update_batching = self._micro_batching(role_cfg, "ppo")
        group = role_cfg if log_prob_cfg is None else log_prob_cfg
        prefix = "ppo" if setting(group, "log_prob_max_token_len_per_gpu") is None else "log_prob"
        self.forward_batching = self._micro_batching(group, prefix)
        self._adapter_only = bool(setting(role_cfg, "checkpoint.save_lora_only", False))
        self._grad_clip = setting(role_cfg, "grad_clip", 1.0)
        self._at_home = True
        self._replays = setting(role_cfg, "router_replay.mode", "disabled") != "disabled"
        self._passes = Passes(self._model, self.head, topk=self.topk, replays=self._replays)

    def _micro_batching(self, group: Any, prefix: str) -> MicroBatching:
        batching = micro_batching(group, prefix, share_prompt=False)
        size = self.sizes.context
        return MicroBatching(batching.tokens * size, batching.rows, False, limit=batching.limit * size)

    # -- passes ----------------------------------------------------------------------------------------------

    def _batches(self, rows: Sequence[Segment], batching: MicroBatching) -> list[ModelBatch]:
        """As many on every rank, without rows where this one has fewer."""
        adapter = self._model.adapter
        # Without its adapter this is the reference, which is nobody else's routes.
        batching = replace(batching, replay=self._replays and (adapter is None or adapter.is_on))
        chunks = split_rows(rows, batching)
        count = max(1, *all_gather_json(len(chunks)))
        stages = self.sizes.pipeline if self.sizes.virtual else 1
        count = -(-count // stages) * stages  # the interleaved schedule takes micro-batches in rounds of all stages
        chunks += [[] for _ in range(count - len(chunks))]
        return [self._batch(chunk, batching) for chunk in chunks]

    def _batch(self, rows: Sequence[Segment], batching: MicroBatching) -> ModelBatch:
        laid = pack(rows, batching, self.device)
        multiple = self.sizes.tensor if self.sizes.tensor > 1 else 1
        if not weights.FUSED_KERNELS:
            return padded(laid, multiple)
        if self.sizes.context > 1:
            multiple *= 2 * self.sizes.context
        return packed(laid, multiple, self.sizes.context, parallel_state.get_context_parallel_rank())

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

    def step(
        self,
        rows: Sequence[Segment],
        loss: MicroLoss,
        outputs: Collection[str] = LOG_PROBS,
        *,
        temperature: float,
    ) -> TrainStepResult:
        """See `TrainingEngine.step`. Metrics hold `{role}/grad_norm` (before clipping) beside the loss's own."""
        optimizer = self._require_optimizer()
        total, norm = self._gradients(optimizer, rows, loss, outputs, temperature)
        if not total.refused and not math.isfinite(norm):
            total.refused = f"the gradient norm is {norm}"
        if not total.refused:
            clip_gradients(optimizer, norm, self._grad_clip)
            optimizer.step_with_ready_grads()
        metrics = {} if total.refused else total.metrics()
        return TrainStepResult(metrics | {f"{self.role}/grad_norm": norm}, norm, total.refused, total.tokens)

    def _gradients(
        self, optimizer: Any, rows: Sequence[Segment], loss: MicroLoss, outputs: Collection[str], temperature: float
    ) -> tuple[StepAccumulator, float]:
        """The optimizer's gradients: what the passes came to, and the norm. In float16 the largest scale with which nothing
        overflows is found anew in each step, as with the FSDP engine."""
        for scale in LOSS_SCALES if self._model.dtype == torch.float16 else (1.0,):
            for chunk in self._model.chunks:
                chunk.train()
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            batches = self._batches(rows, self.update_batching)
            total = self._conclude(batches, self._passes.run(batches, outputs, temperature, loss, scale))
            optimizer.prepare_grads()
            norm = math.nan if total.refused else float(optimizer.get_grad_norm())
            if total.refused or math.isfinite(norm):
                break
        scale_gradients(optimizer, 1.0 / scale)
        return total, norm / scale

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
                valid = changed[changed >= 0]
                mine.add({f"{self.role}/router_replay/changed_frac": (float(valid.sum()), len(valid))})
        mine.tokens = sum(batch.pack.size for batch in batches) if counts else 0
        merged = StepAccumulator()
        for sums, tokens, refused in all_gather_json([mine.sums, mine.tokens, mine.refused]):
            merged.add(sums)
            merged.tokens += tokens
            merged.refused = merged.refused or refused
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

    @property
    def adapted(self) -> bool:
        """See `TrainingEngine.adapted`."""
        return self._model.adapter is not None

    def without_adapter(self) -> AbstractContextManager[None]:
        """See `TrainingEngine.without_adapter`."""
        return super().without_adapter() if self._model.adapter is None else self._model.adapter.off()

    def adapter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `TrainingEngine.adapter_weights`; float32, every rank gets every tensor."""
        return super().adapter_weights() if self._model.adapter is None else self._model.adapter.tensors()

    @torch.no_grad()
    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `TrainingEngine.named_weights`; float32, every rank gets every tensor."""
        for name, exported in self._model.exported():
            tensor = exported.float()
            yield name, tensor
            if name == "model.embed_tokens.weight" and self._model.tied:
                yield "lm_head.weight", tensor

    def save_weights(self, directory: Path) -> None:
        """See `TrainingEngine.save_weights`; ranks write files in turn."""
        directory, adapter = Path(directory), self._model.adapter
        for chunk in self._model.chunks:
            refuse_non_finite(chunk)
        if adapter is not None:
            adapter.save(directory)
        if adapter is None or not self._adapter_only:
            models.save(self._model, directory, self._serving_dtype)

    def load_weights(self, directory: Path) -> None:
        """See `TrainingEngine.load_weights`; whatever the layout that wrote it."""
        directory = Path(directory)
        if self._model.adapter is not None:
            self._model.adapter.load(directory)
        else:
            on_all_ranks(lambda: lora.refuse_adapter_checkpoint(directory))
            on_all_ranks(lambda: models.load(self._model, directory))
        if self._optimizer is not None:
            self._optimizer.reload_model_params()

    def save_optimizer(self, directory: Path) -> None:
        """See `TrainingEngine.save_optimizer`; megatron-core's distributed checkpoint."""
        save_state(Path(directory), self._require_optimizer(), self._model.chunks, self._schedule)

    def load_optimizer(self, directory: Path) -> None:
        """See `TrainingEngine.load_optimizer`."""
        load_state(Path(directory), self._require_optimizer(), self._model.chunks, self._schedule)
