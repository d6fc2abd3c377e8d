"""What an advantage estimator gets, and the estimators.

Formulas: docs/algorithms.md, "Advantage estimators".

An estimator is written on `EstimatorInputs` and returns one number per response, float64 [N], or (advantages, returns)
of the policy tokens, a list of arrays [K_i] each. So no array of tokens is made where one number per response will do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from verl.algorithms.flat_tokens import discounted_sums
from verl.algorithms.registry import ESTIMATORS
from verl.config.schema.base import setting
from verl.trajectory import Batch, Trajectory

EPSILON = 1e-6
Arrays = list[np.ndarray]
Result = np.ndarray | tuple[Arrays, Arrays]


@dataclass(frozen=True, slots=True)
class EstimatorInputs:
    """The N responses that count. A response's tokens are those that the policy wrote, in order, over all its segments.

    scores     float64 [N]: s, the sum of the token rewards (KL penalty taken off); without a policy token
               the score itself
    index      [N] group keys
    lengths    int [N]: K, policy tokens
    column     name of a column → float64 [K_i] of each response; ValueError where the step does not have it
    part       key → what the reward function returned under it, one value per response
    baselines  float64 [N]: score of the prompt's greedy response, where the estimator needs `reward_baselines`
    divide     `norm_adv_by_std_in_grpo`
    batch      the responses themselves, where the loop calls
    state      what the estimator keeps from step to step, as JSON; it is in the checkpoints
    """

    scores: np.ndarray
    index: Iterable[Any]
    lengths: np.ndarray
    column: Callable[[str], Iterable[np.ndarray]]
    part: Callable[[str], Sequence[Any]]
    baselines: np.ndarray | None = None
    config: Mapping[str, Any] | None = None
    epsilon: float = EPSILON
    divide: bool = True
    gamma: float = 1.0
    lam: float = 1.0
    batch: Batch | None = None
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def loss_masks(self) -> Arrays:
        """m of the policy tokens, bool [K_i] of each response."""
        return [mask.astype(bool, copy=False) for mask in self.column("loss_mask")]


Estimator = Callable[[EstimatorInputs], Result]


# -- groups and whitening ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of N responses: `ids` 0, 1, … in order of first appearance; `size` members of each response's
    group."""

    ids: np.ndarray
    size: np.ndarray

    @classmethod
    def of(cls, index: Iterable[Any]) -> Groups:
        """From group keys [N] (any hashables, or a tensor or array of them)."""
        keys = index.tolist() if hasattr(index, "tolist") else list(index)
        id_of_key: dict[Any, int] = {}
        ids = np.array([id_of_key.setdefault(key, len(id_of_key)) for key in keys], np.int64)
        return cls(ids, np.bincount(ids)[ids] if len(ids) else ids)

    def sums(self, values: np.ndarray) -> np.ndarray:
        """For each response the sum over its group, [N]."""
        return np.bincount(self.ids, weights=values)[self.ids] if len(self.ids) else values

    def members(self) -> list[np.ndarray]:
        """Positions of the members of each group."""
        order = np.argsort(self.ids, kind="stable")
        return np.split(order, np.cumsum(np.bincount(self.ids))[:-1]) if len(order) else []


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """For each response, of its group: mean, sample standard deviation (n_g − 1), and whether all scores are equal.

    A group of one has mean 0 and std 1, and is not `equal`: its score is the advantage. Float64 [N], bool [N].
    """

    groups: Groups
    mean: np.ndarray
    std: np.ndarray
    equal: np.ndarray

    @classmethod
    def of(cls, scores: np.ndarray, index: Iterable[Any]) -> GroupStatistics:
        """ValueError if there are not as many keys as scores [N]."""
        groups = Groups.of(index)
        if len(groups.ids) != len(scores):
            raise ValueError(f"{len(scores)} responses but {len(groups.ids)} group keys")
        mean = groups.sums(scores) / groups.size
        variance = groups.sums((scores - mean) ** 2) / np.maximum(groups.size - 1, 1)
        equal = np.zeros(len(scores), bool)
        for members in groups.members():
            equal[members] = len(members) > 1 and np.ptp(scores[members]) == 0
        alone = groups.size == 1
        return cls(groups, np.where(alone, 0.0, mean), np.where(alone, 1.0, np.sqrt(variance)), equal)

    def without_equal(self, advantages: np.ndarray) -> np.ndarray:
        """The advantages, exactly 0 where all scores of the group are equal."""
        return np.where(self.equal, 0.0, advantages)


