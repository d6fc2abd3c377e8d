"""Validation metrics: slow reference by plain loops, the published draws, failed answers, names."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.tracking.validation_metrics import draws, subset_sizes, validation_metrics
from verl.trajectory import Prompt, Trajectory


def trajectory_of(uid="p0", index=0, score=1.0, source="gsm8k", media=None, **parts) -> Trajectory:
    prompt = Prompt(uid, np.arange(3), [], source, media=media or {})
    t = Trajectory(prompt, index, np.arange(2), np.ones(2, bool), score=score, score_parts=parts)
    if score is None:
        t.score_error = "it raised"
    return t


def slow(values: list[float], preds: list[str] | None, n: int) -> dict[str, float]:
    """One prompt, drawn one by one from the legacy global generator as published."""
    mean = sum(values) / len(values)
    out = {f"mean@{n}": mean}
    if n == 1:
        return out
    out[f"std@{n}"] = math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))
    sizes, k = [], 2
    while k < n:
        sizes.append(k)
        k *= 2
    for k in [*sizes, n]:
        rng = np.random.RandomState(42)
        found: dict[str, list[float]] = {"best": [], "worst": [], "maj": []}
        for _ in range(1000):
            chosen = [int(i) for i in rng.choice(len(values), size=k, replace=True)]
            found["best"].append(max(values[i] for i in chosen))
            found["worst"].append(min(values[i] for i in chosen))
            if preds is not None:
                votes: dict[str, list[float]] = {}
                for i in chosen:
                    votes.setdefault(preds[i], []).append(values[i])
                found["maj"].append(max(votes.values(), key=len)[0])
        for name, series in found.items():
            if series:
                centre = sum(series) / 1000
                out[f"{name}@{k}/mean"] = centre
                out[f"{name}@{k}/std"] = math.sqrt(sum((v - centre) ** 2 for v in series) / 1000)
    return out


def groups_of(n: int):
    """Scores and answers of n responses to one prompt."""
    one = st.tuples(st.sampled_from([0.0, 0.1, 1.0, -2.5]), st.sampled_from("abc"))
    return st.lists(one, min_size=n, max_size=n)


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 9).flatmap(lambda n: st.lists(groups_of(n), min_size=1, max_size=3)))
def test_against_plain_loops(groups):
    n = len(groups[0])
    rows = [
        trajectory_of(f"p{g}", i, score, acc=score > 0, pred=pred)
        for g, group in enumerate(groups)
        for i, (score, pred) in enumerate(group)
    ]
    found = validation_metrics(rows)
    for variable, of in (("reward", lambda s: s), ("acc", lambda s: float(s > 0))):
        each = [slow([of(s) for s, _ in group], [p for _, p in group], n) for group in groups]
        for metric in each[0]:
            expected = sum(e[metric] for e in each) / len(each)
            core = metric.split("/")[0] in (f"mean@{n}", f"best@{n}", f"maj@{n}")
            place = "val-core" if core else "val-aux"
            assert found[f"{place}/gsm8k/{variable}/{metric}"] == pytest.approx(expected, abs=1e-9), metric
    expected_names = {m.partition("/reward/")[2] for m in found if "/reward/" in m}
    assert expected_names == set(slow([0.0] * n, ["a"] * n, n))


def test_gsm8k_run_logs_both_reward_and_acc():
    rows = [trajectory_of(f"p{i}", 0, float(i % 2), "openai/gsm8k") for i in range(4)]
    assert validation_metrics(rows) == {
        "val-core/openai/gsm8k/reward/mean@1": 0.5,
        "val-core/openai/gsm8k/acc/mean@1": 0.5,
        "val-aux/num_turns/min": 2.0,
        "val-aux/num_turns/max": 2.0,
        "val-aux/num_turns/mean": 2.0,
        "val/accuracy": 0.5,
    }


def test_prompts_weigh_the_same_and_sources_are_apart():
    rows = [
        *(trajectory_of("a", i, 1.0) for i in range(2)),
        *(trajectory_of("b", i, 0.0) for i in range(2)),
        trajectory_of("c", 0, 0.5, "math"),
        trajectory_of("c", 1, 1.0, "math"),
    ]
    found = validation_metrics(rows)
    assert found["val-core/gsm8k/acc/mean@2"] == 0.5
    assert found["val-core/math/acc/mean@2"] == 0.75
    assert found["val/accuracy"] == pytest.approx((1 + 0 + 0.75) / 3)


def test_failed_responses():
    rows = [
        trajectory_of("a", 0, 1.0, acc=1, extra=5.0),
        trajectory_of("a", 1, None),
        trajectory_of("b", 0, None),
        trajectory_of("b", 1, None),
        trajectory_of("c", 0, -1.0, acc=0, extra=1.0),
        trajectory_of("c", 1, 1.0, acc=1, extra=1.0),
    ]
    found = validation_metrics(rows)
    assert found["val-core/gsm8k/acc/mean@2"] == pytest.approx((0.5 + 0 + 0.5) / 3)
    assert found["val-core/gsm8k/reward/mean@2"] == pytest.approx((1.0 + 0.0) / 2), "prompt b has no reward"
    assert found["val-aux/gsm8k/acc_success_only/mean@2"] == pytest.approx((1.0 + 0.5) / 2)
    assert found["val-aux/gsm8k/errors"] == 3
    assert found["val-aux/gsm8k/extra/mean@2"] == pytest.approx((5.0 + 1.0) / 2)
    best = slow([-1.0, 1.0], None, 2)["best@2/mean"]
    assert found["val-core/gsm8k/reward/best@2/mean"] == pytest.approx((1.0 + best) / 2)
    assert found["val/accuracy"] == pytest.approx(1 / 3)


def test_everything_failed_is_accuracy_zero_and_reward_nan():
    found = validation_metrics([trajectory_of("a", 0, None), trajectory_of("b", 0, None)])
    assert found["val-core/gsm8k/acc/mean@1"] == 0.0
    assert math.isnan(found["val-core/gsm8k/reward/mean@1"])
    assert math.isnan(found["val-aux/gsm8k/acc_success_only/mean@1"])
    assert found["val-aux/gsm8k/errors"] == 2 and found["val/accuracy"] == 0.0
    assert all(type(v) in (int, float) for v in found.values())


def test_without_acc_the_reward_stands_in():
    found = validation_metrics([trajectory_of("a", 0, 0.3, fmt=1.0), trajectory_of("b", 0, None)])
    assert "val-core/gsm8k/acc/mean@1" not in found and "val-aux/gsm8k/acc_success_only/mean@1" not in found
    assert found["val/accuracy"] == pytest.approx(0.3)
    assert found["val-aux/gsm8k/fmt/mean@1"] == 1.0


def test_majority_needs_every_response_to_vote():
    rows = [trajectory_of("a", 0, 1.0, acc=1, pred="7"), trajectory_of("a", 1, 0.0, acc=0)]
    assert not [name for name in validation_metrics(rows) if "maj@" in name]
    rows[1].score_parts["pred"] = "8"
    found = validation_metrics(rows)
    assert "val-core/gsm8k/acc/maj@2/mean" in found and "val-core/gsm8k/reward/maj@2/std" in found


def test_pictures_and_named_n():
    rows = [trajectory_of("a", 0, 1.0, media={"images": [1]}), trajectory_of("b", 0, 0.0)]
    found = validation_metrics(rows, n=2)
    assert found["val/multimodal_score"] == 1.0 and found["val/accuracy"] == 0.5
    assert "val-core/gsm8k/acc/mean@2" in found
    assert validation_metrics([]) == {}


def test_sizes_and_draws():
    found = [subset_sizes(n) for n in (1, 2, 3, 4, 5, 16)]
    assert found == [[1], [2], [2, 3], [2, 4], [2, 4, 5], [2, 4, 8, 16]]
    one_by_one = np.random.RandomState(42)
    expected = [one_by_one.choice(5, size=3, replace=True) for _ in range(1000)]
    assert np.array_equal(draws(5, 3), expected)


def test_large_groups_are_fast():
    import time

    rng = np.random.default_rng(0)
    rows = [
        trajectory_of(f"p{g}", i, float(rng.integers(2)), acc=float(rng.integers(2)), pred=str(rng.integers(9)))
        for g in range(20)
        for i in range(64)
    ]
    started = time.process_time()
    validation_metrics(rows)
    assert time.process_time() - started < 5
