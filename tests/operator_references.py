"""Operators of CUDA devices in torch on the processor, slow and plain: ours (`torch.ops.verl`, what their Triton
kernels compute) and torch's own that the processor lacks, with what they refuse.

`install` registers ours, so that the paths for devices run here; on a pretend device too, which takes `OF_CUDA` as
well. `MOVED` counts the bytes of keys and values that attention reads and writes, which the operators' arguments do not
tell.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.engine.rollout.native import device_decode, sampling  # noqa: F401 - defines the sampler's operators
from verl.engine.rollout.native import step as s
from verl.models.sampling_mask import encode_sets, truncate
from verl.platform import cuda_fused  # noqa: F401 - defines those of training
from verl.platform.operators import LIBRARY

aten, HALF = torch.ops.aten, (torch.bfloat16, torch.float16)
MOVED: Counter[str] = Counter()
_CHUNK = 1024


def inputs(step: Tensor, tokens: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    token, rows = step[s.TOKEN].long(), step[s.LENGTH].nonzero()[:, 0]
    ids = torch.where(token < 0, tokens[(-1 - token).clamp(min=0)].long(), token)
    at = step[s.LENGTH, rows].long() - 1
    seen[step[s.TABLES + 2 * (at // seen.shape[1]), rows].long(), at % seen.shape[1]] = ids[rows].int()
    return ids, step[s.POSITION].long()


def penalise(logits: Tensor, seen: Tensor, step: Tensor) -> Tensor:
    out, penalties = logits.clone(), step[s.PENALTY].contiguous().view(torch.float32).tolist()
    for tile in range(step.shape[1]):
        start, count = step[[s.START, s.COUNT], tile].tolist()
        of_prompts = [(row, s.PROMPT_LENGTH, 1) for row in step[s.ORDER, start : start + count].tolist()]
        for row, length, kind in (*of_prompts, (tile, s.LENGTH, 0)):
            count = int(step[length, row])
            blocks = step[s.TABLES + kind :: 2, tile][: -(-count // seen.shape[1])]
            ids = seen[blocks.long()].flatten()[:count].long()
            values = logits[row, ids]
            out[row, ids] = torch.where(values > 0, values / penalties[row], values * penalties[row])
    return out


def store(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, step: Tensor) -> None:
    rows = step[s.LENGTH].nonzero()[:, 0]
    at = step[s.LENGTH, rows].long() - 1
    blocks = step[s.TABLES + 2 * (at // keys.shape[3]), rows].long()
    for stored, new in ((keys, key), (values, value)):
        stored[blocks, 0, :, at % keys.shape[3]] = new[0].transpose(0, 1)[rows].to(stored.dtype)
        MOVED["store"] += len(rows) * stored[0, 0, :, 0].numel() * stored.element_size()


def partial(
    query: Tensor, keys: Tensor, values: Tensor, step: Tensor, parts: Tensor, lse: Tensor, prompts: bool,
    scale: float, softcap: float, window: int,
) -> None:  # fmt: skip
    lse[:, :, :, int(prompts)], parts[:, :, :, int(prompts)] = -1e30, 0.0
    length, prompt_length = step[s.LENGTH].tolist(), step[s.PROMPT_LENGTH].tolist()
    for tile in range(step.shape[1]):
        start, count = step[[s.START, s.COUNT], tile].tolist() if prompts else (tile, int(length[tile] > 0))
        rows = step[s.ORDER, start : start + count].tolist() if prompts else [tile] * count
        if not rows:
            continue
        seen, before = (prompt_length[rows[0]], 0) if prompts else (length[tile], prompt_length[tile])
        blocks = step[s.TABLES + int(prompts) :: 2, tile][: -(-seen // keys.shape[3])].long()
        k, v = (x[blocks, 0].transpose(0, 1).flatten(1, 2)[:, :seen] for x in (keys, values))
        MOVED["partial"] += sum(x.numel() * x.element_size() for x in (k, v))
        q = query[0][:, rows].to(k.dtype).float().unflatten(0, (len(k), -1))
        score = torch.einsum("hgrd,hkd->hgrk", q, k.float()) * scale
        if softcap:
            score = torch.tanh(score / softcap) * softcap
        if window:
            newest = torch.tensor([prompt_length[row] + length[row] - 1 for row in rows])[:, None]
            score = score.masked_fill(before + torch.arange(seen) <= newest - window, -1e30)
        total = score.logsumexp(-1)
        out = torch.einsum("hgrk,hkd->hgrd", (score - total[..., None]).exp(), v.float())
        lse[rows, :, 0, int(prompts)] = total.flatten(0, 1).t()
        parts[rows, :, 0, int(prompts)] = out.flatten(0, 1).transpose(0, 1)


def merge(parts: Tensor, lse: Tensor, step: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
    total = lse.flatten(2).logsumexp(-1)
    out = (parts * (lse - total[..., None, None]).exp()[..., None]).sum((2, 3))
    if sinks is not None:
        out = out * torch.sigmoid(total - sinks.float())[..., None]
    return out.masked_fill((step[s.LENGTH] == 0)[:, None, None], 0.0).to(dtype)[None]


def _scaled(logits: Tensor, step: Tensor) -> Tensor:
    temperature = step[s.TEMPERATURE].contiguous().view(torch.float32)
    return logits / torch.where(temperature == 0, 1.0, temperature)[:, None]


def _keys(x: Tensor) -> Tensor:
    bits = x.contiguous().view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def threshold(logits: Tensor, top_p: Tensor, step: Tensor) -> Tensor:
    scaled = _scaled(logits, step)
    narrow = step[s.TEMPERATURE : s.LOG_MIN_P + 1].contiguous().view(torch.float32).double().numpy()
    top_k, min_p = step[s.TOP_K].long().numpy(), np.exp(narrow[1])
    filtered = (narrow[0] > 0) & ((top_k > 0) | (top_p.numpy() < 1) | (min_p > 0))
    if filtered.any():
        part = scaled[filtered]
        truncate(part, top_k[filtered], top_p.numpy()[filtered], min_p[filtered])
        scaled[filtered] = part
    return torch.where(torch.isneginf(scaled), 2**31 - 1, _keys(scaled)).amin(1).to(torch.int32)


def encode(logits: Tensor, lowest: Tensor, step: Tensor, sets: Tensor) -> None:
    scaled = _scaled(logits, step)
    allowed = (_keys(scaled) >= lowest[:, None]) & (scaled > -torch.inf)
    sets[:, 0] = allowed.sum(1)
    for row, encoded in enumerate(encode_sets(allowed)):
        content = torch.from_numpy(
            np.frombuffer(encoded[1:].ljust(-(-len(encoded[1:]) // 4) * 4, b"\0"), np.int32).copy()
        )
        sets[row, 1 : 1 + len(content)] = content


def chunk_sums(logits: Tensor, lowest: Tensor, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    shape = len(logits), -(-logits.shape[1] // _CHUNK)
    return torch.zeros(shape), torch.zeros(shape), torch.zeros(shape, dtype=torch.int32)


def draw(
    logits: Tensor, uniform: Tensor, lowest: Tensor, step: Tensor, largest: Tensor, sums: Tensor, best: Tensor,
    tokens: Tensor,
) -> None:  # fmt: skip
    scaled = _scaled(logits, step)
    probs = scaled.masked_fill(_keys(scaled) < lowest[:, None], -torch.inf).softmax(-1)
    greedy = step[s.TEMPERATURE] == 0
    drawn = torch.where(greedy, probs.argmax(-1), sampling._draw(probs, uniform))
    tokens[0] = drawn.to(torch.int32)
    tokens[1] = probs.gather(1, drawn[:, None])[:, 0].log().view(torch.int32)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    inverse = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
    return (x.float() * inverse * (weight.float() + offset)).to(dtype).contiguous(), inverse.reshape(-1)


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, offset: float, inverse: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    inverse = inverse.view(*x.shape[:-1], 1)
    normed, scaled = x.float() * inverse, grad.float() * (weight.float() + offset)
    along = (scaled * normed).mean(-1, keepdim=True)
    dw = (grad.float() * normed).reshape(-1, x.shape[-1]).sum(0)
    return ((scaled - normed * along) * inverse).to(x.dtype).contiguous(), dw


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype).contiguous()


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    g, d, sigmoid = gate.float(), grad.float(), gate.float().sigmoid()
    dg = d * up.float() * sigmoid * (1 + g * (1 - sigmoid))
    return swiglu(gate, up), dg.to(gate.dtype), (d * g * sigmoid).to(gate.dtype)


def rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, back: bool
) -> tuple[Tensor, ...]:  # fmt: skip
    def turned(x: Tensor) -> Tensor:
        wide, c, s = (t.float() for t in (x, cos[:, None], sin[:, None]))
        halves = (wide * s if back else wide).chunk(2, -1)
        other = torch.cat((halves[1], -halves[0]), -1) if back else torch.cat((-halves[1], halves[0]), -1) * s
        return (wide * c + other).to(dtype)[0].transpose(0, 1).contiguous().transpose(0, 1)[None]

    assert len(q) == len(cos) == 1
    return turned(q), turned(k)


def merge_attention(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, index: Tensor) -> None:
    assert out.is_contiguous() and lse.is_contiguous() and other.is_contiguous() and other_lse.is_contiguous()
    mine = lse[:, index]
    joint = torch.logaddexp(mine, other_lse)
    weight, other_weight = ((x - joint).exp().t()[..., None] for x in (mine, other_lse))
    out[index] = (out[index] * weight + other * other_weight).to(out.dtype)
    lse[:, index] = joint


def head_forward(
    z: Tensor, targets: Tensor, state: Tensor, picked: Tensor, start: int, entropy: bool, squares: bool
) -> None:
    assert all(x.is_contiguous() for x in (z, targets, state, picked))
    (top, total, weighted, twice), wide = state.clone(), z.float()
    most = torch.maximum(top, wide.amax(1))
    shrink, e = (top - most).exp(), (wide - most[:, None]).exp()
    moved = torch.where(total > 0, (top - most) * total, 0.0)
    state[0], state[1] = most, total * shrink + e.sum(1)
    state[2] = (weighted + moved) * shrink + (e * (wide - most[:, None])).sum(1) if entropy else weighted
    state[3] = twice * shrink**2 + e.square().sum(1) if squares else twice
    places = targets - start
    inside = (places >= 0) & (places < z.shape[1])
    picked.copy_(torch.where(inside, wide.gather(1, places.clamp(0, z.shape[1] - 1)), picked))


def head_backward(
    z: Tensor, stats: Tensor, targets: Tensor, grad: Tensor, entropy: Tensor | None, squares: Tensor | None, start: int
) -> None:
    assert z.is_contiguous() and targets.is_contiguous() and grad.is_contiguous() and stats.stride(1) == 1
    log_pi = z.float() - stats[0][:, None]
    pi, factor, places = log_pi.exp(), -grad.float().sum(1, keepdim=True).expand_as(z), targets - start
    factor = factor if entropy is None else factor - entropy[:, None] * (log_pi + stats[1][:, None])
    factor = factor if squares is None else factor + 2 * squares[:, None] * (pi - stats[2][:, None])
    inside = (places >= 0) & (places < z.shape[1])
    chosen = torch.zeros(z.shape).scatter_add_(1, places.clamp(0, z.shape[1] - 1), grad.float() * inside)
    z.copy_(pi * factor + chosen)


@functools.cache
def install() -> None:
    """Compute our operators on the processor by these functions."""
    for operator in LIBRARY._op_defs:
        LIBRARY.impl(operator, globals()[operator.partition("::")[2]], "CPU")


def _sequences(
    q: Tensor, k: Tensor, queries: Tensor, keys: Tensor, causal: bool
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Of each sequence its queries, its keys and the mask between them."""
    assert q.dtype in HALF and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 and q.stride(-1) == 1
    assert queries.dtype == keys.dtype == torch.int32
    for i in range(len(queries) - 1):
        rows, columns = slice(*queries[i : i + 2].tolist()), slice(*keys[i : i + 2].tolist())
        n, m = rows.stop - rows.start, columns.stop - columns.start
        hidden = torch.ones(n, m, dtype=torch.bool).triu_(m - n + 1 if causal else m)
        if n:
            yield rows, columns, torch.zeros(n, m, dtype=q.dtype).masked_fill_(hidden, float("-inf"))