def _scale(total: int, squares: float, low: float, high: float) -> float:
    """1 / √(var + 1e-8) of `total` values with this sum of squared deviations; 0 where there is nothing to whiten."""
    return 0.0 if total <= 1 or low == high else 1 / np.sqrt(squares / (total - 1) + 1e-8)


def whiten_responses(values: np.ndarray, inputs: EstimatorInputs) -> np.ndarray:
    """(x − mean) / √(var + 1e-8) over tokens with m = 1, each of which has its response's value [N]."""
    counts = np.array([np.count_nonzero(mask) for mask in inputs.loss_masks], np.int64)
    total, carrying = int(counts.sum()), values[counts > 0]
    if not total:
        return np.zeros_like(values)
    mean = counts @ values / total
    return (values - mean) * _scale(total, counts @ (values - mean) ** 2, carrying.min(), carrying.max())


def whiten_tokens(values: Arrays, inputs: EstimatorInputs) -> Arrays:
    """The same for values of tokens, [K_i] of each response."""
    masked = zip(values, inputs.loss_masks, strict=True)
    selected = [v if mask.all() else v[mask] for v, mask in masked if mask.any()]
    total = sum(map(len, selected))
    if not total:
        return [np.zeros_like(v) for v in values]
    mean = sum(float(v.sum()) for v in selected) / total
    squares = sum(float(((v - mean) ** 2).sum()) for v in selected)
    scale = _scale(total, squares, min(v.min() for v in selected), max(v.max() for v in selected))
    return [(v - mean) * scale for v in values]


# -- estimators --------------------------------------------------------------------------------------------------


@ESTIMATORS.register("grpo", compares_groups=True, keys=["norm_adv_by_std_in_grpo"])
@ESTIMATORS.register("grpo_vectorized", compares_groups=True, keys=["norm_adv_by_std_in_grpo"])
def grpo(inputs: EstimatorInputs) -> Result:
    """A = (s − mean_g) / (std_g + ε); without the division: Dr. GRPO.

    A group whose scores are all equal gets exactly 0; a group of one has mean 0 and std 1.
    Sources: GRPO, arXiv 2402.03300; Dr. GRPO, arXiv 2503.20783.
    """
    return group_relative(inputs.scores, inputs)


def group_relative(scores: np.ndarray, inputs: EstimatorInputs, index: Iterable[Any] | None = None) -> np.ndarray:
    """The advantage of `grpo` on other scores, or over other groups, [N]."""
    group = GroupStatistics.of(scores, inputs.index if index is None else index)
    advantage = scores - group.mean
    if inputs.divide:
        advantage = advantage / (group.std + inputs.epsilon)
    return group.without_equal(advantage)


@ESTIMATORS.register("maxrl", compares_groups=True)
def maxrl(inputs: EstimatorInputs) -> Result:
    """A = (s − mean_g) / mean_g, 0 where mean_g is 0; s in a group of one. ValueError for a score below 0.

    With scores of 0 and 1 the gradient is that of Σ_{k ≤ n} pass@k / k. Source: MaxRL, arXiv 2602.02710.
    """
    if (inputs.scores < 0).any():
        raise ValueError("maxrl needs scores of 0 and above: it divides by their mean; the KL penalty goes in the loss")
    group = GroupStatistics.of(inputs.scores, inputs.index)
    divisor = np.where(group.mean > 0, group.mean, 1.0)
    return group.without_equal((inputs.scores - group.mean) / divisor)


