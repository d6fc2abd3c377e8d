"""Every advantage estimator against its slow reference: as users call it, and through the driver, cut into segments or
not."""

from __future__ import annotations

import itertools
import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests import algorithm_references as slow
from verl.algorithms.advantage import GroupStatistics
from verl.algorithms.batch_advantages import compute_advantages
from verl.algorithms.flat_tokens import discounted_sums
from verl.algorithms.registry import ESTIMATORS
from verl.compat import core_algos
from verl.compat.core_algos import compute_grpo_outcome_advantage
from verl.trajectory import Batch, Prompt, Segment, Trajectory

NAMES = sorted(slow.ESTIMATORS)
TAUGHT = ("teacher_log_probs", "teacher_contrast_log_probs")
COLUMNS = ("values", "old_log_probs", "sum_pi_squared", *TAUGHT)


def config(**settings: Any) -> SimpleNamespace:
    defaults = {
        "norm_adv_by_std_in_grpo": True, "gamma": 1.0, "lam": 1.0, "use_kl_in_reward": False,
        "gdpo_reward_keys": ["accuracy", "form"], "gdpo_reward_weights": None,
        "passk_k": None, "gigpo_step_weight": 1.0, "hgpo_history": 2, "hgpo_alpha": 1.0,
        "rlcsd_tau": 0.1, "rlcsd_scale": 0.5, "rlcsd_threshold": 0.1, "rlcsd_weight": 0.7,
    }  # fmt: skip
    return SimpleNamespace(**(defaults | settings))


def random_rows(seed: int, dense: bool = False) -> list[slow.Row]:
    """Groups of one to five; equal scores, ties, empty responses, tool tokens and tokens out of the loss among them."""
    rng = np.random.default_rng(seed)
    rows = []
    for g in range(int(rng.integers(1, 5))):
        kind = rng.choice(["spread", "equal", "ties"])
        for _ in range(int(rng.integers(1, 6))):
            length = int(rng.integers(0, 8))
            p = (rng.random(length) < 0.75).astype(int).tolist()
            m = [int(x and rng.random() < 0.8) for x in p]
            score = {
                "spread": float(np.float32(rng.normal())),
                "equal": 0.1,
                "ties": float(rng.integers(0, 2)),
            }[kind]
            rewards = [0.0] * length
            policy = [t for t, x in enumerate(p) if x]
            if dense and policy:
                for t in policy:
                    rewards[t] = float(rng.normal())
            elif policy:
                rewards[policy[-1]] = score
            chosen = -rng.exponential(1, length)
            columns = {
                "values": rng.normal(size=length).tolist(),
                "old_log_probs": chosen.tolist(),
                "sum_pi_squared": np.minimum(1, np.exp(chosen) ** 2 + rng.random(length) * 0.1).tolist(),
                "is_weights": rng.uniform(0, 2, length).tolist(),
                **{name: (-rng.exponential(0.2, length)).tolist() for name in TAUGHT},
            }
            parts = {"accuracy": float(rng.integers(0, 2)), "form": float(rng.normal())}
            rows.append(slow.Row(rewards, p, m, f"g{g}", score, columns, parts, baseline=0.25 * g))
    return [rows[i] for i in rng.permutation(len(rows))]


def rows_for(name: str, seed: int, dense: bool) -> list[slow.Row]:
    rows = random_rows(seed, dense)
    if name == "maxrl":  # no score below 0
        for row in rows:
            row.rewards, row.score = [abs(r) for r in row.rewards], abs(row.score)
    return rows


def padded(rows: list[slow.Row], of: Any, width: int) -> torch.Tensor:
    out = torch.zeros(len(rows), width, dtype=torch.float64)
    for row, tensor in zip(rows, out, strict=True):
        values = of(row)
        tensor[: len(values)] = torch.tensor(values, dtype=torch.float64)
    return out


