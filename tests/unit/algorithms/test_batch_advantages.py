"""Which responses count, where rewards stand, what estimators receive, and the columns that come out."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import algorithm_references as slow
from tests.algorithms_rows import algorithm, response
from verl.algorithms.batch_advantages import compute_advantages, prepare_outcomes, token_rewards
from verl.compat import core_algos
from verl.tracking.step_metrics import score_metrics
from verl.trajectory import Batch, flat


@pytest.fixture
def estimator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Registers an estimator for one test."""

    def register(function: Any) -> str:
        monkeypatch.setitem(core_algos.ADV_ESTIMATOR_REGISTRY, "test_estimator", function)
        return "test_estimator"

    yield register


# ---------------------------------------------------------------------------------------------- which responses


def test_failed_scores_are_not_outcomes() -> None:
    batch = Batch(
        [
            response("a", [1, 1], 1.0),
            response("a", [1], None),
            response("a", [1, 0, 1], 0.0),
            response("b", [1], math.nan),
            response("b", [1], math.inf),
        ]
    )
    usable, dropped = prepare_outcomes(batch, 3, True)
    assert usable.tolist() == [True, False, True, False, False] and dropped == 0
    assert [t.loss_mask.tolist() for t in batch] == [
        [True, True],
        [False],
        [True, False, True],
        [False],
        [False],
    ]
    assert batch[0].loss_mask is not batch[0].response_mask


@pytest.mark.parametrize(("rollout_n", "needs", "dropped"), [(2, True, 1), (5, True, 1), (1, True, 0), (2, False, 0)])
def test_a_group_left_with_one_response(rollout_n: int, needs: bool, dropped: int) -> None:
    batch = Batch([response("a", [1], 1.0), response("a", [1], None), response("b", [1], 1.0), response("b", [1], 0.0)])
    usable, found = prepare_outcomes(batch, rollout_n, needs)
    assert found == dropped
    assert usable.tolist() == [not dropped, False, True, True]
    assert batch[0].loss_mask.any() == (not dropped)


def test_an_empty_response_is_an_outcome() -> None:
    batch = Batch([response("a", [], -1.0), response("a", [1], 1.0)])
    usable, dropped = prepare_outcomes(batch, 2, True)
    assert usable.all() and dropped == 0


# ------------------------------------------------------------------------------------------ rewards on tokens


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 1), max_size=8), st.data())
def test_rewards_stand_on_policy_tokens(mask: list[int], data: st.DataObject) -> None:
    written = [t for t, m in enumerate(mask) if m]
    t = response("a", mask, 2.5)
    expected = [2.5 if written and i == written[-1] else 0.0 for i in range(len(mask))]
    assert token_rewards(t).tolist() == expected
    given_scores = data.draw(st.lists(st.integers(-3, 3), min_size=len(mask), max_size=len(mask)))
    t = response("a", mask, 0.0, extra={"token_scores": given_scores})
    moved = [0.0] * len(mask)
    for i, value in enumerate(given_scores):
        before = [k for k in written if k <= i] or written[:1]
        if before:
            moved[before[-1]] += value
    assert token_rewards(t).tolist() == moved


def test_token_scores_of_the_wrong_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"response 4 of q: token_scores has shape \(3,\), the response has 2"):
        token_rewards(response("q", [1, 1], 0.0, 4, extra={"token_scores": [1, 2, 3]}))


# ---------------------------------------------------------------------------------------------- the whole way


def grpo_by_hand(scores: list[float]) -> list[float]:
    mean, std = statistics.mean(scores), statistics.stdev(scores)
    return [(s - mean) / (std + 1e-6) for s in scores]


def test_grpo_over_a_ragged_batch() -> None:
    batch = Batch(
        [
            response("a", [1, 1, 0, 1, 0], 1.0, 0),
            response("a", [1], 0.25, 1),
            response("a", [1, 1], None, 2),
            response("a", [], -1.0, 3),
            response("b", [1, 1], 1.0, 0),
            response("b", [1], 1.0, 1),
            response("c", [1], 0.7, 0),
        ]
    )
    metrics = compute_advantages(batch, algorithm(), rollout_n=4)
    high, low, _ = grpo_by_hand([1.0, 0.25, -1.0])
    assert metrics == {"training/dropped_groups": 1}
    expected = [[high, high, 0, high, 0], [low], [0, 0], [], [0, 0], [0], [0]]
    for t, values in zip(batch, expected, strict=True):
        assert t.advantages.dtype == t.returns.dtype == t.token_rewards.dtype == np.float32
        assert t.advantages.tolist() == pytest.approx(values)
        assert t.returns.tolist() == t.advantages.tolist()
    assert batch[0].token_rewards.tolist() == [0, 0, 0, 1.0, 0]
    assert batch[2].token_rewards.tolist() == [0, 0]
    assert [t.loss_mask.any() for t in batch] == [True, True, False, False, True, True, False]


