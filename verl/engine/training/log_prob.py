"""From hidden states to log-probs, entropy, Σπ² and the most likely tokens, without ever holding the logits.

Rows and vocabulary are walked in blocks of at most BLOCK_SCORES logits (DEVICE_BLOCK_SCORES on an accelerator); a
running maximum and running sums give the log-normaliser. The backward pass computes each block of logits again, turns
it into the gradient of the logits in place, and multiplies it into the gradients of hidden states and head. Memory: one
block, whatever R and V.
Keeping the logits' gradient from the forward pass is no alternative: the head's gradient needs Σ_r g_r·p_r·h_rᵀ,
and g is not known before the loss is.

With z = cap(s·h·Wᵀ)/τ, ℓ = logsumexp z, π = exp(z − ℓ), H = ℓ − Σπz, q = Σπ²:
    ∂logp_t/∂z = 1[t] − π        ∂H/∂z = −π(z − ℓ + H)        ∂q/∂z = 2π(π − q)

Beside the token that follows, a row may have k candidates, and its k most likely tokens may be requested: those of the
blocks seen so far are carried along. Without soft cap, bias and those, a device's own functions
(`FusedOperators.head`) read each block once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.models.attention import product_dtype
from verl.models.sampling_mask import SamplingMask
from verl.platform import platform_of

CANDIDATE_OUTPUTS = ("candidate_log_probs", "candidates_in_topk")
OUTPUTS = ("log_probs", "entropy", "sum_pi_squared", "topk_log_probs", "topk_ids", *CANDIDATE_OUTPUTS)
BLOCK_SCORES = 2 * 1024 * 1024
BLOCK_COLUMNS = 4 * 1024
# An accelerator is done with such a block before the next one's operations are launched; these are 128 MiB of float32.
DEVICE_BLOCK_SCORES = 32 * 1024 * 1024
DEVICE_BLOCK_COLUMNS = 16 * 1024


@dataclass(frozen=True, slots=True)
class LogitLayer:
    """The last layer. weight [V, H], bias [V] or None; logits = cap·tanh(scale·(hWᵀ + b)/cap), cap None = off."""

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] → all logits [R, V]; the plain way, with autograd."""
        out = torch.nn.functional.linear(hidden, self.weight, self.bias).float()
        if self.scale != 1.0:
            out = out * self.scale
        return out if self.softcap is None else self.softcap * torch.tanh(out / self.softcap)


