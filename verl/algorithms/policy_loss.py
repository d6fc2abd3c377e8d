"""Policy losses: per-token terms from ratios and advantages, and their aggregation to one number. One function each.

A loss is a function of `LossInputs`, flat tokens, and returns (loss, metrics). Metrics are floats of this micro-batch,
averaged by token count.

T and B are counted over the mini-batch before its first micro-batch, so that the parts of micro-batches and ranks
simply add up: batching changes neither the value nor the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.correction import Tokens, Weighting, importance_weights, parse_correction
from verl.algorithms.flat_tokens import Rows, aggregate, discounted_sums, masked, masked_mean
from verl.algorithms.registry import LOSSES, MiniBatchTokens, WholeMiniBatch
from verl.config.schema.base import setting

LOG_RATIO_LIMIT = 20.0
CLIP_RATIO = 0.2
CLIP_RATIO_C = 3.0
DPPO_CLIP_RATIO_C = 20.0
CLIP_KEYS = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")

PolicyLoss = tuple[Tensor, dict[str, Any]]


@dataclass(slots=True)
class LossInputs:
    """What a policy loss gets: the T response tokens of a micro-batch, segment after segment, without padding.

    log_probs           [T], with gradient
    old_log_probs       [T]; `log_probs` without gradient in a step's only update
    advantages          [T]
    loss_mask           [T], m: 1 for tokens in the loss, else 0
    response_mask       [T], p: 1 for tokens that the policy wrote
    rows                where each of the b segments begins and ends (`rows.cu_seqlens`), and sums over them
    config              the actor's group, with `global_batch_info`: the counts of the whole mini-batch
    rollout_is_weights  [T], they multiply the policy term; None without a correction
    entropy             [T]; None unless it was computed
    trajectory_tokens   [b]: T_i where trajectories have several segments, else None
    columns             [T, …]: those that the loss declared, by name
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    loss_mask: Tensor
    response_mask: Tensor
    rows: Rows
    loss_agg_mode: str
    config: Mapping[str, Any]
    rollout_is_weights: Tensor | None = None
    entropy: Tensor | None = None
    trajectory_tokens: Tensor | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)

    def aggregate(self, terms: Tensor, mode: str | None = None) -> Tensor:
        """The scalar of per-token terms [T], by the configured mode (or `mode`) and the counts of the mini-batch."""
        counts = setting(self.config, "global_batch_info", {})
        return aggregate(terms, self.loss_mask, self.rows, mode or self.loss_agg_mode, **counts)

    def policy_term(self, terms: Tensor) -> Tensor:
        """`aggregate` of the terms times the importance weights, if there are any."""
        weights = self.rollout_is_weights
        return self.aggregate(terms if weights is None else terms * weights)

    def log_ratio(self) -> Tensor:
        """d = logp − old, 0 where the mask is not set."""
        return masked(self.log_probs - self.old_log_probs, self.loss_mask)

    def ratio(self) -> Tensor:
        """ρ = exp(d), d limited to ±20."""
        return self.log_ratio().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()

    @torch.no_grad()
    def metrics(self, **values: Tensor) -> dict[str, float]:
        """`actor/{name}` of each, its mean over the tokens in the loss, and actor/ppo_kl, that of old − logp.

        They are read from the device in one go.
        """
        mask = self.loss_mask
        by_name = {"ppo_kl": -self.log_ratio(), **values}
        means = torch.stack([masked_mean(v.to(mask.dtype), mask) for v in by_name.values()]).tolist()
        return {f"actor/{name}": mean for name, mean in zip(by_name, means, strict=True)}

    def of_mini_batch(self, whole: WholeMiniBatch) -> Tensor:
        """The column `mini_batch_values` [T]; without a trainer that made it, of the tokens of this call."""
        if "mini_batch_values" in self.columns:
            return self.columns["mini_batch_values"]

        def host(values: Tensor) -> np.ndarray:
            return np.asarray(values.detach().cpu().double().numpy())

        tokens = MiniBatchTokens(
            log_probs=host(self.log_probs),
            old_log_probs=host(self.old_log_probs),
            advantages=host(self.advantages),
            loss_mask=host(self.loss_mask) > 0,
            trajectory=self.rows.index.cpu().numpy(),
            entropy=None if self.entropy is None else host(self.entropy),
            weights=None if self.rollout_is_weights is None else host(self.rollout_is_weights),
        )
        values = torch.from_numpy(whole.compute(tokens, self.config))
        return values.to(self.log_probs.device, self.log_probs.dtype)