def test_kl_in_the_reward_enters_the_group_statistics() -> None:
    old, ref = [[-1.0, -2.0, -1.0], [-0.5]], [[-1.5, -1.0, -9.0], [-0.25]]
    batch = Batch(
        [
            response("a", [1, 1, 0], 1.0, old_log_probs=old[0], ref_log_probs=ref[0]),
            response("a", [1], 0.0, old_log_probs=old[1], ref_log_probs=ref[1]),
            response("a", [], 0.5, old_log_probs=[], ref_log_probs=[]),
        ]
    )
    settings = algorithm(use_kl_in_reward=True, kl_penalty="abs", norm_adv_by_std_in_grpo=False)
    metrics = compute_advantages(batch, settings, rollout_n=3, kl_beta=0.1)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx((1.5 / 2 + 0.25) / 2)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.1
    assert batch[0].token_rewards.tolist() == pytest.approx([-0.05, 0.9, 0])
    sums = [0.85, -0.025, 0.5]
    mean = sum(sums) / 3
    assert batch[0].advantages.tolist() == pytest.approx([sums[0] - mean] * 2 + [0])
    assert batch[1].advantages.tolist() == pytest.approx([sums[1] - mean])
    assert batch[0].score == 1.0


def test_a_response_left_alone_in_its_group_is_charged_for_its_kl_like_every_other() -> None:
    """critic/rewards is the reward with the KL penalty taken off, for every scored response."""
    logs = {"old_log_probs": [-1.0, -2.0], "ref_log_probs": [-1.5, -2.25]}
    batch = Batch(
        [
            response("a", [1, 1], 1.0, 0, **logs),
            response("a", [1, 1], None, 1, **logs),
            response("b", [1, 1], 1.0, 0, **logs),
            response("b", [1, 1], 0.0, 1, **logs),
        ]
    )
    metrics = compute_advantages(batch, algorithm(use_kl_in_reward=True), rollout_n=2, kl_beta=0.1)
    assert metrics["training/dropped_groups"] == 1
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.375)
    found = score_metrics(batch)
    assert found["critic/score/mean"] == pytest.approx(2 / 3)
    assert found["critic/rewards/mean"] == pytest.approx(2 / 3 - 0.1 * 0.75)
    assert not batch[0].loss_mask.any() and not batch[0].advantages.any()


def test_kl_in_the_reward_says_what_is_missing() -> None:
    batch = Batch([response("a", [1], 1.0), response("a", [1], 0.0)])
    with pytest.raises(ValueError, match="needs kl_beta"):
        compute_advantages(batch, algorithm(use_kl_in_reward=True), rollout_n=2)
    with pytest.raises(ValueError, match="use_kl_in_reward needs old_log_probs"):
        compute_advantages(batch, algorithm(use_kl_in_reward=True), rollout_n=2, kl_beta=0.1)


def test_all_failed_and_all_empty_batches_go_through() -> None:
    failed = Batch([response("a", [1, 1], None), response("a", [1], None)])
    metrics = compute_advantages(failed, algorithm(use_kl_in_reward=True), rollout_n=2, kl_beta=0.5)
    assert math.isnan(metrics["actor/reward_kl_penalty"])
    assert [t.advantages.tolist() for t in failed] == [[0, 0], [0]]
    empty = Batch([response("a", [], 1.0), response("a", [], 0.0)])
    assert compute_advantages(empty, algorithm(), rollout_n=2) == {"training/dropped_groups": 0}
    assert [len(t.advantages) for t in empty] == [0, 0]
    assert compute_advantages(Batch([]), algorithm(), rollout_n=2) == {"training/dropped_groups": 0}


def test_running_it_again_gives_the_same() -> None:
    columns = {"old_log_probs": [-1, -1], "ref_log_probs": [-2, -1]}
    batch = Batch([response("a", [1, 1], s, **columns) for s in (1.0, 0.0)])
    settings = algorithm(use_kl_in_reward=True)
    compute_advantages(batch, settings, rollout_n=2, kl_beta=0.3)
    first = [flat(batch.trajectories, name).tolist() for name in ("token_rewards", "advantages")]
    compute_advantages(batch, settings, rollout_n=2, kl_beta=0.3)
    assert [flat(batch.trajectories, name).tolist() for name in ("token_rewards", "advantages")] == first