@ESTIMATORS.register("grpo_passk", compares_groups=True, keys=["passk_k", "norm_adv_by_std_in_grpo"])
def grpo_passk(inputs: EstimatorInputs) -> Result:
    """What a response adds to the best of k: A = Σ_I (max_I s − max_{I without it} s) / C(n_g, k) / (std_g + ε) over
    the subsets I of k members that contain it, undivided where the division is off; k is `passk_k`, n_g without.

    With k = n_g the best response gets s₍₁₎ − s₍₂₎, all others 0. A smaller group has k = n_g. In a group of one A = s.
    Undivided it is s^(loo−1) of PKPO: s_i − (k/n)·ρ(n−1, k−1) without i, ρ the estimate of the best of k.
    Sources: arXiv 2503.19595; k < n_g: PKPO, arXiv 2505.15201, equation 33.
    """
    group = GroupStatistics.of(inputs.scores, inputs.index)
    advantage = np.zeros_like(inputs.scores)
    for members in group.groups.members():
        ranked, size = members[np.argsort(inputs.scores[members], kind="stable")], len(members)
        k = min(setting(inputs.config, "passk_k") or size, size)
        scores = inputs.scores[ranked] if size > 1 else np.append(0.0, inputs.scores[ranked])
        # Subsets in which `best` is the largest and `second` the next one: k − 2 others come from below.
        shares = np.array([math.comb(second, max(k - 2, 0)) / math.comb(size, k) for second in range(len(scores))])
        for best in range(len(scores) - size, len(scores)):
            advantage[ranked[best - len(scores)]] = shares[:best] @ (scores[best] - scores[:best])
    return advantage / (group.std + inputs.epsilon) if inputs.divide else advantage


GDPO_KEYS = ("gdpo_reward_keys", "gdpo_reward_weights", "norm_adv_by_std_in_grpo")


@ESTIMATORS.register("gdpo", compares_groups=True, keys=GDPO_KEYS)
def gdpo(inputs: EstimatorInputs) -> Result:
    """A = whiten(Σ_q w_q A^q), A^q the advantage of GRPO on component q of `gdpo_reward_keys`; w_q = 1 unless weights
    are given.

    RewardPartError without keys, and for a response whose reward has no number under one of them.
    Source: arXiv 2601.05242.
    """
    return whiten_responses(_sum_of_components(inputs), inputs)


@ESTIMATORS.register("mo_grpo", compares_groups=True, keys=GDPO_KEYS[:2])
def mo_grpo(inputs: EstimatorInputs) -> Result:
    """A = Σ_q w_q (s_q − mean_g s_q) / (std_g s_q + ε) over the components q of `gdpo_reward_keys`: each has the same
    variance, whatever its scale, and nothing is whitened after the sum; w_q = 1 unless weights are given.

    RewardPartError as of `gdpo`. Source: MO-GRPO, arXiv 2509.22047.
    """
    return _sum_of_components(replace(inputs, divide=True))


def _sum_of_components(inputs: EstimatorInputs) -> np.ndarray:
    """Σ_q w_q A^q, A^q the advantage of GRPO on component q."""
    keys = setting(inputs.config, "gdpo_reward_keys", [])
    weights = setting(inputs.config, "gdpo_reward_weights", [1.0] * len(keys))
    if not keys or len(weights) != len(keys):
        raise RewardPartError(
            f"{setting(inputs.config, 'adv_estimator', 'gdpo')} needs algorithm.gdpo_reward_keys, and as many "
            f"gdpo_reward_weights: {keys}, {weights}"
        )
    parts = [
        weight * group_relative(_component(key, inputs), inputs) for key, weight in zip(keys, weights, strict=True)
    ]
    return np.asarray(np.sum(parts, axis=0))


class RewardPartError(ValueError, AssertionError):
    """`gdpo_reward_keys` or weights that do not fit the rewards; the public interface makes it an AssertionError."""


def _component(key: str, inputs: EstimatorInputs) -> np.ndarray:
    try:
        values = np.array([float(value) for value in inputs.part(key)])
    except (KeyError, TypeError, ValueError):
        values = np.array([np.nan])
    if not np.isfinite(values).all():
        raise RewardPartError(
            f"algorithm.gdpo_reward_keys: the reward function does not return a finite number "
            f"under {key!r} for every response"
        )
    return values


@ESTIMATORS.register("reinforce_plus_plus_baseline", compares_groups=True)
def reinforce_plus_plus_baseline(inputs: EstimatorInputs) -> Result:
    """A = whiten(s − mean_g). Source: REINFORCE++, arXiv 2501.03262."""
    group = GroupStatistics.of(inputs.scores, inputs.index)
    return whiten_responses(group.without_equal(inputs.scores - group.mean), inputs)