def clip_bounds(config: Mapping[str, Any]) -> tuple[float, float]:
    """(ε_lo, ε_hi) of an actor config; each is clip_ratio where it is not set."""
    both = float(setting(config, "clip_ratio", CLIP_RATIO))
    low, high = (float(setting(config, f"clip_ratio_{side}", both)) for side in ("low", "high"))
    if low < 0 or high < 0:
        raise ValueError(f"clip ratios must not be negative: clip_ratio_low={low}, clip_ratio_high={high}")
    return low, high


@LOSSES.register("vanilla", keys=[*CLIP_KEYS, "clip_ratio_c"])
def vanilla(inputs: LossInputs) -> PolicyLoss:
    """x = max(−Aρ, −A·clip(ρ, 1−ε_lo, 1+ε_hi)); where A < 0 also x = min(x, −A·c), c = clip_ratio_c.

    Metrics: share of tokens where the clipped term is the larger (pg_clipfrac), share cut by c (pg_clipfrac_lower).
    ValueError unless clip_ratio_c > 1.
    Sources: PPO, arXiv 1707.06347; dual clip, arXiv 1912.09729; clip-higher, arXiv 2503.14476.
    """
    low, high = clip_bounds(inputs.config)
    cap = float(setting(inputs.config, "clip_ratio_c", CLIP_RATIO_C))
    if cap <= 1:
        raise ValueError(f"clip_ratio_c must be greater than 1, not {cap}")
    advantages, ratio = inputs.advantages, inputs.ratio()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    larger = torch.maximum(plain, clipped)
    ceiling = -advantages * cap
    cut = (advantages < 0) & (larger > ceiling)
    loss = inputs.policy_term(torch.where(cut, ceiling, larger))
    return loss, inputs.metrics(pg_clipfrac=clipped > plain, pg_clipfrac_lower=cut)


@LOSSES.register("cispo", keys=CLIP_KEYS)
def cispo(inputs: LossInputs) -> PolicyLoss:
    """x = −sg(clip(ρ, 1−ε_lo, 1+ε_hi))·A·logp. Metrics: pg_clipfrac, share of tokens whose ratio is clipped.

    The paper has no lower bound: clip_ratio_low ≥ 1. Source: CISPO, arXiv 2506.13585.
    """
    low, high = clip_bounds(inputs.config)
    ratio = inputs.ratio().detach()
    limited = ratio.clamp(1 - low, 1 + high)
    loss = inputs.policy_term(-limited * inputs.advantages * inputs.log_probs)
    return loss, inputs.metrics(pg_clipfrac=ratio != limited)


@LOSSES.register("ce_gppo", keys=[*CLIP_KEYS, "clip_ratio_c", "policy_loss.gppo_beta1", "policy_loss.gppo_beta2"])
def ce_gppo(inputs: LossInputs) -> PolicyLoss:
    """x = −A·v·ρ / sg(ρ), v = β₁·(1−ε_lo) where A < 0 and ρ < 1−ε_lo, v = β₂·(1+ε_hi) where A > 0 and ρ > 1+ε_hi, else
    ρ; where A < 0 also x = min(x, −A·c), c = clip_ratio_c: what the clip would silence keeps a bounded gradient.

    β₁, β₂ = gppo_beta1, gppo_beta2; both 0 are the gradient of `vanilla`. Metrics: pg_clipfrac, share of tokens outside
    the clip; pg_clipfrac_lower, share cut by c. ValueError unless clip_ratio_c > 1.
    Source: CE-GPPO, arXiv 2509.20712, and the README of the authors' code.
    """
    (low, high), settings = clip_bounds(inputs.config), setting(inputs.config, "policy_loss")
    beta1, beta2 = float(setting(settings, "gppo_beta1", 0.75)), float(setting(settings, "gppo_beta2", 1.0))
    cap = float(setting(inputs.config, "clip_ratio_c", CLIP_RATIO_C))
    if cap <= 1:
        raise ValueError(f"clip_ratio_c must be greater than 1, not {cap}")
    advantages, ratio = inputs.advantages, inputs.ratio()
    below, above = (advantages < 0) & (ratio < 1 - low), (advantages > 0) & (ratio > 1 + high)
    value = ratio.detach()
    value = torch.where(below, beta1 * (1 - low), torch.where(above, beta2 * (1 + high), value))
    # The factor is 1: it only carries the gradient, which is that of the log-prob.
    log_probs = masked(inputs.log_probs, inputs.loss_mask)
    terms, ceiling = -advantages * value * (log_probs - log_probs.detach()).exp(), -advantages * cap
    cut = (advantages < 0) & (terms > ceiling)
    loss = inputs.policy_term(torch.where(cut, ceiling, terms))
    return loss, inputs.metrics(pg_clipfrac=below | above, pg_clipfrac_lower=cut)


