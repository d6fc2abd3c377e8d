"""Runs the Hugging Face model for the sampler: ids and positions in, float32 logits of the wanted rows out.

The linear layers are the trainer's weights, laid out for the fastest product of this machine.

On CPU the products go to oneDNN with prepacked weights. Measured on Zen 5, one thread, 256 rows: float32
230 GFLOP/s (torch's default, MKL, 100), bfloat16 470 (unpacked 440, and the cast of the master weight saved).
A processor without AVX512 has no packed bfloat16 product, and torch's unpacked one runs at a fifth of float32's rate:
there the weights and inputs are rounded to bfloat16 and multiplied in float32.
Elsewhere bfloat16 copies are kept in buffers that are written, never allocated, at each refresh.

Only instances of torch.nn.Linear itself are touched, and adapted ones, only inside `active()`, and only their
`forward`: training sees the module as it always was. The copy of an adapted layer is that of its merged weight: the
adapter costs nothing while sampling. Where no copy is made (float32 on a GPU) the layers add their adapters as in
training.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verl.engine.rollout.native.decode_plan import DecodePlan
from verl.engine.rollout.native.graphs import DecodeGraphs, warn_of, why_not
from verl.engine.rollout.native.prefill_plan import PrefillPlan
from verl.engine.rollout.native.scheduler import Prefill, Request, Scheduler
from verl.engine.rollout.native.vision import ImageEncoder
from verl.models import attention
from verl.models.adapters import adapted_layers, is_adapted, merged_weight
from verl.models.inputs import model_inputs
from verl.models.routing import Routing
from verl.platform import platform_of
from verl.weight_sync.verify import WeightSyncError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from verl.platform.cuda_graphs import GraphRecorder


def _linears(model: nn.Module) -> list[Any]:
    """Linear layers, adapted ones as a whole; not what is inside of those, nor adapters of other kinds of layers."""
    adapted = adapted_layers(model).values()
    inside = {id(part) for layer in adapted for part in layer.modules()}
    plain = [m for m in model.modules() if type(m) is nn.Linear and id(m) not in inside]
    # a `parameter_name` is that of an adapter of a stack of matrices
    whole = [layer for layer in adapted if not hasattr(layer, "parameter_name")]
    return plain + [layer for layer in whole if type(layer.base_layer) is nn.Linear]


class FastLinears:
    """Replacement forwards for a model's linear layers, refreshed when its weights change."""

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        self._dtype = dtype
        self._model = model
        self._modules = _linears(model)
        self._adapted = {module for module in self._modules if is_adapted(module)}
        self._platform = platform_of(next(model.parameters()).device)
        # The data type in which packed products multiply; None where there are none.
        kinds = (kind for kind in (dtype, torch.float32) if self._platform.has_packed_products(kind))
        self._inner = next(kinds, None)
        self._copies: dict[nn.Module, tuple[Tensor, Tensor | None]] = {}
        self._forwards: dict[nn.Module, Callable[[Tensor], Tensor]] = {}
        self._stale = True

    def invalidate(self) -> None:
        """The weights changed: copy them again before the next product."""
        self._stale = True

    def release(self) -> None:
        """Free the copies; the next product makes them again."""
        self._forwards, self._copies, self._stale = {}, {}, True

    @torch.no_grad()
    def refresh(self) -> None:
        if not self._stale:
            return
        self._stale = False
        for module in self._modules:
            # one after the other: an old copy goes when the new one is there, not after all of them
            if self._inner is not None:
                self._forwards[module] = self._packed(module)
            elif self._dtype not in (torch.float32, module.weight.dtype):
                self._forwards[module] = self._copied(module)

    def _weight(self, module: Any) -> Tensor:
        return merged_weight(module) if module in self._adapted else module.weight.detach()

    def _packed(self, module: Any) -> Callable[[Tensor], Tensor]:
        dtype, inner = self._dtype, self._inner
        weight = self._platform.pack_weight(self._weight(module).to(dtype).to(inner))
        bias = None if module.bias is None else module.bias.detach().to(dtype).to(inner)
        self._copies[module] = (weight, bias)
        product = self._platform.packed_product
        return lambda x: product(x.to(dtype).to(inner), weight, bias).to(dtype)

    def _copied(self, module: Any) -> Callable[[Tensor], Tensor]:
        if module not in self._copies:
            room = None if module.bias is None else torch.empty_like(module.bias, dtype=self._dtype)
            self._copies[module] = (torch.empty_like(module.weight, dtype=self._dtype), room)
        weight, bias = self._copies[module]
        weight.copy_(self._weight(module))
        if bias is not None:
            bias.copy_(module.bias)
        return lambda x: F.linear(x.to(weight.dtype), weight, bias)

    @torch.no_grad()
    def check(self, *, sampled: bool = False) -> None:
        """Compare what the next product would use with the weights. WeightSyncError names those that differ.

        sampled: two columns of each matrix; of layers with an adapter, whose weights must be merged first, every tenth.
        """
        from verl.weight_sync.verify import named

        self.refresh()
        modules = list(self._copies)
        if sampled:
            adapted = [m for m in modules if m in self._adapted]
            modules = [m for m in modules if m not in self._adapted] + adapted[::10]
        wrong = {module for module in modules if not self._same(module, sampled)}
        if names := [name for name, module in self._model.named_modules() if module in wrong]:
            raise WeightSyncError(f"weight sync: the sampler's copy of {named(names)} is not its weight")

    def _same(self, module: Any, sampled: bool) -> bool:
        weight, bias = self._copies[module]
        expected, width = self._weight(module), weight.shape[1]
        columns = torch.arange(0, width, -(-width // 2) if sampled else 1, device=weight.device)
        packed = self._inner is not None
        if sampled and packed:  # rows with a single one give its columns, exactly
            rows = F.one_hot(columns, width).to(weight.dtype)
            plain = self._platform.packed_product(rows, weight).T
        else:
            plain = (weight.to_dense() if packed else weight)[:, columns]
        same = torch.equal(plain, expected[:, columns].to(self._dtype).to(plain.dtype))
        return same and (bias is None or torch.equal(bias, module.bias.to(self._dtype).to(bias.dtype)))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Use the fast products until the block ends."""
        self.refresh()
        try:
            for module, forward in self._forwards.items():
                module.__dict__["forward"] = forward
            yield
        finally:
            for module in self._forwards:
                module.__dict__.pop("forward", None)


class Runner:
    """The model, its fast linear layers, and the two ways to call it. forbidden: tokens that are never sampled; images:
    of a model that takes images.

    `routes`, with record_routes: the experts that the tokens of the newest pass went to, int16 [tokens, layers, k].
    """

    #: Whether `routes` are kept.
    record_routes = False
    routes: np.ndarray | None = None

    def __init__(
        self,
        model: PreTrainedModel,
        scheduler: Scheduler,
        dtype: torch.dtype,
        forbidden: Sequence[int] = (),
        images: ImageEncoder | None = None,
    ):
        self._images = images
        self.model = model
        # Whether the model can be told which rows' logits are wanted.
        self._chooses = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.device = next(model.parameters()).device
        self.linears = FastLinears(model, dtype)
        self._dtype = dtype
        self._pool = scheduler.responses.pool
        self._decode = DecodePlan(scheduler.prompts, scheduler.responses)
        self._graphs: DecodeGraphs | None = None
        self._forbidden = torch.tensor(sorted(set(forbidden)), dtype=torch.int64, device=self.device)

    def capture_with(self, capture: GraphRecorder) -> None:
        """Decode from captured graphs from now on, if the model is not known to be unfit for them."""
        if reason := why_not(self.model):
            warn_of(reason)
            return
        self._graphs = DecodeGraphs(lambda i, p: self._forward(i, p, self._decode, 0), self._decode, capture)

    def release(self) -> None:
        """Hold nothing but the model: the cache's memory goes, and so do graphs that read it and copies of weights."""
        if self._graphs is not None:
            self._graphs.clear()
        self._decode.forget()
        self.linears.release()

    @contextmanager
    def ready(self) -> Iterator[None]:
        """The model as the sampler wants it (evaluation mode, our attention, fast products), put back at the end."""
        lower, keep = self._dtype != torch.float32, self._graphs is None
        cast = torch.autocast(self.device.type, dtype=self._dtype, enabled=lower, cache_enabled=keep)
        with torch.no_grad(), attention.sampling_mode(self.model), self.linears.active(), cast:
            yield

    def prefill(self, work: Prefill) -> Tensor:
        """Logits for `work.sampled`, float32 [len(sampled), V]."""
        ids = np.concatenate([np.array(span.ids, np.int64) for span in work.spans])
        seeing = self._images is not None and any(span.images is not None for span in work.spans)
        positions = np.concatenate([span.axes if seeing else span.positions for span in work.spans], axis=-1)
        rows = np.array([row for _, row in work.sampled], np.int64)
        # several responses may start from one row, and a response from an earlier row than the one before it (its
        # prompt's last): the head runs once for each row, in their order
        distinct, back = np.unique(rows, return_inverse=True)
        plan = PrefillPlan(self._pool, work.spans)
        keep = self._tensor(distinct if len(distinct) else np.zeros(1, np.int64))
        media = self._images.of_spans(work.spans) if seeing and self._images is not None else None
        logits = self._forward(self._tensor(ids), self._tensor(positions), plan, keep, media)
        in_order = np.array_equal(distinct, rows)
        return logits[: len(rows)] if in_order else logits.index_select(0, self._tensor(back))

    def decode(self, requests: Sequence[Request]) -> Tensor:
        """Logits after the newest token of each request (ascending slots), float32 [N, V]."""
        slots = np.array([r.slot for r in requests], np.int64)
        filled = slots if self._graphs is None else self._filled(slots)
        at = np.searchsorted(filled, slots)
        columns = np.zeros((5, len(filled)), np.int64)
        placed = [(r, r.group) for r in requests if r.group]
        rows = [(r.tokens[-1], len(r.tokens), g.slot, len(r.prompt), g.shift) for r, g in placed]
        columns[:, at] = np.array(rows).T
        ids, lengths, prompt_slots, prompt_lengths, shifts = columns
        positions = np.maximum(prompt_lengths + lengths - 1 + shifts, 0)
        rounded = self._graphs is not None
        self._decode.prepare(filled, lengths, prompt_slots, prompt_lengths, rounded=rounded)
        if self._graphs is None:
            return self._forward(self._tensor(ids), self._tensor(positions), self._decode, 0)
        logits = self._graphs.run(self._tensor(ids), self._tensor(positions))
        return logits.index_select(0, self._tensor(at))

    def _filled(self, slots: np.ndarray) -> np.ndarray:
        """The slots that captured graphs have rows for, int64: all of each block_row with one of `slots`."""
        rows = self._pool.layout.rows
        return (np.unique(slots // rows)[:, None] * rows + np.arange(rows)).reshape(-1)

    def _forward(
        self,
        ids: Tensor,
        positions: Tensor,
        plan: attention.AttentionPlan,
        keep: Tensor | int,
        media: Mapping[str, Any] | None = None,
    ) -> Tensor:
        choice = {"logits_to_keep": keep} if self._chooses else {}
        self._pool.calls.start()
        routing = Routing(self.model) if self.record_routes else None
        with attention.use(plan), routing or nullcontext():
            out = self.model(**model_inputs(ids, positions, media), **choice)
        self._pool.calls.finish()
        self.routes = None if routing is None else routing.recorded().cpu().numpy().astype(np.int16)
        rows = out.logits[0]
        if not self._chooses and isinstance(keep, Tensor):
            rows = rows.index_select(0, keep)
        logits = rows.float()
        if len(self._forbidden):
            logits.index_fill_(1, self._forbidden, -torch.inf)
        return logits

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
