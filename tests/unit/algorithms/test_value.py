"""The critic's loss against a loop over tokens, and PF-PPO's draws."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.algorithm_references import share_of
from tests.algorithms_rows import response
from verl.algorithms.advantage import variance_proxies
from verl.algorithms.batch_advantages import resampling_weights, rows_of_update
from verl.algorithms.flat_tokens import MODES
from verl.algorithms.value_loss import explained_variance
from verl.compat.core_algos import compute_value_loss
from verl.trajectory import Batch


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(4))
def test_value_loss_equals_the_loop(mode: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = (4, 5)
    new, old, returns = (rng.normal(0, 1, shape) for _ in range(3))
    mask = (rng.random(shape) < 0.7).astype(float)
    mask[1] = 0
    vpreds = torch.from_numpy(new).requires_grad_()
    given = (torch.from_numpy(returns), torch.from_numpy(old), torch.from_numpy(mask), 0.3, mode)
    loss, clipfrac = compute_value_loss(vpreds, *given, loss_scale_factor=7.0)
    loss.backward()
    tokens, carrying = mask.sum(), (mask.sum(-1) > 0).sum()
    value = clipped = 0.0
    for i, t in np.ndindex(shape):
        if not mask[i, t]:
            assert vpreds.grad[i, t] == 0
            continue
        share = share_of(mode, tokens, carrying, mask[i].sum(), 7.0)
        limited = min(max(new[i, t], old[i, t] - 0.3), old[i, t] + 0.3)
        plain, other = (new[i, t] - returns[i, t]) ** 2, (limited - returns[i, t]) ** 2
        value += share * max(plain, other) / 2
        clipped += (other > plain) / tokens
        slope = 0.0 if other > plain else share * (new[i, t] - returns[i, t])
        assert vpreds.grad[i, t].item() == pytest.approx(slope, rel=1e-9, abs=1e-12)
    assert loss.item() == pytest.approx(value, rel=1e-9)
    assert clipfrac.item() == pytest.approx(clipped, rel=1e-9)


def test_explained_variance() -> None:
    returns = np.array([0.0, 1.0, 2.0])
    assert explained_variance(returns, returns) == pytest.approx(1.0)
    assert explained_variance(returns, np.zeros(3)) == pytest.approx(0.0, abs=1e-4)
    assert math.isnan(explained_variance(returns[:1], returns[:1]))


def test_weights_of_pf_ppo() -> None:
    scores = np.array([-2.0, 0.0, 1.0, 3.0, 3.0])
    assert resampling_weights(scores, "pow", 2.0).tolist() == [4, 0, 1, 9, 9]
    assert resampling_weights(scores, "max_min", 2.0).tolist() == [1, 0, 0, 1, 1]
    assert resampling_weights(scores, "max_random", 2.0).tolist() == [0.1, 0.1, 0.1, 0.4, 0.4]
    with pytest.raises(ValueError, match=r"unknown pf_ppo\.reweight_method 'best'"):
        resampling_weights(scores, "best", 1.0)


def test_responses_are_drawn_by_weight_and_stand_alone() -> None:
    rows = [
        response(f"g{i // 2}", [1, 1], score, i, advantages=[i, i])
        for i, score in enumerate([0.0, 0.0, 1.0, None, 3.0])
    ]
    how = SimpleNamespace(use_pf_ppo=True, pf_ppo=SimpleNamespace(reweight_method="pow", weight_pow=1.0))
    counts = np.zeros(5)
    for seed in range(400):
        drawn, metrics = rows_of_update(Batch(rows), how, seed)
        again, _ = rows_of_update(Batch(rows), how, seed)
        indices = [t.index for t in drawn]
        assert indices == [t.index for t in again] == sorted(indices) and len(drawn) == 4
        assert metrics["training/pf_ppo/unique_ratio"] == len(set(indices)) / 4
        np.add.at(counts, indices, 1)
    assert counts[[0, 1, 3]].sum() == 0
    assert counts[4] / counts[2] == pytest.approx(3, rel=0.15)
    segments = [s for t in drawn for s in t.segments]
    assert len({id(t) for t in drawn}) == len({id(s) for s in segments}) == 4
    assert all(s.trajectory is t for t in drawn for s in t.segments)
    drawn[0].loss_mask = np.zeros(2, bool)
    assert all(t.loss_mask is None for t in [*drawn.trajectories[1:], *rows])
    how.pf_ppo.weight_pow = 1e9  # 3 to that power is more than any number
    assert {t.index for t in rows_of_update(Batch(rows), how, 0)[0]} == {4}
    nothing, metrics = rows_of_update(Batch([rows[3]]), how, 0)
    assert len(nothing) == 1 and math.isnan(metrics["training/pf_ppo/unique_ratio"])


@pytest.mark.parametrize("weighted", [False, True])
def test_variance_proxies_equal_the_loop(weighted: bool) -> None:
    rng = np.random.default_rng(3)
    rows = []
    for i, mask in enumerate(([1, 0, 1], [1, 1], [0], [1, 1, 1, 0])):
        names = ["old_log_probs", "sum_pi_squared", "advantages", *(["is_weights"] if weighted else [])]
        columns = {name: rng.uniform(0, 1, len(mask)) for name in names}
        columns["old_log_probs"] = -columns["old_log_probs"]
        rows.append(response("g", mask, 0.0, i, **columns))
    powers = []
    for row in rows:
        written = [t for t, p in enumerate(row.response_mask) if p]
        if not written:
            continue
        a = sum(float(row.advantages[t]) for t in written) / len(written)
        w = 0.0
        for t in written:
            c = float(row.is_weights[t]) if weighted else 1.0
            w += (1 - 2 * math.exp(row.old_log_probs[t]) + float(row.sum_pi_squared[t])) * c * c
        powers.append((a * a, w))
    found = variance_proxies(rows, 0.1)
    power = sum(a * w for a, w in powers) / 3
    assert found == pytest.approx(
        {
            "variance_proxy/proxy1_signal_strength": 0.01,
            "variance_proxy/proxy2_total_power": power,
            "variance_proxy/proxy3_pure_noise": max(0.0, power - 0.01) / 2,
            "variance_proxy/expected_a_squared": sum(a for a, _ in powers) / 3,
            "variance_proxy/expected_w": sum(w for _, w in powers) / 3,
        },
        rel=1e-6,
    )
    rows[0].sum_pi_squared = rows[1].sum_pi_squared = rows[3].sum_pi_squared = None
    assert variance_proxies(rows, 0.1) == {}