@ESTIMATORS.register("rloo", compares_groups=True)
@ESTIMATORS.register("rloo_vectorized", compares_groups=True)
def rloo(inputs: EstimatorInputs) -> Result:
    """A = s − mean of the group's other members = (s − mean_g)·n_g / (n_g − 1); s in a group of one. Source: arXiv
    2402.14740."""
    group = GroupStatistics.of(inputs.scores, inputs.index)
    size = group.groups.size
    return group.without_equal((inputs.scores - group.mean) * size / np.maximum(size - 1, 1))


@ESTIMATORS.register("opo", compares_groups=True)
def opo(inputs: EstimatorInputs) -> Result:
    """A = s − Σ_g K·s / Σ_g K: the baseline weighs responses by their policy tokens; without any it is mean_g, in a
    group of one 0.

    Source: arXiv 2505.23585.
    """
    group = GroupStatistics.of(inputs.scores, inputs.index)
    tokens = group.groups.sums(inputs.lengths.astype(np.float64))
    weighted = group.groups.sums(inputs.lengths * inputs.scores) / np.maximum(tokens, 1)
    baseline = np.where((group.groups.size > 1) & (tokens > 0), weighted, group.mean)
    return group.without_equal(inputs.scores - baseline)


@ESTIMATORS.register("gpg", compares_groups=True)
def gpg(inputs: EstimatorInputs) -> Result:
    """A = α(s − mean_g), α = N / N₊ with N₊ the responses in groups whose scores differ (groups of one among them); 0
    if none.

    Source: arXiv 2504.02546.
    """
    group = GroupStatistics.of(inputs.scores, inputs.index)
    differing = np.count_nonzero(~group.equal)
    alpha = len(inputs.scores) / differing if differing else 0.0
    return alpha * group.without_equal(inputs.scores - group.mean)


@ESTIMATORS.register("real")
def real(inputs: EstimatorInputs) -> Result:
    """A = 1 where s > ½, else −1: the reward as a label, for the policy loss `real`. Source: REAL, arXiv 2602.05630."""
    return np.where(inputs.scores > 0.5, 1.0, -1.0)


@ESTIMATORS.register("rae", keys=["rae_decay"])
def rae(inputs: EstimatorInputs) -> Result:
    """A = s − b, then b ← αb + (1 − α)s, one response after the other: b is a running mean for each game
    (`data_source`) and role (`role` of the loop's fields, else of `extra_info`), at first 0; α is `rae_decay`.

    For self-play, where the members of a group play different roles. b is in the checkpoints.
    Source: SPIRAL, arXiv 2506.24119.
    """
    if inputs.batch is None:
        raise ValueError("rae needs the roles of the responses, which only the trainer knows")
    decay, baselines = setting(inputs.config, "rae_decay", 0.95), inputs.state.setdefault("rae", {})
    advantages = np.zeros_like(inputs.scores)
    for i, (t, score) in enumerate(zip(inputs.batch, inputs.scores.tolist(), strict=True)):
        key = f"{t.prompt.data_source}/{t.fields.get('role', t.prompt.extra_info.get('role', ''))}"
        before = baselines.get(key, 0.0)
        advantages[i], baselines[key] = score - before, decay * before + (1 - decay) * score
    return advantages


# -- an estimator that reads teachers ------------------------------------------------------------------------------

RLCSD_KEYS = ("rlcsd_tau", "rlcsd_scale", "rlcsd_threshold", "rlcsd_weight", "norm_adv_by_std_in_grpo")
RLCSD_NEEDS = frozenset({"teacher_log_probs", "teacher_contrast_log_probs"})
WITHOUT_CONTRAST = "without_contrast"
"""The note (`Trajectory.extra`) of a response for which the teacher had no right or no wrong response to read."""


