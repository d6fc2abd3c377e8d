"""What the training engine's tests share: rows of any shape, and the obvious reference to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from verl.trajectory import Prompt, Trajectory

BOTH = ("log_probs", "entropy")


def rows_of(groups: Sequence[tuple[int, Sequence[int]]], seed: int = 0, vocab: int = 250) -> list[Trajectory]:
    """Groups as (prompt length, response lengths) → rows with random tokens, advantages ±1 in `advantages`."""
    rng = np.random.default_rng(seed)
    rows = []
    for g, (length, responses) in enumerate(groups):
        prompt = Prompt(uid=f"0:{g}@0", ids=rng.integers(0, vocab, length), messages=None)
        for i, size in enumerate(responses):
            rows.append(
                Trajectory(
                    prompt,
                    i,
                    rng.integers(0, vocab, size),
                    np.ones(size, bool),
                    advantages=rng.standard_normal(size).astype(np.float32),
                )
            )
    return rows


def branching_rows(count: int, seed: int = 0, vocab: int = 250, *, every_segment: bool = False) -> list[Trajectory]:
    """Rows of one group, each of which goes on from a place in an earlier one, or from its end. every_segment: what it
    shares behind the first 20 tokens is a part of its response."""
    rng = np.random.default_rng(seed)
    rows, sequences = [], [rng.integers(0, vocab, 20)]
    for number in range(count):
        earlier = sequences[rng.integers(len(sequences))]
        kept = earlier[: rng.integers(16, len(earlier) + 1)]
        context = np.concatenate([kept, rng.integers(0, vocab, rng.integers(0, 4))])
        ids = rng.integers(0, vocab, int(rng.integers(1, 30)))
        sequences.append(np.concatenate([context, ids]))
        if every_segment and len(kept) > 20:
            context, ids = np.split(sequences[-1], [20])
        advantages = rng.standard_normal(len(ids)).astype(np.float32)
        prompt = Prompt(uid="0:0@0", ids=context, messages=None)
        rows.append(Trajectory(prompt, number, ids, np.ones(len(ids), bool), advantages=advantages))
        rows[-1].segments[0].shared = len(kept)
    return rows


def reference(module: Any, rows: Sequence[Trajectory], temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies [ΣL] of the plain way: one padded batch, prompt repeated, all logits."""
    width = max(len(r.prompt.ids) + r.length for r in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for i, r in enumerate(rows):
        both = np.concatenate((r.prompt.ids, r.response_ids))
        ids[i, : len(both)] = torch.from_numpy(both)
        mask[i, : len(both)] = 1
    z = module(input_ids=ids, attention_mask=mask, use_cache=False).logits.float() / temperature
    logp = torch.log_softmax(z, -1)
    entropy = -(logp.exp() * logp).sum(-1)
    picked = logp[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    spans = [(i, len(r.prompt.ids) - 1, len(r.prompt.ids) - 1 + r.length) for i, r in enumerate(rows)]
    return (
        torch.cat([picked[i, a:b] for i, a, b in spans]),
        torch.cat([entropy[i, a:b] for i, a, b in spans]),
    )


def simple_loss(total: int, entropy_coeff: float = 0.0) -> Any:
    """−Σ A·logp·(1 + ½ logp)/T − c·ΣH/T − Σ of candidates' logp/T, if there are any: the gradient depends on the
    log-probs too."""

    def loss(batch: Any) -> tuple[torch.Tensor, dict[str, tuple[float, float]]]:
        parts = [r.advantages for r in batch.rows]
        advantages = torch.from_numpy(np.concatenate(parts)).to(batch.log_probs.device)
        value = -(advantages * (batch.log_probs + batch.log_probs**2 / 4)).sum() / total
        if entropy_coeff:
            value = value - entropy_coeff * batch.entropy.sum() / total
        candidates, extremes = batch.candidate_log_probs, {}
        if candidates is not None and candidates.numel():
            value = value - candidates.sum() / total
            least, share = float(candidates.detach().min()), float(batch.candidates_in_topk.sum())
            extremes = {"candidates_min": (least, 1.0), "in_topk": (share, 1.0 * len(candidates))}
        metrics = extremes | {
            "sum": (float(value.detach()), 0.0),
            "mean": (float(batch.log_probs.detach().sum()), len(advantages)),
        }
        return value, metrics

    return loss


def gradients(engine: Any) -> dict[str, torch.Tensor]:
    """Copies of the gradients in the engine's buffers."""
    return {n: p.grad.clone() for n, p in engine.module.named_parameters()}


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float) -> None:
    """Each tensor within `tolerance` of the other, relative to its own norm."""
    assert ours.keys() == theirs.keys()
    for name, right in theirs.items():
        scale = max(float(right.norm()), 1e-7)
        assert float((ours[name] - right).norm()) <= tolerance * scale, name
