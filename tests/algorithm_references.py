"""Every estimator and loss once more, slowly: loops over responses and tokens in plain floats, written from the
formulas.

No code is shared with the product. A response is a `Row`; p are its policy tokens, m those in the loss.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

EPS = 1e-6


@dataclass
class Row:
    """Token rewards, p and m of a response, its group, and what else an estimator asks for, per token or per
    response."""

    rewards: list[float]
    p: list[int]
    m: list[int]
    uid: str
    score: float
    columns: dict[str, list[float]] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    baseline: float = 0.0

    @property
    def policy(self) -> list[int]:
        return [t for t, p in enumerate(self.p) if p]

    @property
    def s(self) -> float:
        """Sum of the token rewards; of a response without a policy token its score."""
        return math.fsum(self.rewards[t] for t in self.policy) if self.policy else self.score


def group_of(rows: list[Row], row: Row) -> list[Row]:
    return [other for other in rows if other.uid == row.uid]


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def std(values: list[float]) -> float:
    centre = mean(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / (len(values) - 1))


def whiten(rows: list[Row], values: list[list[float]]) -> list[list[float]]:
    """values per policy token."""
    kept = [v for row, own in zip(rows, values, strict=True) for v, t in zip(own, row.policy, strict=True) if row.m[t]]
    if len(kept) <= 1 or max(kept) == min(kept):
        return [[0.0] * len(own) for own in values]
    centre = mean(kept)
    variance = math.fsum((v - centre) ** 2 for v in kept) / (len(kept) - 1)
    return [[(v - centre) / math.sqrt(variance + 1e-8) for v in own] for own in values]


def everywhere(rows: list[Row], numbers: list[float]) -> list[list[float]]:
    return [[number] * len(row.policy) for row, number in zip(rows, numbers, strict=True)]


def relative(rows: list[Row], scores: list[float], divide: bool = True) -> list[float]:
    """GRPO."""
    out = []
    for row, own in zip(rows, scores, strict=True):
        group = [s for other, s in zip(rows, scores, strict=True) if other.uid == row.uid]
        if len(group) == 1:
            out.append(own / (1 + EPS) if divide else own)
        elif max(group) == min(group):
            out.append(0.0)
        else:
            out.append((own - mean(group)) / (std(group) + EPS if divide else 1.0))
    return out


def centred(rows: list[Row]) -> list[float]:
    return relative(rows, [row.s for row in rows], divide=False)


def grpo(rows: list[Row], config: Any) -> Any:
    return everywhere(rows, relative(rows, [row.s for row in rows], config.norm_adv_by_std_in_grpo))


def grpo_passk(rows: list[Row], config: Any) -> Any:
    out = []
    for row in rows:
        group = group_of(rows, row)
        size = min(config.passk_k or len(group), len(group))
        gain = 0.0
        for subset in itertools.combinations(group, size):
            if any(member is row for member in subset):
                others = [member.s for member in subset if member is not row] or [0.0]
                gain += max(row.s, *others) - max(others) if len(group) > 1 else row.s
        scale = (1.0 if len(group) == 1 else std([other.s for other in group])) + EPS
        gain /= math.comb(len(group), size)
        out.append(gain / scale if config.norm_adv_by_std_in_grpo else gain)
    return everywhere(rows, out)


def maxrl(rows: list[Row], config: Any) -> Any:
    """The average of the score functions of successes, less that of all: 1/K − 1/n for a success, −1/n else, times
    n."""
    out = []
    for row in rows:
        scores = [other.s for other in group_of(rows, row)]
        total = math.fsum(scores)
        equal = max(scores) == min(scores)
        out.append(row.s if len(scores) == 1 else 0.0 if equal else len(scores) * row.s / total - 1)
    return everywhere(rows, out)


def real_label(rows: list[Row], config: Any) -> Any:
    return everywhere(rows, [1.0 if row.s > 0.5 else -1.0 for row in rows])


def gdpo(rows: list[Row], config: Any) -> Any:
    total = [0.0] * len(rows)
    weights = config.gdpo_reward_weights or [1.0] * len(config.gdpo_reward_keys)
    for key, weight in zip(config.gdpo_reward_keys, weights, strict=True):
        own = relative(rows, [row.parts[key] for row in rows], config.norm_adv_by_std_in_grpo)
        total = [a + weight * b for a, b in zip(total, own, strict=True)]
    return whiten(rows, everywhere(rows, total))


def mo_grpo(rows: list[Row], config: Any) -> Any:
    weights = config.gdpo_reward_weights or [1.0] * len(config.gdpo_reward_keys)
    of_keys = [relative(rows, [row.parts[key] for row in rows]) for key in config.gdpo_reward_keys]
    return everywhere(
        rows, [math.fsum(w * a for w, a in zip(weights, each, strict=True)) for each in zip(*of_keys, strict=True)]
    )


def rlcsd(rows: list[Row], config: Any) -> Any:
    """Two means in one: the loss's token mean divides by all tokens."""
    outcome = relative(rows, [row.s for row in rows], config.norm_adv_by_std_in_grpo)

    def change(row: Row, t: int) -> float:
        e = row.columns["teacher_log_probs"][t] - row.columns["teacher_contrast_log_probs"][t]
        r = config.rlcsd_scale * math.tanh(e / config.rlcsd_tau)
        return r if abs(r) > config.rlcsd_threshold else 0.0

    tokens = [(row, t) for row in rows for t in row.policy if row.m[t]]
    changed = sum(change(row, t) != 0 for row, t in tokens)
    factors = {True: len(tokens) / max(changed, 1), False: len(tokens) / max(len(tokens) - changed, 1)}
    out = []
    for row, a in zip(rows, outcome, strict=True):
        per_token = []
        for t in row.policy:
            r = change(row, t)
            moved = max(a + r, 0.0) if a > 0 else min(a + r, 0.0) if a < 0 else 0.0
            per_token.append(moved * config.rlcsd_weight * factors[True] if r else a * factors[False])
        out.append(per_token)
    return out