def _alone(rows: slice, *tensors: Tensor) -> list[Tensor]:
    """[S, H, D] → [1, H, rows, D]"""
    return [x[rows].transpose(0, 1)[None] for x in tensors]


def flash(
    q: Any, k: Any, v: Any, cq: Any, ck: Any, most: int, _: int, p: float, causal: bool, *__: Any, scale: float
) -> Any:
    assert most > 1 or q.shape[1] == k.shape[1] or len(q) == len(cq) - 1, "of one query each, with grouped heads"
    out, lse = torch.zeros_like(q), torch.full((q.shape[1], q.shape[0]), float("-inf"))
    for rows, columns, mask in _sequences(q, k, cq, ck, causal):
        parts = *_alone(rows, q), *_alone(columns, k, v)
        part, lse[None, :, rows] = aten._scaled_dot_product_flash_attention_for_cpu(*parts, attn_mask=mask, scale=scale)
        out[rows] = part[0].transpose(0, 1)
    return out, lse, torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64), q.new_zeros(0)


def flash_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, cq: Any, ck: Any, _: int, __: int, p: float, causal: bool,
    *___: Any, scale: float,
) -> Any:  # fmt: skip
    assert lse.dtype == torch.float32 and lse.is_contiguous() and grad.dtype == out.dtype == q.dtype
    call, sums = aten._scaled_dot_product_flash_attention_for_cpu_backward, [torch.zeros(x.shape) for x in (q, k, v)]
    for rows, columns, mask in _sequences(q, k, cq, ck, causal):
        parts = *_alone(rows, grad, q), *_alone(columns, k, v), *_alone(rows, out)
        gradients = call(*parts, lse[None, :, rows].contiguous(), 0.0, False, attn_mask=mask, scale=scale)
        for total, at, gradient in zip(sums, (rows, columns, columns), gradients, strict=True):
            total[at] += gradient[0].transpose(0, 1)
    return tuple(total.to(q.dtype) for total in sums)


