"""The sampler's operators in torch on the processor, slow and plain: what its Triton kernels compute.

`install` registers them, so that the sampler's decode step for devices runs here; on a pretend device too.
`MOVED` counts the bytes of keys and values that attention reads and writes, which the operators' arguments do not tell.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import torch
from torch import Tensor

from verl.engine.rollout.native import ops, sampling
from verl.engine.rollout.native import step as s
from verl.models.sampling_mask import truncate

MOVED: Counter[str] = Counter()
_CHUNK = 1024


def inputs(step: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    token = step[s.TOKEN].long()
    return torch.where(token < 0, tokens[(-1 - token).clamp(min=0)].long(), token), step[s.POSITION].long()


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


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    wide = x.float()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if offset == 0.0:
        normal = normal.to(x.dtype).float()
    return (normal * (weight.float() + offset)).to(torch.promote_types(x.dtype, weight.dtype))


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def one(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        out = x * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]
        return out.transpose(1, 2).contiguous().transpose(1, 2)

    return one(q), one(k)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up


@cache
def install() -> torch.library.Library:
    """Compute the sampler's operators on the processor by these functions. What is returned must be kept."""
    library = torch.library.Library("verl_sampler", "IMPL", "CPU")
    for schema in (schema for schemas in ops._SCHEMAS.values() for schema in schemas):
        name = schema.partition("(")[0]
        library.impl(name, globals()[name])
    return library