def as_users_call_it(name: str, rows: list[slow.Row], cfg: Any) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(1, *(len(row.p) for row in rows))
    rewards = padded(rows, lambda row: row.rewards, width)
    for row, tensor in zip(rows, rewards, strict=True):
        if not row.policy:
            tensor[0] = row.score
    keys = {key: np.array([row.parts[key] for row in rows], object) for key in ("accuracy", "form")}
    given = {
        "token_level_rewards": rewards,
        "response_mask": padded(rows, lambda row: row.p, width),
        "loss_mask": padded(rows, lambda row: row.m, width),
        "index": np.array([row.uid for row in rows], object),
        "config": cfg,
        "norm_adv_by_std_in_grpo": cfg.norm_adv_by_std_in_grpo,
        "gamma": cfg.gamma,
        "lam": cfg.lam,
        "non_tensor_batch": keys,
        "reward_baselines": torch.tensor([row.baseline for row in rows]),
        "rollout_is_weights": padded(rows, lambda row: row.columns["is_weights"], width),
        **{c: padded(rows, lambda row, c=c: row.columns[c], width) for c in COLUMNS},
    }
    function = core_algos.get_adv_estimator_fn(name)
    if name == "gae":
        given = {k: given[k] for k in ("token_level_rewards", "values", "response_mask", "gamma", "lam", "loss_mask")}
    return function(**given)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", [name for name in NAMES if name != "rlcsd"])  # it has no public form
def test_the_public_form_equals_the_loop(name: str, seed: int) -> None:
    cfg = config(
        norm_adv_by_std_in_grpo=seed % 2 == 0,
        gamma=(1.0, 0.9, 0.0)[seed % 3],
        lam=(1.0, 0.95)[seed % 2],
        gdpo_reward_weights=[0.3, 1.7] if seed % 2 else None,
    )
    cfg.passk_k = (None, 2, 3)[seed % 3]
    rows = rows_for(name, seed, dense=seed % 4 == 0)
    expected = slow.ESTIMATORS[name](rows, cfg)
    advantages, returns = expected if isinstance(expected, tuple) else (expected, expected)
    found = as_users_call_it(name, rows, cfg)
    for tensor, wanted in zip(found, (advantages, returns), strict=True):
        for row, values, want in zip(rows, tensor, wanted, strict=True):
            assert values[row.policy].tolist() == pytest.approx(want, rel=1e-6, abs=1e-7)
            others = [t for t in range(len(values)) if t not in row.policy]
            assert not values[others].any()