@pytest.mark.parametrize("in_baseline", [True, False])
def test_rejected_responses_leave_the_statistics_of_their_group(in_baseline: bool) -> None:
    """Scores 100 (rejected), 1 and 0: the siblings are compared with each other alone."""
    near, far = (
        {"old_log_probs": [-1.0], "rollout_log_probs": [-1.0]},
        {"old_log_probs": [-1.0], "rollout_log_probs": [-9.0]},
    )
    scores = [("a", 100.0, far), ("a", 1.0, near), ("a", 0.0, near), ("b", 5.0, far), ("b", 2.0, near)]
    batch = Batch([response(uid, [1], score, **columns) for uid, score, columns in scores])
    correction = {
        "rollout_rs": "seq_mean_k1",
        "rollout_rs_threshold": "0.5_2.0",
        "rollout_rs_in_baseline": in_baseline,
    }
    settings = algorithm(norm_adv_by_std_in_grpo=False, rollout_correction=correction)
    metrics = compute_advantages(batch, settings, rollout_n=3)
    mean = 101 / 3 if in_baseline else 0.5
    assert [t.advantages[0] for t in batch][1:3] == pytest.approx([1 - mean, -mean])
    assert [bool(t.loss_mask.any()) for t in batch] == [False, True, True, False, in_baseline]
    assert metrics["training/dropped_groups"] == (0 if in_baseline else 1)
    assert metrics["rollout_corr/rollout_rs_rejected_fraction"] == pytest.approx(2 / 5)


# --------------------------------------------------------------------------------------- users' own estimators


def test_an_estimator_finds_the_score_of_an_empty_response_in_its_row(estimator: Any) -> None:
    def sums(token_level_rewards, response_mask):  # type: ignore[no-untyped-def]
        out = token_level_rewards.sum() * response_mask
        return out, out

    batch = Batch([response("a", [1, 0, 1], 1.0), response("a", [], 4.0), response("a", [0, 0], 2.0)])
    compute_advantages(batch, algorithm(adv_estimator=estimator(sums)), rollout_n=3)
    assert [t.advantages.tolist() for t in batch] == [[7, 0, 7], [], [0, 0]]


def test_an_estimator_receives_what_it_names(estimator: Any) -> None:
    seen: dict[str, Any] = {}

    def named(token_level_rewards, index, config, gamma, loss_mask, rollout_log_probs, non_tensor_batch, own=5):  # type: ignore[no-untyped-def]
        seen.update(locals())
        return token_level_rewards * 0 + 7, token_level_rewards * 0 + 8

    settings = algorithm(adv_estimator=estimator(named), gamma=0.5)
    batch = Batch(
        [
            response("a", [1, 0], 1.0, rollout_log_probs=[-1, -2], score_parts={"acc": True}),
            response("a", [1], 0.0, rollout_log_probs=[-3]),
            response("a", [1], None, rollout_log_probs=[-4]),
        ]
    )
    compute_advantages(batch, settings, rollout_n=3)
    assert list(seen["index"]) == ["a", "a"]
    assert (seen["config"], seen["gamma"], seen["own"]) == (settings, 0.5, 5)
    assert seen["rollout_log_probs"].tolist() == [[-1, -2], [-3, 0]]
    assert seen["loss_mask"].tolist() == [[1, 0], [1, 0]]
    assert list(seen["non_tensor_batch"]["acc"]) == [True, None]
    assert [t.advantages.tolist() for t in batch] == [[7, 0], [7], [0]]
    assert [t.returns.tolist() for t in batch] == [[8, 0], [8], [0]]