def token_outputs(
    hidden: Tensor,
    targets: Tensor,
    layer: LogitLayer,
    outputs: Collection[str],
    *,
    temperature: float,
    candidates: Tensor | None = None,
    topk: int = 0,
    mask: SamplingMask | None = None,
) -> dict[str, Tensor]:
    """The outputs asked for, float32, of `targets` int64 [R] under softmax(logits(hidden)/temperature); hidden [R, H].

    log_probs, entropy, sum_pi_squared: [R]. topk_log_probs, topk_ids: [R, k] of the `topk` most likely tokens, the
    likeliest first. candidate_log_probs: [R, k] of `candidates` int64 [R, k], −inf where the vocabulary lacks it;
    candidates_in_topk: [R, k], 1 for those among the k most likely. mask: the softmax is over the tokens of these
    sets alone.

    Differentiable in hidden states, weight and bias, but for what is said of the k most likely tokens.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    columns, topk = requested_columns(targets, outputs, candidates, topk)
    requested = ("entropy" in outputs, "sum_pi_squared" in outputs, topk)
    settings = _BlockSettings(layer.scale, layer.softcap, temperature, product_dtype(hidden), *requested, mask)
    with torch.autocast(hidden.device.type, enabled=False):
        results = _TokenOutputs.apply(hidden, layer.weight, layer.bias, columns, settings)
    return _named(results, outputs)


def outputs_of_logits(
    z: Tensor, targets: Tensor, outputs: Collection[str], candidates: Tensor | None = None, topk: int = 0,
    mask: SamplingMask | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """`token_outputs` the plain way: z float32 [R, V] are the logits divided by the temperature."""
    z = z if mask is None else mask.bar(z, slice(0, len(z)))
    logp, (columns, topk) = torch.log_softmax(z, -1), requested_columns(targets, outputs, candidates, topk)
    picked = logp.gather(1, columns.clamp(max=z.shape[1] - 1))
    picked = picked.masked_fill(columns >= z.shape[1], float("-inf"))
    entropy = -(logp.exp() * logp).sum(-1) if "entropy" in outputs else None
    squares = (2 * logp).exp().sum(-1) if "sum_pi_squared" in outputs else None
    return _named((picked, entropy, squares, *logp.detach().topk(topk, 1)), outputs)


def requested_columns(
    targets: Tensor, outputs: Collection[str], candidates: Tensor | None, topk: int
) -> tuple[Tensor, int]:
    """The tokens whose log-probs are asked for, [R, 1 + k], and how many most likely ones."""
    if candidates is None or not {*outputs}.intersection(CANDIDATE_OUTPUTS):
        return targets[:, None], topk
    return torch.cat((targets[:, None], candidates), 1), candidates.shape[1]


def _named(results: Sequence[Tensor | None], outputs: Collection[str]) -> dict[str, Tensor]:
    """The requested of log-probs [R, 1 + k], entropy, Σπ², and log-probs and ids of the likeliest tokens [R, k]."""
    logp, entropy, squares, best, ids = results
    assert logp is not None and best is not None and ids is not None
    # FSDP warns of outputs that are views.
    columns = {"log_probs": logp[:, 0].clone(), "entropy": entropy, "sum_pi_squared": squares}
    # Whole numbers below 2²⁴ are exact in float32.
    columns |= {"topk_log_probs": best, "topk_ids": ids.float()}
    if "candidate_log_probs" in outputs:
        columns["candidate_log_probs"] = logp[:, 1:].clone()
    if "candidates_in_topk" in outputs:
        columns["candidates_in_topk"] = (logp[:, 1:] >= best[:, -1:]).float()
    return {name: column for name, column in columns.items() if name in outputs and column is not None}


def _blocks(rows: int, columns: int, device: torch.device) -> tuple[int, int]:
    """Block size (rows, columns): at most so many scores, columns first as far as they stay useful."""
    small = platform_of(device).on_host
    scores, widest = (BLOCK_SCORES, BLOCK_COLUMNS) if small else (DEVICE_BLOCK_SCORES, DEVICE_BLOCK_COLUMNS)
    width = min(columns, widest)
    return max(1, min(rows, scores // max(1, width))), max(1, width)


def _ranges(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


@dataclass(frozen=True, slots=True)
class _BlockSettings:
    """The scalars of one call, the type of its products, the requested outputs; computes a block of scaled logits."""

    scale: float
    softcap: float | None
    temperature: float
    dtype: torch.dtype
    entropy: bool
    squares: bool
    topk: int = 0
    mask: SamplingMask | None = None

    def kernels(self, hidden: Tensor, bias: Tensor | None) -> Any:
        """The device's own functions for a block (`FusedOperators.head`), None where there are none that fit."""
        fused = platform_of(hidden.device).fused_operators()
        plain = self.softcap is None and bias is None and not self.topk and self.mask is None
        return fused.head if fused is not None and plain else None

    def product(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Block of z in the products' type, without soft cap and bias."""
        factor = self.scale if self.softcap is not None else self.scale / self.temperature
        return torch.addmm(hidden.new_empty(()), hidden, weight.t(), beta=0, alpha=factor)

    def z(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: slice, first: int
    ) -> tuple[Tensor, Tensor | None]:
        """Block of z in float32, of these rows and the columns from `first` on, and with a soft cap
        d(capped)/d(uncapped)."""
        factor = self.scale if self.softcap is not None else self.scale / self.temperature
        z = self.product(hidden, weight).float()
        if bias is not None:
            z.add_(bias.float(), alpha=factor)
        if self.softcap is None:
            return self._barred(z, rows, first), None
        z = torch.tanh_(z.div_(self.softcap))
        slope = 1 - z * z
        return self._barred(z.mul_(self.softcap / self.temperature), rows, first), slope

    def _barred(self, z: Tensor, rows: slice, first: int) -> Tensor:
        return z if self.mask is None else self.mask.bar(z, rows, first)

    @property
    def outer(self) -> float:
        """d(z)/d(h·Wᵀ), the soft cap's slope left out."""
        return self.scale / self.temperature


class _TokenOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, settings):  # type: ignore[no-untyped-def]
        h, w = hidden.to(settings.dtype), weight.to(settings.dtype)
        rows = h.shape[0]
        stats = h.new_zeros((3, rows), dtype=torch.float32)  # lse, entropy, q
        logp = h.new_full(targets.shape, float("-inf"), dtype=torch.float32)
        best = h.new_full((rows, settings.topk), float("-inf"), dtype=torch.float32)
        ids = targets.new_zeros((rows, settings.topk))
        height, width = _blocks(rows, w.shape[0], h.device)
        for r in _ranges(rows, height):
            likely = (best[r], ids[r])
            _forward_rows(stats[:, r], logp[r], likely, h[r], w, bias, targets[r], settings, width, r)
        ctx.save_for_backward(hidden, weight, bias, targets, stats)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        # Copies: the saved statistics must not be views of what the caller may change in place.
        h_out, q_out = stats[1].clone(), stats[2].clone()
        fixed = [best, ids, *([] if settings.entropy else [h_out]), *([] if settings.squares else [q_out])]
        ctx.mark_non_differentiable(*fixed)
        return logp, h_out, q_out, best, ids

    @staticmethod
    def backward(ctx, g_logp, g_entropy, g_squares, *_):  # type: ignore[no-untyped-def]
        (hidden, weight, bias, targets, stats), settings = ctx.saved_tensors, ctx.settings
        h, w = hidden.to(settings.dtype), weight.to(settings.dtype)
        rows, columns = h.shape[0], w.shape[0]
        needs_h, needs_w, needs_b = ctx.needs_input_grad[:3]
        # Where products write float32, the first of them makes a gradient, and nothing is set to zero before.
        writes = rows > 0 and settings.dtype != torch.float32 and platform_of(h.device).has_widening_product()
        made = torch.empty if writes else torch.zeros
        dh = made(h.shape, dtype=torch.float32, device=h.device) if needs_h else None
        dw, direct, fresh = _weight_gradient(weight, settings.dtype, made) if needs_w else (None, False, False)
        db = torch.zeros(columns, dtype=torch.float32, device=h.device) if needs_b else None
        gradients = (g_logp, g_entropy if settings.entropy else None, g_squares if settings.squares else None)
        height, width = _blocks(rows, columns, h.device)
        kernels = settings.kernels(h, bias)
        if kernels is not None:
            g_logp = torch.zeros_like(targets, dtype=torch.float32) if g_logp is None else g_logp.contiguous()
        for r in _ranges(rows, height):
            for c in _ranges(columns, width):
                if kernels is not None:
                    dz, (_, *more) = settings.product(h[r], w[c]), gradients
                    more = [None if g is None else g[r].contiguous() for g in more]
                    kernels[1](dz, stats[:, r], targets[r].contiguous(), g_logp[r], *more, c.start)
                else:
                    z, slope = settings.z(h[r], w[c], None if bias is None else bias[c], r, c.start)
                    dz = _logit_gradient(z, stats[:, r], targets[r] - c.start, gradients, r)
                    if slope is not None:
                        dz = dz.mul_(slope)
                    if db is not None:
                        db[c].add_(dz.sum(0), alpha=settings.outer)
                    dz = dz.to(settings.dtype)
                if dh is not None:
                    _add_product(dh[r], dz, w[c], settings.outer, first=writes and not c.start)
                if dw is not None:
                    _add_product(dw[c], dz.t(), h[r], settings.outer, first=writes and fresh and not r.start)
        dh = dh.to(hidden.dtype) if dh is not None else None
        dw = None if dw is None or direct else dw.to(weight.dtype)
        db = db.to(bias.dtype) if db is not None else None
        return dh, dw, db, None, None