def reinforce_plus_plus(rows: list[Row], config: Any) -> Any:
    returns = []
    for row in rows:
        running, own = 0.0, []
        for t in reversed(row.policy):
            running = row.rewards[t] + config.gamma * running
            own.insert(0, running)
        returns.append(own)
    return whiten(rows, returns), returns


def reinforce_plus_plus_baseline(rows: list[Row], config: Any) -> Any:
    return whiten(rows, everywhere(rows, centred(rows)))


def gae(rows: list[Row], config: Any) -> Any:
    advantages, returns = [], []
    for row in rows:
        values = [row.columns["values"][t] for t in row.policy]
        running, following, own = 0.0, 0.0, []
        for k in reversed(range(len(values))):
            error = row.rewards[row.policy[k]] + config.gamma * following - values[k]
            running = error + config.gamma * config.lam * running
            following = values[k]
            own.insert(0, running)
        advantages.append(own)
        returns.append([a + v for a, v in zip(own, values, strict=True)])
    return whiten(rows, advantages), returns


def rloo(rows: list[Row], config: Any) -> Any:
    out = []
    for i, row in enumerate(rows):
        others = [other.s for j, other in enumerate(rows) if other.uid == row.uid and j != i]
        equal = bool(others) and max([*others, row.s]) == min([*others, row.s])
        out.append(0.0 if equal else row.s - (mean(others) if others else 0.0))
    return everywhere(rows, out)


def remax(rows: list[Row], config: Any) -> Any:
    returns = [[math.fsum(row.rewards[j] for j in row.policy if j >= t) for t in row.policy] for row in rows]
    return [[g - row.baseline for g in own] for row, own in zip(rows, returns, strict=True)], returns


def opo(rows: list[Row], config: Any) -> Any:
    out = []
    for row in rows:
        group = group_of(rows, row)
        tokens = sum(len(other.policy) for other in group)
        scores = [other.s for other in group]
        if len(group) == 1:
            baseline = 0.0
        elif tokens:
            baseline = math.fsum(len(other.policy) * other.s for other in group) / tokens
        else:
            baseline = mean(scores)
        equal = len(group) > 1 and max(scores) == min(scores)
        out.append(0.0 if equal else row.s - baseline)
    return everywhere(rows, out)


def gpg(rows: list[Row], config: Any) -> Any:
    def differs(row: Row) -> bool:
        scores = [other.s for other in group_of(rows, row)]
        return len(scores) == 1 or max(scores) != min(scores)

    differing = sum(differs(row) for row in rows)
    alpha = len(rows) / differing if differing else 0.0
    return everywhere(rows, [alpha * a for a in centred(rows)])


