"""Outputs of response tokens where each tensor-parallel rank has a part of the vocabulary.

With z = h·Wᵀ/τ over all parts, the log-normaliser, Σπz and Σπ² are sums over ranks; what a token's own logit is comes
from the rank that has it. Rows are taken in blocks that are computed again in the backward pass, so that the logits
of one block are all that is held.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from verl.engine.training.log_prob import DEVICE_BLOCK_SCORES, requested_columns
from verl.models.sampling_mask import LOWEST, SamplingMask


def vocabulary_outputs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    outputs: Collection[str],
    *,
    temperature: float,
    vocabulary: int,
    barred: Sequence[int] = (),
    candidates: Tensor | None = None,
    topk: int = 0,
    mask: SamplingMask | None = None,
) -> dict[str, Tensor]:
    """The outputs of `verl.engine.training.log_prob.token_outputs`, float32 [R] or [R, k].

    hidden [R, H], the same on all ranks that share the vocabulary; weight [V/ranks, H], this rank's rows; targets
    int64 [R]; vocabulary: tokens of the model, without padding; barred: those of them that have no probability.
    """
    hidden = copy_to_tensor_model_parallel_region(hidden)
    first = parallel_state.get_tensor_model_parallel_rank() * weight.shape[0]
    ids = torch.arange(first, first + weight.shape[0], device=weight.device)
    absent = (ids >= vocabulary) | torch.isin(ids, torch.tensor(barred, dtype=ids.dtype, device=ids.device))
    columns, likely = requested_columns(targets, outputs, candidates, topk)

    def block(rows: Tensor, tokens: Tensor, start: int) -> tuple[Tensor, ...]:
        def bar(z: Tensor) -> Tensor:
            z = z.masked_fill(absent, LOWEST)
            return z if mask is None else mask.bar(z, slice(start, start + len(z)), first)

        return _block(rows, weight, tokens, bar, first, temperature, likely)

    size = max(1, DEVICE_BLOCK_SCORES // weight.shape[0])
    parts = [
        checkpoint(block, h, c, n * size, use_reentrant=False, preserve_rng_state=False)
        for n, (h, c) in enumerate(zip(hidden.split(size), columns.split(size), strict=True))
    ]
    logp, entropy, squares, best, best_ids = (torch.cat(part) for part in zip(*parts, strict=True))
    logp = logp.masked_fill(columns >= vocabulary, float("-inf"))
    named = {"log_probs": logp[:, 0], "entropy": entropy, "sum_pi_squared": squares}
    named |= {"topk_log_probs": best, "topk_ids": best_ids.float(), "candidate_log_probs": logp[:, 1:]}
    if likely:
        named["candidates_in_topk"] = (logp[:, 1:] >= best[:, -1:]).float()
    return {name: named[name] for name in outputs}


def _block(
    hidden: Tensor, weight: Tensor, tokens: Tensor, bar: Callable[[Tensor], Tensor], first: int, temperature: float,
    topk: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    z = bar((hidden.to(weight.dtype) @ weight.t()).float() / temperature)
    top = z.detach().amax(1, keepdim=True)
    group = parallel_state.get_tensor_model_parallel_group()
    dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    centred = z - top
    e = centred.exp()
    inside = (tokens >= first) & (tokens < first + weight.shape[0])
    own = centred.gather(1, (tokens - first).clamp(0, weight.shape[0] - 1)).where(inside, torch.zeros(()).to(z))
    sums = torch.stack((e.sum(1), (e * centred).sum(1), (e * e).sum(1)), 1)
    reduced = reduce_from_tensor_model_parallel_region(torch.cat((sums, own), 1))
    total, weighted, squares, own = reduced[:, 0], reduced[:, 1], reduced[:, 2], reduced[:, 3:]
    log_total = total.log()
    logp = own - log_total[:, None]
    best, ids = _likely(centred.detach() - log_total.detach()[:, None], first, topk)
    return logp, log_total - weighted / total, squares / total.square(), best, ids


def _likely(logp: Tensor, first: int, topk: int) -> tuple[Tensor, Tensor]:
    """The k most likely tokens of all parts of the vocabulary: log-probs and ids [R, k]."""
    values, places = logp.topk(min(topk, logp.shape[1]), 1)
    ids = places + first
    if topk:
        values, ids = _of_all_parts(values), _of_all_parts(ids)
        values, order = values.topk(topk, 1)
        ids = ids.gather(1, order)
    return values, ids


def _of_all_parts(mine: Tensor) -> Tensor:
    """[R, k] of each rank that shares the vocabulary, side by side."""
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(mine) for _ in range(parallel_state.get_tensor_model_parallel_world_size())]
    dist.all_gather(parts, mine.contiguous(), group=group)
    return torch.cat(parts, 1)