@LOSSES.register("sapo", keys=["policy_loss.tau_pos", "policy_loss.tau_neg"])
def sapo(inputs: LossInputs) -> PolicyLoss:
    """x = −A·(4/τ)·σ(τ(ρ − 1)), τ = tau_pos where A > 0, else tau_neg: the gradient fades where the ratio leaves 1.

    Metrics: pg_clipfrac, always 0. ValueError unless both are above 0. Source: SAPO, arXiv 2511.20347.
    """
    settings = setting(inputs.config, "policy_loss")
    positive, negative = float(setting(settings, "tau_pos", 1.0)), float(setting(settings, "tau_neg", 1.05))
    if positive <= 0 or negative <= 0:
        raise ValueError(f"tau_pos and tau_neg must be greater than 0, not {positive} and {negative}")
    advantages = inputs.advantages
    tau = torch.where(advantages > 0, advantages.new_tensor(positive), advantages.new_tensor(negative))
    gate = torch.sigmoid(tau * (inputs.ratio() - 1)) * 4 / tau
    loss = inputs.policy_term(-advantages * gate)
    return loss, inputs.metrics(pg_clipfrac=torch.zeros_like(advantages))


@LOSSES.register("gpg")
def gpg(inputs: LossInputs) -> PolicyLoss:
    """x = −A·logp. Source: GPG, arXiv 2504.02546."""
    return inputs.policy_term(-inputs.advantages * inputs.log_probs), inputs.metrics()


@LOSSES.register("dro", keys=["policy_loss.dro_beta"])
def dro(inputs: LossInputs) -> PolicyLoss:
    """x = −(A·logp − ½β·d²), β = dro_beta. ValueError unless it is above 0. Source: DRO, arXiv 2405.19107."""
    beta = setting(setting(inputs.config, "policy_loss"), "dro_beta")
    if beta is None or beta <= 0:
        raise ValueError(f"policy_loss.dro_beta must be greater than 0, not {beta}")
    terms = inputs.advantages * inputs.log_probs - beta * inputs.log_ratio().square() / 2
    return inputs.policy_term(-terms), inputs.metrics()


def _without_blocked(inputs: LossInputs, allowed: Tensor) -> PolicyLoss:
    """x = −A·sg(min(ρ, c))·logp·v, v [T] True where a token may move. Blocked tokens stay in T.

    No token moves the policy further than a bound on its divergence from the old one. Meant for
    `rollout_correction.bypass_mode`, so that the old policy is the sampler's.
    """
    cap = float(setting(inputs.config, "clip_ratio_c", DPPO_CLIP_RATIO_C))
    ratio = inputs.ratio().detach()
    terms = -inputs.advantages * ratio.clamp(max=cap) * inputs.log_probs
    loss = inputs.policy_term(torch.where(allowed, terms, torch.zeros_like(terms)))
    return loss, inputs.metrics(pg_clipfrac=~allowed, pg_clipfrac_lower=ratio > cap)