def optimal_token_baseline(rows: list[Row], config: Any) -> Any:
    def weight(row: Row, k: int) -> float:
        total = 0.0
        for t in row.policy[: k + 1]:
            c = row.columns["is_weights"][t] if "is_weights" in row.columns else 1.0
            total += (1 - 2 * math.exp(row.columns["old_log_probs"][t]) + row.columns["sum_pi_squared"][t]) * c * c
        return total

    def later(row: Row, k: int) -> float:
        return math.fsum(row.rewards[t] for t in row.policy[k:])

    advantages, returns = [], []
    for row in rows:
        group = group_of(rows, row)
        lengths = sorted(len(other.policy) for other in group)
        scores = [other.s for other in group]
        own = []
        for k in range(len(row.policy)):
            baseline = 0.0
            if len(group) > 1 and k < lengths[-2]:
                there = [other for other in group if len(other.policy) > k]
                above = math.fsum(later(other, k) * weight(other, k) for other in there)
                baseline = above / (math.fsum(weight(other, k) for other in there) + 1e-8)
            equal = len(group) > 1 and max(scores) == min(scores)
            own.append(0.0 if equal else later(row, k) - baseline)
        advantages.append(own)
        returns.append([later(row, k) for k in range(len(row.policy))])
    return advantages, returns


Step = tuple[str, float, int]
"""State, reward and number of policy tokens."""


def relative_to(value: float, values: list[float], alone: float, config: Any) -> float:
    if len(values) == 1 or max(values) == min(values):
        return alone if len(values) == 1 else 0.0
    return (value - mean(values)) / (std(values) + EPS if config.norm_adv_by_std_in_grpo else 1.0)


def discounted(steps: list[Step], t: int, config: Any) -> float:
    return math.fsum(config.gamma ** (j - t) * steps[j][1] for j in range(t, len(steps)))


def hgpo(episodes: list[tuple[str, list[Step]]], config: Any) -> list[list[float]]:
    """Of each (group, steps) the advantage of each step."""
    out = []
    for uid, steps in episodes:
        group = [other for key, other in episodes if key == uid]
        of_episode = []
        for t in range(len(steps)):
            above = below = 0.0
            for k in range(min(t, config.hgpo_history) + 1):
                history = [state for state, _, _ in steps[t - k : t + 1]]
                same = [
                    discounted(other, j, config)
                    for other in group
                    for j in range(k, len(other))
                    if [state for state, _, _ in other[j - k : j + 1]] == history
                ]
                a = relative_to(discounted(steps, t, config), same, 0.0, config)
                weight = (k + 1) ** config.hgpo_alpha if a else 0.0
                above, below = above + weight * a, below + weight
            of_episode.append(above / below if below else 0.0)
        out.append(of_episode)
    return out


def gigpo(episodes: list[tuple[str, list[Step]]], config: Any) -> list[list[float]]:
    """Of each (group, steps) the advantage of each step."""
    out = []
    for uid, steps in episodes:
        group = [other for key, other in episodes if key == uid]
        score = math.fsum(reward for _, reward, _ in steps)
        alone = score / (1 + EPS if config.norm_adv_by_std_in_grpo else 1.0)
        whole = relative_to(score, [math.fsum(r for _, r, _ in other) for other in group], alone, config)
        of_episode = []
        for t, (state, _, _) in enumerate(steps):
            same = [discounted(other, j, config) for other in group for j in range(len(other)) if other[j][0] == state]
            of_episode.append(
                whole + config.gigpo_step_weight * relative_to(discounted(steps, t, config), same, 0.0, config)
            )
        out.append(of_episode)
    return out


ESTIMATORS = {
    "gae": gae,
    "grpo": grpo,
    "grpo_vectorized": grpo,
    "grpo_passk": grpo_passk,
    "gdpo": gdpo,
    "maxrl": maxrl,
    "mo_grpo": mo_grpo,
    "rlcsd": rlcsd,
    "real": real_label,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "rloo": rloo,
    "rloo_vectorized": rloo,
    "opo": opo,
    "gpg": gpg,
    "optimal_token_baseline": optimal_token_baseline,
    "tir_optimal_token_baseline": optimal_token_baseline,
}


# -- losses ------------------------------------------------------------------------------------------------------


@dataclass
class Response:
    """Per token: current and old log-prob, advantage, m, importance weight, entropy."""

    new: list[float]
    old: list[float]
    a: list[float]
    m: list[int]
    w: list[float] | None = None
    h: list[float] | None = None

    @property
    def kept(self) -> list[int]:
        return [t for t, m in enumerate(self.m) if m]

    def d(self, t: int) -> float:
        return self.new[t] - self.old[t]

    def ratio(self, t: int) -> float:
        return math.exp(min(max(self.d(t), -20.0), 20.0))


