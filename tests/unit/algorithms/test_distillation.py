"""Distillation's terms in the actor's objective against a loop in plain floats, for any split into micro-batches."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests import algorithm_references as slow
from tests.algorithms_rows import actor
from tests.unit.algorithms.test_losses import constants, random_responses, segments
from verl.algorithms.distillation import Distillation, joined_sets, topk_terms
from verl.algorithms.flat_tokens import MODES, count_denominators, trajectory_tokens
from verl.algorithms.objective import ActorObjective
from verl.config.schema.actor import KL_NAMES
from verl.config.schema.algorithm import TOPK_MODES
from verl.engine.training.base import MicroBatch
from verl.engine.training.optimizer import StepAccumulator
from verl.trajectory import segments_of

H, K = 9.0, 4


def settings(**more: Any) -> SimpleNamespace:
    defaults = {
        "loss_mode": "k3", "topk": K, "use_policy_gradient": False, "use_task_rewards": False, "loss_max_clamp": None,
        "distillation_loss_coef": 0.7, "log_prob_min_clamp": None, "policy_loss_mode": "vanilla", "clip_ratio": 0.2,
        "clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "token_set": "student",
    }  # fmt: skip
    return SimpleNamespace(**(defaults | more))


class Case:
    """Random responses with a teacher; `new` and `teacher` are [response][token][1 or k]."""

    def __init__(self, seed: int, topk: bool):
        self.batch, self.topk = random_responses(seed), topk
        rng = np.random.default_rng(seed + 100)
        for r in self.batch:
            if seed % 2:
                r.old = list(r.new)
        self.new = [[[v] for v in r.new] for r in self.batch]
        if topk:
            self.new = [[np.log(rng.dirichlet(np.ones(9)))[:K].tolist() for _ in r.new] for r in self.batch]
        spread = rng.choice([0.3, 3.0])
        self.teacher = [
            [(np.minimum(np.array(v) + rng.normal(0, spread, len(v)), -1e-3)).tolist() for v in own] for own in self.new
        ]

    def run(self, cfg: Any, loss: Any, parts: int, cut: bool = False) -> tuple[float, Any, Any, dict[str, float]]:
        """(value, slopes of the sampled tokens, slopes of the candidates, metrics) in so many micro-batches."""
        rows = segments(self.batch, cut)
        name = "teacher_topk_log_probs" if self.topk else "teacher_log_probs"
        leaves, others = {}, {}
        for row, r, mine, theirs in zip(rows, self.batch, self.new, self.teacher, strict=True):
            row.put(name, np.array(theirs) if self.topk else np.array(theirs)[:, 0])
            ends = np.cumsum([s.length for s in row.segments])[:-1]
            pieces = zip(row.segments, np.split(r.new, ends), np.split(np.array(mine), ends), strict=True)
            for s, own, candidates in pieces:
                leaves[id(s)] = torch.tensor(own, dtype=torch.float64, requires_grad=True)
                others[id(s)] = torch.tensor(candidates, dtype=torch.float64, requires_grad=True)
        usable = segments_of(rows)
        counts = trajectory_tokens(usable)
        tokens_of = None if counts is None else dict(zip(map(id, usable), counts, strict=True))
        part_of_loss = Distillation(loss)
        objective = ActorObjective(cfg, count_denominators(usable, H), None, tokens_of, part_of_loss)
        total, sums = 0.0, StepAccumulator()
        for part in range(parts):
            chosen = usable[part::parts]
            micro = MicroBatch(chosen, torch.cat([leaves[id(s)] for s in chosen]))
            if self.topk:
                micro.candidate_log_probs = torch.cat([others[id(s)] for s in chosen])
                micro.candidates_in_topk = (micro.candidate_log_probs > -1.5).double()
            value, metrics = objective(micro)
            value.backward()
            total += value.item()
            sums.add(metrics)

        def slopes(of: dict[int, torch.Tensor]) -> np.ndarray:
            own = [of[id(s)] for row in rows for s in row.segments]
            return torch.cat([torch.zeros_like(v) if v.grad is None else v.grad for v in own]).detach().numpy()

        return total, slopes(leaves), slopes(others), sums.metrics()


@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("mode", [*KL_NAMES, *TOPK_MODES])
def test_it_is_the_loop_in_any_split(mode: str, gradient: bool, clamped: bool) -> None:
    for seed, aggregate in enumerate(MODES):
        case = Case(seed, mode in TOPK_MODES)
        least, limit = (-1.6, 0.4) if clamped else (None, None)
        loss = settings(loss_mode=mode, use_policy_gradient=gradient, log_prob_min_clamp=least, loss_max_clamp=limit)
        cfg = actor(loss_agg_mode=aggregate, clip_ratio_c=3.0)
        c = constants(loss_mode=mode, least=least, limit=limit, gradient=gradient)
        value, slopes, told = slow.distillation(case.batch, case.new, case.teacher, c, aggregate, H)
        by_token = [np.array(of_token) for own in slopes for of_token in own]
        sampled = gradient or not case.topk
        for parts in (1, 2, 3):
            found = case.run(cfg, loss, min(parts, len(case.batch)))
            assert found[0] == pytest.approx(value, rel=1e-6, abs=1e-9)
            wanted = [one[0] for one in by_token] if sampled else by_token
            moved, still = (found[1], found[2]) if sampled else (found[2], found[1])
            np.testing.assert_allclose(moved, np.array(wanted), rtol=1e-6, atol=1e-9)
            assert not still.any()
            for name, number in told.items():
                assert found[3][f"distillation/{name}"] == pytest.approx(number, rel=1e-6, abs=1e-9), name
            assert found[3]["actor/loss"] == pytest.approx(value, rel=1e-6, abs=1e-9)
            assert clamped == ("distillation/loss_clamped_ratio" in found[3])
            assert not clamped or 0 <= found[3]["distillation/log_prob_clamped_ratio"] <= 1


@pytest.mark.parametrize("mode", ["k2", "forward_kl_topk"])
def test_it_adds_to_the_task_and_segments_change_nothing(mode: str) -> None:
    case, cfg = Case(3, mode == "forward_kl_topk"), actor(loss_agg_mode="seq-mean-token-mean")
    alone = case.run(cfg, settings(loss_mode=mode), 1)
    both = case.run(cfg, settings(loss_mode=mode, use_task_rewards=True), 1)
    assert both[0] == pytest.approx(both[3]["actor/pg_loss"] + 0.7 * alone[0])
    assert "actor/pg_loss" not in alone[3]  # it is not in that loss
    cut = case.run(cfg, settings(loss_mode=mode, use_task_rewards=True), 2, cut=True)
    assert cut[3] == pytest.approx(both[3], rel=1e-9)
    np.testing.assert_allclose(cut[1], both[1], rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match="responses of one segment"):
        case.run(cfg, settings(loss_mode=mode, use_policy_gradient=True, policy_loss_mode="gspo"), 1, cut=True)


@pytest.mark.parametrize("token_set", ["teacher", "intersection"])
def test_the_reverse_kl_over_the_teachers_tokens_or_those_of_both(token_set: str) -> None:
    case = Case(2, topk=True)
    loss = settings(loss_mode="reverse_kl_topk", token_set=token_set, log_prob_min_clamp=-4.0)
    value, _, slopes, metrics = case.run(actor(), loss, 2)
    expected, mass, tokens, moved = 0.0, 0.0, 0, []
    for r, mine, theirs in zip(case.batch, case.new, case.teacher, strict=True):
        for t in range(len(r.new)):
            compared = [v for v in range(K) if token_set == "teacher" or mine[t][v] > -1.5]
            low = [(max(mine[t][v], -4.0), max(theirs[t][v], -4.0)) for v in compared]
            term = sum(math.exp(a) * (a - b) for a, b in low)
            counted = t in r.kept
            expected += max(term, 0.0) * counted
            mass += sum(math.exp(theirs[t][v]) for v in compared) * counted
            tokens += counted
            moved.append([v in compared and counted and term > 0 and mine[t][v] > -4.0 for v in range(K)])
    assert value == pytest.approx(expected / tokens, rel=1e-6)
    assert metrics["distillation/teacher_mass"] == pytest.approx(mass / tokens, rel=1e-6)
    assert ((slopes != 0) <= np.array(moved)).all() and (slopes != 0).any()


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_tokens_of_either_or_of_one_alone_are_compared_once(symmetric: bool) -> None:
    rng = np.random.default_rng(0)
    ids, others = (np.array([rng.permutation(7)[:K] for _ in range(20)]) for _ in range(2))
    of_token = -rng.exponential(1, (20, 7))  # the teacher's log-probs of the whole vocabulary
    joined, log_probs = joined_sets(
        ids, np.take_along_axis(of_token, ids, 1), others, np.take_along_axis(of_token, others, 1), symmetric=symmetric
    )
    for t in range(20):
        mine, theirs = set(ids[t].tolist()), set(others[t].tolist())
        found = [(v, p) for v, p in zip(joined[t].tolist(), log_probs[t].tolist(), strict=True) if p > -np.inf]
        wanted = mine ^ theirs if symmetric else mine | theirs
        assert sorted(found) == [(v, pytest.approx(of_token[t, v])) for v in sorted(wanted)]


def test_dppo_has_its_own_constant_unless_one_is_set() -> None:
    case, loss = Case(3, False), settings(use_policy_gradient=True, policy_loss_mode="dppo_tv")
    for r in case.batch:
        r.old = [v - 1.8 for v in r.new]  # ratios of 6
    unset, its_own, lower = (case.run(actor(clip_ratio_c=c), loss, 1)[0] for c in (3.0, 20.0, 4.0))
    assert unset == its_own != lower


def test_the_overlap_of_the_most_likely_tokens() -> None:
    case = Case(2, topk=True)
    found = case.run(actor(), settings(loss_mode="forward_kl_topk"), 2)[3]
    kept = [(np.array(case.new[i][t]), np.array(case.teacher[i][t])) for i, r in enumerate(case.batch) for t in r.kept]
    masses = {
        "student_mass": [np.exp(s).sum() for s, _ in kept],
        "teacher_mass": [np.exp(t).sum() for _, t in kept],
    }
    for name, values in masses.items():
        assert found[f"distillation/{name}"] == pytest.approx(np.mean(values))
        assert found[f"distillation/{name}_min"] == pytest.approx(min(values))
        assert found[f"distillation/{name}_max"] == pytest.approx(max(values))
    inside = [s > -1.5 for s, _ in kept]
    gains = [
        (np.exp(t) * (s - t))[both].mean() if both.any() else 0.0 for (s, t), both in zip(kept, inside, strict=True)
    ]
    assert found["distillation/overlap_ratio"] == pytest.approx(np.mean([both.mean() for both in inside]))
    assert found["distillation/overlap_token_advantage"] == pytest.approx(np.mean(gains))


def test_a_token_that_the_policy_has_not_is_left_out_with_its_gradient() -> None:
    student = torch.tensor([[-1.0, -float("inf")]], requires_grad=True)
    term = topk_terms(student, torch.tensor([[-0.5, -9.0]]))
    term.sum().backward()
    assert term.item() == pytest.approx(np.exp(-0.5) * 0.5) and student.grad.tolist() == [
        [pytest.approx(-np.exp(-0.5)), 0.0]
    ]