@LOSSES.register("dppo_tv", keys=[*CLIP_KEYS, "clip_ratio_c"])
def dppo_tv(inputs: LossInputs) -> PolicyLoss:
    """x = −A·sg(min(ρ, c))·logp·v, c = clip_ratio_c (20); v = [π − π_old ≤ ε_hi] where A > 0, else [π − π_old ≥ −ε_lo].

    clip_ratio_low and clip_ratio_high bound the total variation. Metrics: pg_clipfrac, share blocked;
    pg_clipfrac_lower, share with ρ > c. Source: DPPO, arXiv 2602.04879.
    """
    low, high = clip_bounds(inputs.config)
    with torch.no_grad():
        moved = inputs.log_probs.exp() - inputs.old_log_probs.exp()
        allowed = torch.where(inputs.advantages > 0, moved <= high, moved >= -low)
    return _without_blocked(inputs, allowed)


@LOSSES.register("dppo_kl", keys=[*CLIP_KEYS, "clip_ratio_c"])
def dppo_kl(inputs: LossInputs) -> PolicyLoss:
    """As dppo_tv with v = [D ≤ ε_hi or π ≤ π_old] where A > 0, else [D ≤ ε_lo or π ≥ π_old].

    D = π_old·(old − logp) + (1−π_old)·log((1−π_old+1e-8) / (1−π+1e-8)), the divergence of whether the token is drawn.
    The paper has bounds of 0.05. Source: DPPO, arXiv 2602.04879.
    """
    low, high = clip_bounds(inputs.config)
    with torch.no_grad():
        new, old = inputs.log_probs.exp(), inputs.old_log_probs.exp()
        complement = (1 - old) * torch.log((1 - old + 1e-8) / (1 - new + 1e-8))
        divergence = old * (inputs.old_log_probs - inputs.log_probs) + complement
        up = (divergence <= high) | (new <= old)
        down = (divergence <= low) | (new >= old)
        allowed = torch.where(inputs.advantages > 0, up, down)
    return _without_blocked(inputs, allowed)


def reinforce(inputs: LossInputs) -> PolicyLoss:
    """Policy gradient with importance weights instead of a clipped ratio: x = −w·A·logp (w = 1 without weights).

    `old_log_probs` is the sampler's, for actor/ppo_kl = mean of old − logp only.
    Source: Liu, Li et al. 2025, "When Speed Kills Stability".
    """
    loss = inputs.policy_term(-inputs.advantages * inputs.log_probs)
    return loss, {"actor/pg_clipfrac": 0.0, "actor/pg_clipfrac_lower": 0.0, **inputs.metrics()}


@LOSSES.register("bypass_mode")
def bypass_mode(inputs: LossInputs) -> PolicyLoss:
    """Two policies: `old_log_probs` is the sampler's. The loss is that of `config.rollout_correction.loss_type`.

    ppo_clip: the configured loss_mode with the ratio to the sampler; weights would count twice and are left out.
    reinforce: `reinforce` with the weights given, else those of `rollout_is` from current over
    sampler, over the policy's tokens. Rejection is the caller's: it changes the counts of the mini-batch.
    Source: Liu, Li et al. 2025, "When Speed Kills Stability".
    """
    correction = parse_correction(setting(inputs.config, "rollout_correction"))
    if not correction.reinforce:
        name = setting(setting(inputs.config, "policy_loss"), "loss_mode", "vanilla")
        loss = LOSSES.get("vanilla" if name == "bypass_mode" else name)
        outcome: PolicyLoss = loss(replace(inputs, rollout_is_weights=None))
        return outcome
    weights = inputs.rollout_is_weights
    if weights is None and correction.weighting is not None:
        weights = weights_now(inputs, correction.weighting)
    return reinforce(replace(inputs, rollout_is_weights=weights))


@torch.no_grad()
def weights_now(inputs: LossInputs, how: Weighting) -> Tensor:
    """Importance weights [T] of the current policy over `old_log_probs`, in the dtype of log_probs, 0 off the policy's
    tokens."""
    mask = inputs.response_mask.bool()
    now, before = (column[mask].cpu().double() for column in (inputs.log_probs, inputs.old_log_probs))
    error = (now - before).numpy()
    weights, _ = importance_weights(Tokens.of(error, inputs.rows.index[mask].cpu().numpy()), how)
    out = torch.zeros_like(inputs.log_probs)
    out[mask] = torch.from_numpy(weights).to(out.dtype).to(out.device)
    return out


