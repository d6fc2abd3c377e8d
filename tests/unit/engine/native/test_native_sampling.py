"""Drawing tokens: every setting against probabilities computed the slow way, in float64 and by sorting."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.engine.rollout.base import SamplingParams
from verl.engine.rollout.native.sampling import Rows, sample, uniforms

DRAWS = 20_000


def expected(logits: np.ndarray, p: SamplingParams, seen: tuple[int, ...] = ()) -> np.ndarray:
    """The distribution that `p` asks for, by sorting, float64."""
    z = logits.astype(np.float64)
    for token in seen:
        z[token] = z[token] / p.repetition_penalty if z[token] > 0 else z[token] * p.repetition_penalty
    z = z / p.temperature
    order = np.argsort(-z)
    keep = np.ones(len(z), bool)
    if p.top_k > 0:
        keep[order[p.top_k :]] = False
    probs = np.where(keep, np.exp(z - z.max()), 0.0)
    probs /= probs.sum()
    before = np.cumsum(probs[order]) - probs[order]
    keep[order[before >= p.top_p]] = False
    keep &= probs >= p.min_p * probs.max()
    probs = np.where(keep, probs, 0.0)
    return probs / probs.sum()


def draw(
    logits: np.ndarray, p: SamplingParams, count: int = DRAWS, seen: tuple[int, ...] = ()
) -> tuple[np.ndarray, np.ndarray]:
    rows = Rows.of([p] * count, range(count))
    ids = {i: torch.tensor(seen) for i in range(count)} if seen else None
    tokens, log_probs, _ = sample(torch.from_numpy(logits).float().repeat(count, 1), rows, seen=ids)
    return tokens.numpy(), log_probs.numpy()


SETTINGS = [
    SamplingParams(1),
    SamplingParams(1, temperature=0.5),
    SamplingParams(1, temperature=1.7, seed=2**63 + 5),
    SamplingParams(1, top_k=5),
    SamplingParams(1, top_p=0.8),
    SamplingParams(1, min_p=0.2),
    SamplingParams(1, temperature=0.7, top_k=9, top_p=0.9, min_p=0.05),
    SamplingParams(1, temperature=2.0, top_p=0.99),
]


@pytest.mark.parametrize("p", SETTINGS, ids=str)
@pytest.mark.parametrize("vocab", [13, 64, 150])
def test_frequencies_and_log_probs(p: SamplingParams, vocab: int) -> None:
    logits = np.random.default_rng(vocab).normal(0, 2, vocab)
    want = expected(logits, p)
    tokens, log_probs = draw(logits, p)
    counts = np.bincount(tokens, minlength=vocab)
    assert (counts[want == 0] == 0).all()
    np.testing.assert_allclose(log_probs, np.log(want[tokens]), atol=1e-5)
    kept = want > 0
    chi2 = float((((counts - DRAWS * want) ** 2)[kept] / (DRAWS * want[kept])).sum())
    freedom = int(kept.sum()) - 1
    # Wilson–Hilferty: the cube root of chi2 / freedom is nearly normal; 5 sigma
    if freedom:
        z = ((chi2 / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
        assert abs(z) < 5


def test_repetition_penalty() -> None:
    logits = np.random.default_rng(3).normal(0, 2, 30)
    seen = (int(np.argmax(logits)), int(np.argmin(logits)), 7)
    p = SamplingParams(1, repetition_penalty=1.8, temperature=0.9)
    tokens, log_probs = draw(logits, p, 500, seen)
    np.testing.assert_allclose(log_probs, np.log(expected(logits, p, seen)[tokens]), atol=1e-5)


@given(
    st.integers(0, 2**32),
    st.integers(2, 200),
    st.floats(0.01, 0.999),
    st.integers(1, 50),
    st.floats(0.0, 1.0),
    st.floats(0.1, 3.0),
)
@settings(max_examples=60, deadline=None)
def test_truncation_is_that_of_sorting(
    seed: int, vocab: int, top_p: float, top_k: int, min_p: float, temperature: float
) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, vocab).astype(np.float32)
    p = SamplingParams(1, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    want = expected(logits, p)
    order = np.sort(want)[::-1]
    tokens, log_probs = draw(logits, p, 40)
    # a token whose fate is decided by the last bit of float32 may go either way; then only the sizes can be compared
    close = np.abs(log_probs - np.log(np.maximum(want[tokens], 1e-300))) < 1e-4
    if not close.all():
        relaxed = [
            expected(
                logits,
                SamplingParams(1, temperature=temperature, top_p=top_p + d, top_k=top_k, min_p=min_p + e),
            )
            for d in (-1e-6, 1e-6)
            for e in (-1e-6, 1e-6)
        ]
        assert any((np.abs(log_probs - np.log(np.maximum(r[tokens], 1e-300))) < 1e-4).all() for r in relaxed), order[:5]


def test_greedy_rows_among_others() -> None:
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(0))
    params = [
        SamplingParams(1, temperature=0.0, top_k=3),
        SamplingParams(1),
        SamplingParams(1, top_p=0.5),
        SamplingParams(1, temperature=0.0),
    ]
    tokens, log_probs, _ = sample(logits.clone(), Rows.of(params, [0] * 4))
    for row in (0, 3):
        assert tokens[row] == logits[row].argmax()
        assert log_probs[row] == pytest.approx(float(logits[row].log_softmax(-1).max()), abs=1e-5)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(1))
    params = [SamplingParams(1, seed=i, top_p=0.9 if i % 2 else 1.0, temperature=0.5 + i / 4) for i in range(6)]
    together, *_ = sample(logits.clone(), Rows.of(params, range(6)))
    for i in range(6):
        alone, *_ = sample(logits[i : i + 1].clone(), Rows.of(params[i : i + 1], [i]))
        assert alone[0] == together[i]


def test_ties_at_the_border_are_kept() -> None:
    tokens, log_probs = draw(np.zeros(8), SamplingParams(1, top_k=3), 200)
    assert set(tokens) == set(range(8))
    np.testing.assert_allclose(log_probs, -math.log(8), atol=1e-6)


def test_uniforms_are_uniform_and_independent_of_order() -> None:
    seeds = np.repeat(np.arange(300, dtype=np.uint64), 300)
    positions = np.tile(np.arange(300, dtype=np.uint64), 300)
    first = np.zeros_like(seeds)
    u = uniforms(seeds, first, positions)
    assert u.min() >= 0 and u.max() < 1
    counts = np.histogram(u, 100, (0, 1))[0]
    assert ((counts - 900) ** 2 / 900).sum() < 180  # 99 degrees of freedom, far in the tail
    grid = u.reshape(300, 300)
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.02
    np.testing.assert_array_equal(uniforms(seeds[::-1], first, positions[::-1]), u[::-1])
    assert len(np.unique(u)) == len(u)


def test_each_call_draws_from_a_stream_of_its_own() -> None:
    """Call 0 has the stream that runs had before calls were counted."""
    seeds, positions = np.zeros(20_000, np.uint64), np.arange(20_000, dtype=np.uint64)
    streams = [uniforms(seeds, np.full_like(seeds, call), positions) for call in range(4)]
    np.testing.assert_array_equal(streams[0][:2], [0.6524484863740322, 0.7012121095215252])
    assert len(np.unique(streams)) == 4 * 20_000
    assert np.abs(np.corrcoef(streams) - np.eye(4)).max() < 0.03
    assert np.abs(np.mean(streams, 1) - 0.5).max() < 0.01


def test_rare_tokens_are_never_of_probability_zero() -> None:
    logits = torch.full((5000, 130), -math.inf)
    logits[:, 129] = 0.0
    tokens, log_probs, _ = sample(logits, Rows.of([SamplingParams(1, seed=3)] * 5000, range(5000)))
    assert (tokens == 129).all() and (log_probs == 0).all()