def trajectories(rows: list[slow.Row], cut: bool) -> Batch:
    """The same responses, whole or every one in up to three segments."""
    out = []
    for i, row in enumerate(rows):
        length = len(row.p)
        ends = [0, *([length // 3, length // 2] if cut and length > 3 else []), length]
        segments = []
        for start, end in itertools.pairwise(ends):
            columns = {c: np.array(row.columns[c][start:end], np.float32) for c in COLUMNS if c in row.columns}
            mask = np.array(row.p[start:end], bool)
            segments.append(Segment(np.arange(3 + start), np.arange(end - start), mask, **columns))
        prompt = Prompt(uid=row.uid, ids=np.arange(3), messages=[])
        t = Trajectory(prompt, i, segments=segments, score=row.score, score_parts=dict(row.parts))
        t.baseline = Trajectory(prompt, -1, np.arange(1), np.ones(1, bool), score=row.baseline)
        if row.policy and row.s != row.score:
            t.extra["token_scores"] = row.rewards
        out.append(t)
    return Batch(out)


@pytest.mark.parametrize("seed", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_segments_change_nothing_and_the_driver_says_the_same(name: str, seed: int) -> None:
    cfg = config(adv_estimator=name, gamma=0.9, lam=0.95)
    rows = rows_for(name, seed, dense=seed == 4)
    for row in rows:
        row.m = row.p
        del row.columns["is_weights"]
    whole, cut = trajectories(rows, False), trajectories(rows, True)
    metrics = [compute_advantages(batch, cfg, rollout_n=1) for batch in (whole, cut)]
    assert metrics[0] == metrics[1]
    expected = slow.ESTIMATORS[name](rows, cfg)
    pair = expected if isinstance(expected, tuple) else (expected, expected)
    for column, wanted in zip(("advantages", "returns"), pair, strict=True):
        for row, a, b, want in zip(rows, whole, cut, wanted, strict=True):
            assert np.array_equal(getattr(a, column), getattr(b, column)), "cutting changes nothing"
            assert getattr(a, column)[row.policy].tolist() == pytest.approx(want, rel=2e-5, abs=2e-6)
            assert not getattr(a, column)[~np.array(row.p, bool)].any()


@pytest.mark.parametrize("name", NAMES)
def test_no_response_and_nothing_in_the_loss(name: str) -> None:
    cfg = config(adv_estimator=name)
    compute_advantages(Batch([]), cfg, rollout_n=2)
    rows = [slow.Row([], [], [], "a", 1.0, {c: [] for c in COLUMNS}, {"accuracy": 1.0, "form": 0.0}) for _ in range(2)]
    batch = trajectories(rows, False)
    compute_advantages(batch, cfg, rollout_n=2)
    assert [len(t.advantages) for t in batch] == [0, 0]


@pytest.mark.parametrize("factor", [0.0, 0.3, 0.99, 1.0])
@pytest.mark.parametrize("length", [0, 1, 2, 7, 64, 1000])
def test_discounted_sums(factor: float, length: int) -> None:
    values = np.random.default_rng(length).normal(size=length)
    running, expected = 0.0, []
    for value in values[::-1]:
        running = value + factor * running
        expected.insert(0, running)
    assert discounted_sums(values, factor).tolist() == pytest.approx(expected, rel=1e-10, abs=1e-10)


def test_gdpo_names_what_the_reward_does_not_return() -> None:
    rows = random_rows(2)
    batch = trajectories(rows, False)
    for key, name in (("accuracy", None), ("form", float("nan"))):
        batch[0].score_parts = {"accuracy": 1.0, "form": 1.0, key: name}
        with pytest.raises(ValueError, match=f"finite number under '{key}'"):
            compute_advantages(batch, config(adv_estimator="gdpo"), rollout_n=1)
    with pytest.raises(ValueError, match=r"gdpo needs algorithm\.gdpo_reward_keys"):
        compute_advantages(batch, config(adv_estimator="gdpo", gdpo_reward_keys=None), rollout_n=1)


def test_a_group_whose_greedy_response_has_no_score_is_dropped() -> None:
    rows = [slow.Row([1.0], [1], [1], uid, 1.0, baseline=0.5) for uid in "aabb"]
    batch = trajectories(rows, False)
    for t in batch:
        if t.uid == "a":
            t.baseline.score = None
    metrics = compute_advantages(batch, config(adv_estimator="remax"), rollout_n=2)
    assert metrics["training/dropped_groups"] == 1 and metrics["critic/reward_baseline/mean"] == 0.5
    assert [t.loss_mask.tolist() for t in batch] == [[False], [False], [True], [True]]
    assert [t.advantages.tolist() for t in batch] == [[0], [0], [0.5], [0.5]]
    for t in batch:
        t.baseline.score = None
    assert math.isnan(compute_advantages(batch, config(adv_estimator="remax"), 2)["critic/reward_baseline/mean"])


def test_what_they_need() -> None:
    more = {name: ESTIMATORS.needs(name) - {"response_mask", "token_rewards"} for name in NAMES}
    squares = {"old_log_probs", "sum_pi_squared"}
    expected = {"gae": {"values"}, "remax": {"reward_baselines"}, "rlcsd": set(TAUGHT)}
    expected |= {"optimal_token_baseline": squares, "tir_optimal_token_baseline": squares}
    assert {name: needs for name, needs in more.items() if needs} == expected
    batch = trajectories(random_rows(1), False)
    for t in batch:
        for segment in t.segments:
            segment.put("values", None)
    with pytest.raises(ValueError, match="adv_estimator=gae needs values, which this step has not"):
        compute_advantages(batch, config(adv_estimator="gae"), rollout_n=1)


def test_rlcsd_leaves_out_responses_without_a_right_and_a_wrong_one_to_read() -> None:
    rows = [slow.Row([0.0, s], [1, 1], [1, 1], "a", s, {c: [-1.0, -2.0] for c in COLUMNS}) for s in (1.0, 0.0, 0.0)]
    rows[1].columns["teacher_log_probs"] = [-0.5, -2.0]
    batch, expected = trajectories(rows, False), slow.rlcsd(rows, config())
    batch[0].extra["without_contrast"] = True
    compute_advantages(batch, config(adv_estimator="rlcsd"), rollout_n=3)
    assert batch[0].advantages.tolist() == [0, 0]
    # Of the six tokens four are counted, of which one has a change: the mean of the other three is over three, not
    # five.
    assert batch[1].advantages.tolist() == pytest.approx([expected[1][0], expected[1][1] * 5 / 3])
    assert batch[2].advantages.tolist() == pytest.approx([a * 5 / 3 for a in expected[2]])


def test_pass_at_k_is_the_estimator_of_its_paper() -> None:
    """Equation 33 of PKPO: s_i, what the subsets with i have at best, less k/n of what k − 1 of the others have."""
    scores, k = np.random.default_rng(3).normal(size=6), 3
    others = [np.delete(scores, i) for i in range(6)]
    best = [np.mean([max(rest) for rest in itertools.combinations(other, k - 1)]) for other in others]
    with_it = [
        sum(max(scores[i], *rest) for rest in itertools.combinations(other, k - 1)) / math.comb(6, k)
        for i, other in enumerate(others)
    ]
    rows = [slow.Row([s], [1], [1], "a", s) for s in scores]
    batch = trajectories(rows, False)
    compute_advantages(batch, config(adv_estimator="grpo_passk", passk_k=k, norm_adv_by_std_in_grpo=False), rollout_n=6)
    wanted = [a - k / 6 * b for a, b in zip(with_it, best, strict=True)]
    assert [t.advantages[0] for t in batch] == pytest.approx(wanted, rel=1e-5)


# -- steps of agents ------------------------------------------------------------------------------------

STATES = {"a": [7], "b": [8, 9], "c": [8]}


def episode(uid: str, index: int, steps: list[slow.Step], cut: bool) -> Trajectory:
    """As one segment, or one of its own for each step; the first state is the prompt's, whatever its name."""
    ids, mask, scores, segments, shared = [1, 2, 3], [False] * 3, [0.0] * 3, [], 0
    for number, (state, reward, tokens) in enumerate(steps):
        said = STATES[state] if number else []
        ids, mask = [*ids, *said, *[5] * tokens], [*mask, *[False] * len(said), *[True] * tokens]
        scores += [0.0] * (len(said) + tokens - 1) + [reward]
        if cut:
            arrays = np.arange(tokens), np.ones(tokens, bool)
            parent = {"parent": number - 1, "shared": shared} if number else {}
            segments.append(Segment(np.array(ids[:-tokens]), *arrays, **parent))
            shared = len(ids)
    if not cut:
        segments = [Segment(np.array(ids[:3]), np.array(ids[3:]), np.array(mask[3:]))]
    score = math.fsum(reward for _, reward, _ in steps)
    t = Trajectory(Prompt(uid=uid, ids=np.arange(3), messages=[]), index, segments=segments, score=score)
    dense = [s for s, m in zip(scores, mask, strict=True) if m] if cut else scores[3:]
    t.extra["token_scores"] = dense
    return t


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["gigpo", "hgpo"])
def test_the_steps_of_a_group_in_the_same_state_are_compared(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    episodes = []
    for i in range(7):
        states = ["prompt", *rng.choice(list(STATES), int(rng.integers(0, 4)))]
        steps = [(str(s), float(rng.integers(0, 2)), int(rng.integers(1, 4))) for s in states]
        episodes.append((f"g{min(i // 3, 1 + seed % 2)}", steps))
    cfg = config(adv_estimator=name, gamma=0.9, gigpo_step_weight=0.5, norm_adv_by_std_in_grpo=seed % 2 == 0)
    cfg.hgpo_history, cfg.hgpo_alpha = seed, 0.5 + seed
    expected = getattr(slow, name)(episodes, cfg)
    assert any(any(steps) for steps in expected)
    for cut in (False, True):
        batch = Batch([episode(uid, i, steps, cut) for i, (uid, steps) in enumerate(episodes)])
        compute_advantages(batch, cfg, rollout_n=1)
        for t, (_, steps), of_steps in zip(batch, episodes, expected, strict=True):
            wanted = np.repeat(of_steps, [tokens for _, _, tokens in steps])
            assert t.advantages[t.response_mask].tolist() == pytest.approx(wanted.tolist(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", ["gigpo", "hgpo"])
def test_steps_of_responses_without_tokens(name: str) -> None:
    batch = trajectories([slow.Row([], [], [], "a", 1.0) for _ in range(2)], False)
    compute_advantages(batch, config(adv_estimator=name), rollout_n=2)
    assert [len(t.advantages) for t in batch] == [0, 0]


def test_rae_keeps_a_baseline_for_each_game_and_role_from_step_to_step() -> None:
    """The role is the loop's, else the row's; a response without a score leaves the baselines alone."""
    rng, state, baselines = np.random.default_rng(0), dict[str, Any](), dict[tuple[str, str], float]()
    cfg = config(adv_estimator="rae", rae_decay=0.8)
    for _ in range(3):
        batch = trajectories([slow.Row([s], [1], [1], f"g{i // 2}", s) for i, s in enumerate(rng.normal(size=6))], True)
        expected = []
        for i, t in enumerate(batch):
            t.prompt.data_source, t.prompt.extra_info = "poker" if i < 4 else "chess", {"role": "black"}
            t.fields = {"role": "white"} if i % 2 else {}
            if i == 3:
                t.score = None
                continue
            key = (t.prompt.data_source, "white" if i % 2 else "black")
            baseline = baselines.get(key, 0.0)
            expected.append(t.score - baseline)
            baselines[key] = 0.8 * baseline + 0.2 * t.score
        compute_advantages(batch, cfg, rollout_n=2, state=state)
        found = [t.advantages[0] for t in batch if t.scored]
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
        state = json.loads(json.dumps(state))
    assert state["rae"] == pytest.approx({f"{game}/{role}": b for (game, role), b in baselines.items()})


def test_maxrl_refuses_scores_below_zero() -> None:
    batch = trajectories([slow.Row([s], [1], [1], "a", s) for s in (1.0, -1.0)], False)
    with pytest.raises(ValueError, match="maxrl needs scores of 0 and above"):
        compute_advantages(batch, config(adv_estimator="maxrl"), rollout_n=2)


# -- grpo: what the loop does not show -----------------------------------------------------------------------


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("score", [0.0, 0.1, 1 / 3, -7.7])
def test_equal_scores_give_exactly_zero(normalise: bool, score: float) -> None:
    # In float64 the mean of ten equal numbers is not always that number: 0.1 is such a one.
    rewards = torch.full((10, 1), score, dtype=torch.float64)
    advantages, _ = compute_grpo_outcome_advantage(
        rewards, torch.ones(10, 1), ["a"] * 10, norm_adv_by_std_in_grpo=normalise
    )
    assert torch.equal(advantages, torch.zeros(10, 1, dtype=torch.float64))


def test_float32_in_float32_out_with_float64_statistics() -> None:
    # 1e8 + {0, 8, 16} are float32 numbers whose float32 variance is badly off.
    rewards = torch.tensor([[1e8], [1e8 + 8], [1e8 + 16]], dtype=torch.float32)
    advantages, _ = compute_grpo_outcome_advantage(rewards, torch.ones(3, 1), ["g"] * 3)
    assert advantages.dtype == torch.float32
    torch.testing.assert_close(advantages[:, 0], torch.tensor([-1.0, 0.0, 1.0]), rtol=1e-6, atol=1e-6)


def test_keys_may_be_a_tensor_and_must_match_the_responses() -> None:
    scores = np.array([1.0, 2.0, 5.0])
    from_tensor = GroupStatistics.of(scores, torch.tensor([4, 4, 9]))
    from_names = GroupStatistics.of(scores, ["x", "x", "y"])
    assert np.array_equal(from_tensor.mean, from_names.mean)
    assert from_names.mean.dtype == from_names.std.dtype == np.float64
    with pytest.raises(ValueError, match="3 responses but 2 group keys"):
        GroupStatistics.of(scores, ["x", "y"])


def test_no_responses() -> None:
    advantages, _ = compute_grpo_outcome_advantage(torch.zeros(0, 4), torch.zeros(0, 4), [])
    assert advantages.shape == (0, 4)
