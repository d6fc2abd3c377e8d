"""The actor's objective: against a loop over responses and tokens, and the same for any split into micro-batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import algorithm_references as slow
from tests.algorithms_rows import actor, response, run_objective
from verl.algorithms.flat_tokens import MODES, LossDenominators, MicroBatchColumns, count_denominators
from verl.algorithms.objective import ActorObjective, LossConfig
from verl.algorithms.registry import LOSSES
from verl.compat import core_algos
from verl.config.schema.actor import DemonstrationsConfig
from verl.data.demonstrations import share
from verl.engine.training.base import MicroBatch
from verl.trajectory import Segment, segments_of
from verl.workers.update_plan import UpdatePlan

ONE_STEP = {"ppo_mini_batch_size": 8, "ppo_epochs": 1}
PLAN = {"max_response_length": 9.0, "batch_prompts": 1}


def rows_of(seed: int, masks: list[list[int]], **change: Any) -> list[Segment]:
    """Random responses with every column; loss masks leave out some policy tokens and one whole response."""
    rng = np.random.default_rng(seed)
    rows = []
    for i, mask in enumerate(masks):
        size = len(mask)
        keep = np.array(mask, bool) & (rng.random(size) > 0.25) & (i != 1)
        row = response(
            f"g{i // 2}",
            mask,
            1.0,
            i,
            old_log_probs=-rng.random(size) * 3,
            ref_log_probs=-rng.random(size) * 3,
            advantages=rng.normal(size=size),
            is_weights=rng.random(size) * 2,
        )
        row.loss_mask = keep
        for name, value in change.items():
            setattr(row, name, value)
        rows.append(row.segments[0])
    return rows


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_observation_loss_is_the_cross_entropy_of_what_others_wrote(micro_batches: int) -> None:
    """Also of responses that are not in the loss otherwise (the second, and one without a policy token), which need no
    importance weights; micro-batches change nothing."""
    rows = rows_of(3, [[1, 0, 1, 0], [1, 0, 0], [0, 0], [1, 1]])
    for row in rows[1:3]:
        row.put("is_weights", None)
    assert UpdatePlan(actor(observation_loss_coef=0.5, **ONE_STEP), **PLAN)._usable(rows) == rows
    assert UpdatePlan(actor(**ONE_STEP), **PLAN)._usable(rows) == [rows[0], rows[3]]
    flat = tokens(rows, 3)
    parts = [i % micro_batches for i in range(len(rows))]
    others = torch.from_numpy(np.concatenate([~row.response_mask for row in rows]))
    without, with_it = (
        run_objective(actor(observation_loss_coef=coef), rows, flat, flat, parts) for coef in (0.0, 0.5)
    )
    cross_entropy = -flat[others].mean().item()
    assert with_it[0] == pytest.approx(without[0] + 0.5 * cross_entropy)
    assert (with_it[1] - without[1]).tolist() == pytest.approx((-0.5 * others / others.sum()).tolist())
    assert with_it[3]["actor/observation_loss"] == pytest.approx(cross_entropy)
    assert with_it[3]["actor/pg_loss"] == pytest.approx(without[3]["actor/pg_loss"])


@pytest.mark.parametrize("by_confidence", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_demonstrations_are_learned_beside_the_policy_loss(micro_batches: int, by_confidence: bool) -> None:
    """CHORD: (1 − μ) of the policy loss, whose advantages the step has scaled, and μ of the mean cross-entropy; what
    environments said is another loss."""
    rows = rows_of(3, [[1, 0, 1, 0], [0, 0], [0, 0, 0], [1, 1]])
    rows[1].put("loss_mask", np.zeros(2, bool))
    mu = 0.3
    for row in rows:
        row.put("demonstration_weights", np.full(row.length, mu if row is rows[2] else 0.0, np.float32))
    rows[2].put("loss_mask", np.zeros(3, bool))
    assert UpdatePlan(actor(**ONE_STEP), **PLAN)._usable(rows) == [rows[0], rows[2], rows[3]]
    flat, parts = tokens(rows, 3), [i % micro_batches for i in range(len(rows))]
    settings = {"observation_loss_coef": 0.5, "demonstrations": SimpleNamespace(by_confidence=by_confidence)}
    found = run_objective(actor(**settings), rows, flat, flat, parts)
    shown, observed = slice(6, 9), [1, 3, 4, 5]
    chances = flat[shown].exp()
    factors = chances * (1 - chances) if by_confidence else torch.ones(3)
    loss = (-flat[shown] * factors).mean().item()
    cross_entropy = -flat[observed].mean().item()
    assert found[3]["actor/demonstration_loss"] == pytest.approx(loss)
    assert found[3]["actor/observation_loss"] == pytest.approx(cross_entropy)
    assert found[3]["actor/demonstration_weight"] == pytest.approx(mu, rel=1e-6)
    assert found[0] == pytest.approx(found[3]["actor/pg_loss"] + mu * loss + 0.5 * cross_entropy, rel=1e-6)
    assert found[1][shown].tolist() == pytest.approx((-mu * factors / 3).tolist(), rel=1e-6)


def test_the_share_of_demonstrations_rises_and_falls() -> None:
    config = DemonstrationsConfig(mu=0.5, final_mu=0.1, warmup_steps=2, decay_steps=4)
    assert [share(config, step) for step in range(1, 9)] == pytest.approx([0.25, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1, 0.1])
    assert share(DemonstrationsConfig(mu=0.5), 1000) == 0.5


def tokens(rows: list[Segment], seed: int) -> torch.Tensor:
    """Fake log-probs of the policy for all rows, float64 [ΣL], near the old ones."""
    rng = np.random.default_rng(seed)
    parts = [row.old_log_probs if row.old_log_probs is not None else -np.ones(row.length) for row in rows]
    flat = np.concatenate([np.zeros(0), *parts]).astype(np.float64)
    return torch.tensor(flat + rng.normal(0, 0.4, len(flat)), dtype=torch.float64)


def loop_oracle(cfg: Any, rows: list[Segment], flat: torch.Tensor, entropy: torch.Tensor, horizon: float) -> Any:
    """Loss, gradients and metrics: the policy term by its slow reference, KL and entropy one token at a time."""
    new, bonuses = (torch.split(values, [row.length for row in rows]) for values in (flat, entropy))
    batch = [
        slow.Response(
            *(np.asarray(v).tolist() for v in (own, r.old_log_probs, r.advantages, r.loss_mask, r.is_weights))
        )
        for own, r in zip(new, rows, strict=True)
    ]
    constants = SimpleNamespace(low=0.2, high=0.2, cap=3.0)
    pg, slopes, told = slow.loss("vanilla", batch, constants, cfg.loss_agg_mode, horizon)
    counts = sum(len(r.kept) for r in batch), sum(bool(r.kept) for r in batch)
    sums = {"pg": pg, "kl": 0.0, "entropy": 0.0, "old_kl": told["ppo_kl"]}
    bonus = [[0.0] * row.length for row in rows]
    for i, (r, row) in enumerate(zip(batch, rows, strict=True)):
        for t in r.kept:
            share = slow.share_of(cfg.loss_agg_mode, *counts, len(r.kept), horizon)
            u = r.new[t] - float(row.ref_log_probs[t])
            sums["kl"] += share * u * u / 2
            sums["entropy"] += share * float(bonuses[i][t])
            slopes[i][t] += share * cfg.kl_loss_coef * u
            bonus[i][t] = -share * cfg.entropy_coeff
    loss = sums["pg"] - cfg.entropy_coeff * sums["entropy"] + cfg.kl_loss_coef * sums["kl"]
    return loss, np.concatenate(slopes), np.concatenate(bonus), sums


MASKS = [[1, 1, 0, 1], [1, 1], [], [1], [0, 1, 1, 1, 1, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize("mode", MODES)
def test_equals_the_loop(mode: str) -> None:
    cfg = actor(loss_agg_mode=mode, entropy_coeff=0.03, use_kl_loss=True, kl_loss_coef=0.7, kl_loss_type="k2")
    rows = rows_of(1, MASKS)
    flat, entropy = tokens(rows, 2), tokens(rows, 3).abs()
    loss, gradient, bonus, metrics = run_objective(cfg, rows, flat, entropy, [0] * len(rows))
    expected = loop_oracle(cfg, rows, flat, entropy, 9.0)
    assert loss == pytest.approx(expected[0], rel=1e-12)
    assert gradient.tolist() == pytest.approx(expected[1], rel=1e-9, abs=1e-14)
    assert bonus.tolist() == pytest.approx(expected[2], rel=1e-12, abs=1e-14)
    assert metrics["actor/loss"] == pytest.approx(expected[0], rel=1e-12)
    assert metrics["actor/pg_loss"] == pytest.approx(expected[3]["pg"], rel=1e-12)
    assert metrics["actor/kl_loss"] == pytest.approx(expected[3]["kl"], rel=1e-12)
    assert metrics["actor/entropy_loss"] == pytest.approx(expected[3]["entropy"], rel=1e-12)
    assert metrics["actor/ppo_kl"] == pytest.approx(expected[3]["old_kl"], rel=1e-9)
    assert metrics["actor/kl_coef"] == pytest.approx(0.7)
    assert metrics["actor/kl_clipped_ratio"] == 0
    assert {"actor/pg_clipfrac", "actor/pg_clipfrac_lower"} <= metrics.keys()


@st.composite
def splits(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    masks = draw(st.lists(st.lists(st.integers(0, 1), max_size=5), min_size=1, max_size=7))
    parts = draw(st.lists(st.integers(0, 6), min_size=len(masks), max_size=len(masks)))
    return masks, parts


@settings(max_examples=120, deadline=None)
@given(splits(), st.sampled_from(MODES), st.integers(0, 99), st.sampled_from(["k3", "k3+", "abs"]))
def test_micro_batches_never_change_the_response(
    split: tuple[list[list[int]], list[int]], mode: str, seed: int, kind: str
) -> None:
    masks, parts = split
    cfg = actor(loss_agg_mode=mode, entropy_coeff=0.1, use_kl_loss=True, kl_loss_coef=0.2, kl_loss_type=kind)
    rows = rows_of(seed, masks)
    flat, entropy = tokens(rows, seed + 1), tokens(rows, seed + 2)
    whole = run_objective(cfg, rows, flat, entropy, [0] * len(rows))
    single = run_objective(cfg, rows, flat, entropy, list(range(len(rows))))
    pieces = run_objective(cfg, rows, flat, entropy, parts)
    for other in (single, pieces):
        assert other[0] == pytest.approx(whole[0], rel=1e-10, abs=1e-12)
        torch.testing.assert_close(other[1], whole[1], rtol=1e-10, atol=1e-13)
        torch.testing.assert_close(other[2], whole[2], rtol=1e-10, atol=1e-13)
        assert other[3] == pytest.approx(whole[3], rel=1e-9, abs=1e-12)


def test_denominators_count_what_is_left_after_drops() -> None:
    rows = segments_of([response(*one) for one in (("a", [1, 1, 0]), ("a", [1]), ("b", [1, 1]), ("b", []))])
    assert count_denominators(rows, 4) == LossDenominators(5, 3, 4, observed=1)
    rows[0].loss_mask = np.array([False, True, False])
    rows[1].loss_mask = np.array([False])
    assert count_denominators(rows, 4) == LossDenominators(3, 2, 4, observed=1)
    info = {"dp_size": 1, "batch_num_tokens": 3, "global_batch_size": 2, "loss_scale_factor": 4}
    assert MicroBatchColumns([], torch.zeros(0)).batch_info(count_denominators(rows, 4), None) == info


def test_dr_grpo_gradient_does_not_depend_on_length() -> None:
    cfg = actor(loss_agg_mode="seq-mean-token-sum-norm")
    gradients = {}
    for length in (2, 5):
        rows = segments_of(response("a", [1] * size, advantages=[1.0] * size) for size in (length, 3))
        flat = torch.full((length + 3,), -1.0, dtype=torch.float64)
        gradients[length] = run_objective(cfg, rows, flat, flat, [0, 1], horizon=8.0)[1]
    assert gradients[2][:2].tolist() == gradients[5][:2].tolist() == pytest.approx([-1 / 16] * 2)


def test_without_old_log_probs_the_policy_is_its_own_old() -> None:
    rows = rows_of(4, MASKS, old_log_probs=None, is_weights=None)
    flat = tokens(rows, 5)
    loss, gradient, _, metrics = run_objective(actor(), rows, flat, flat, [0] * len(rows))
    mask = np.concatenate([r.loss_mask for r in rows])
    advantages = np.concatenate([r.advantages for r in rows])
    assert loss == pytest.approx(-(advantages * mask).sum() / mask.sum())
    assert gradient.tolist() == pytest.approx((-advantages * mask / mask.sum()).tolist())
    assert metrics["actor/ppo_kl"] == metrics["actor/pg_clipfrac"] == 0


def test_rows_with_and_without_old_log_probs_mix() -> None:
    rows = rows_of(4, MASKS)
    flat = tokens(rows, 5)
    rows[0].old_log_probs = None
    explicit = rows_of(4, MASKS)
    explicit[0].old_log_probs = flat[: rows[0].length].numpy()
    mixed = run_objective(actor(), rows, flat, flat, [0] * len(rows))
    full = run_objective(actor(), explicit, flat, flat, [0] * len(rows))
    assert mixed[0] == full[0]
    assert torch.equal(mixed[1], full[1])


def test_what_is_not_asked_for_is_not_logged() -> None:
    rows = rows_of(4, MASKS, ref_log_probs=None)
    flat = tokens(rows, 5)
    micro = MicroBatch(rows, flat.clone().requires_grad_())
    loss, metrics = ActorObjective(actor(), count_denominators(rows, None))(micro)
    names = {"pg_loss", "loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"}
    assert metrics.keys() == {f"actor/{name}" for name in names}
    assert metrics["actor/loss"] == (loss.item(), 1.0)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_coefficient_of_the_entropy_by_step_is_one_of_the_config(micro_batches: int) -> None:
    flat, entropy = tokens(rows_of(4, MASKS), 5), tokens(rows_of(4, MASKS), 6)
    parts = [i % micro_batches for i in range(len(MASKS))]
    given_rows = rows_of(4, MASKS)
    for row in given_rows:
        row.put("entropy_weights", np.full(row.length, 0.25, np.float32))
    by_step = run_objective(actor(), given_rows, flat, entropy, parts)
    configured = run_objective(actor(entropy_coeff=0.25), rows_of(4, MASKS), flat, entropy, parts)
    assert by_step[0] == pytest.approx(configured[0]) and by_step[2].any()
    for mine, other in zip(by_step[1:3], configured[1:3], strict=True):
        assert torch.allclose(mine, other)


def test_what_is_missing_is_named() -> None:
    rows = rows_of(4, MASKS)
    flat = tokens(rows, 5)
    denominators = count_denominators(rows, None)
    with pytest.raises(ValueError, match=r"entropy_coeff=0\.5 needs the engine's entropy"):
        ActorObjective(actor(entropy_coeff=0.5), denominators)(MicroBatch(rows, flat))
    rows[2].ref_log_probs = None
    with pytest.raises(ValueError, match="response 2 of g1 has no ref_log_probs"):
        ActorObjective(actor(use_kl_loss=True), denominators)(MicroBatch(rows, flat))
    rows[3].advantages = None
    with pytest.raises(ValueError, match="response 3 of g1 has no advantages"):
        ActorObjective(actor(), denominators)(MicroBatch(rows, flat))
    with pytest.raises(ValueError, match="log-probs for rows with 17 response tokens"):
        ActorObjective(actor(), denominators)(MicroBatch(rows, flat[:-1]))
    with pytest.raises(ValueError, match="Unknown policy loss simply: gsop"):
        ActorObjective(actor(loss_mode="gsop"), denominators)


def test_a_users_loss_gets_the_config_and_the_global_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.compat.core_algos import agg_loss

    seen: list[Any] = []

    def mine(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config=None, rollout_is_weights=None):
        seen.append((config, response_mask, rollout_is_weights))
        share = (log_prob * response_mask).sum() / response_mask.sum().clamp(min=1)
        terms = -advantages * log_prob * config.my_scale
        return agg_loss(terms, response_mask, loss_agg_mode, **config.global_batch_info), {"actor/mine": share}

    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "mine", mine)
    cfg = actor(loss_mode="mine", my_scale=2.0, loss_agg_mode="seq-mean-token-mean")
    rows = rows_of(4, MASKS, is_weights=None)
    flat = tokens(rows, 5)
    whole = run_objective(cfg, rows, flat, flat, [0] * len(rows))
    split = run_objective(cfg, rows, flat, flat, [0, 1, 2, 0, 1, 2])
    assert split[0] == pytest.approx(whole[0])
    assert split[3]["actor/mine"] == pytest.approx(whole[3]["actor/mine"])
    config, mask, weights = seen[0]
    assert config.get("my_scale") == config["my_scale"] == 2.0
    assert config.get("absent", 3) == 3
    assert "clip_ratio" in config and "absent" not in config
    assert config.policy_loss.loss_mode == "mine"
    assert weights is None
    assert mask.shape == (6, 7)


def _with_counts(terms: torch.Tensor, mask: torch.Tensor, mode: str, config: Any) -> torch.Tensor:
    return core_algos.agg_loss(terms, mask, mode, **config.global_batch_info)


def _without_counts(terms: torch.Tensor, mask: torch.Tensor, mode: str, config: Any) -> torch.Tensor:
    return core_algos.agg_loss(loss_mat=terms, loss_mask=mask, loss_agg_mode=mode)


def _own_mean(terms: torch.Tensor, mask: torch.Tensor, mode: str, config: Any) -> torch.Tensor:
    return (terms * mask).sum() / mask.sum()  # nan for a micro-batch without a token in the loss


@pytest.mark.parametrize("aggregated", [_with_counts, _without_counts, _own_mean])
@pytest.mark.parametrize("micro_batches", [1, 2, len(MASKS)])
def test_a_users_loss_does_not_depend_on_micro_batches_whatever_it_divides_by(
    aggregated: Any, micro_batches: int, caplog: pytest.LogCaptureFixture
) -> None:
    def mine(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, **_):
        terms = -advantages * (log_prob - old_log_prob).exp()
        return aggregated(terms, response_mask, loss_agg_mode, config), {}

    mine.__qualname__ = f"{aggregated.__name__} {micro_batches}"
    core_algos.register_policy_loss("divides")(mine)
    try:
        rows = rows_of(4, MASKS)
        flat, parts = tokens(rows, 5), [i % micro_batches for i in range(len(rows))]
        loss, gradient, *_ = run_objective(actor(loss_mode="divides"), rows, flat, flat, parts)
    finally:
        del LOSSES.functions["divides"]
    joined = {name: torch.from_numpy(np.concatenate([getattr(r, name) for r in rows])) for name in ("advantages",)}
    kept = torch.from_numpy(np.concatenate([r.loss_mask for r in rows])).double()
    old = torch.from_numpy(np.concatenate([r.old_log_probs for r in rows]))
    terms = -joined["advantages"] * (flat - old).exp() * kept / kept.sum()
    assert loss == pytest.approx(terms.sum().item()) and gradient.tolist() == pytest.approx(terms.tolist())
    assert ("uses no counts" in caplog.text) == (aggregated is _own_mean)


def test_the_loss_config_survives_copying() -> None:
    import copy

    config = copy.copy(LossConfig(SimpleNamespace(clip_ratio=0.3), LossDenominators(1, 1, 1)))
    assert config.clip_ratio == 0.3


def test_a_loss_may_require_the_weights_of_a_correction_that_is_off() -> None:
    def mine(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights):
        assert rollout_is_weights is None
        return log_prob.sum(), {}

    core_algos.register_policy_loss("requires_weights")(mine)
    try:
        rows = rows_of(4, MASKS, is_weights=None)
        micro = MicroBatch(rows, tokens(rows, 5).requires_grad_())
        own = actor(loss_mode="requires_weights")
        assert ActorObjective(own, count_denominators(rows, None))(micro)[0].isfinite()
    finally:
        del LOSSES.functions["requires_weights"]