# -- losses whose ratio is that of a whole response, over all its segments -------------------------------------------
#
# A row of `LossInputs.rows` is a segment. Where a trajectory has several, what is summed over all of them comes from
# the pass before the mini-batch's update, as the column `mini_batch_values`; otherwise the row says all.

GSPO_LIMIT = 10.0


def _sums(tokens: MiniBatchTokens, values: np.ndarray) -> np.ndarray:
    """For each token the sum of the values [ΣL] over the tokens in the loss of its trajectory."""
    mask, owner = tokens.loss_mask, tokens.trajectory
    return np.asarray(np.bincount(owner[mask], values[mask], owner.max(initial=0) + 1)[owner])


def _means(tokens: MiniBatchTokens, values: np.ndarray) -> np.ndarray:
    """The same for the mean; 0 without any."""
    return _sums(tokens, values) / np.maximum(_sums(tokens, np.ones(len(values))), 1)


def _response_log_ratios(tokens: MiniBatchTokens, config: Mapping[str, Any]) -> np.ndarray:
    """log q_i on every token of trajectory i."""
    return _means(tokens, tokens.log_probs - tokens.old_log_probs)


RESPONSE_LOG_RATIOS = WholeMiniBatch(_response_log_ratios, only_segments=True)


@LOSSES.register("gspo", whole=RESPONSE_LOG_RATIOS, keys=CLIP_KEYS)
@LOSSES.register("luspo", whole=RESPONSE_LOG_RATIOS, keys=CLIP_KEYS)
def gspo(inputs: LossInputs) -> PolicyLoss:
    """q_i = exp(Σ_t m·d / T_i), q_t = sg(q_i)·exp(logp − sg(logp)) with log q ≤ 10; x = max(−Aq, −A·clip(q, 1−ε_lo,
    1+ε_hi)).

    Metrics: pg_clipfrac, share of tokens where the clipped term is the larger. The paper has ε_lo 3e-4, ε_hi 4e-4,
    aggregated by seq-mean-token-mean. LUSPO multiplies the loss of a response by T_i: seq-mean-token-sum.
    Sources: GSPO, arXiv 2507.18071; LUSPO, arXiv 2602.05261.
    """
    low, high = clip_bounds(inputs.config)
    if "mini_batch_values" in inputs.columns:
        mean = inputs.columns["mini_batch_values"]
    else:
        mean = inputs.rows.spread(inputs.rows.means(inputs.log_ratio(), inputs.loss_mask))
    log_probs = masked(inputs.log_probs, inputs.loss_mask)
    ratio = (mean.detach() + log_probs - log_probs.detach()).clamp(max=GSPO_LIMIT).exp()
    plain = -inputs.advantages * ratio
    clipped = -inputs.advantages * ratio.clamp(1 - low, 1 + high)
    loss = inputs.policy_term(torch.maximum(plain, clipped))
    return loss, inputs.metrics(pg_clipfrac=clipped > plain)


def _response_terms(tokens: MiniBatchTokens, config: Mapping[str, Any]) -> np.ndarray:
    """Ā_i·ρ_i·w_i of `geo_mean` on every token of trajectory i."""
    low, high = clip_bounds(config)
    difference, advantages = tokens.log_probs - tokens.old_log_probs, tokens.advantages
    limited = np.where(advantages > 0, np.minimum(difference, high), np.maximum(difference, -low))
    exponent = _means(tokens, np.where(advantages == 0, 0.0, limited))
    if tokens.weights is not None:
        with np.errstate(divide="ignore"):
            exponent += _means(tokens, np.log(tokens.weights))
    return _means(tokens, advantages) * np.exp(exponent)


