"""Importance weights and rejection against plain loops over responses and tokens, written from the formulas."""

from __future__ import annotations

import math
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithms_rows import actor, algorithm, matrices, response, run_objective
from verl.algorithms.batch_advantages import compute_advantages
from verl.algorithms.correction import (
    LIMIT,
    Tokens,
    correct,
    importance_weights,
    parse_correction,
    parse_rules,
    parse_weighting,
    rejection,
    weights_of_the_update,
)
from verl.compat.core_algos import compute_policy_loss_bypass_mode, compute_policy_loss_reinforce
from verl.compat.rollout_corr_helper import (
    compute_rollout_correction_and_rejection_mask,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from verl.trajectory import Batch, flat, segments_of
from verl.workers.update_plan import UpdatePlan

NAN = math.nan
RULES = (
    [f"token_k{k}" for k in (1, 2, 3)]
    + [f"seq_{over}_k{k}" for over in ("sum", "mean") for k in (1, 2, 3)]
    + ["seq_max_k2", "seq_max_k3"]
)


def limited(x: float) -> float:
    return min(max(x, -20.0), 20.0)


def spread(values: list[float]) -> dict[str, float]:
    return {
        "mean": statistics.fmean(values) if values else NAN,
        "std": statistics.stdev(values) if len(values) > 1 else NAN,
        "max": max(values, default=NAN),
        "min": min(values, default=NAN),
    }


def share(flags: list[bool]) -> float:
    return sum(flags) / len(flags) if flags else NAN


def slow_weights(
    errors: list[list[float]], kind: str, threshold: str, normalize: bool
) -> tuple[list[list[float]], dict[str, float]]:
    """Per response a list of weights, from per response a list of log-ratios of its policy tokens (may be empty)."""
    bounds = [float(x) for x in threshold.split("_")]
    raw = [
        [math.exp(limited(e)) for e in row] if kind == "token" else [math.exp(limited(sum(row)))] * len(row)
        for row in errors
    ]

    def apply(w: float) -> float:
        if len(bounds) == 1:
            return min(w, bounds[0])
        return w if bounds[0] <= w <= bounds[1] else 0.0

    out = [[apply(w) for w in row] for row in raw]
    present = [i for i, row in enumerate(errors) if row]

    def units(rows: list[list[float]]) -> list[float]:
        return [w for row in rows for w in row] if kind == "token" else [rows[i][0] for i in present]

    factor = 1.0
    if normalize and units(out) and sum(units(out)) > 0:
        factor = sum(units(out)) / len(units(out))
        out = [[w / factor for w in row] for row in out]
    low, high = bounds if len(bounds) == 2 else (1 / bounds[0], bounds[0])
    used, before = units(out), units(raw)
    means = [statistics.fmean(out[i]) for i in present]
    raw_means = [statistics.fmean(raw[i]) for i in present]
    mean = statistics.fmean(used) if used else NAN
    metrics = {f"rollout_is_{k}": v for k, v in spread(used).items()}
    metrics |= {
        "rollout_is_std": statistics.pstdev(used) if used else NAN,
        "rollout_is_eff_sample_size": 1 / statistics.fmean([(w / mean) ** 2 for w in used]) if mean > 0 else NAN,
        "rollout_is_ratio_fraction_high": share([w > high for w in before]),
        "rollout_is_ratio_fraction_low": share([w < low for w in before]),
        "rollout_is_oob_ratio": 0.0 if len(bounds) == 1 else share([not low <= w <= high for w in before]),
        **{f"rollout_is_seq_{k}": v for k, v in spread(means).items()},
        "rollout_is_seq_max_deviation": max((abs(m - 1) for m in means), default=NAN),
        "rollout_is_seq_fraction_high": share([m > high for m in raw_means]),
        "rollout_is_seq_fraction_low": share([m < low for m in raw_means]),
    }
    if normalize:
        metrics["rollout_is_batch_norm_factor"] = factor
    return out, metrics


def slow_kept(
    errors: list[list[float]], names: list[str], thresholds: list[str]
) -> tuple[list[list[bool]], dict[str, float]]:
    kept = [[True] * len(row) for row in errors]
    metrics: dict[str, float] = {}
    for name, threshold in zip(names, thresholds, strict=True):
        k, over = name[-1], name.split("_")[-2]
        value = {
            "1": lambda e: -limited(e),
            "2": lambda e: limited(e) ** 2 / 2,
            "3": lambda e: math.exp(limited(e)) - 1 - limited(e),
        }[k]
        each = [[value(e) for e in row] for row in errors]
        reduce = {"token": statistics.fmean, "sum": math.fsum, "mean": statistics.fmean, "max": max}[over]
        per_response = {i: reduce(row) for i, row in enumerate(each) if row}
        if k == "1":
            parts = [float(x) for x in threshold.split("_")]
            low, high = map(math.log, parts if len(parts) == 2 else (1 / parts[0], parts[0]))
        else:
            low, high = -math.inf, float(threshold)
        mine = []
        for i, row in enumerate(each):
            judged = row if over == "token" else [per_response[i]] * len(row) if row else []
            mine.append([low <= v <= high for v in judged])
        kept = [[a and b for a, b in zip(x, y, strict=True)] for x, y in zip(kept, mine, strict=True)]
        values = [v for row in each for v in row] if over == "token" else list(per_response.values())
        responses = list(per_response.values())
        found = spread(values) | {
            "fraction_high": share([v > high for v in values]),
            "fraction_low": share([v < low for v in values]),
            "masked_fraction": share([not x for row in mine for x in row]),
            "seq_masked_fraction": share([not all(row) for row in mine if row]),
            **{f"seq_{key}": v for key, v in spread(responses).items()},
            "seq_fraction_high": share([v > high for v in responses]),
            "seq_fraction_low": share([v < low for v in responses]),
            "seq_max_deviation": max((abs(v) for v in responses), default=NAN),
        }
        metrics |= {f"rollout_rs_{name}_{key}": v for key, v in found.items()}
    metrics["rollout_rs_masked_fraction"] = share([not x for row in kept for x in row])
    metrics["rollout_rs_seq_masked_fraction"] = share([not all(row) for row in kept if row])
    metrics["rollout_rs_rejected_fraction"] = share([not any(row) for row in kept if row])
    return kept, metrics


def ragged(masks: list[list[int]], values: list[list[float]]) -> list[list[float]]:
    return [[v for v, m in zip(row, mask, strict=True) if m] for row, mask in zip(values, masks, strict=True)]


RATIOS = st.sampled_from([0.3, 2.0, 30.0]).flatmap(
    lambda scale: matrices(st.floats(-scale, scale, allow_subnormal=False))
)


@settings(max_examples=150, deadline=None)
@given(RATIOS, st.sampled_from(["token", "sequence"]), st.sampled_from(["2.0", "1.1", "0.5_5.0"]), st.booleans())
def test_weights_equal_the_loop(case, kind: str, threshold: str, normalize: bool) -> None:
    errors, masks = case
    log_ratio, mask = torch.tensor(errors, dtype=torch.float64), torch.tensor(masks)
    found, metrics = compute_rollout_correction_weights(log_ratio, mask, kind, threshold, normalize)
    expected, told = slow_weights(ragged(masks, errors), kind, threshold, normalize)
    assert metrics == pytest.approx(told, rel=1e-9, abs=1e-12, nan_ok=True)
    for row, m, want in zip(found, mask, expected, strict=True):
        assert row[m.bool()].tolist() == pytest.approx(want, rel=1e-12)
        assert not row[~m.bool()].any()


@settings(max_examples=150, deadline=None)
@given(RATIOS, st.lists(st.sampled_from(RULES), min_size=1, max_size=3, unique=True), st.booleans())
def test_rejection_equals_the_loop(case, names: list[str], narrow: bool) -> None:
    errors, masks = case
    thresholds = [("0.8_1.25" if narrow else "3.0") if n.endswith("1") else "0.05" if narrow else "2" for n in names]
    mask, found = compute_rollout_rejection_mask(
        torch.tensor(errors, dtype=torch.float64), torch.tensor(masks), ",".join(names), ",".join(thresholds)
    )
    expected, told = slow_kept(ragged(masks, errors), names, thresholds)
    assert found == pytest.approx(told, rel=1e-9, abs=1e-12, nan_ok=True)
    for row, m, want in zip(mask, torch.tensor(masks).bool(), expected, strict=True):
        assert row[m].bool().tolist() == want and not row[~m].any()
    assert mask.dtype == torch.int64


def test_one_threshold_serves_all_and_a_single_bound_of_k1_is_two_sided() -> None:
    rules = parse_rules("token_k1, seq_mean_k1", 2.0)
    assert [(r.low, r.high) for r in rules] == [(-math.log(2), math.log(2))] * 2
    assert parse_rules("seq_sum_k2,token_k1", "3,0.5_2")[0].low == -math.inf


@pytest.mark.parametrize(
    ("names", "threshold", "said"),
    [
        ("token_k4", "1", "rollout_rs=token_k4: a list of"),
        ("seq_max_k1", "2", "rollout_rs=seq_max_k1"),
        ("token_k1", None, "rollout_rs_threshold: rollout_rs needs one"),
        ("token_k1,token_k2", "1,2,3", "3 thresholds for 2 rules"),
        ("token_k2", "0.5_2.0", "token_k2 has an upper bound only"),
        ("token_k1", "0.5", "one number above 1"),
        ("token_k1", "2_1", "ratio bounds"),
        ("token_k1", "nan", "ratio bounds"),
        ("token_k3", "much", "token_k3 has an upper bound only"),
    ],
)
def test_what_cannot_be_is_named(names: str, threshold: str | None, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        parse_rules(names, threshold)


def test_kinds_and_thresholds_of_weights() -> None:
    with pytest.raises(ValueError, match="token or sequence"):
        parse_weighting("geometric", 2.0)
    off = Tokens(np.array([-3.0, 30.0]), np.array([0, 0]), 1)
    for text in ("inf", "1e-9_inf"):
        assert np.allclose(importance_weights(off, parse_weighting("token", text))[0], np.exp([-3.0, LIMIT]))
        assert rejection(off, parse_rules("token_k1", text))[0].all()
    assert rejection(off, parse_rules("token_k2", "inf"))[0].all()
    for bad in ("0", "-1", "x", "5_0.5", "1_2_3", "nan", "inf_inf", 0.52):
        with pytest.raises(ValueError, match="rollout_is_threshold"):
            parse_weighting("token", bad)


def correction(**settings_) -> SimpleNamespace:
    return SimpleNamespace(**settings_)


def batch_of(seed: int = 0, unscored: bool = True) -> Batch:
    rng = np.random.default_rng(seed)
    rows = []
    for g in range(3):
        for i, size in enumerate((*(4, 0, 6)[: 2 + g % 2], 3)):
            mask = rng.integers(0, 2, size).tolist()
            mu = rng.normal(-1.5, 0.5, size)
            row = response(
                f"g{g}", mask, float(rng.normal()), i,
                rollout_log_probs=mu * np.array(mask), old_log_probs=mu + rng.normal(0, 0.6, size),
            )  # fmt: skip
            rows.append(row)
    if unscored:
        rows.append(response("g2", [1, 1], None, 9, rollout_log_probs=[-9, -9], old_log_probs=[-1, -1]))
    return Batch(rows)


def errors_of(rows) -> list[list[float]]:
    return [
        [
            float(o) - float(m)
            for o, m, p in zip(r.old_log_probs, r.rollout_log_probs, r.response_mask, strict=True)
            if p
        ]
        for r in rows
    ]


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_the_driver_weighs_and_rejects_what_counts_and_nothing_else(kind: str) -> None:
    how = correction(
        rollout_is=kind, rollout_is_threshold=1.3, rollout_is_batch_normalize=True,
        rollout_rs="token_k2", rollout_rs_threshold=0.15,
    )  # fmt: skip
    plain, batch = batch_of(), batch_of()
    compute_advantages(plain, algorithm(), rollout_n=3)
    metrics = compute_advantages(batch, algorithm(rollout_correction=how), rollout_n=3)
    counted = [r for r in batch if r.score is not None]
    weights, told = slow_weights(errors_of(counted), kind, "1.3", True)
    kept, dropped = slow_kept(errors_of(counted), ["token_k2"], ["0.15"])
    for name, value in (told | dropped).items():
        assert metrics[f"rollout_corr/{name}"] == pytest.approx(value, rel=1e-6, nan_ok=True), name
    assert 0 < metrics["rollout_corr/rollout_rs_masked_fraction"] < 1
    for row, w, k in zip(counted, weights, kept, strict=True):
        assert row.is_weights[row.response_mask].tolist() == pytest.approx(w, rel=1e-6)
        assert row.loss_mask[row.response_mask].tolist() == k and not row.loss_mask[~row.response_mask].any()
    for mine, theirs in zip(batch, plain, strict=True):
        assert mine.advantages.tolist() == theirs.advantages.tolist(), "scores stay in the group's statistics"
    assert batch[-1].is_weights is None and not batch[-1].loss_mask.any()


def test_a_missing_column_is_named() -> None:
    how = parse_correction(correction(rollout_is="token"))
    row = response("g", [1, 1], 1.0, 3, old_log_probs=[-1, -1])
    with pytest.raises(ValueError, match="response 3 of g has no rollout_log_probs; its agent loop must return"):
        correct([row], how)
    with pytest.raises(ValueError, match="has no old_log_probs"):
        correct([response("g", [1], 1.0, rollout_log_probs=[-1])], how)
    assert math.isnan(correct([], how)["rollout_corr/rollout_is_mean"])


def loss_of(rows, how, flat: torch.Tensor, parts: list[int], **settings_):
    """Loss and gradient with row i in micro-batch parts[i]."""
    segments = [row.segments[0] for row in rows]
    return run_objective(actor(**settings_), segments, flat, flat, parts, correction=how)[:2]


@pytest.mark.parametrize("parts", [[0, 0, 0, 0], [0, 1, 0, 1], [0, 1, 2, 3]])
@pytest.mark.parametrize("kind", ["token", "sequence", None])
def test_reinforce_in_bypass_mode_is_the_formula(kind, parts) -> None:
    """x = −w·A·logp with w of the current policy over the sampler, constant; token-mean over the mini-batch."""
    rng = np.random.default_rng(5)
    rows = []
    for i, mask in enumerate(([1, 0, 1], [1, 1, 1, 1], [0, 1], [1])):
        mu, a = rng.normal(-1, 0.5, len(mask)), np.full(len(mask), rng.normal())
        rows.append(response("g", mask, 0.0, i, rollout_log_probs=mu, advantages=a))
        rows[-1].loss_mask = np.array(mask, bool)
    rows[1].loss_mask[2] = False
    flat = torch.from_numpy(rng.normal(-1, 0.6, 10))
    how = correction(bypass_mode=True, loss_type="reinforce", rollout_is=kind, rollout_is_threshold="1.5")
    value, gradient = loss_of(rows, how, flat, parts)
    now = [part.tolist() for part in torch.split(flat, [r.length for r in rows])]
    errors = [
        [n - float(m) for n, m, p in zip(new, r.rollout_log_probs, r.response_mask, strict=True) if p]
        for new, r in zip(now, rows, strict=True)
    ]
    weights = slow_weights(errors, kind, "1.5", False)[0] if kind else [[1.0] * len(e) for e in errors]
    count = sum(int(r.loss_mask.sum()) for r in rows)
    expected, slopes = 0.0, []
    for new, r, w in zip(now, rows, weights, strict=True):
        given_ = iter(w)
        for t in range(r.length):
            weight = next(given_) if r.response_mask[t] else 0.0
            slope = -weight * float(r.advantages[t]) / count if r.loss_mask[t] else 0.0
            expected += slope * new[t]
            slopes.append(slope)
    assert value == pytest.approx(expected, rel=1e-9)
    assert gradient.tolist() == pytest.approx(slopes, rel=1e-9)


def test_ppo_clip_in_bypass_mode_takes_the_sampler_for_the_old_policy_and_no_weight() -> None:
    rng = np.random.default_rng(6)
    rows, flat = [], torch.from_numpy(rng.normal(-1, 0.6, 7))
    for i, size in enumerate((3, 4)):
        mu, a = rng.normal(-1, 0.5, size), np.full(size, rng.normal())
        rows.append(response("g", [1] * size, 0.0, i, rollout_log_probs=mu, advantages=a, old_log_probs=mu - 5))
        rows[-1].loss_mask = np.ones(size, bool)
    how = correction(bypass_mode=True, loss_type="ppo_clip", rollout_is="token")
    found = loss_of(rows, how, flat, [0, 1])
    for row in rows:
        row.old_log_probs = row.rollout_log_probs
    plain = loss_of(rows, None, flat, [0, 1])
    assert found[0] == pytest.approx(plain[0]) and found[1].tolist() == pytest.approx(plain[1].tolist())
    for row in rows:
        row.rollout_log_probs = None
    with pytest.raises(ValueError, match="response 0 of g has no rollout_log_probs"):
        loss_of(rows, how, flat, [0, 1])


def test_the_weights_multiply_the_policy_term_only() -> None:
    row = response(
        "g",
        [1, 1],
        0.0,
        advantages=[1, 1],
        is_weights=[2, 0.5],
        old_log_probs=[-1, -1],
        ref_log_probs=[-2, -2],
    )
    row.loss_mask = np.ones(2, bool)
    flat = torch.tensor([-1.0, -1.0], dtype=torch.float64)
    weighted = loss_of([row], None, flat, [0], use_kl_loss=True, kl_loss_coef=1.0)[0]
    row.is_weights = None
    plain = loss_of([row], None, flat, [0], use_kl_loss=True, kl_loss_coef=1.0)[0]
    assert weighted - plain == pytest.approx(-(2 + 0.5) / 2 + 1)


def test_in_bypass_mode_the_driver_leaves_rows_alone_and_kl_is_of_the_sampler() -> None:
    how = correction(bypass_mode=True, rollout_is="token", rollout_rs="token_k2", rollout_rs_threshold=0.001)
    batch = batch_of(unscored=False)
    metrics = compute_advantages(batch, algorithm(rollout_correction=how), rollout_n=3)
    assert all(r.is_weights is None and (r.loss_mask == r.response_mask).all() for r in batch)
    assert not any(name.startswith("rollout_corr/") for name in metrics)
    charged = batch_of(unscored=False)
    for row in charged:
        row.old_log_probs, row.ref_log_probs = None, np.full(row.length, -2, np.float32)
    with_kl = algorithm(rollout_correction=how, use_kl_in_reward=True)
    found = compute_advantages(charged, with_kl, rollout_n=3, kl_beta=0.5)["actor/reward_kl_penalty"]
    means = [float(np.mean(r.rollout_log_probs[r.response_mask] + 2)) for r in charged if r.response_mask.any()]
    assert found == pytest.approx(statistics.fmean(means), rel=1e-6)


def plan(how, mini: int = 2, epochs: int = 1) -> UpdatePlan:
    cfg = SimpleNamespace(ppo_mini_batch_size=mini, ppo_epochs=epochs, shuffle=False)
    return UpdatePlan(cfg, max_response_length=9.0, batch_prompts=3, rollout_correction=how)


def test_a_mini_batch_is_corrected_with_its_own_current_log_probs_each_time() -> None:
    how = correction(
        bypass_mode=True, loss_type="reinforce", rollout_is="token", rollout_is_batch_normalize=True,
        rollout_rs="token_k2", rollout_rs_threshold=0.1,
    )  # fmt: skip
    batch = batch_of(unscored=False)
    compute_advantages(batch, algorithm(rollout_correction=how), rollout_n=3)
    minis = plan(how, epochs=2).mini_batches(batch, step=1)
    seen = []
    for number, mini in enumerate(minis):
        shift = 0.05 * number

        def now(rows, shift=shift):
            seen.append(rows)
            return flat(rows, "old_log_probs") + shift

        corrected = plan(how).corrected(mini, now)
        metrics = corrected.metrics
        rows = [r for r in mini.rows if r.policy_tokens]
        assert seen[-1] == segments_of(rows), "rows that an earlier pass rejected are looked at again"
        errors = [[e + shift for e in row] for row in errors_of(rows)]
        kept, _ = slow_kept(errors, ["token_k2"], ["0.1"])
        weights, told = slow_weights(errors, "token", "2.0", True)
        for row, k, w in zip(rows, kept, weights, strict=True):
            assert row.loss_mask[row.response_mask].tolist() == k
            assert row.is_weights[row.response_mask].tolist() == pytest.approx(w, rel=1e-5)
        count = sum(sum(k) for k in kept)
        assert corrected.denominators.tokens == count and len(corrected.usable) == sum(any(k) for k in kept)
        for name, value in told.items():
            assert metrics[f"rollout_corr/{name}"] == pytest.approx(value, rel=1e-4)
    assert len(minis) == 4


@pytest.mark.parametrize(
    "how",
    [
        None,
        correction(rollout_is="token", rollout_rs="token_k2", rollout_rs_threshold=1.0),
        correction(bypass_mode=True, rollout_is="token", rollout_is_batch_normalize=True),
        correction(bypass_mode=True, rollout_is="token", loss_type="reinforce"),
    ],
)
def test_no_pass_where_nothing_of_the_whole_mini_batch_is_needed(how) -> None:
    batch = batch_of(unscored=False)
    compute_advantages(batch, algorithm(rollout_correction=how), rollout_n=3)
    for mini in plan(how).mini_batches(batch, step=1):
        assert not plan(how).needs_pass(mini)


def test_weights_that_the_loss_made_by_itself_are_told_afterwards() -> None:
    batch = batch_of(unscored=False)
    how = parse_correction(correction(bypass_mode=True, loss_type="reinforce", rollout_is="sequence"))
    found = weights_of_the_update(batch.trajectories, how)
    _, told = slow_weights(errors_of([r for r in batch if r.policy_tokens]), "sequence", "2.0", False)
    assert found == pytest.approx({f"rollout_corr/{k}": v for k, v in told.items()}, rel=1e-9)
    assert weights_of_the_update(batch.trajectories, parse_correction(None)) == {}
    assert weights_of_the_update([], how) == {}


def test_public_functions_join_both_and_the_divergence() -> None:
    old, mu, mask = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.0, -3.0]]), torch.ones(1, 2)
    weights, kept, metrics = compute_rollout_correction_and_rejection_mask(
        old,
        mu,
        mask,
        rollout_is="token",
        rollout_is_threshold=2.0,
        rollout_rs="token_k2",
        rollout_rs_threshold=1.0,
    )
    assert weights.batch["rollout_is_weights"].tolist() == [[1.0, 2.0]] and kept.tolist() == [[1.0, 0.0]]
    assert metrics["rollout_corr/kl"] == pytest.approx(-1.0) and "rollout_corr/rollout_is_mean" in metrics
    nothing = compute_rollout_correction_and_rejection_mask(old, mu, mask)
    assert nothing[0] is None and nothing[1] is mask and "rollout_corr/rollout_is_mean" not in nothing[2]


def test_losses_as_users_call_them() -> None:
    old, new = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]], requires_grad=True)
    mask, advantages = torch.ones(1, 2), torch.tensor([[1.0, -1.0]])
    loss, metrics = compute_policy_loss_reinforce(old, new, advantages, mask)
    assert loss.item() == pytest.approx((1.5 - 1.0) / 2) and metrics["actor/ppo_kl"] == pytest.approx(-0.25)
    cfg = correction(rollout_correction=correction(loss_type="reinforce", rollout_is="token", rollout_is_threshold=2.0))
    loss, _ = compute_policy_loss_bypass_mode(old, new, advantages, mask, config=cfg)
    assert loss.item() == pytest.approx((1.5 * math.exp(-0.5) - 1.0 * 2.0) / 2)