@dataclass
class Term:
    """x, dx/dlogp of a token, and its indicators."""

    x: float
    slope: float
    told: dict[str, float] = field(default_factory=dict)


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def vanilla(r: Response, t: int, c: Any, batch: list[Response]) -> Term:
    a, ratio = r.a[t], r.ratio(t)
    plain, clipped = -a * ratio, -a * clip(ratio, 1 - c.low, 1 + c.high)
    x, slope = (clipped, 0.0) if clipped > plain else (plain, -a * ratio)
    cut = a < 0 and x > -a * c.cap
    if cut:
        x, slope = -a * c.cap, 0.0
    return Term(x, slope, {"pg_clipfrac": clipped > plain, "pg_clipfrac_lower": cut})


def gspo(r: Response, t: int, c: Any, batch: list[Response]) -> Term:
    log_q = math.fsum(r.d(j) for j in r.kept) / len(r.kept)
    q, a = math.exp(min(log_q, 10.0)), r.a[t]
    plain, clipped = -a * q, -a * clip(q, 1 - c.low, 1 + c.high)
    slope = 0.0 if clipped > plain or log_q > 10 else -a * q
    return Term(max(plain, clipped), slope, {"pg_clipfrac": clipped > plain})


def sapo(r: Response, t: int, c: Any, batch: list[Response]) -> Term:
    a, ratio = r.a[t], r.ratio(t)
    tau = c.tau_pos if a > 0 else c.tau_neg
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return Term(-a * 4 / tau * gate, -a * 4 * gate * (1 - gate) * ratio, {"pg_clipfrac": 0.0})


def cispo(r: Response, t: int, c: Any, batch: list[Response]) -> Term:
    limited = clip(r.ratio(t), 1 - c.low, 1 + c.high)
    slope = -limited * r.a[t]
    return Term(slope * r.new[t], slope, {"pg_clipfrac": limited != r.ratio(t)})


def ce_gppo(r: Response, t: int, c: Any, batch: list[Response]) -> Term:
    """The three cases of the loss, each −A times a number times ρ/ρ, whose slope is that of the log-prob."""
    a, ratio = r.a[t], r.ratio(t)
    if a < 0 and ratio < 1 - c.low:
        x = -c.beta1 * (1 - c.low) * a
    elif a > 0 and ratio > 1 + c.high:
        x = -c.beta2 * (1 + c.high) * a
    else:
        x = -a * ratio
    outside = (a < 0 and ratio < 1 - c.low) or (a > 0 and ratio > 1 + c.high)
    cut = a < 0 and x > -a * c.cap
    term = Term(-a * c.cap, 0.0) if cut else Term(x, x)
    term.told = {"pg_clipfrac": outside, "pg_clipfrac_lower": cut}
    return term


def gpg_loss(r: Response, t: int, c: Any, batch: list[Response]) -> Term:
    return Term(-r.a[t] * r.new[t], -r.a[t])


def dro(r: Response, t: int, c: Any, batch: list[Response]) -> Term:
    return Term(-(r.a[t] * r.new[t] - c.beta * r.d(t) ** 2 / 2), -(r.a[t] - c.beta * r.d(t)))


def covariance(r: Response, t: int, batch: list[Response]) -> float:
    advantages = [other.a[j] for other in batch for j in other.kept]
    log_probs = [other.new[j] for other in batch for j in other.kept]
    return (r.a[t] - mean(advantages)) * (r.new[t] - mean(log_probs))


def clip_cov_candidate(r: Response, t: int, c: Any, batch: list[Response]) -> bool:
    """Which of them get 0 is drawn; the product's draw is taken from it, and must be of these."""
    by_ppo = -r.a[t] * clip(r.ratio(t), 1 - c.low, 1 + c.high) > -r.a[t] * r.ratio(t)
    return c.lb < covariance(r, t, batch) < c.ub and not by_ppo


def clip_cov(r: Response, t: int, c: Any, batch: list[Response]) -> Term:
    plain, clipped = -r.a[t] * r.ratio(t), -r.a[t] * clip(r.ratio(t), 1 - c.low, 1 + c.high)
    zero = (batch.index(r), t) in c.zeroed
    if zero:
        return Term(0.0, 0.0, {"pg_clipfrac": 1.0})
    return Term(max(plain, clipped), 0.0 if clipped > plain else plain, {"pg_clipfrac": 0.0})


