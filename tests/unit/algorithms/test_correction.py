"""Sampler against trainer: every metric against a loop over responses and tokens."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithms_rows import matrices, response
from verl.algorithms.agreement import high_percentile, sampler_metrics
from verl.compat.rollout_corr_helper import compute_offpolicy_metrics


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def oracle(old: list[list[float]], mu: list[list[float]]) -> dict[str, float]:
    """Metrics from ragged lists that hold policy tokens only."""
    rows = [(o, m) for o, m in zip(old, mu, strict=True) if o]
    e = [a - b for o, m in rows for a, b in zip(o, m, strict=True)]
    log_ppl = [-mean(o) for o, _ in rows]
    theirs = [-mean(m) for _, m in rows]
    gaps = [ours - other for ours, other in zip(log_ppl, theirs, strict=True)]
    sums = [sum(a - b for a, b in zip(o, m, strict=True)) for o, m in rows]

    def chi2(x: float) -> float:
        return math.exp(2 * min(max(x, -20.0), 20.0)) - 1

    return {
        "kl": mean([-x for x in e]),
        "k3_kl": mean([math.exp(x) - x - 1 for x in e]),
        "training_ppl": mean([math.exp(x) for x in log_ppl]),
        "training_log_ppl": mean(log_ppl),
        "rollout_ppl": mean([math.exp(x) for x in theirs]),
        "rollout_log_ppl": mean(theirs),
        "log_ppl_diff": mean(gaps),
        "log_ppl_abs_diff": mean([abs(g) for g in gaps]),
        "log_ppl_diff_max": max(gaps, default=math.nan),
        "log_ppl_diff_min": min(gaps, default=math.nan),
        "ppl_ratio": mean([math.exp(g) for g in gaps]),
        "chi2_token": mean([chi2(x) for x in e]),
        "chi2_seq": mean([chi2(x) for x in sums]),
    }


@settings(max_examples=100, deadline=None)
@given(matrices(st.floats(-6, 0), st.floats(-6, 0)))
def test_divergence_equals_the_loop(batch: tuple[list[list[float]], ...]) -> None:
    old, mu, masks = batch
    found = compute_offpolicy_metrics(
        torch.tensor(old, dtype=torch.float64), torch.tensor(mu, dtype=torch.float64), torch.tensor(masks)
    )
    kept = [
        [[x for x, m in zip(row, mask, strict=True) if m] for row, mask in zip(side, masks, strict=True)]
        for side in (old, mu)
    ]
    assert found == pytest.approx(oracle(*kept), rel=1e-9, abs=1e-9, nan_ok=True)
    assert all(type(value) is float for value in found.values())


def test_the_sampler_may_be_absent() -> None:
    found = compute_offpolicy_metrics(torch.full((2, 2), -1.0), None, torch.ones(2, 2))
    assert found == pytest.approx({"training_ppl": math.e, "training_log_ppl": 1.0})


def test_extremes_are_limited() -> None:
    found = compute_offpolicy_metrics(torch.zeros(1, 2), torch.full((1, 2), -50.0), torch.ones(1, 2))
    limited = pytest.approx(math.exp(40) - 1, rel=1e-12)
    assert found["chi2_token"] == limited and found["chi2_seq"] == limited


def test_metrics_of_a_batch() -> None:
    rng = np.random.default_rng(0)
    rows, old, mu = [], [], []
    for i, mask in enumerate(([1, 1, 0, 1], [], [1, 0], [1] * 6)):
        ours = np.log(rng.uniform(0.05, 0.9, len(mask))).astype(np.float32)
        theirs = (ours + rng.normal(0, 0.1, len(mask))).astype(np.float32)
        rows.append(response("g", mask, None, i, old_log_probs=ours, rollout_log_probs=theirs))
        old.append([float(x) for x, m in zip(ours, mask, strict=True) if m])
        mu.append([float(x) for x, m in zip(theirs, mask, strict=True) if m])
    rows.append(response("g", [1, 1], 1.0, 9, rollout_log_probs=[-9, -9]))
    found = sampler_metrics(rows)
    ours, theirs = [math.exp(x) for o in old for x in o], [math.exp(x) for m in mu for x in m]
    apart = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    logs = sorted(abs(math.log(a) - math.log(b)) for a, b in zip(ours, theirs, strict=True))
    at = 0.99 * (len(logs) - 1)
    p99 = logs[int(at)] + (at - int(at)) * (logs[math.ceil(at)] - logs[int(at)])
    expected = {
        "training/rollout_probs_diff_valid": 1,
        "training/rollout_probs_diff_max": max(apart),
        "training/rollout_probs_diff_mean": mean(apart),
        "training/rollout_probs_diff_std": statistics.stdev(apart),
        "training/rollout_actor_probs_pearson_corr": statistics.correlation(ours, theirs),
        "training/rollout_logprob_abs_diff/mean": mean(logs),
        "training/rollout_logprob_abs_diff/max": logs[-1],
        "training/rollout_logprob_abs_diff/p99": p99,
    } | {f"rollout_corr/{name}": value for name, value in oracle(old, mu).items()}
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("rows", [[], [response("g", [], None, old_log_probs=[], rollout_log_probs=[])]])
def test_nothing_to_compare_is_nan_and_says_so(rows: list) -> None:
    found = sampler_metrics(rows)
    assert found.pop("training/rollout_probs_diff_valid") == 0
    assert all(math.isnan(value) for value in found.values())


def test_equal_sides_agree_fully() -> None:
    logs = np.log([0.5, 0.25, 0.125])
    found = sampler_metrics([response("g", [1, 1, 1], old_log_probs=logs, rollout_log_probs=logs)])
    assert found["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1.0)
    assert found["training/rollout_logprob_abs_diff/max"] == 0.0
    assert found["rollout_corr/ppl_ratio"] == 1.0
    constant = [response("g", [1, 1], old_log_probs=[-1, -1], rollout_log_probs=[-1, -1])]
    assert math.isnan(sampler_metrics(constant)["training/rollout_actor_probs_pearson_corr"])


@pytest.mark.parametrize("count", [1, 2, 3, 99, 101, 7001, 200_000])
@pytest.mark.parametrize("kind", ["spread", "equal", "few", "periodic", "nan"])
def test_a_percentile_found_from_the_top(count: int, kind: str) -> None:
    """Where the sample misleads (values that repeat with its period) the response is still numpy's."""
    rng = np.random.default_rng(count)
    values = {
        "spread": np.abs(rng.standard_normal(count)),
        "equal": np.full(count, 0.25),
        "few": rng.integers(0, 3, count).astype(float),
        "periodic": np.where(np.arange(count) % 61 == 0, 9.0, rng.random(count)),
        "nan": np.where(np.arange(count) == count // 2, np.nan, rng.random(count)),
    }[kind]
    parts = np.array_split(values, min(3, count)) if kind != "periodic" else [values]
    found = high_percentile(parts, 99)
    assert found == pytest.approx(float(np.percentile(values, 99)), rel=1e-12, nan_ok=True)


@pytest.mark.parametrize("block", [1, 5, 1 << 20])
def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Against the definitions over all tokens at once, from 64-bit log-probs far from the first block's mean."""
    from verl.algorithms import agreement

    monkeypatch.setattr(agreement, "_BLOCK", block)
    rng = np.random.default_rng(0)
    rows = []
    for i, size in enumerate([4, 1, 9, 2, 40]):
        mu = -np.abs(rng.standard_normal(size)) * (0.01 if i == 0 else 3)
        noise = 0.2 * rng.standard_normal(size)
        rows.append(response(f"g{i}", [1] * size, old_log_probs=mu + noise, rollout_log_probs=mu))
    old = np.concatenate([r.old_log_probs for r in rows]).astype(np.float64)
    mu = np.concatenate([r.rollout_log_probs for r in rows]).astype(np.float64)
    found = sampler_metrics(rows)
    p, q, e = np.exp(old), np.exp(mu), old - mu
    expected = {
        "training/rollout_probs_diff_std": np.abs(p - q).std(ddof=1),
        "training/rollout_probs_diff_max": np.abs(p - q).max(),
        "training/rollout_actor_probs_pearson_corr": np.corrcoef(p, q)[0, 1],
        "training/rollout_logprob_abs_diff/p99": np.percentile(np.abs(e), 99),
        "rollout_corr/kl": -e.mean(),
        "rollout_corr/k3_kl": (np.exp(e) - 1 - e).mean(),
        "rollout_corr/chi2_token": (np.exp(2 * e) - 1).mean(),
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-12), name
