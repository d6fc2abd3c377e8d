"""The training engine of many ranks: torch's FSDP2, one process a device, all running the same calls.

    rank 0   rows 0 ──▶ micro-batches ─┐ layer by layer: gather weights, compute, free
    rank 1   rows 1 ──▶ micro-batches ─┤ backward: gather, compute, add gradients over ranks, keep own share
    rank 2   (none) ──▶ dummies       ─┘ then all: agree on metrics, norm, finiteness; one optimizer step or none

Master weights, gradients and optimizer state are float32 and cut over ranks; what is gathered is in the compute
data type. Ranks run the same number of passes, so that none waits in a collective that another never enters: one
with fewer rows runs passes over a token that counts for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.config.adapter_files import ADAPTER_FOLDER
from verl.config.layout import MODEL_KEYS, Sizes, model_problems
from verl.engine.training import sharded_state
from verl.engine.training.base import MicroBatch, MicroLoss
from verl.engine.training.collectives import all_gather_json, merge_sums, on_all_ranks
from verl.engine.training.fuse import FusedForwards
from verl.engine.training.layout import layout
from verl.engine.training.log_prob import TokenTensors
from verl.engine.training.log_prob_head import LogProbHead, tensors
from verl.engine.training.lora import Adapter, AdapterSource, inject, refuse_adapter_checkpoint
from verl.engine.training.lora_config import LoraSettings
from verl.engine.training.offload import Offloading
from verl.engine.training.optimizer_state import load_state, save_state
from verl.engine.training.packed_engine import PackedEngine, StepAccumulator, serving_dtype
from verl.engine.training.packing import Pack
from verl.engine.training.process_group import waiting
from verl.engine.training.settings import read
from verl.engine.training.sharding import (
    Policy,
    local,
    shard,
    sharded_modules,
    take_share,
    whole,
)
from verl.engine.training.tensor_parallel import TensorParallel
from verl.engine.training.ulysses import SequenceParallel
from verl.engine.training.weight_source import WeightSource, open_source
from verl.errors import UserError
from verl.models import attention, meta_init, positions
from verl.models import load as models
from verl.models.adapters import PlainView
from verl.models.flops import model_cost
from verl.models.layers import is_recurrent, layer_configs
from verl.models.packed_attention import TokenSpan
from verl.platform import Platform
from verl.tracking.mfu import ModelCost


class FSDPEngine(PackedEngine):
    """See the module. The ranks must have met (`process_group.init_process_group`); every method is collective.

    role_cfg      actor, reference or SFT group: `fsdp_config` and `ulysses_sequence_parallel_size` beside the rest
    log_prob_cfg  group with the `log_prob_*` micro-batch keys (the rollout group for an actor); None: role_cfg
    device_index  which of the devices this process sees is its own
    trainable     False builds no gradients and no optimizer
    longest       most tokens of a sequence of the run, for frequencies that depend on it (`verl.models.positions`)
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        model_cfg: Any = None,
        role_cfg: Any = None,
        log_prob_cfg: Any = None,
        device: str | Platform = "auto",
        device_index: int = 0,
        trainable: bool = True,
        seed: int = 0,
        role: str = "actor",
        longest: int | None = None,
    ):
        self._place(device, role_cfg, role=role, trainable=trainable, seed=seed, index=device_index)
        self.platform.select(device_index)
        split = int(read(role_cfg, "ulysses_sequence_parallel_size", 1))
        products = int(read(role_cfg, "fsdp_config.tensor_parallel_size", 1))
        cut = int(read(role_cfg, "fsdp_config.fsdp_size", -1))
        self.layout = layout(self.device.type, cut, split, products)
        self.dp_rank, self.dp_size = self.layout.dp_rank, self.layout.dp_size
        self.module = on_all_ranks(lambda: meta_init.build(model_path, model_cfg))
        self._serving_dtype = serving_dtype(model_path, model_cfg)
        tensor = self.layout.tensor
        self._tensor = None if tensor is None else TensorParallel(self.module, tensor)
        self._refuse_sizes(Sizes(split, products))
        self._sequence = self._sequence_parallel()
        settings = LoraSettings.of(model_cfg, model_path) if trainable else None
        if settings is not None and tensor is not None:
            raise UserError(
                "model.lora_rank with fsdp_config.tensor_parallel_size > 1 is not here; set one of them to 0, 1"
            )
        source = self._source(model_path, model_cfg)
        positions.settle(self.module, longest)
        if settings is not None:
            self._adapter = on_all_ranks(lambda: inject(self.module, settings))
            source = on_all_ranks(lambda: AdapterSource(self.module, settings, seed, source))
        self.scorer, self._fused = LogProbHead(self.module), FusedForwards()
        parts = Policy.of(role_cfg, self.compute_dtype, self.device)
        options: dict[str, Any] = {"trainable": trainable, "tensor": self._tensor}
        on_all_ranks(lambda: shard(self.scorer, source, self.layout, parts, self._fused, **options))
        if read(model_cfg, "use_fused_kernels") is not False:
            self._find_head()
        self._read_settings(model_cfg, role_cfg, log_prob_cfg, devices=split)
        # With `offload_policy` the state is in host memory at all times.
        if not read(role_cfg, "fsdp_config.offload_policy", False):
            self._offloading = Offloading.of(role_cfg)
        self._free = 0
        if trainable:
            self._prepare_training(role_cfg)

    def cost(self) -> ModelCost | None:
        """See `TrainingEngine.cost`."""
        return model_cost(self.module, self.platform, self.compute_dtype, devices=self.layout.size)

    # -- building --------------------------------------------------------------------------------------------

    def _refuse_sizes(self, sizes: Sizes) -> None:
        for config in layer_configs(self.config.get_text_config()):
            for text, problem in model_problems(
                sizes, {key: getattr(config, key, None) for key in MODEL_KEYS}
            ):
                raise UserError(f"{text}: {problem}")

    def _sequence_parallel(self) -> SequenceParallel | None:
        if self.layout.sequence is None:
            return None
        if is_recurrent(self.module):
            raise UserError(
                f"ulysses_sequence_parallel_size={self.layout.sequence_size}: {type(self.module).__name__} carries a "
                "state along the row, so a row cannot be split; set it to 1"
            )
        heads = int(self.config.get_text_config().num_attention_heads) // self.layout.tensor_size
        return SequenceParallel(self.layout.sequence, heads)

    def _source(self, path: str | Path, model_cfg: Any) -> WeightSource:
        """Weights for the meta parameters; buffers get theirs here."""
        unknown = set(meta_init.fill_buffers(self.module))
        wanted: dict[str, torch.Tensor] = dict(self.module.named_parameters())
        kept = {n: b for n, b in self.module.named_buffers() if n in self.module.state_dict()}
        # Where a buffer's value is unknown only a model that was loaded whole can tell.
        strange = {n: b for n, b in self.module.named_buffers() if n in unknown}

        def load() -> dict[str, torch.Tensor]:
            loaded = models.load_model(path, model_cfg)
            return dict(loaded.named_parameters()) | dict(loaded.named_buffers())

        source = open_source(path, self.module, wanted | kept | strange, load)
        for name, buffer in (kept | strange).items():
            buffer.copy_(source.read(name, buffer))
        return source

    @torch.no_grad()
    def _find_head(self) -> None:
        """Take the head as a formula if the sharded model agrees with it; all ranks look, and all must find so."""
        with self._autocast():
            head = self.scorer(models.find_head, self.module)
        self._after_passes()
        if all(all_gather_json(head is not None)):
            self.scorer.head = head
        # What was whole while it loaded and for the probe is not needed again.
        self.platform.empty_cache()

    # -- what ranks agree on ---------------------------------------------------------------------------------

    _alone = False

    def _agreed_count(self, micro_batches: int) -> int:
        said = all_gather_json([micro_batches, super()._free_memory()])
        self._free = min(free for _, free in said)
        return max(count for count, _ in said)

    def _free_memory(self) -> int:
        # The least of all ranks: with a split sequence, recomputing is collective too.
        return self._free

    def _before_micro_batch(self, last: bool) -> None:
        self.scorer.set_is_last_backward(last)  # type: ignore[operator]
        if self.layout.hybrid:
            self.scorer.set_requires_all_reduce(last)  # type: ignore[operator]

    def _after_passes(self) -> None:
        # A pass without a backward pass leaves the root's weights whole, and they would outlive the next update.
        for part in sharded_modules(self.scorer):
            part.reshard()

    def _clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _gradients(self) -> list[torch.Tensor]:
        return [local(p.grad) for p in self._parameters if p.grad is not None]

    @torch.no_grad()
    def _conclude(self, tally: StepAccumulator) -> tuple[StepAccumulator, float]:
        for parameter in self._parameters:
            # A weight without a gradient decays and keeps its place in the optimizer, as on one device.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        own = self._gradients()
        if self._tensor is not None:
            with waiting("adding up gradients", self.layout.groups):
                self._tensor.complete(self._names)
            own = [local(p.grad) for p in self._parameters if p.grad is not None and self._tensor.own(p)]
        speaks = self.layout.speaks
        said = all_gather_json(
            [
                tally.sums if speaks else {},
                tally.tokens if speaks else 0,
                tally.refused,
                _squares(own) if self.layout.counts else 0.0,
            ]
        )
        merged = StepAccumulator(
            merge_sums([sums for sums, *_ in said]), sum(tokens for _, tokens, *_ in said)
        )
        merged.refused = next((why for *_, why, _ in said if why), "")
        return merged, math.nan if merged.refused else math.sqrt(sum(squares for *_, squares in said))

    # -- passes ----------------------------------------------------------------------------------------------

    def _forward(self, batch: Pack, temperature: float, entropy: bool, squares: bool) -> TokenTensors:
        counts = bool(batch.targets.numel())
        full = batch if counts else self._dummy(batch)
        with waiting("a forward pass", self.layout.groups):
            stats = self._score(full, temperature, entropy, squares)
        if counts:
            return stats
        # None of the dummy's tokens, but still tied to its pass: the backward pass has to run.
        return TokenTensors(
            stats.log_probs[:0],
            None if stats.entropy is None else stats.entropy[:0],
            None if stats.sum_pi_squared is None else stats.sum_pi_squared[:0],
        )

    def _score(self, batch: Pack, temperature: float, entropy: bool, squares: bool) -> TokenTensors:
        wanted = {"temperature": temperature, "entropy": entropy, "squares": squares}
        if self._sequence is None:
            return super()._forward(batch, **wanted)
        part = self._sequence.share(batch)
        with self._autocast(), attention.use(part.plan):
            given = (part.input_ids, part.positions, part.source, part.targets)
            stats = tensors(self.scorer(self.scorer.stats, *given, **wanted))
            return self._sequence.whole(stats, part.mine, int(batch.targets.numel()))

    def _dummy(self, batch: Pack) -> Pack:
        """One token, predicted from itself."""
        zero = torch.zeros(1, dtype=torch.int64, device=self.device)
        return replace(
            batch, input_ids=zero, positions=zero, segments=[TokenSpan(0, 1)], source=zero, targets=zero
        )

    def _micro_step(
        self, batch: Pack, loss: MicroLoss, temperature: float, entropy: bool
    ) -> tuple[float, dict[str, tuple[float, float]]]:
        """As on one device, but the backward pass runs in any case: the other ranks are in it."""
        recomputing = self._recomputing(-(-batch.size // self.layout.sequence_size))
        with self._fused.active(), recomputing, waiting("the passes of a step", self.layout.groups):
            stats = self._forward(batch, temperature, entropy, False)
            scalar, metrics = stats.log_probs.sum(), {}
            if batch.rows:
                scalar, metrics = loss(MicroBatch(batch.rows, stats.log_probs, stats.entropy))
            value = float(scalar.detach())
            root = scalar if scalar.requires_grad else stats.log_probs.sum() * 0.0
            root.backward(torch.full_like(root, self._scale))
        return value, metrics

    # -- weights and state -----------------------------------------------------------------------------------

    @torch.no_grad()
    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `TrainingEngine.named_weights`; float32, every rank gets every tensor."""
        yield from sharded_state.gathered(self.module)

    @torch.no_grad()
    def adapter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `TrainingEngine.adapter_weights`; float32, every rank gets every tensor."""
        if self._adapter is not None:
            yield from self._adapter.tensors(whole)

    @torch.no_grad()
    def save_weights(self, directory: Path) -> None:
        """See `TrainingEngine.save_weights`; float32, each rank writes its share of the safetensors files."""
        own = [(name, local(p)) for name, p in self.module.named_parameters()]
        on_all_ranks(lambda: models.refuse_non_finite(own))
        if self._adapter is not None:
            tensors, folder = dict(self._adapter.tensors(whole)), Path(directory) / ADAPTER_FOLDER
            save = self._adapter.save
            on_all_ranks(lambda: save(folder, tensors) if self.layout.rank == 0 else None)
            if self._adapter_only:
                return
        sharded_state.write_weights(self.module, Path(directory), self._serving_dtype)

    @torch.no_grad()
    def load_weights(self, directory: Path) -> None:
        """See `TrainingEngine.load_weights`; whatever the number of ranks that wrote it."""
        if self._adapter is not None:
            self._load_adapter(Path(directory), self._adapter)
            return
        on_all_ranks(lambda: refuse_adapter_checkpoint(directory))
        state = sharded_state.untied(self.module)
        source = open_source(
            directory, self.module, state, lambda: models.saved_tensors(self.module, directory)
        )

        def load() -> None:
            for name, tensor in state.items():
                take_share(tensor, source.read(name, tensor))

        on_all_ranks(load)

    def _load_adapter(self, directory: Path, adapter: Adapter) -> None:
        own = PlainView(self.module).adapter_state()
        saved = on_all_ranks(lambda: adapter.read(directory / ADAPTER_FOLDER))
        for name, tensor in own.items():
            take_share(tensor, saved[name])
        adapter.check_base(directory, whole)

    def save_optimizer(self, directory: Path) -> None:
        """See `TrainingEngine.save_optimizer`; each rank writes its share."""
        optimizer = self._require_optimizer()
        assert self._schedule is not None
        save_state(Path(directory), optimizer, self._names, self._schedule.step)

    def load_optimizer(self, directory: Path) -> None:
        """See `TrainingEngine.load_optimizer`; whatever the number of ranks that wrote it."""
        step = on_all_ranks(lambda: load_state(Path(directory), self._require_optimizer(), self._names))
        assert self._schedule is not None
        self._schedule.restore(step)


def _squares(gradients: list[torch.Tensor]) -> float:
    """Σ of squares, float64 over float32 norms."""
    norms = torch._foreach_norm(gradients, 2.0, torch.float32) if gradients else []
    values = torch.stack([n.to(norms[0].device) for n in norms]).double() if norms else torch.zeros(1)
    return float(np.square(values.cpu().numpy()).sum())
