"""Linear layers while sampling: the trainer's weights, laid out for the fastest product of this machine.

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

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from verl.models.adapters import adapted_layers, is_adapted, merged_weight
from verl.platform import platform_of

# Above this many rows per call oneDNN's choice of layout no longer depends on the hint.
_ROWS_HINT = 256


def _linears(model: nn.Module) -> list[Any]:
    """Linear layers, adapted ones as a whole; not what is inside of those, nor adapters of other kinds of layers."""
    adapted = adapted_layers(model).values()
    inside = {id(part) for layer in adapted for part in layer.modules()}
    plain = [m for m in model.modules() if type(m) is nn.Linear and id(m) not in inside]
    return plain + [
        layer for layer in adapted if type(layer.base_layer) is nn.Linear and not _is_stack(layer)
    ]


def _is_stack(layer: Any) -> bool:
    return hasattr(layer, "parameter_name")


class FastLinears:
    """Replacement forwards for a model's linear layers, refreshed when its weights change."""

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        self._dtype = dtype
        self._model = model
        self._modules = _linears(model)
        platform = platform_of(next(model.parameters()).device)
        # The data type in which packed products multiply; None where there are none.
        self._inner = next((d for d in (dtype, torch.float32) if platform.has_packed_products(d)), None)
        self._copies: dict[nn.Module, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._forwards: dict[nn.Module, Callable[[torch.Tensor], torch.Tensor]] = {}
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

    def _packed(self, module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        dtype, inner = self._dtype, self._inner
        weight = torch.ops.mkldnn._reorder_linear_weight(
            merged_weight(module).to(dtype).to(inner).contiguous(), _ROWS_HINT
        )
        bias = None if module.bias is None else module.bias.detach().to(dtype).to(inner)
        self._copies[module] = (weight, bias)
        product = torch.ops.mkldnn._linear_pointwise.default

        def forward(x: torch.Tensor) -> torch.Tensor:
            return product(x.to(dtype), weight, bias, "none", [], "")

        def forward_rounded(x: torch.Tensor) -> torch.Tensor:
            return product(x.to(dtype).to(inner), weight, bias, "none", [], "").to(dtype)

        return forward if inner == dtype else forward_rounded

    def _copied(self, module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        if module not in self._copies:
            room = None if module.bias is None else torch.empty_like(module.bias, dtype=self._dtype)
            self._copies[module] = (torch.empty_like(module.weight, dtype=self._dtype), room)
        weight, bias = self._copies[module]
        weight.copy_(merged_weight(module))
        if bias is not None:
            bias.copy_(module.bias)
        return lambda x: F.linear(x.to(weight.dtype), weight, bias)

    @torch.no_grad()
    def check(self, *, sampled: bool = False) -> None:
        """Compare what the next product would use with the weights. WeightSyncError names those that differ.

        sampled: two columns of each matrix; of layers with an adapter, whose weights must be merged for it, every tenth.
        """
        from verl.weight_sync.base import WeightSyncError
        from verl.weight_sync.verify import named

        self.refresh()
        modules = list(self._copies)
        if sampled:
            adapted = [m for m in modules if is_adapted(m)]
            modules = [m for m in modules if not is_adapted(m)] + adapted[::10]
        wrong = {module for module in modules if not self._same(module, sampled)}
        if names := [name for name, module in self._model.named_modules() if module in wrong]:
            raise WeightSyncError(
                f"weight sync: the sampler computes with a copy of {named(names)} that is not its weight"
            )

    def _same(self, module: Any, sampled: bool) -> bool:
        weight, bias = self._copies[module]
        expected = merged_weight(module)
        if sampled:
            width = expected.shape[1]
            columns = torch.arange(0, width, -(-width // 2), device=weight.device)
            expected = expected[:, columns]
            if weight.is_mkldnn:  # packed: rows with a single one give its columns, exactly
                rows = F.one_hot(columns, width).to(weight.dtype)
                plain = torch.ops.mkldnn._linear_pointwise.default(rows, weight, None, "none", [], "").T
            else:
                plain = weight[:, columns]
        else:
            plain = weight.to_dense() if weight.is_mkldnn else weight
        same = torch.equal(plain, expected.to(self._dtype).to(plain.dtype))
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
