"""Runs the Hugging Face model for the sampler: ids and positions in, float32 logits of the wanted rows out.

The linear layers are the trainer's weights, laid out for the fastest product of this machine.

On CPU weights are packed for products of oneDNN, or of the compiled kernels where these are faster. oneDNN's,
measured on Zen 5, one thread, 256 rows: float32 230 GFLOP/s (torch's default, MKL, 100), bfloat16 470 (unpacked 440,
and the cast of the master weight saved).
A processor without AVX512 has no packed bfloat16 product, and torch's unpacked one runs at a fifth of float32's rate:
there the weights and inputs are rounded to bfloat16 and multiplied in float32.
Elsewhere bfloat16 copies are kept in buffers that are written, never allocated, at each refresh. Layers that read the
same input have one product: on a CPU 1 to 2.2 times as fast as several, the more the fewer rows, with the same bits.

Only instances of torch.nn.Linear itself are touched, and adapted ones, only inside `active()`, and only their
`forward`: training sees the module as it always was. The copy of an adapted layer is that of its merged weight: the
adapter costs nothing while sampling. Where no copy is made (float32 on a GPU) the layers add their adapters as in
training.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verl.engine.rollout.native.decode_plan import DecodePlan
from verl.engine.rollout.native.decoder_layers import SamplerLayers
from verl.engine.rollout.native.device_decode import DeviceDecoder
from verl.engine.rollout.native.graphs import warn_of, why_not
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


# layers that read the same input where a module has all of them
_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def _linears(model: nn.Module) -> list[Any]:
    """Linear layers, adapted ones as a whole; not what is inside of those, nor adapters of other kinds of layers."""
    adapted = adapted_layers(model).values()
    inside = {id(part) for layer in adapted for part in layer.modules()}
    plain = [m for m in model.modules() if type(m) is nn.Linear and id(m) not in inside]
    # a `parameter_name` is that of an adapter of a stack of matrices
    whole = [layer for layer in adapted if not hasattr(layer, "parameter_name")]
    return plain + [layer for layer in whole if type(layer.base_layer) is nn.Linear]


def _siblings(model: nn.Module, linears: list[Any]) -> list[list[Any]]:
    """The linear layers, those of one module together that by their names read the same input."""
    groups, copied = [], set(linears)
    for parent in model.modules():
        for names in _SAME_INPUT:
            layers = [getattr(parent, name, None) for name in names]
            alike = {(layer.in_features, layer.bias is None) for layer in layers if layer in copied}
            if copied.issuperset(layers) and len(alike) == 1:
                groups.append(layers)
    joined = {layer for layers in groups for layer in layers}
    return [*groups, *([layer] for layer in linears if layer not in joined)]


def _rows_of(modules: list[Any]) -> list[tuple[Any, slice]]:
    """Each layer with its rows in a matrix of all their weights, one below the other."""
    ends = list(accumulate(module.out_features for module in modules))
    return [(module, slice(end - module.out_features, end)) for module, end in zip(modules, ends, strict=True)]


def _split_product(multiply: Callable[[Tensor], Tensor], modules: list[Any]) -> dict[Any, Callable[[Tensor], Tensor]]:
    """Forwards of layers whose outputs lie side by side in one product, made when the first is called with an input."""
    if len(modules) == 1:
        return {modules[0]: multiply}
    sizes = [module.out_features for module in modules]
    newest: list[Any] = [None, ()]

    def forward(x: Tensor, number: int) -> Tensor:
        if newest[0] is not x:
            newest[:] = x, multiply(x).split(sizes, -1)
        part: Tensor = newest[1][number]
        if number == len(sizes) - 1:
            newest[:] = None, ()
        return part

    return {module: partial(forward, number=number) for number, module in enumerate(modules)}


class _Copy(NamedTuple):
    """A layer's weight and bias as the product takes them: `rows` of what it shares with its siblings."""

    weight: Tensor
    bias: Tensor | None
    rows: slice


