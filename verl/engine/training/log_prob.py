"""From hidden states to log-probs, entropy and Σπ², without ever holding the logits.

Rows and vocabulary are walked in blocks of at most BLOCK_SCORES logits (DEVICE_BLOCK_SCORES on an accelerator); a
running maximum and running sums give the log-normaliser. The backward pass makes each block of logits again, turns it into the gradient of the logits
in place, and multiplies it into the gradients of hidden states and head. Memory: one block, whatever R and V.
Keeping the logits' gradient from the forward pass is no alternative: the head's gradient needs Σ_r g_r·p_r·h_rᵀ,
and g is not known before the loss is.

With z = cap(s·h·Wᵀ)/τ, ℓ = logsumexp z, π = exp(z − ℓ), H = ℓ − Σπz, q = Σπ²:
    ∂logp_t/∂z = 1[t] − π        ∂H/∂z = −π(z − ℓ + H)        ∂q/∂z = 2π(π − q)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from verl.models.attention import product_dtype
from verl.platform import platform_of

OUTPUTS = ("log_probs", "entropy", "sum_pi_squared")
BLOCK_SCORES = 2 * 1024 * 1024
BLOCK_COLUMNS = 4 * 1024
# An accelerator is done with such a block before the next one's operations are launched; these are 128 MiB of float32.
DEVICE_BLOCK_SCORES = 32 * 1024 * 1024
DEVICE_BLOCK_COLUMNS = 16 * 1024


@dataclass(frozen=True, slots=True)
class LogitLayer:
    """The last layer. weight [V, H], bias [V] or None; logits = cap·tanh(scale·(hWᵀ + b)/cap), cap None = off."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, H] → all logits [R, V]; the plain way, with autograd."""
        out = torch.nn.functional.linear(hidden, self.weight, self.bias).float()
        if self.scale != 1.0:
            out = out * self.scale
        return out if self.softcap is None else self.softcap * torch.tanh(out / self.softcap)


def token_outputs(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    layer: LogitLayer,
    outputs: Collection[str],
    *,
    temperature: float,
) -> dict[str, torch.Tensor]:
    """log_probs, entropy and sum_pi_squared, float32 [R] each, of `targets` int64 [R] under
    softmax(logits(hidden)/temperature); hidden [R, H].

    Differentiable in hidden states, weight and bias.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    asked = ("entropy" in outputs, "sum_pi_squared" in outputs)
    how = _How(layer.scale, layer.softcap, temperature, product_dtype(hidden), *asked)
    with torch.autocast(hidden.device.type, enabled=False):
        found = _TokenOutputs.apply(hidden, layer.weight, layer.bias, targets, how)
    return {name: column for name, column in zip(OUTPUTS, found, strict=True) if name in outputs}


def outputs_of_logits(
    z: torch.Tensor, targets: torch.Tensor, outputs: Collection[str]
) -> dict[str, torch.Tensor]:
    """The plain way: z float32 [R, V] are the logits divided by the temperature."""
    logp = torch.log_softmax(z, -1)
    out = {"log_probs": logp.gather(1, targets[:, None])[:, 0]}
    if "entropy" in outputs:
        out["entropy"] = -(logp.exp() * logp).sum(-1)
    if "sum_pi_squared" in outputs:
        out["sum_pi_squared"] = (2 * logp).exp().sum(-1)
    return out


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
class _How:
    """The scalars of one call, the type of its products, what is asked for; and how a block of scaled logits is made."""

    scale: float
    softcap: float | None
    temperature: float
    dtype: torch.dtype
    entropy: bool
    squares: bool

    def z(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Block of z in float32 and, with a soft cap, d(capped)/d(uncapped)."""
        factor = self.scale if self.softcap is not None else self.scale / self.temperature
        z = torch.addmm(hidden.new_empty(()), hidden, weight.t(), beta=0, alpha=factor).float()
        if bias is not None:
            z.add_(bias.float(), alpha=factor)
        if self.softcap is None:
            return z, None
        z = torch.tanh_(z.div_(self.softcap))
        slope = 1 - z * z
        return z.mul_(self.softcap / self.temperature), slope

    @property
    def outer(self) -> float:
        """d(z)/d(h·Wᵀ), the soft cap's slope left out."""
        return self.scale / self.temperature