def kl_cov(r: Response, t: int, c: Any, batch: list[Response]) -> Term:
    everyone = sorted((covariance(other, j, batch) for other in batch for j in other.kept), reverse=True)
    count = max(1, int(c.kl_ratio * len(everyone)))
    x = -r.a[t] * r.ratio(t)
    slope = x
    if covariance(r, t, batch) >= everyone[count - 1]:
        x += c.coef * abs(r.d(t))
        slope += c.coef * ((r.d(t) > 0) - (r.d(t) < 0))
    return Term(x, slope, {"ppo_kl": abs(r.d(t))})


def dppo(r: Response, t: int, c: Any, allowed: bool) -> Term:
    slope = -r.a[t] * min(r.ratio(t), c.cap) if allowed else 0.0
    told = {"pg_clipfrac": not allowed, "pg_clipfrac_lower": r.ratio(t) > c.cap}
    return Term(slope * r.new[t], slope, told)


def dppo_tv(r: Response, t: int, c: Any, batch: list[Response]) -> Term:
    moved = math.exp(r.new[t]) - math.exp(r.old[t])
    return dppo(r, t, c, moved <= c.high if r.a[t] > 0 else moved >= -c.low)


def dppo_kl(r: Response, t: int, c: Any, batch: list[Response]) -> Term:
    pi, old = math.exp(r.new[t]), math.exp(r.old[t])
    far = old * (r.old[t] - r.new[t]) + (1 - old) * math.log((1 - old + 1e-8) / (1 - pi + 1e-8))
    return dppo(r, t, c, (far <= c.high or pi <= old) if r.a[t] > 0 else (far <= c.low or pi >= old))


def vespo(r: Response, t: int, c: Any, batch: list[Response]) -> Term:
    log_w = clip(math.fsum(r.d(j) + (math.log(r.w[j]) if r.w else 0.0) for j in r.kept), -20.0, 20.0)
    k, rate = (c.k_pos, c.lambda_pos) if r.a[t] >= 0 else (c.k_neg, c.lambda_neg)
    slope = -(math.exp(log_w) ** k) * math.exp(rate * (1 - math.exp(log_w))) * r.a[t]
    return Term(slope * r.new[t], slope)


def fipo(r: Response, t: int, c: Any, batch: list[Response]) -> Term:
    gamma = 2 ** (-1 / c.decay_rate)
    future = math.fsum(gamma ** (j - t) * r.d(j) for j in r.kept if j >= t and r.ratio(j) <= c.cap)
    f = clip(math.exp(clip(future, -20.0, 20.0)), 1 - c.clip_low, 1 + c.clip_high)
    if r.a[t] < 0 and r.ratio(t) > c.safety:
        f = clip(f, 0.8, 1.0)
    return vanilla(Response(r.new, r.old, [f * a for a in r.a], r.m), t, c, batch)


def stare(r: Response, t: int, c: Any, batch: list[Response]) -> Term:
    """Tokens of the whole batch in one list, the least likely first; what follows is the paper's steps 1 to 5."""
    everyone = [(other, j) for other in batch for j in other.kept]
    weight = 1.0
    if r.a[t] and mean([other.h[j] for other, j in everyone if other.h]) < c.target:
        same = [
            (other.new[j], n, other is r and j == t) for n, (other, j) in enumerate(everyone) if other.a[j] * r.a[t] > 0
        ]
        place = [mine for *_, mine in sorted(same)].index(True)
        if place < max(1, int(c.share * len(same))):
            weight = c.amplified if r.a[t] > 0 else c.attenuated
    return vanilla(Response(r.new, r.old, [weight * a for a in r.a], r.m), t, c, batch)


def real(r: Response, t: int, c: Any, batch: list[Response]) -> Term:
    """Groups of two, one after the other: the gradient of the group's loss by differences."""
    start = batch.index(r) // 2 * 2
    group = batch[start : start + 2]

    def group_loss(moved: float) -> float:
        sums = {1: 1.0, -1: 1.0, 0: 1.0}
        for other in group:
            s = math.fsum(other.d(j) for j in other.kept) / len(other.kept) + (moved if other is r else 0.0)
            advantage = math.fsum(other.a[j] for j in other.kept)
            label = (advantage > 0) - (advantage < 0)
            sums[label] += math.exp(-label * s / c.real_tau)
        return math.log(sums[1]) + math.log(sums[-1])

    slope = len(group) * (group_loss(1e-6) - group_loss(-1e-6)) / 2e-6
    return Term(slope * r.new[t], slope)