def _weight_gradient(weight: Tensor, dtype: torch.dtype, made: Callable[..., Tensor]) -> tuple[Tensor, bool, bool]:
    """Where the head's gradient goes: straight into a leaf's float32 .grad, else a new tensor; whether it is `made`."""
    fresh = weight.grad is None and weight.dtype == torch.float32 != dtype
    if weight.is_leaf and fresh and not platform_of(weight.device).on_host:
        # made here: a tied embedding's is added to it without a third tensor
        weight.grad = made(weight.shape, dtype=torch.float32, device=weight.device)
        return weight.grad, True, True
    if weight.is_leaf and weight.grad is not None and weight.grad.dtype == torch.float32:
        return weight.grad, True, False
    return made(weight.shape, dtype=torch.float32, device=weight.device), False, True


def _add_product(total: Tensor, a: Tensor, b: Tensor, alpha: float, *, first: bool) -> None:
    """total += alpha·a·b, the sum in float32 whatever the product is; first: total holds nothing yet."""
    if a.dtype == total.dtype:
        total.addmm_(a, b, alpha=alpha)
    elif platform_of(total.device).has_widening_product():
        torch.addmm(total, a, b, beta=0 if first else 1, alpha=alpha, out_dtype=total.dtype, out=total)
    else:
        total.add_(a @ b, alpha=alpha)