class FastLinears:
    """Replacement forwards for a model's linear layers, refreshed when its weights change."""

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        self._dtype = dtype
        self._model = model
        self._modules = _linears(model)
        self._siblings = _siblings(model, self._modules)
        self._adapted = {module for module in self._modules if is_adapted(module)}
        self._platform = platform_of(next(model.parameters()).device)
        # The data type in which packed products multiply; None where there are none.
        kinds = (kind for kind in (dtype, torch.float32) if self._platform.has_packed_products(kind))
        self._inner = next(kinds, None)
        self._copies: dict[nn.Module, _Copy] = {}
        self._forwards: dict[nn.Module, Callable[[Tensor], Tensor]] = {}
        self._products: dict[tuple[nn.Module, ...], Callable[[Tensor], Tensor]] = {}
        self._stale = True

    def invalidate(self) -> None:
        """The weights changed: copy them again before the next product."""
        self._stale = True

    def release(self) -> None:
        """Free the copies; the next product makes them again."""
        self._forwards, self._products, self._copies, self._stale = {}, {}, {}, True

    def product(self, x: Tensor, *modules: nn.Module) -> Tensor:
        """The outputs of linear layers that read x [..., in] side by side: one product where they share one."""
        joined = self._products.get(modules)
        return torch.cat([module(x) for module in modules], -1) if joined is None else joined(x)

    @torch.no_grad()
    def refresh(self) -> None:
        if not self._stale:
            return
        self._stale = False
        for modules in self._siblings:
            # one group after the other: an old copy goes when the new one is there, not after all of them
            if self._inner is not None:
                self._pack(modules, self._inner)
            elif self._dtype not in (torch.float32, modules[0].weight.dtype):
                self._fill(modules)

    def _weight(self, module: Any) -> Tensor:
        return merged_weight(module) if module in self._adapted else module.weight.detach()

    def _pack(self, modules: list[Any], inner: torch.dtype) -> None:
        """One packed product of layers that read the same input."""
        dtype, product = self._dtype, self._platform.packed_product
        weights = [self._weight(module).to(dtype).to(inner) for module in modules]
        weight = self._platform.pack_weight(weights[0] if len(weights) == 1 else torch.cat(weights))
        biases = [module.bias.detach().to(dtype).to(inner) for module in modules if module.bias is not None]
        bias = torch.cat(biases) if biases else None
        self._copies |= {module: _Copy(weight, bias, rows) for module, rows in _rows_of(modules)}
        self._set_product(modules, lambda x: product(x.to(dtype).to(inner), weight, bias).to(dtype))

    def _set_product(self, modules: list[Any], multiply: Callable[[Tensor], Tensor]) -> None:
        self._products[tuple(modules)] = multiply
        self._forwards |= _split_product(multiply, modules)

    def _fill(self, modules: list[Any]) -> None:
        """Copy the weights of layers that read the same input, one below the other."""
        if modules[0] not in self._copies:
            self._make_room(modules)
        for module in modules:
            copy = self._copies[module]
            copy.weight[copy.rows] = self._weight(module)
            if copy.bias is not None:
                copy.bias[copy.rows] = module.bias

    def _make_room(self, modules: list[Any]) -> None:
        like = modules[0].weight
        height = sum(module.out_features for module in modules)
        weight = torch.empty(height, like.shape[1], dtype=self._dtype, device=like.device)
        bias = None if modules[0].bias is None else weight.new_empty(height)
        self._copies |= {module: _Copy(weight, bias, rows) for module, rows in _rows_of(modules)}

        def multiply(x: Tensor) -> Tensor:
            return F.linear(x.to(weight.dtype).flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])

        self._set_product(modules, multiply)

    @torch.no_grad()
    def check(self, *, sampled: bool = False) -> None:
        """Compare what the next product would use with the weights. WeightSyncError names those that differ.

        sampled: two columns of each matrix; of layers with an adapter, whose weights must be merged first, every tenth.
        """
        from verl.weight_sync.verify import named

        self.refresh()
        checked = set(self._copies)
        if sampled:
            adapted = [module for module in self._copies if module in self._adapted]
            checked -= {module for number, module in enumerate(adapted) if number % 10}
        groups = ([module for module in modules if module in checked] for modules in self._siblings)
        wrong = {module for modules in groups if modules for module in self._differing(modules, sampled)}
        if names := [name for name, module in self._model.named_modules() if module in wrong]:
            raise WeightSyncError(f"weight sync: the sampler's copy of {named(names)} is not its weight")

    def _differing(self, modules: list[Any], sampled: bool) -> Iterator[Any]:
        """Those of layers with one product whose copies are not their weights."""
        weight, bias, _ = self._copies[modules[0]]
        width, packed = modules[0].weight.shape[1], self._inner is not None
        columns = torch.arange(0, width, -(-width // 2) if sampled else 1, device=weight.device)
        if sampled and packed:  # inputs with a single one give its columns, exactly
            inputs = F.one_hot(columns, width).to(self._inner)
            plain = self._platform.packed_product(inputs, weight).T
        else:
            plain = (self._platform.unpack_weight(weight) if packed else weight)[:, columns]
        for module in modules:
            rows, expected = self._copies[module].rows, self._weight(module)[:, columns]
            same = torch.equal(plain[rows], expected.to(self._dtype).to(plain.dtype))
            if not same or not (bias is None or torch.equal(bias[rows], module.bias.to(self._dtype).to(bias.dtype))):
                yield module

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

    `routes`, with record_routes: the experts that the tokens of the newest pass went to, int64 [tokens, layers, k].
    """

    #: Whether `routes` are kept.
    record_routes = False
    routes: Tensor | None = None

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
        self._scheduler = scheduler
        with attention.sampling_mode(model):
            self._fused = SamplerLayers(model, self.linears.product)
        #: Decodes on a device that Triton compiles for, from the cache of a paged pool; None: `decode` does.
        self.device_decode: DeviceDecoder | None = None
        self._forbidden = torch.tensor(sorted(set(forbidden)), dtype=torch.int64, device=self.device)

    def decode_on_device(self, max_model_len: int, capture: GraphRecorder | None) -> None:
        """Decode by kernels from now on, from captured graphs if there is a recorder and the model is not known to be
        unfit for them."""
        if capture is not None and (reason := why_not(self.model)):
            warn_of(reason)
            capture = None
        forward = partial(self._forward, keep=0)
        self.device_decode = DeviceDecoder(forward, self._scheduler, max_model_len, capture)

    @property
    def _captures(self) -> bool:
        return self.device_decode is not None and self.device_decode.graphs is not None

    def weights_updated(self) -> None:
        """Copies of weights are made anew when they are wanted."""
        self.linears.invalidate()
        if self.device_decode is not None and self.device_decode.graphs is not None:
            self.device_decode.graphs.begin_round()

    def release(self) -> None:
        """Hold nothing but the model: the cache's memory goes, and so do graphs that read it and copies of weights."""
        if self.device_decode is not None and self.device_decode.graphs is not None:
            self.device_decode.graphs.clear()
        self._decode.forget()
        self.linears.release()

    @contextmanager
    def ready(self) -> Iterator[None]:
        """The model as the sampler wants it (evaluation mode, our attention, fast products), put back at the end."""
        lower, keep = self._dtype != torch.float32, not self._captures
        cast = torch.autocast(self.device.type, dtype=self._dtype, enabled=lower, cache_enabled=keep)
        with torch.no_grad(), attention.sampling_mode(self.model), self.linears.active(), self._fused.active(), cast:
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
        tokens = self._tensor(ids)
        logits = self._forward(tokens, self._tensor(positions), plan, keep, media)
        if self.device_decode is not None:
            self.device_decode.seen.view(-1).index_copy_(0, plan.places(1), tokens.int())
        if self._pool.states is not None:
            self._pool.states.copy(self._scheduler.handed_on(work))
        in_order = np.array_equal(distinct, rows)
        return logits[: len(rows)] if in_order else logits.index_select(0, self._tensor(back))

    def decode(self, requests: Sequence[Request]) -> Tensor:
        """Logits after the newest token of each request (ascending slots), float32 [N, V]."""
        placed = [(r, r.group) for r in requests if r.group]
        rows = [(r.tokens[-1], r.slot, len(r.tokens), g.slot, len(r.prompt), g.shift) for r, g in placed]
        ids, slots, lengths, prompt_slots, prompt_lengths, shifts = np.array(rows, np.int64).T
        self._decode.prepare(slots, lengths, prompt_slots, prompt_lengths)
        positions = prompt_lengths + lengths - 1 + shifts
        return self._forward(self._tensor(ids), self._tensor(positions), self._decode, 0)

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
        self.routes = None if routing is None else routing.recorded()
        rows = out.logits[0]
        if not self._chooses and isinstance(keep, Tensor):
            rows = rows.index_select(0, keep)
        logits = rows.float()
        if len(self._forbidden):
            logits.index_fill_(1, self._forbidden, -torch.inf)
        return logits

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