LOSSES = {
    "vanilla": vanilla,
    "gspo": gspo,
    "luspo": gspo,
    "vespo": vespo,
    "fipo": fipo,
    "real": real,
    "stare": stare,
    "sapo": sapo,
    "cispo": cispo,
    "ce_gppo": ce_gppo,
    "gpg": gpg_loss,
    "dro": dro,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
}

Found = tuple[float, list[list[float]], dict[str, float]]


def share_of(mode: str, tokens: int, carrying: int, own: int, horizon: float) -> float:
    """What a token's term is multiplied by: T, B, T_i and H are given."""
    return {
        "token-mean": 1 / tokens,
        "token-sum": 1.0,
        "seq-mean-token-sum": 1 / carrying,
        "seq-mean-token-mean": 1 / carrying / own,
        "seq-mean-token-sum-norm": 1 / carrying / horizon,
    }[mode]


def loss(name: str, batch: list[Response], c: Any, mode: str, horizon: float) -> Found:
    """Value, gradient per token and metrics of a whole mini-batch."""
    if name == "geo_mean":
        return geo_mean(batch, c)
    tokens = sum(len(r.kept) for r in batch)
    carrying = sum(bool(r.kept) for r in batch)
    value, told = 0.0, {"ppo_kl": 0.0}
    slopes = [[0.0] * len(r.new) for r in batch]
    for i, r in enumerate(batch):
        for t in r.kept:
            term = LOSSES[name](r, t, c, batch)
            share = share_of(mode, tokens, carrying, len(r.kept), horizon)
            share *= 1.0 if r.w is None or name == "vespo" else r.w[t]
            value += share * term.x
            slopes[i][t] = share * term.slope
            for key, number in {"ppo_kl": -r.d(t), **term.told}.items():
                told[key] = told.get(key, 0.0) + float(number) / tokens
    return value, slopes, told


def losses_of_sources(
    batch: list[Response], source_of: list[int], losses: list[tuple[str, Any, str]], horizon: float
) -> tuple[float, list[list[float]]]:
    """The sum over sources of the loss of each one's responses, (name, constants, mode), as if they were alone, but for
    the counts that it divides by: those of all responses."""
    tokens, carrying = sum(len(r.kept) for r in batch), sum(bool(r.kept) for r in batch)
    value, slopes = 0.0, [[0.0] * len(r.new) for r in batch]
    for source, (name, c, mode) in enumerate(losses):
        own = [r for r, s in zip(batch, source_of, strict=True) if s == source]
        for i, r in enumerate(batch):
            for t in r.kept if source_of[i] == source else ():
                term = LOSSES[name](r, t, c, own)
                share = share_of(mode, tokens, carrying, len(r.kept), horizon)
                value, slopes[i][t] = value + share * term.x, share * term.slope
    return value, slopes


def geo_mean(batch: list[Response], c: Any) -> Found:
    carrying = sum(bool(r.kept) for r in batch)
    tokens = sum(len(r.kept) for r in batch)
    value, told = 0.0, dict.fromkeys(("ppo_kl", "pg_clipfrac", "pg_clipfrac_lower"), 0.0)
    slopes = [[0.0] * len(r.new) for r in batch]
    for i, r in enumerate(batch):
        if not r.kept:
            continue
        size = len(r.kept)
        limited = {t: min(r.d(t), c.high) if r.a[t] > 0 else max(r.d(t), -c.low) if r.a[t] < 0 else 0.0 for t in r.kept}
        ratio = math.exp(math.fsum(limited.values()) / size)
        advantage = math.fsum(r.a[t] for t in r.kept) / size
        weight = 1.0 if r.w is None else math.prod(r.w[t] ** (1 / size) for t in r.kept)
        value += -advantage * ratio * weight / carrying
        for t in r.kept:
            passes = (r.a[t] > 0 and r.d(t) < c.high) or (r.a[t] < 0 and r.d(t) > -c.low)
            slopes[i][t] = -advantage * ratio * weight / size / carrying if passes else 0.0
            outside = not -c.low <= r.d(t) <= c.high
            told["pg_clipfrac"] += (outside and r.a[t] > 0) / tokens
            told["pg_clipfrac_lower"] += (outside and r.a[t] < 0) / tokens
            told["ppo_kl"] -= r.d(t) / tokens
    return value, slopes, told