def sdpa_flash(
    q: Tensor, k: Tensor, v: Tensor, p: float = 0.0, causal: bool = False, *_: Any, scale: Any = None
) -> Any:
    attend = torch.nn.functional.scaled_dot_product_attention
    out, empty = attend(q, k, v, is_causal=causal, scale=scale, enable_gqa=True), torch.zeros(0)
    return out, torch.zeros(q.shape[:3]), None, None, q.shape[2], k.shape[2], empty, empty, empty


def _wide(product: Any, *tensors: Any, out: Any = None, **options: Any) -> Tensor:
    """A product of half precision with float32 results."""
    *tensors, dtype = tensors
    assert tensors[-2].dtype in HALF and tensors[-1].dtype == tensors[-2].dtype and dtype == torch.float32
    result: Tensor = product(*(x.float() for x in tensors), **options)
    return result if out is None else out.copy_(result)


OF_CUDA: dict[Any, Any] = {
    aten._flash_attention_forward.default: flash,
    aten._flash_attention_backward.default: flash_backward,
    aten._scaled_dot_product_flash_attention.default: sdpa_flash,
    aten.bmm.dtype_out: functools.partial(_wide, torch.bmm),
    aten.mm.dtype: functools.partial(_wide, torch.mm),
    aten.addmm.dtype_out: functools.partial(_wide, torch.addmm),
}
"""torch's operator → what stands in for it."""
