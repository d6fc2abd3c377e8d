"""The training engine: one process with the whole model, or torch's FSDP2 on many ranks, all running the same calls.

    rows ── split_rows ──▶ micro-batches ── pack ──▶ model ──▶ head ──▶ outputs ──▶ loss ──▶ backward
                             one after the other; gradients add up
                             then all ranks: agree on metrics, norm, finiteness; clip; one optimizer step or none

    rank 0   rows 0 ──▶ micro-batches ─┐ layer by layer: gather weights, compute, free
    rank 1   rows 1 ──▶ micro-batches ─┤ backward: gather, compute, add gradients over ranks, keep own share
    rank 2   (none) ──▶ dummies       ─┘

Master weights, gradients and optimizer state are float32; matrix products run in the compute data type. In one process
nothing is wrapped: `module` is the Hugging Face model itself. Its gradient buffers are cleared in place; on a processor
they are allocated once (elsewhere the sampler has better use for their memory). On many ranks weights, gradients and
state are sharded, and all ranks run the same number of passes, so that none waits in a collective that another never
enters: a rank with fewer rows runs passes over a token that counts for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl.config.schema.base import setting
from verl.engine.registry import Placement
from verl.engine.training import weight_files
from verl.engine.training.activations import ActivationMemory, missing_gradients
from verl.engine.training.base import (
    LOG_PROBS,
    ON_ROWS,
    ROUTES,
    SAMPLING_MASK,
    MicroBatch,
    MicroLoss,
    TrainingEngine,
    TrainStepResult,
)
from verl.engine.training.fsdp import ENGINE, fsdp_settings
from verl.engine.training.fsdp.model import ModelSettings, sharded_model, whole_model
from verl.engine.training.fsdp.sharding import MicroBatchSharding, layout
from verl.engine.training.further_tokens import FurtherTokens
from verl.engine.training.muon import matrices
from verl.engine.training.optimizer import (
    StepAccumulator,
    build_optimizer,
    global_norm,
    move_state,
    optim_config,
    sum_of_squares,
)
from verl.engine.training.packing import MicroBatching, Pack, keep_routes, keep_sampling_mask, pack, split_rows
from verl.engine.training.process_group import all_gather_json, local, waiting, whole
from verl.engine.training.scheduled import ScheduledEngine
from verl.engine.training.settings import compute_dtype, micro_batching, preferred_tokens
from verl.errors import UserError
from verl.models import adapters, attention, pretrained
from verl.models.attention import TokenSpan
from verl.models.inputs import VisionInputs
from verl.models.layers import activation_bytes, is_recurrent, model_cost
from verl.models.routing import Routing
from verl.platform import Platform

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from verl.models.layers import ModelCost
    from verl.trajectory import Segment


class FSDPEngine(ScheduledEngine):
    """See the module. Many ranks where a process group has been joined (`process_group.init_process_group`): then
    every method is collective.

    module        a model that is already built, used as it is instead of the one at `model_path` (one process only)
    role_cfg      actor, reference or SFT group; absent keys take their defaults
    log_prob_cfg  group with the `log_prob_*` micro-batch keys (the rollout group for an actor); None: role_cfg
    device_index  which of the devices this process sees is its own
    trainable     False builds no gradients and no optimizer
    longest       most tokens of a sequence of the run, for frequencies that depend on it (`verl.models.positions`)
    placement     None: that of role_cfg
    idles         False: the role is never idle, `param_offload` keeps the weights in host memory during a step too
    shared        a sampler of this process works on the same tensors: `fsdp_config.param_offload` leaves them alone
    head          what the outputs are made with (`verl.engine.training.heads`)
    topk          how many of the most likely tokens its outputs topk_log_probs and topk_ids hold
    truncation    top_k, top_p and min_p of the sampler, for the output sampling_mask
    barred        tokens without probability beside those of the model's images
    """

    def __init__(
        self,
        model_path: str | Path | None = None,
        *,
        module: PreTrainedModel | None = None,
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
        truncation: tuple[int, float, float] | None = None,
        barred: Sequence[int] = (),
    ):
        self.role, self.head, self.trainable = role, head, trainable
        placement = placement or ENGINE.placement(role_cfg or {})
        fsdp, _ = fsdp_settings(role_cfg)
        deterministic = bool(setting(fsdp, "full_determinism", False))
        self._take_device(device, device_index, seed, deterministic=deterministic)
        self._index, self.compute_dtype = device_index, compute_dtype(placement, self.platform)
        self.layout = layout(self.device.type, placement)
        self.dp_rank, self.dp_size = (n // self.layout.ranks_per_row for n in (self.layout.rank, self.layout.size))
        streams = bool(setting(fsdp, "offload_policy", False)) or (placement.param_offload and not idles)
        settings = ModelSettings(
            model_path, model_cfg, fsdp, head, self.device, self.compute_dtype, trainable, seed, longest,
            streams=streams, freezes_vision=bool(setting(role_cfg, "freeze_vision_tower", False)),
            compiles=bool(setting(role_cfg, "use_torch_compile", True)),
        )  # fmt: skip
        alone = self.layout.mesh is None
        self._model = whole_model(settings, module) if alone else sharded_model(settings, self.layout)
        self.module = self._model.head.module
        self._set_head(topk, truncation, barred)
        self._sharded = not alone
        self._sharding = None if alone else MicroBatchSharding(self._model.head, self.layout, settings, device_index)
        self._vision = VisionInputs.of(self.module)
        self._images = {"encoded": 0, "distinct": 0}
        self._serving_dtype, self._source = pretrained.serving_dtype(model_path, model_cfg), model_path
        self._further = FurtherTokens.of(model_cfg, role, self.device) if trainable and head == "lm" else None
        self._activations = ActivationMemory(activation_bytes(self.module.config))
        self._heads = int(self.module.config.get_text_config().num_attention_heads)
        self._checkpointing: bool | None = setting(model_cfg, "enable_gradient_checkpointing")
        self._routing: Routing | None = None
        self._added_norm = 0.0
        self._scales: list[tuple[torch.nn.Parameter, float]] = []
        self._watched: dict[str, torch.nn.Parameter] = {}
        self._read_settings(role_cfg, log_prob_cfg)
        # With `offload_policy` the state of a sharded engine is in host memory at all times.
        moves = not (self._sharded and streams)
        self._weights_leave = moves and not shared and placement.param_offload
        self._state_leaves = moves and placement.optimizer_offload
        self._cost = model_cost(self.module, self.platform, self.compute_dtype, devices=self.layout.size)
        if setting(model_cfg, "use_fused_kernels") is not False:
            self._find_layer()
        if self._replays:  # a model that it does not fit is refused before anything is sampled
            self._refuse_misfit()
        self._names = {n: p for n, p in self.module.named_parameters() if trainable and p.requires_grad}
        self._parameters = list(self._names.values())
        if trainable:
            self._prepare_training(role_cfg)

    def _set_head(self, topk: int, truncation: tuple[int, float, float] | None, barred: Sequence[int]) -> None:
        self._model.head.topk, self._model.head.truncation = topk, truncation
        if barred:
            self._model.head.bar(barred)

    def _micro_batching(self, role_cfg: Any, group: Any, prefix: str) -> MicroBatching:
        preferred = preferred_tokens(self.platform, int(self._activations.token))
        # What predicts further tokens reads each token beside the one after it, of which a shared one has several.
        share = False if self._further is not None and prefix == "ppo" else setting(role_cfg, "use_prefix_grouper")
        batching = micro_batching(group, prefix, share_prompt=share, preferred=preferred)
        # A sequence lies on all devices that share it.
        tokens, limit = (size * self.layout.placement.sequence for size in (batching.tokens, batching.limit))
        return replace(batching, tokens=tokens, limit=limit, one_by_one=is_recurrent(self.module))

    @torch.no_grad()
    def _find_layer(self) -> None:
        """Take the head as a formula if the model agrees with it; all ranks look, and all must find so."""
        head = self._model.head
        with self._autocast() if self._sharded else nullcontext():
            layer = head(head.find_layer)
        self._after_passes()
        if all(all_gather_json(layer is not None)):
            head.layer = layer
        if self._sharded:
            # What was whole while it loaded and for the probe is not needed again.
            self.platform.empty_cache()

    def _prepare_training(self, role_cfg: Any) -> None:
        self._optim = optim_config(setting(role_cfg, "optim"))
        self._optimizer = build_optimizer(self._parameters, self._optim, matrices(self.module))
        self._layers = pretrained.checkpoint_layers(self.module)
        if not self.module.supports_gradient_checkpointing:
            if self._checkpointing:
                raise UserError(
                    f"model.enable_gradient_checkpointing=True: {type(self.module).__name__} cannot recompute its "
                    "layers; set it to False"
                )
            self._checkpointing = False
        if self._checkpointing is not False and self._layers:
            options = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": self._both_contexts}
            pretrained.recompute_layers(self.module, options)
            pretrained.switch_off_dropout(self._layers)
            self._measure_activations()
        with self._autocast() if self._sharded else nullcontext():
            scales = self._model.head(self._model.head.scales)
        self._after_passes()
        weights = dict(self.module.named_parameters())
        self._scales = [(weights[name], offset) for name, offset in scales.items()]
        # Those that are not trained get gradients all the same, which no update takes: beside adapters nothing else
        # tells what became of the loss on its way through micro-batches and ranks.
        self._watched = {name: weights[name].requires_grad_() for name in scales.keys() - self._names.keys()}
        self.schedule(1)

    def _measure_activations(self) -> None:
        """Replace the estimate of what a pass keeps, where the device counts it and the choice is ours. Collective."""
        if self.platform.on_host or self._checkpointing is not None or self.layout.expert is not None:
            return

        def run(tokens: int) -> dict[str, torch.Tensor]:
            batch = _dummy(pack([], self.update_batching, self.device), tokens * self.layout.placement.sequence)
            with self._model.fused.active():
                return self._computed(batch, self._model.head.outputs[:1], 1.0)

        free = min(all_gather_json(self.platform.room(self._index)))
        copied = 0 if self._sharded else sum(p.numel() for p in self.module.parameters())
        if self._activations.may_be_measured(self.module.config, copied, free):
            measured = ActivationMemory.measured(run, self.platform, self._index)
            self._activations = measured or self._activations
            self._after_passes()
            self.platform.empty_cache()

    def set_topk(self, count: int) -> None:
        """How many tokens the outputs topk_log_probs and topk_ids hold from now on."""
        self._model.head.topk = count

    def cost(self) -> ModelCost | None:
        """See `TrainingEngine.cost`."""
        return self._cost

    @torch.no_grad()
    def _refuse_misfit(self) -> None:
        """UserError for a model whose routes cannot be replayed: a pass over one token tells."""
        self._outputs(pack([], self.forward_batching, self.device), (*LOG_PROBS, ROUTES), 1.0)
        self._after_passes()

    # -- forward ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(
        self, rows: Sequence[Segment], outputs: Collection[str] = LOG_PROBS, *, temperature: float
    ) -> dict[str, np.ndarray]:
        """See `TrainingEngine.forward`."""
        with self._model.fused.active():
            packs = self._packs(rows, self.forward_batching)
            results = [self._outputs(batch, outputs, temperature) for batch, _ in packs]
        self._after_passes()
        names, nothing = [name for name in outputs if name not in ON_ROWS], torch.zeros(0)
        return {name: torch.cat([f[name] for f in results] or [nothing]).cpu().numpy() for name in names}

    def _packs(self, rows: Sequence[Segment], batching: MicroBatching) -> Iterator[tuple[Pack, bool]]:
        """(pack, whether it is the last): as many on every rank, without rows where this one has fewer."""
        batching = replace(batching, replay=self._follows_routes())
        chunks = split_rows(rows, batching)
        distinct = {row.media for row in rows if row.media is not None and row.length}
        self._images["distinct"] += sum(media.images for media in distinct)
        room = self.platform.room(self._index) - missing_gradients(self._parameters)
        reports = all_gather_json([len(chunks), room, bool(distinct)])
        count = max(number for number, *_ in reports)
        # The least of all ranks: with a split sequence, recomputing is collective too.
        self._free = min(free for _, free, _ in reports)
        # Where one rank's images go through the tower, the others gather its weights with it.
        together = self._sharded and any(seeing for *_, seeing in reports)
        for number in range(count):
            chunk = chunks[number] if number < len(chunks) else []
            batch = pack(chunk, batching, self.device, self._vision, tower=together)
            self._images["encoded"] += batch.images
            yield batch, number + 1 == count

    def images(self) -> dict[str, int]:
        """See `TrainingEngine.images`."""
        counts, self._images = self._images, dict.fromkeys(self._images, 0)
        return counts

    def _autocast(self) -> AbstractContextManager[Any]:
        lower = self.compute_dtype != torch.float32
        return torch.autocast(self.device.type, dtype=self.compute_dtype, enabled=lower)

    def _outputs(self, batch: Pack, outputs: Collection[str], temperature: float) -> dict[str, torch.Tensor]:
        """Outputs of the pack's response tokens, float32 [R] or [R, k]."""
        computes = bool(batch.targets.numel())
        counted = batch.targets.numel() - batch.blank
        with waiting("a forward pass"):
            computed = self._computed(batch if computes else _dummy(batch), outputs, temperature)
        # None of the dummy's tokens, but still tied to its pass: the backward pass has to run.
        whole = computes and not batch.blank
        return computed if whole else {name: column[:counted] for name, column in computed.items()}

    def _computed(self, batch: Pack, outputs: Collection[str], temperature: float) -> dict[str, torch.Tensor]:
        """Outputs of a pack, `ROUTES` put on its rows. Where routes are replayed also `Routing.changed` of the tokens
        that the response's are predicted from."""
        head, sequence, names = self._model.head, self._model.sequence, [n for n in outputs if n != ROUTES]
        if sequence is None:
            part, plan = batch, batch.plan(self._heads)
        else:
            part, mine, plan = sequence.share(batch)
        records = ROUTES in outputs
        routed = records or part.routes is not None
        self._routing = Routing(self.module, None if records else part.routes) if routed else None
        with self._autocast(), attention.use(plan), self._routing or nullcontext():
            computed = head(head.compute, part, names, temperature)
        if SAMPLING_MASK in outputs and part.sampling_mask is not None:
            keep_sampling_mask(batch, part.sampling_mask.sets)
        if self._routing is not None:
            used, changed = self._routing.recorded(), self._routing.changed
            if records:
                used = used if sequence is None else sequence.all_tokens(used)
                keep_routes(batch, used.cpu().numpy().astype(np.int16))
            if changed is not None:
                computed["changed"] = changed[part.source]
        return computed if sequence is None else sequence.whole(computed, mine, batch.targets.numel())

    def _both_contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Contexts of a checkpointed layer: the second runs in the backward pass, when plan and routes are gone."""
        routing = None if self._routing is None else self._routing.again()
        return nullcontext(), _recomputed_with(attention.current(), routing)

    def _after_passes(self) -> None:
        if self._sharding is not None:
            self._sharding.end()

    # -- update ----------------------------------------------------------------------------------------------

    def _accumulate(
        self,
        rows: Sequence[Segment],
        loss: MicroLoss,
        outputs: Collection[str],
        temperature: float,
        scale: float,
    ) -> tuple[StepAccumulator, float]:
        """See `ScheduledEngine._accumulate`; this rank's share."""
        self._clear_gradients()
        return self._add_gradients(rows, loss, outputs, temperature, scale)

    def accumulate(
        self, rows: Sequence[Segment], loss: MicroLoss, outputs: Collection[str] = LOG_PROBS, *, temperature: float
    ) -> TrainStepResult:
        """The passes of `step` alone: gradients are added to those of the calls since the last `update`; `grad_norm` is
        that of the sum. Where a loss or the norm is not finite, all of them are dropped and `refused` says so."""
        self._require_optimizer()
        total, norm = self._add_gradients(rows, loss, outputs, temperature, 1.0)
        if not total.refused and not math.isfinite(norm):
            total.refused = f"the gradient norm is {norm}"
        if total.refused:
            self._clear_gradients()
        self._added_norm = 0.0 if total.refused else norm
        return TrainStepResult(total.metrics(), norm, total.refused, total.tokens)

    def update(self, clip: float, **settings: Any) -> float:
        """One step of the optimizer with the gradients of `accumulate`, which are zero afterwards. clip: the largest
        global norm, 0 for none; settings: entries of its parameter groups (lr, betas, …) from now on. Returns the norm
        before clipping."""
        norm, self._added_norm = self._added_norm, 0.0
        self._fill_gradients()
        if 0 < clip < norm:
            self._multiply_gradients(clip / (norm + 1e-6))
        for group in self._require_optimizer().param_groups:
            group.update(settings)
        self._update_weights()
        self._clear_gradients()
        return norm

    def _add_gradients(
        self, rows: Sequence[Segment], loss: MicroLoss, outputs: Collection[str], temperature: float, scale: float
    ) -> tuple[StepAccumulator, float]:
        """See `ScheduledEngine._accumulate`, but added to the gradients that are there. A loss that is not finite ends
        it, where no rank waits."""
        if self._further is not None:
            loss, outputs = self._further.joined(rows, loss, outputs)
        total = StepAccumulator()
        if self._sharding is not None:
            self._sharding.begin()
        for number, (batch, last) in enumerate(self._packs(rows, self.update_batching)):
            if self._sharding is not None:
                self._sharding.before(last)
            total.tokens += batch.size
            recomputing = self._recomputing(-(-batch.size // self.layout.placement.sequence))
            with self._model.fused.active(), recomputing, waiting("the passes of a step"):
                computed = self._outputs(batch, outputs, temperature)
                changed = computed.pop("changed", None)
                value, metrics = _backward(computed, batch.rows, loss, scale)
            if not math.isfinite(value):
                why = f"the loss of micro-batch {number} is {value} ({_name_rows(batch.rows)})"
                total.refused = total.refused or why
                if not self._sharded:
                    break
            total.add(metrics)
            if changed is not None:
                self._count_changed_routes(total, changed)
        self._after_passes()
        return self._conclude(total)

    @torch.no_grad()
    def _conclude(self, total: StepAccumulator) -> tuple[StepAccumulator, float]:
        """What all ranks' micro-batches came to, and the norm of all gradients (NaN for a refused step)."""
        # A weight without a gradient decays and keeps its place in the optimizer.
        self._fill_gradients()
        if not self._sharded:
            norm, derivative = torch.stack([global_norm(self._gradients()), self._scale_derivative()]).tolist()
            total.scale_derivative = derivative if self._scales else None
            return total, math.nan if total.refused else norm
        tensor, speaks = self._model.tensor, self.layout.counts_rows
        if tensor is not None:
            with waiting("adding up gradients"):
                tensor.complete(self._names | self._watched)
        squares = sum_of_squares([local(p.grad) for p in self._parameters if p.grad is not None and self._counts(p)])
        counted = [total.sums, total.tokens] if speaks else [{}, 0]
        reports = all_gather_json([*counted, total.refused, squares, float(self._scale_derivative())])
        merged = StepAccumulator(tokens=sum(tokens for _, tokens, *_ in reports))
        for sums, *_ in reports:
            merged.add(sums)
        merged.refused = next((why for *_, why, _, _ in reports if why), "")
        merged.scale_derivative = sum(derivative for *_, derivative in reports) if self._scales else None
        return merged, math.nan if merged.refused else math.sqrt(sum(square for *_, square, _ in reports))

    def _counts(self, parameter: torch.Tensor) -> bool:
        """True on one of the ranks that hold this shard of a parameter."""
        return self.layout.counts and (self._model.tensor is None or self._model.tensor.own(parameter))

    def _scale_derivative(self) -> torch.Tensor:
        """This rank's share of `TrainStepResult.scale_derivative`, float32 scalar: dL/ds = Σ (w + offset) · dL/dw over
        the weights that the head's output grows with (`OutputHead.scales`)."""
        products = []
        for parameter, offset in self._scales:
            if parameter.grad is not None and self._counts(parameter):
                gradient = local(parameter.grad)
                products.append(torch.dot(local(parameter), gradient))
                products += [offset * gradient.sum()] if offset else []
        return sum(products[1:], products[0]) if products else torch.zeros((), device=self.device)

    def _gradients(self) -> list[torch.Tensor]:
        """The gradients, this rank's share."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        return [local(gradient) for gradient in gradients] if self._sharded else gradients

    def _multiply_gradients(self, factor: float) -> None:
        torch._foreach_mul_(self._gradients(), factor)

    def _update_weights(self) -> None:
        self._optimizer.step()

    def _clear_gradients(self) -> None:
        """Make all gradients zero: in place on a processor; elsewhere the first products of the step make them."""
        if self._sharded or not self.platform.on_host:
            return self._drop_gradients()
        watched = [p.grad for p in self._watched.values() if p.grad is not None]
        if gradients := [*self._gradients(), *watched]:
            torch._foreach_zero_(gradients)
        self._fill_gradients()

    def _fill_gradients(self) -> None:
        for parameter in (*self._parameters, *self._watched.values()):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _drop_gradients(self) -> None:
        for parameter in (*self._parameters, *self._watched.values()):
            parameter.grad = None

    @contextmanager
    def _recomputing(self, tokens: int) -> Iterator[None]:
        """Recompute layers in the backward pass of this block if asked for, or if memory asks for it.

        transformers looks at each layer's own `training` flag. Nothing below it is told, so dropout stays off there;
        a layer's own was switched off for good.
        """
        recompute = self._checkpointing
        if recompute is None:
            # Where experts are spread, recomputing is collective, and ranks have packs of their own.
            recompute = self.layout.expert is not None or not self._activations.fits(tokens, self._free)
        layers = self._layers if recompute else []
        try:
            for layer in layers:
                layer.training = True
            yield
        finally:
            for layer in layers:
                layer.training = False

    @torch.no_grad()
    def follow(self, other: TrainingEngine, rate: float) -> None:
        """See `TrainingEngine.follow`: each rank moves its share, wherever the two are."""
        weights, targets = ([local(w) for w in engine.module.parameters()] for engine in (self, other))
        if [w.shape for w in weights] != [w.shape for w in targets]:
            raise UserError(f"the {self.role} cannot follow the policy: its weights are others, or cut in another way")
        for weight, target in zip(weights, targets, strict=True):
            weight.lerp_(target.to(weight.device, weight.dtype), rate)

    # -- the device's memory -----------------------------------------------------------------------------------

    def offload(self) -> None:
        """See `TrainingEngine.offload`; gradients are let go, not kept."""
        if not (self._weights_leave or self._state_leaves):
            return
        self._drop_gradients()
        self._move(torch.device("cpu"), optimizer=True)
        self.platform.empty_cache()

    def onload(self, *, optimizer: bool = False) -> None:
        """See `TrainingEngine.onload`."""
        self._move(self.device, optimizer=optimizer)

    def _move(self, device: torch.device, *, optimizer: bool) -> None:
        # Parameters stay the same objects: the optimizer and what names them hold on to them.
        if self._weights_leave:
            self._model.head.to(device)
        if self._state_leaves and optimizer and self._optimizer is not None:
            move_state(self._optimizer, device)

    def release_cached_memory(self) -> None:
        """See `TrainingEngine.release_cached_memory`: gradients are freed too. A processor's heap and gradients are
        kept: new pages cost more than they are worth to others."""
        if not self.platform.on_host:
            self._drop_gradients()
            self.platform.empty_cache()

    # -- weights and state -----------------------------------------------------------------------------------

    @torch.no_grad()
    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `TrainingEngine.named_weights`; float32, every rank gets every tensor."""
        yield from adapters.exported(self.module, whole)

    def _modules(self) -> Sequence[torch.nn.Module]:
        return [self.module]

    def _write_weights(self, directory: Path) -> None:
        weight_files.save_weights(self.module, directory, self._serving_dtype, self._source)

    def _read_weights(self, directory: Path) -> None:
        weight_files.load_weights(self.module, directory)

    def optimizer_norm(self) -> float | None:
        """See `TrainingEngine.optimizer_norm`."""
        state = self._require_optimizer().state
        shares = [
            local(value)
            for parameter in self._parameters if self._counts(parameter)
            for value in state.get(parameter, {}).values()
            if isinstance(value, torch.Tensor) and value.ndim and value.is_floating_point()
        ]  # fmt: skip
        return math.sqrt(sum(all_gather_json(sum_of_squares(shares))))

    def save_optimizer(self, directory: Path) -> None:
        """See `TrainingEngine.save_optimizer`; each rank writes its share."""
        from verl.engine.training.fsdp.optimizer_state import save_state

        save_state(Path(directory), self._require_optimizer(), self._names, self._schedule.step)

    def load_optimizer(self, directory: Path) -> None:
        """See `TrainingEngine.load_optimizer`; whatever the number of ranks that wrote it."""
        from verl.engine.training.fsdp.optimizer_state import load_state

        self._schedule.restore(load_state(Path(directory), self._require_optimizer(), self._names))
        if self._weights_leave or self._state_leaves:  # it was put where the parameters are for the moment
            move_state(self._require_optimizer(), torch.device("cpu") if self._state_leaves else self.device)


def _dummy(batch: Pack, tokens: int = 1) -> Pack:
    """A sequence of zeros, each predicted from itself."""
    zeros = torch.zeros(tokens, dtype=torch.int64, device=batch.input_ids.device)
    numbers, spans = torch.arange(tokens, device=zeros.device), [TokenSpan(0, tokens)]
    packed = {"input_ids": zeros, "positions": numbers, "segments": spans, "source": numbers, "targets": zeros}
    return replace(batch, **packed, candidates=None, sampling_mask=None)


def _backward(
    outputs: dict[str, torch.Tensor], rows: Sequence[Segment], loss: MicroLoss, scale: float
) -> tuple[float, Mapping[str, Sequence[float]]]:
    """The loss of these outputs and its metrics, gradients added to what is there. The backward pass runs in any case:
    other ranks are in it."""
    tied = next(iter(outputs.values())).sum() * 0.0
    scalar, metrics = loss(MicroBatch(rows, **outputs)) if rows else (tied, {})  # type: ignore[arg-type]
    root = scalar if scalar.requires_grad else tied
    root.backward(torch.full_like(root, scale))
    return float(scalar.detach()), metrics


@contextmanager
def _recomputed_with(plan: attention.AttentionPlan, routing: Routing | None) -> Iterator[None]:
    with attention.use(plan), routing or nullcontext():
        yield


def _name_rows(rows: Sequence[Segment]) -> str:
    uids = list(dict.fromkeys(r.uid for r in rows))
    return f"prompts {', '.join(uids[:4])}{', …' if len(uids) > 4 else ''}"