def _forward_rows(stats, logp, likely, h, w, bias, targets, settings, width, r):  # type: ignore[no-untyped-def]
    """Fill stats [3, r], logp [r, n] and the most likely tokens for a block of rows, walking the vocabulary once."""
    rows = h.shape[0]
    top = torch.full((rows,), float("-inf"), device=h.device)
    total, weighted, squares = (torch.zeros(rows, device=h.device) for _ in range(3))
    kernels = settings.kernels(h, bias)
    if kernels is not None:
        state, targets = torch.stack((top, total, weighted, squares)), targets.contiguous()
        for c in _ranges(w.shape[0], width):
            kernels[0](settings.product(h, w[c]), targets, state, logp, c.start, settings.entropy, settings.squares)
        top, total, weighted, squares = state
    for c in () if kernels is not None else _ranges(w.shape[0], width):
        z, _ = settings.z(h, w[c], None if bias is None else bias[c], r, c.start)
        inside = (targets >= c.start) & (targets < c.stop)
        picked = z.gather(1, (targets - c.start).clamp(0, z.shape[1] - 1))
        logp.copy_(torch.where(inside, picked, logp))
        if settings.topk:
            _keep_likely(*likely, z, c.start)
        new_top = torch.maximum(top, z.amax(1))
        shrink = torch.exp(top - new_top)
        centred = z.sub_(new_top[:, None])
        e = centred.exp() if settings.entropy else centred.exp_()
        if settings.entropy:
            # Σ e·(z − top): moving the top from old to new adds (old − new)·Σe to each centred term.
            moved = torch.where(total > 0, (top - new_top) * total, torch.zeros_like(total))
            weighted = (weighted + moved) * shrink + torch.linalg.vecdot(e, centred)
        total = total * shrink + e.sum(1)
        if settings.squares:
            squares = squares * shrink * shrink + torch.linalg.vecdot(e, e)
        top = new_top
    log_total = torch.log(total)
    stats[0] = top + log_total
    logp.sub_(stats[0][:, None])
    likely[0].sub_(stats[0][:, None])
    if settings.entropy:
        stats[1] = log_total - weighted / total
    if settings.squares:
        stats[2] = squares / (total * total)


def _keep_likely(best: Tensor, ids: Tensor, z: Tensor, start: int) -> None:
    """Of the most likely tokens so far [r, k] and those of a block of logits, the k largest, in place."""
    values, places = z.topk(min(best.shape[1], z.shape[1]), 1)
    values, places = torch.cat((best, values), 1), torch.cat((ids, places + start), 1)
    kept, order = values.topk(best.shape[1], 1)
    best.copy_(kept)
    ids.copy_(places.gather(1, order))


def _logit_gradient(z, stats, targets, gradients, rows):  # type: ignore[no-untyped-def]
    """d(loss)/dz of a block, made in place of z. `targets` [r, n] are relative to the block's first column."""
    g_logp, g_entropy, g_squares = (None if g is None else g[rows].float() for g in gradients)
    log_pi = z.sub_(stats[0][:, None])
    if g_entropy is None and g_squares is None:
        dz = log_pi.exp_()
        dz.mul_(-g_logp.sum(1, keepdim=True) if g_logp is not None else torch.zeros_like(stats[0])[:, None])
    else:
        pi = log_pi.exp()
        factor = torch.zeros_like(pi)
        if g_logp is not None:
            factor -= g_logp.sum(1, keepdim=True)
        if g_entropy is not None:
            factor -= g_entropy[:, None] * (log_pi + stats[1][:, None])
        if g_squares is not None:
            factor += 2 * g_squares[:, None] * (pi - stats[2][:, None])
        dz = pi.mul_(factor)
    if g_logp is not None:
        inside = (targets >= 0) & (targets < z.shape[1])
        dz.scatter_add_(1, targets.clamp(0, z.shape[1] - 1), g_logp * inside)
    return dz