@ESTIMATORS.register("rlcsd", compares_groups=True, needs=RLCSD_NEEDS, keys=RLCSD_KEYS)
def rlcsd(inputs: EstimatorInputs) -> Result:
    """A = A^g, that of `grpo`, and on tokens with |r| > `rlcsd_threshold` A = A^g + r, limited to the side of A^g: r =
    `rlcsd_scale`·tanh(e / `rlcsd_tau`), e the teacher's log-prob after a right response less that after wrong ones.

    The tokens of both kinds have a mean of their own in the loss (`token-mean`), that of those with r times
    `rlcsd_weight`: A is multiplied by T / T_kind, counts of the step's tokens in the loss. A response for which the
    teacher had not both to read (`contrast` of a teacher) has A = 0 and is in no count.
    Source: RLCSD, arXiv 2606.11709; the constants are those of the authors' code.
    """
    settings = {name: float(setting(inputs.config, name)) for name in RLCSD_KEYS[:4]}
    rows = inputs.batch or ()
    learns = [not t.extra.get(WITHOUT_CONTRAST) for t in rows] or [True] * len(inputs.scores)
    masks = [mask & counted for mask, counted in zip(inputs.loss_masks, learns, strict=True)]
    right, wrong = inputs.column("teacher_log_probs"), inputs.column("teacher_contrast_log_probs")
    residuals = [
        settings["rlcsd_scale"] * np.tanh((a - b) / settings["rlcsd_tau"]) for a, b in zip(right, wrong, strict=True)
    ]
    selected = [np.abs(r) > settings["rlcsd_threshold"] for r in residuals]
    of_kind = [
        sum(int((m & kind).sum()) for m, kind in zip(masks, kinds, strict=True))
        for kinds in ([~s for s in selected], selected)
    ]
    total = sum(int(mask.sum()) for mask in inputs.loss_masks)
    plain, moved = (total / max(count, 1) for count in of_kind)
    advantages = []
    for base, r, kind, counted in zip(group_relative(inputs.scores, inputs), residuals, selected, learns, strict=True):
        towards = np.sign(base) * np.maximum(np.sign(base) * (base + r), 0.0)
        scaled = np.where(kind, towards * moved * settings["rlcsd_weight"], base * plain)
        advantages.append(scaled * counted)
    return advantages, advantages


# -- estimators whose advantages differ from token to token: recursions over the policy tokens of all segments ------


@ESTIMATORS.register("gae", needs={"values"}, keys=["gamma", "lam"])
def gae(inputs: EstimatorInputs) -> Result:
    """δ_k = r_k + γV_{k+1} − V_k; a_k = δ_k + γλ·a_{k+1}; returns a + V; A = whiten(a). V after the last policy token
    is 0.

    Sources: GAE, arXiv 1506.02438; PPO, arXiv 1707.06347.
    """
    advantages, returns = [], []
    for rewards, values in zip(inputs.column("token_rewards"), inputs.column("values"), strict=True):
        following = np.append(values[1:], 0.0)[: len(values)]
        errors = rewards + inputs.gamma * following - values
        advantages.append(discounted_sums(errors, inputs.gamma * inputs.lam))
        returns.append(advantages[-1] + values)
    return whiten_tokens(advantages, inputs), returns


@ESTIMATORS.register("reinforce_plus_plus", keys=["gamma"])
def reinforce_plus_plus(inputs: EstimatorInputs) -> Result:
    """G_k = r_k + γG_{k+1}; A = whiten(G); returns G. γ is `config.gamma`, 1 without. Source: arXiv 2501.03262."""
    returns = [discounted_sums(rewards, inputs.gamma) for rewards in inputs.column("token_rewards")]
    return whiten_tokens(returns, inputs), returns


@ESTIMATORS.register("remax", needs={"reward_baselines"})
def remax(inputs: EstimatorInputs) -> Result:
    """A_k = Σ_{j ≥ k} r_j − b_g; returns Σ_{j ≥ k} r_j. b_g is the score of the prompt's greedy response.

    Source: ReMax, arXiv 2310.10505.
    """
    if inputs.baselines is None:
        raise ValueError("remax needs reward_baselines, the score of a greedy response to each prompt")
    returns = [discounted_sums(rewards, 1.0) for rewards in inputs.column("token_rewards")]
    return [row_returns - baseline for row_returns, baseline in zip(returns, inputs.baselines, strict=True)], returns


def _gradient_norms(inputs: EstimatorInputs) -> Arrays:
    """W_k = Σ_{j ≤ k} (1 − 2π_j + Σ_v π(v)²)·c_j² of each response, c the importance weight (1 where there is none)."""
    try:
        corrections = inputs.column("is_weights")
    except ValueError:  # the step has no correction
        corrections = [np.ones(int(length)) for length in inputs.lengths]
    columns = zip(inputs.column("old_log_probs"), inputs.column("sum_pi_squared"), corrections, strict=True)
    return [np.cumsum((1 - 2 * np.exp(old) + squares) * c**2) for old, squares, c in columns]