def test_an_estimator_with_kwargs_receives_everything_there_is(estimator: Any) -> None:
    seen: dict[str, Any] = {}

    def greedy(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        seen.update(kwargs)
        return kwargs["token_level_rewards"], kwargs["token_level_rewards"]

    batch = Batch([response("a", [1], 1.0), response("b", [1], None), response("b", [1], 2.0)])
    compute_advantages(batch, algorithm(adv_estimator=estimator(greedy)), rollout_n=2)
    assert {"index", "batch", "epsilon", "norm_adv_by_std_in_grpo", "response_mask"} <= seen.keys()
    assert "values" not in seen
    assert batch[2].loss_mask.all()


def test_estimators_of_any_callable(estimator: Any) -> None:
    def keywords(**kwargs):  # type: ignore[no-untyped-def]
        return kwargs["token_level_rewards"], kwargs["token_level_rewards"]

    @dataclass
    class Scaled:  # not hashable
        scale: float

        def __call__(self, token_level_rewards, index):  # type: ignore[no-untyped-def]
            return token_level_rewards * self.scale, token_level_rewards

    for function, expected in ((keywords, 1.0), (Scaled(3.0), 3.0)):
        batch = Batch([response("a", [1], 1.0), response("a", [1], 1.0)])
        compute_advantages(batch, algorithm(adv_estimator=estimator(function)), rollout_n=2)
        assert batch[0].advantages.tolist() == [expected]


def test_what_an_estimator_lacks_or_gets_wrong_is_named(estimator: Any) -> None:
    batch = Batch([response("a", [1, 1], 1.0)])

    def wants(token_level_rewards, values, foo):  # type: ignore[no-untyped-def]
        raise AssertionError("not called")

    with pytest.raises(ValueError, match="test_estimator asks for values, foo, which this step does not have"):
        compute_advantages(batch, algorithm(adv_estimator=estimator(wants)), rollout_n=1)

    def flat(token_level_rewards):  # type: ignore[no-untyped-def]
        return token_level_rewards.sum(-1), token_level_rewards

    with pytest.raises(ValueError, match=r"returned advantages of shape \(1,\); expected \(1, 2\)"):
        compute_advantages(batch, algorithm(adv_estimator=estimator(flat)), rollout_n=1)


def test_garbage_outside_of_the_policy_tokens_is_ignored(estimator: Any) -> None:
    def noisy(token_level_rewards, response_mask):  # type: ignore[no-untyped-def]
        out = torch.where(response_mask.bool(), 1.0, torch.nan)
        return out, out

    batch = Batch([response("a", [0, 1, 0], 1.0), response("a", [1], 1.0)])
    compute_advantages(batch, algorithm(adv_estimator=estimator(noisy)), rollout_n=2)
    assert [t.advantages.tolist() for t in batch] == [[0, 1, 0], [1]]


# ------------------------------------------------------------------------------------------------- entropy control


def test_the_entropy_coefficient_follows_the_target() -> None:
    """Over steps below, at and above it, at both ends of the range, and one without a policy token."""
    steps = [[0.2, 0.4], [0.1], [0.5, 0.5], [2.0], [3.0, 4.0], [], [0.9], [0.1], [0.3], [0.0], [0.0], [9.0], [0.0]]
    control = SimpleNamespace(target=0.5, coeff=0.002, delta=0.004, max_coeff=0.011)
    state: dict[str, Any] = {}
    found = []
    for entropies in steps:
        row = response("a", [0, *[1] * len(entropies)], 1.0, entropy=[9.0, *entropies])
        settings = algorithm(adv_estimator="reinforce_plus_plus", entropy_ctrl=control)
        metrics = compute_advantages(Batch([row]), settings, rollout_n=1, state=state)
        assert row.segments[0].columns["entropy_weights"] == pytest.approx(metrics["actor/entropy_coeff"])
        found.append(metrics["actor/entropy_coeff"])
        state = json.loads(json.dumps(state))
    assert found == pytest.approx(slow.entropy_coefficients(steps, 0.5, 0.002, 0.004, 0.011))
    assert 0.0 in found and max(found) == 0.011 and len(set(found)) > 4
    assert "entropy_weights" not in response("a", [1]).segments[0].columns


# ---------------------------------------------------------------------------------------------- several environments


def test_rows_of_a_source_have_settings_and_statistics_of_their_own() -> None:
    """As if each source were alone in the batch, its advantages times its weight."""

    def batch() -> Batch:
        rows = [response(uid, [1, 1], s, i) for uid, scores in SCORES.items() for i, s in enumerate(scores)]
        for t in rows:
            t.prompt.data_source = "code" if t.uid in "cd" else "maths"
        return Batch(rows)

    own = {"code": {"adv_estimator": "reinforce_plus_plus_baseline", "weight": 0.25}}
    mixed = batch()
    metrics = compute_advantages(mixed, algorithm(adv_estimator="grpo", by_source=own), rollout_n=2)
    assert metrics["training/dropped_groups"] == 0
    for source, name, weight in (("maths", "grpo", 1.0), ("code", "reinforce_plus_plus_baseline", 0.25)):
        alone = Batch([t for t in batch() if t.prompt.data_source == source])
        compute_advantages(alone, algorithm(adv_estimator=name), rollout_n=2)
        found = [t.advantages for t in mixed if t.prompt.data_source == source]
        for mine, other in zip(found, alone, strict=True):
            np.testing.assert_allclose(mine, weight * other.advantages, rtol=1e-6)
            assert mine.any()


SCORES = {"a": (0.0, 1.0), "c": (3.0, 0.5), "b": (1.0, 4.0), "d": (-1.0, 0.0)}


def test_a_lone_response_is_dropped_where_its_source_compares() -> None:
    rows = [response(uid, [1], 1.0) for uid in "ab"]
    rows[1].prompt.data_source = "game"
    batch = Batch(rows)
    own = {"game": {"adv_estimator": "reinforce_plus_plus"}}
    metrics = compute_advantages(batch, algorithm(adv_estimator="grpo", by_source=own), rollout_n=2)
    assert metrics["training/dropped_groups"] == 1 and [t.loss_mask.any() for t in batch] == [False, True]