def entropy_coefficients(
    entropies: list[list[float]], target: float, start: float, delta: float, most: float
) -> list[float]:
    """Skywork-OR1: α_k of each step from the entropies of its tokens."""
    c, out = start, []
    for step in entropies:
        if not step:
            out.append(c)
            continue
        e = math.fsum(step) / len(step)
        out.append(c if e <= target else 0.0)
        c = min(max(c + delta if e < target else c - delta if e > target else c, 0.0), most)
    return out


# -- distillation ------------------------------------------------------------------------------------------------


def distilled(mode: str, new: list[float], teacher: list[float], least: float | None) -> tuple[float, list[float]]:
    """A token's term and its slopes: of one sampled token, or of the teacher's k most likely ones."""
    floor = -math.inf if least is None else least
    moves = [1.0 if v >= floor else 0.0 for v in new]
    new, teacher = [max(v, floor) for v in new], [max(v, floor) for v in teacher]
    if mode == "forward_kl_topk":
        term = math.fsum(math.exp(nu) * (nu - v) for v, nu in zip(new, teacher, strict=True))
        return max(term, 0.0), [-math.exp(nu) * m if term > 0 else 0.0 for nu, m in zip(teacher, moves, strict=True)]
    if mode == "jsd_topk":
        half = [math.log((math.exp(v) + math.exp(nu)) / 2) for v, nu in zip(new, teacher, strict=True)]
        of_teacher = math.fsum(math.exp(nu) * (nu - m) for nu, m in zip(teacher, half, strict=True))
        of_policy = [math.exp(v) * (v - m) for v, m in zip(new, half, strict=True)]
        return (of_teacher + math.fsum(of_policy)) / 2, [x * m / 2 for x, m in zip(of_policy, moves, strict=True)]
    if mode == "reverse_kl_topk":
        term = math.fsum(math.exp(v) * (v - nu) for v, nu in zip(new, teacher, strict=True))
        slopes = [math.exp(v) * (1 + v - nu) * m for v, nu, m in zip(new, teacher, moves, strict=True)]
        return max(term, 0.0), [slope if term > 0 else 0.0 for slope in slopes]
    u = new[0] - teacher[0]
    near = clip(u, -20.0, 20.0)
    k3 = math.exp(-near) + near - 1
    term, slope = {
        "k1": (u, 1.0),
        "abs": (abs(u), float((u > 0) - (u < 0))),
        "k2": (u * u / 2, u),
        "k3": (clip(k3, -10.0, 10.0), 1 - math.exp(-near) if abs(u) < 20 and k3 < 10 else 0.0),
    }[{"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(mode, mode)]
    return term, [slope * moves[0]]


def distillation(
    batch: list[Response],
    new: list[list[list[float]]],
    teacher: list[list[list[float]]],
    c: Any,
    mode: str,
    horizon: float,
) -> Found:
    """Value, slopes by [response][token][one of k] and means over tokens of the whole mini-batch. `c`: loss_mode,
    least, limit, gradient (as a policy gradient of the vanilla loss with c.low, c.high, c.cap)."""
    tokens, carrying = sum(len(r.kept) for r in batch), sum(bool(r.kept) for r in batch)
    value, told = 0.0, {"abs_loss": 0.0, "loss_min": math.inf, "loss_max": -math.inf}
    slopes = [[[0.0] * len(of_token) for of_token in own] for own in new]
    for i, r in enumerate(batch):
        for t in r.kept:
            term, own = distilled(c.loss_mode, new[i][t], teacher[i][t], c.least)
            if c.limit is not None and abs(term) > c.limit:
                term, own = clip(term, -c.limit, c.limit), [0.0] * len(own)
            told["abs_loss"] += abs(term) / tokens
            told |= {"loss_min": min(told["loss_min"], term), "loss_max": max(told["loss_max"], term)}
            share = share_of(mode, tokens, carrying, len(r.kept), horizon)
            if c.gradient:
                found = vanilla(Response(r.new, r.old, [-term] * len(r.new), r.m), t, c, batch)
                term, own = found.x, [found.slope]
            value += share * term
            slopes[i][t] = [share * slope for slope in own]
    return value, slopes, told  # type: ignore[return-value]