def _group_baseline(returns: Arrays, weights: Arrays) -> np.ndarray:
    """b_k = Σ_j G·W / (Σ_j W + 1e-8) over members that have a token k, up to the second-longest length."""
    width = sorted(map(len, returns))[-2]
    above, below = np.zeros(width), np.zeros(width)
    for row_returns, weight in zip(returns, weights, strict=True):
        size = min(width, len(row_returns))
        above[:size] += row_returns[:size] * weight[:size]
        below[:size] += weight[:size]
    return above / (below + 1e-8)


_OTB_NEEDS = frozenset({"old_log_probs", "sum_pi_squared"})


@ESTIMATORS.register("optimal_token_baseline", compares_groups=True, needs=_OTB_NEEDS)
@ESTIMATORS.register("tir_optimal_token_baseline", compares_groups=True, needs=_OTB_NEEDS)
def optimal_token_baseline(inputs: EstimatorInputs) -> Result:
    """A_k = G_k − b_{g,k}; returns G_k = Σ_{j ≥ k} r_j. The baseline weighs the group's returns at token k by W_k, the
    expected squared norm of the gradient so far.

    w_k = (1 − 2π_k + Σ_v π(v)²)·c_k², W_k = Σ_{j ≤ k} w_j; b_{g,k} = Σ_j G_{j,k}W_{j,k} / (Σ_j W_{j,k} + 1e-8) over
    members that have a token k. b is 0 in a group of one and beyond the second-longest length; A is 0 where all scores
    of a group are equal. Source: Optimal Token Baseline (Li et al. 2025).
    """
    returns = [discounted_sums(rewards, 1.0) for rewards in inputs.column("token_rewards")]
    weights = _gradient_norms(inputs)
    group = GroupStatistics.of(inputs.scores, inputs.index)
    advantages = list(returns)
    for members in group.groups.members():
        if len(members) == 1:
            continue
        baseline = _group_baseline([returns[i] for i in members], [weights[i] for i in members])
        for i in members:
            width = min(len(baseline), len(returns[i]))
            advantages[i] = returns[i].copy()
            advantages[i][:width] -= baseline[:width]
            if group.equal[i]:
                advantages[i] = np.zeros_like(returns[i])
    return advantages, returns


# -- how much of the policy gradient is signal: proxies of its variance, from Σπ² per token ---------------------------


def variance_proxies(rows: Sequence[Trajectory], gradient_norm: float) -> dict[str, float]:
    """variance_proxy/…, over the responses with a policy token whose log-probs and Σπ² are known; {} where that is
    none.

    A is the mean advantage of a response over its policy tokens, W = Σ_k (1 − 2π_k + Σ_v π(v)²)·c_k² with c the
    importance weight. proxy1_signal_strength: squared gradient norm; proxy2_total_power: mean A²W; proxy3_pure_noise:
    (proxy2 − proxy1) / (N − 1), not below 0; expected_a_squared, expected_w: means of A² and W.
    """
    terms = [
        _power(t) for t in rows if t.policy_tokens and t.old_log_probs is not None and t.sum_pi_squared is not None
    ]
    if not terms:
        return {}
    squares, weights = np.array(terms).T
    signal, power = gradient_norm**2, float(np.mean(squares * weights))
    return {
        "variance_proxy/proxy1_signal_strength": signal,
        "variance_proxy/proxy2_total_power": power,
        "variance_proxy/proxy3_pure_noise": max(0.0, power - signal) / (len(terms) - 1) if len(terms) > 1 else np.nan,
        "variance_proxy/expected_a_squared": float(squares.mean()),
        "variance_proxy/expected_w": float(weights.mean()),
    }


def _power(t: Trajectory) -> tuple[float, float]:
    """(A², W) of a response."""
    mask = np.asarray(t.response_mask, bool)

    def column(values: Any) -> np.ndarray:
        return np.asarray(values, np.float64)[mask]

    weights = 1 - 2 * np.exp(column(t.old_log_probs)) + column(t.sum_pi_squared)
    if t.is_weights is not None:
        weights = weights * column(t.is_weights) ** 2
    return float(column(t.advantages).mean() ** 2), float(weights.sum())