@LOSSES.register("geo_mean", whole=WholeMiniBatch(_response_terms, only_segments=True), keys=CLIP_KEYS)
def geo_mean(inputs: LossInputs) -> PolicyLoss:
    """GMPO: x_i = −Ā_i·ρ_i, one value per response, ρ_i = exp(Σ_t m·d̂ / T_i), Ā_i = Σ_t m·A / T_i; the loss is Σ_i x_i
    / B.

    d̂ = min(d, ε_hi) where A > 0, max(d, −ε_lo) where A < 0, 0 where A = 0. `loss_agg_mode` changes nothing. The
    importance weight of a response is exp(Σ_t m·log w / T_i). Metrics: pg_clipfrac (A > 0) and pg_clipfrac_lower (A <
    0), shares of tokens with d outside [−ε_lo, ε_hi]. The paper has ε = 0.4. Source: GMPO, arXiv 2507.20673.
    """
    low, high = clip_bounds(inputs.config)
    rows, mask, advantages, difference = inputs.rows, inputs.loss_mask, inputs.advantages, inputs.log_ratio()
    limited = torch.where(advantages > 0, difference.clamp(max=high), difference.clamp(min=-low))
    limited = torch.where(advantages == 0, torch.zeros_like(difference), limited)
    tokens = rows.sums(mask).clamp(min=1)
    share = tokens / (tokens if inputs.trajectory_tokens is None else inputs.trajectory_tokens.clamp(min=1))
    exponent = rows.means(limited, mask) * share
    if "mini_batch_values" in inputs.columns:
        whole = rows.means(inputs.columns["mini_batch_values"], mask)
    else:
        whole = rows.means(advantages, mask) * exponent.detach().exp()
        if inputs.rollout_is_weights is not None:
            whole = whole * rows.means(inputs.rollout_is_weights.log(), mask).exp()
    # The value of a response is told by its segments in proportion to their tokens; the gradient of each is whole.
    terms = -whole * (share + (exponent - exponent.detach()).exp() - 1) / tokens
    loss = inputs.aggregate(rows.spread(terms), "seq-mean-token-sum")
    outside = (difference > high) | (difference < -low)
    upper, lower = outside & (advantages > 0), outside & (advantages < 0)
    return loss, inputs.metrics(pg_clipfrac=upper, pg_clipfrac_lower=lower)