class _TokenOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, how):  # type: ignore[no-untyped-def]
        h, w = hidden.to(how.dtype), weight.to(how.dtype)
        stats = h.new_zeros((4, h.shape[0]), dtype=torch.float32)  # logp, lse, entropy, q
        height, width = _blocks(h.shape[0], w.shape[0], h.device)
        for r in _ranges(h.shape[0], height):
            _forward_rows(stats[:, r], h[r], w, bias, targets[r], how, width)
        ctx.save_for_backward(hidden, weight, bias, targets, stats)
        ctx.how = how
        ctx.set_materialize_grads(False)
        # Copies: the saved statistics must not be views of what the caller may change in place.
        logp, h_out, q_out = stats[0].clone(), stats[2].clone(), stats[3].clone()
        ctx.mark_non_differentiable(*([] if how.entropy else [h_out]), *([] if how.squares else [q_out]))
        return logp, h_out, q_out

    @staticmethod
    def backward(ctx, g_logp, g_entropy, g_squares):  # type: ignore[no-untyped-def]
        (hidden, weight, bias, targets, stats), how = ctx.saved_tensors, ctx.how
        h, w = hidden.to(how.dtype), weight.to(how.dtype)
        rows, columns = h.shape[0], w.shape[0]
        needs_h, needs_w, needs_b = ctx.needs_input_grad[:3]
        dh = torch.zeros(h.shape, dtype=torch.float32, device=h.device) if needs_h else None
        dw, direct = _weight_gradient(weight) if needs_w else (None, False)
        db = torch.zeros(columns, dtype=torch.float32, device=h.device) if needs_b else None
        gradients = (g_logp, g_entropy if how.entropy else None, g_squares if how.squares else None)
        height, width = _blocks(rows, columns, h.device)
        for r in _ranges(rows, height):
            for c in _ranges(columns, width):
                z, slope = how.z(h[r], w[c], None if bias is None else bias[c])
                dz = _logit_gradient(z, stats[:, r], targets[r] - c.start, gradients, r)
                if slope is not None:
                    dz = dz.mul_(slope)
                if db is not None:
                    db[c].add_(dz.sum(0), alpha=how.outer)
                dz = dz.to(how.dtype)
                if dh is not None:
                    _add_product(dh[r], dz, w[c], how.outer)
                if dw is not None:
                    _add_product(dw[c], dz.t(), h[r], how.outer)
        dh = dh.to(hidden.dtype) if dh is not None else None
        dw = None if dw is None or direct else dw.to(weight.dtype)
        db = db.to(bias.dtype) if db is not None else None
        return dh, dw, db, None, None


def _weight_gradient(weight: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Where the head's gradient goes: straight into a leaf's existing float32 .grad, else a new tensor."""
    if weight.is_leaf and weight.grad is not None and weight.grad.dtype == torch.float32:
        return weight.grad, True
    return torch.zeros(weight.shape, dtype=torch.float32, device=weight.device), False


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, alpha: float) -> None:
    """total += alpha·a·b, the sum in float32 whatever the product is."""
    if a.dtype == total.dtype:
        total.addmm_(a, b, alpha=alpha)
    else:
        total.add_(a @ b, alpha=alpha)


def _forward_rows(stats, h, w, bias, targets, how, width):  # type: ignore[no-untyped-def]
    """Fill stats [4, r] for a block of rows, walking the vocabulary once."""
    rows = h.shape[0]
    top = torch.full((rows,), float("-inf"), device=h.device)
    total, weighted, squares, chosen = (torch.zeros(rows, device=h.device) for _ in range(4))
    for c in _ranges(w.shape[0], width):
        z, _ = how.z(h, w[c], None if bias is None else bias[c])
        inside = (targets >= c.start) & (targets < c.stop)
        picked = z.gather(1, (targets - c.start).clamp(0, z.shape[1] - 1)[:, None])[:, 0]
        chosen = torch.where(inside, picked, chosen)
        new_top = torch.maximum(top, z.amax(1))
        shrink = torch.exp(top - new_top)
        centred = z.sub_(new_top[:, None])
        e = centred.exp() if how.entropy else centred.exp_()
        if how.entropy:
            # Σ e·(z − top): moving the top from old to new adds (old − new)·Σe to each centred term.
            moved = torch.where(total > 0, (top - new_top) * total, torch.zeros_like(total))
            weighted = (weighted + moved) * shrink + torch.linalg.vecdot(e, centred)
        total = total * shrink + e.sum(1)
        if how.squares:
            squares = squares * shrink * shrink + torch.linalg.vecdot(e, e)
        top = new_top
    log_total = torch.log(total)
    stats[1] = top + log_total
    stats[0] = chosen - stats[1]
    if how.entropy:
        stats[2] = log_total - weighted / total
    if how.squares:
        stats[3] = squares / (total * total)


def _logit_gradient(z, stats, targets, gradients, rows):  # type: ignore[no-untyped-def]
    """d(loss)/dz of a block, made in place of z. `targets` are relative to the block's first column."""
    g_logp, g_entropy, g_squares = (None if g is None else g[rows].float() for g in gradients)
    log_pi = z.sub_(stats[1][:, None])
    if g_entropy is None and g_squares is None:
        dz = log_pi.exp_()
        dz.mul_((-g_logp if g_logp is not None else torch.zeros_like(stats[0]))[:, None])
    else:
        pi = log_pi.exp()
        factor = torch.zeros_like(pi)
        if g_logp is not None:
            factor -= g_logp[:, None]
        if g_entropy is not None:
            factor -= g_entropy[:, None] * (log_pi + stats[2][:, None])
        if g_squares is not None:
            factor += 2 * g_squares[:, None] * (pi - stats[3][:, None])
        dz = pi.mul_(factor)
    if g_logp is not None:
        inside = (targets >= 0) & (targets < z.shape[1])
        dz.scatter_add_(1, targets.clamp(0, z.shape[1] - 1)[:, None], (g_logp * inside)[:, None])
    return dz