VESPO_KEYS = tuple(f"policy_loss.vespo_{name}" for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg"))


def _kernel(tokens: MiniBatchTokens, config: Mapping[str, Any]) -> np.ndarray:
    """φ(W_i) of `vespo` on every token of trajectory i, by the sign of the token's advantage."""
    settings, positive = setting(config, "policy_loss"), tokens.advantages >= 0
    log_weight = _sums(tokens, tokens.log_probs - tokens.old_log_probs)
    if tokens.weights is not None:
        log_weight += _sums(tokens, np.log(np.maximum(tokens.weights, 1e-8)))
    log_weight = log_weight.clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    k = np.where(positive, setting(settings, "vespo_k_pos", 2.0), setting(settings, "vespo_k_neg", 3.0))
    rate = np.where(positive, setting(settings, "vespo_lambda_pos", 3.0), setting(settings, "vespo_lambda_neg", 2.0))
    return np.asarray(np.exp(k * log_weight + rate * (1 - np.exp(log_weight))))


KERNEL = WholeMiniBatch(_kernel, only_segments=True)


@LOSSES.register("vespo", whole=KERNEL, keys=VESPO_KEYS)
def vespo(inputs: LossInputs) -> PolicyLoss:
    """x = −sg(φ(W_i))·A·logp, W_i = exp(Σ_t m·(d + log w)), not divided by the length; φ(W) = W^k·exp(λ(1 − W)) with
    k, λ = vespo_k_pos, vespo_lambda_pos where A ≥ 0, else vespo_k_neg, vespo_lambda_neg.

    log W is limited to ±20. Importance weights w are a part of W and do not multiply x again.
    Source: VESPO, arXiv 2602.10693.
    """
    terms = -inputs.of_mini_batch(KERNEL) * inputs.advantages * inputs.log_probs
    return inputs.aggregate(terms), inputs.metrics()


FIPO_KEYS = tuple(f"policy_loss.fipo_{name}" for name in ("decay_rate", "clip_low", "clip_high", "safety_threshold"))


def _influence(tokens: MiniBatchTokens, config: Mapping[str, Any]) -> np.ndarray:
    """f of `fipo`, [ΣL]."""
    settings, cap = setting(config, "policy_loss"), float(setting(config, "clip_ratio_c", CLIP_RATIO_C))
    low, high = setting(settings, "fipo_clip_low", 0.0), setting(settings, "fipo_clip_high", 0.2)
    discount = 2 ** (-1 / setting(settings, "fipo_decay_rate", 32.0))
    difference = tokens.log_probs - tokens.old_log_probs
    counted = np.where(tokens.loss_mask & (difference <= np.log(cap)), difference, 0.0)
    of_trajectories = np.split(counted, np.flatnonzero(np.diff(tokens.trajectory)) + 1)
    future = np.concatenate([discounted_sums(values, discount) for values in of_trajectories])
    weight = np.exp(future.clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).clip(1 - low, 1 + high)
    far = difference > np.log(setting(settings, "fipo_safety_threshold", 4.0))
    return np.where((tokens.advantages < 0) & far, weight.clip(0.8, 1.0), weight)


INFLUENCE = WholeMiniBatch(_influence, only_segments=True)


@LOSSES.register("fipo", whole=INFLUENCE, keys=[*CLIP_KEYS, "clip_ratio_c", *FIPO_KEYS])
def fipo(inputs: LossInputs) -> PolicyLoss:
    """`vanilla` with A·f for A: f = clip(exp(Σ_{j ≥ t} γ^{j−t}·d_j), 1 − fipo_clip_low, 1 + fipo_clip_high), γ =
    2^(−1/fipo_decay_rate), over tokens in the loss with ρ_j ≤ clip_ratio_c.

    Where A < 0 and ρ > fipo_safety_threshold, f is limited to [0.8, 1]. With one update in a step f is 1. The paper's
    32B run has clip_ratio_c=10, fipo_safety_threshold=10. Source: FIPO, arXiv 2603.19835.
    """
    return vanilla(replace(inputs, advantages=inputs.advantages * inputs.of_mini_batch(INFLUENCE)))


# -- a loss that compares the responses of a group -------------------------------------------------------------------


def _label_weights(tokens: MiniBatchTokens, config: Mapping[str, Any]) -> np.ndarray:
    """y_i·n_g·w_i of `real` on every token of trajectory i. ValueError without the groups."""
    if tokens.group is None:
        raise ValueError("loss_mode=real compares the responses of a group, which only the trainer knows")
    tau = float(setting(setting(config, "policy_loss"), "real_tau", 0.5))
    _, first, of_token = np.unique(tokens.trajectory, return_index=True, return_inverse=True)
    label = np.sign(_means(tokens, tokens.advantages))[first]
    ratio = _means(tokens, tokens.log_probs - tokens.old_log_probs)[first]
    odds = np.exp((-label * ratio / tau).clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    group = tokens.group[first]
    same_label = group[:, None] == group
    size = same_label.sum(-1)
    same_label &= label[:, None] == label
    return np.asarray((label * size * odds / tau / (1 + same_label @ odds))[of_token])


LABEL_WEIGHTS = WholeMiniBatch(_label_weights)


@LOSSES.register("real", whole=LABEL_WEIGHTS, keys=["policy_loss.real_tau"])
def real(inputs: LossInputs) -> PolicyLoss:
    """x = −y_i·n_g·sg(w_i)·logp, the gradient of log(1 + Σ_{y=1} exp(−s̄/τ)) + log(1 + Σ_{y=−1} exp(s̄/τ)) over a
    group: y_i the sign of Ā_i, s̄_i = Σ_t m·d / T_i, τ = real_tau, w_i = exp(−y_i·s̄_i/τ) / (τ·(1 + Σ_j
    exp(−y_j·s̄_j/τ))) over the members j of the same label.

    n_g, the members of the group in the mini-batch, makes seq-mean-token-mean the mean over groups. Meant for
    `algorithm.adv_estimator=real`, whose advantages are the labels; with another one A = 0 is no label.
    Source: REAL, arXiv 2602.05630, and the README of the authors' code.
    """
    terms = -inputs.of_mini_batch(LABEL_WEIGHTS) * inputs.log_probs
    return inputs.policy_term(terms), inputs.metrics()
