"""The correction for a sampler that is not the policy in training: importance weights and rejection.

e is the log-ratio of a policy token, trainer minus sampler; everything works on flat float64 arrays of such tokens.
Sources: truncated importance sampling between sampler and trainer (Yao et al. 2025); IcePop (arXiv 2510.18855);
Liu, Li et al. 2025 ("When Speed Kills Stability").
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl.config.schema.base import setting
from verl.trajectory import Trajectory, fill_flat, flat

LIMIT = 20.0
_RULE = re.compile(r"(?:(token)|seq_(sum|mean|max))_k([123])")


@dataclass(frozen=True, slots=True)
class Tokens:
    """Policy tokens of several responses: error float64 [T]; owner int [T], 0 … responses − 1, each with a token."""

    error: np.ndarray
    owner: np.ndarray
    responses: int

    @classmethod
    def of(cls, error: np.ndarray, response: np.ndarray) -> Tokens:
        """`response` [T]: any number per response, equal for its tokens."""
        unique, owner = np.unique(response, return_inverse=True)
        return cls(np.asarray(error, np.float64), owner, len(unique))

    def sums(self, values: np.ndarray) -> np.ndarray:
        """[responses]: sum of the values [T] of each response's tokens."""
        return np.bincount(self.owner, weights=values, minlength=self.responses)

    def means(self, values: np.ndarray) -> np.ndarray:
        """[responses]: mean of the values [T] of each response's tokens."""
        return self.sums(values) / np.bincount(self.owner, minlength=self.responses)

    def maxima(self, values: np.ndarray) -> np.ndarray:
        """[responses]: largest of the values [T] of each response's tokens."""
        out = np.full(self.responses, -np.inf)
        np.maximum.at(out, self.owner, values)
        return out


@dataclass(frozen=True, slots=True)
class Weighting:
    """`rollout_is`: kind token or sequence. With `low` weights outside [low, high] become 0, else min(w, high)."""

    kind: str
    low: float | None
    high: float
    normalize: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """One option of `rollout_rs`. over: token, sum, mean or max; k: 1, 2 or 3. Kept if low ≤ value ≤ high.

    low and high are those of the value itself: logarithms of the ratio bounds for k1; low is −inf for k2 and k3.
    """

    name: str
    over: str
    k: int
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Correction:
    """`algorithm.rollout_correction`, parsed. `rejected_in_baseline`: rejected responses stay in their group's
    statistics."""

    weighting: Weighting | None = None
    rules: tuple[Rule, ...] = ()
    rejected_in_baseline: bool = True
    bypass: bool = False
    reinforce: bool = False

    @property
    def active(self) -> bool:
        """True if the trainer's log-probs are compared with the sampler's to weigh or reject."""
        return self.weighting is not None or bool(self.rules)

    @property
    def needs_mini_batch_pass(self) -> bool:
        """True if something must be known of a whole mini-batch before its update, under its current weights."""
        normalized = self.reinforce and self.weighting is not None and self.weighting.normalize
        return self.bypass and (bool(self.rules) or normalized)


def parse_correction(config: Mapping[str, Any] | None) -> Correction:
    """From the config group (None: nothing is corrected). ValueError naming the key and the form it must have."""
    kind = setting(config, "rollout_is")
    rules = setting(config, "rollout_rs")
    weighting = None
    if kind:
        normalize = bool(setting(config, "rollout_is_batch_normalize", False))
        weighting = parse_weighting(kind, setting(config, "rollout_is_threshold", 2.0), normalize)
    return Correction(
        weighting,
        parse_rules(rules, setting(config, "rollout_rs_threshold")) if rules else (),
        rejected_in_baseline=bool(setting(config, "rollout_rs_in_baseline", True)),
        bypass=bool(setting(config, "bypass_mode", False)),
        reinforce=setting(config, "loss_type", "ppo_clip") == "reinforce",
    )


def parse_weighting(kind: str, threshold: float | str, normalize: bool = False) -> Weighting:
    """From `rollout_is`, `rollout_is_threshold` ("2.0" truncates, "0.5_5.0" zeroes outside) and the flag."""
    if kind not in ("token", "sequence"):
        raise ValueError(f"rollout_is={kind!r}: it is token or sequence")
    parts = _numbers(threshold)
    if not parts:
        raise ValueError(
            f'rollout_is_threshold={threshold!r}: write a number, "2.0" (truncates), or bounds, '
            '"0.5_5.0" (zeroes outside)'
        )
    if len(parts) == 1 and parts[0] < 1:
        # YAML and mappings of Hydra's grammar read 0.5_2 as the number 0.52
        raise ValueError(
            f"rollout_is_threshold={threshold}: truncates the weight of every token, that of tokens on which sampler "
            'and trainer agree (1) too; bounds are written in quotes, "0.5_2.0"'
        )
    return Weighting(kind, parts[0] if len(parts) == 2 else None, parts[-1], normalize)


def parse_rules(listed: str, threshold: float | str | None) -> tuple[Rule, ...]:
    """From `rollout_rs` and `rollout_rs_threshold`: comma lists, one threshold for each name or one for all."""
    names = [name.strip() for name in listed.split(",") if name.strip()]
    if threshold is None:
        raise ValueError('rollout_rs_threshold: rollout_rs needs one: a number, or bounds "0.5_2.0" for k1')
    thresholds = [part.strip() for part in str(threshold).split(",")]
    if len(thresholds) not in (1, len(names)):
        raise ValueError(
            f"rollout_rs_threshold={threshold}: {len(thresholds)} thresholds for {len(names)} rules; give one each, or "
            "one for all"
        )
    return tuple(parse_rule(*pair) for pair in zip(names, thresholds * (len(names) // len(thresholds)), strict=True))


def parse_rule(name: str, threshold: str) -> Rule:
    """One name of `rollout_rs` with its threshold. ValueError for an unknown name or a threshold of another form."""
    match = _RULE.fullmatch(name)
    if not match or name == "seq_max_k1":
        raise ValueError(
            f"rollout_rs={name}: a list of token_k1..3, seq_sum_k1..3, seq_mean_k1..3, seq_max_k2..3, "
            "separated by commas"
        )
    over, k, parts = match[1] or match[2], int(match[3]), _numbers(threshold)
    if k > 1:
        if len(parts) != 1:
            raise ValueError(f"rollout_rs_threshold={threshold}: {name} has an upper bound only")
        return Rule(name, over, k, -math.inf, parts[0])
    if len(parts) == 1 and parts[0] > 1:
        parts = [1 / parts[0], parts[0]]
    if len(parts) != 2:
        raise ValueError(
            f'rollout_rs_threshold={threshold}: {name} needs ratio bounds, "0.5_2.0", or one number above 1'
        )
    low, high = (math.log(part) if part else -math.inf for part in parts)
    return Rule(name, over, k, low, high)


def _numbers(threshold: float | str | None) -> list[float]:
    """[c], or [lo, hi] of "lo_hi", where infinity is no upper bound; [] for anything else: all must be above 0, and lo
    below hi."""
    try:
        parts = [float(part) for part in str(threshold).split("_")]
    except ValueError:
        return []
    ordered = len(parts) == 1 or (len(parts) == 2 and parts[0] < parts[1])
    return parts if ordered and all(part > 0 for part in parts) else []


def importance_weights(tokens: Tokens, how: Weighting) -> tuple[np.ndarray, dict[str, float]]:
    """Weights float64 [T] and their metrics (names without prefix).

    Statistics are over tokens (kind token) or responses (kind sequence): rollout_is_{mean,std,max,min},
    eff_sample_size of weights as applied; ratio_fraction_{high,low}, oob_ratio of raw ones; seq_*: per-response
    means, as applied, but fraction_{high,low} of raw ones. rollout_is_std is that of
    all weights, other std are unbiased; nan where there is nothing.
    """
    sequence = how.kind == "sequence"
    raw = np.exp(np.clip(tokens.sums(tokens.error) if sequence else tokens.error, -LIMIT, LIMIT))
    low = 1 / how.high if how.low is None else how.low
    outside = (raw < low) | (raw > how.high)
    applied = np.minimum(raw, how.high) if how.low is None else np.where(outside, 0.0, raw)
    factor = 1.0
    if how.normalize and len(applied) and applied.mean() > 0:
        factor = float(applied.mean())
        applied = applied / factor
    means, raw_means = (values if sequence else tokens.means(values) for values in (applied, raw))
    metrics = {f"rollout_is_{name}": value for name, value in _spread(applied, ddof=0).items()}
    mean = mean_of(applied)
    metrics |= {
        "rollout_is_eff_sample_size": 1 / mean_of((applied / mean) ** 2) if mean > 0 else math.nan,
        "rollout_is_ratio_fraction_high": mean_of(raw > how.high),
        "rollout_is_ratio_fraction_low": mean_of(raw < low),
        "rollout_is_oob_ratio": 0.0 if how.low is None else mean_of(outside),
        **{f"rollout_is_seq_{name}": value for name, value in _spread(means).items()},
        "rollout_is_seq_max_deviation": float(np.abs(means - 1).max()) if len(means) else math.nan,
        "rollout_is_seq_fraction_high": mean_of(raw_means > how.high),
        "rollout_is_seq_fraction_low": mean_of(raw_means < low),
    }
    if how.normalize:
        metrics["rollout_is_batch_norm_factor"] = factor
    return applied[tokens.owner] if sequence else applied, metrics


def rejection(tokens: Tokens, rules: Sequence[Rule]) -> tuple[np.ndarray, dict[str, float]]:
    """Kept tokens bool [T], those that every rule keeps, and metrics (names without prefix).

    Per rule: rollout_rs_{name}_{mean,max,min,std,fraction_high,fraction_low} of its values, one per token or per
    response; masked_fraction, seq_masked_fraction: shares of tokens, of responses with any token, that it drops;
    seq_*: the same of per-response values (for a token rule: means), seq_max_deviation their largest |value|.
    rollout_rs_rejected_fraction: share of responses of which all rules together keep no token.
    """
    accepted = np.ones(len(tokens.error), bool)
    metrics: dict[str, float] = {}
    for rule in rules:
        keeps, rule_metrics = _apply(tokens, rule)
        accepted &= keeps
        metrics |= {f"rollout_rs_{rule.name}_{name}": value for name, value in rule_metrics.items()}
    metrics |= {f"rollout_rs_{name}": value for name, value in _dropped(tokens, accepted).items()}
    metrics["rollout_rs_rejected_fraction"] = mean_of(tokens.sums(accepted) == 0)
    return accepted, metrics


def _apply(tokens: Tokens, rule: Rule) -> tuple[np.ndarray, dict[str, float]]:
    error = np.clip(tokens.error, -LIMIT, LIMIT)
    divergence = -error if rule.k == 1 else error**2 / 2 if rule.k == 2 else np.expm1(error) - error
    means = {"token": tokens.means, "sum": tokens.sums, "mean": tokens.means, "max": tokens.maxima}[rule.over](
        divergence
    )
    values = divergence if rule.over == "token" else means
    keeps = (rule.low <= values) & (values <= rule.high)
    accepted = keeps if rule.over == "token" else keeps[tokens.owner]

    def beyond(of: np.ndarray) -> dict[str, float]:
        return {"fraction_high": mean_of(of > rule.high), "fraction_low": mean_of(of < rule.low)}

    seq = _spread(means) | beyond(means)
    seq["max_deviation"] = float(np.abs(means).max()) if len(means) else math.nan
    metrics = _spread(values) | beyond(values) | _dropped(tokens, accepted)
    return accepted, metrics | {f"seq_{name}": value for name, value in seq.items()}


def _dropped(tokens: Tokens, kept: np.ndarray) -> dict[str, float]:
    touched = tokens.sums(~kept) > 0
    return {"masked_fraction": mean_of(~kept), "seq_masked_fraction": mean_of(touched)}


def _spread(values: np.ndarray, ddof: int = 1) -> dict[str, float]:
    return {
        "mean": mean_of(values),
        "std": float(values.std(ddof=ddof)) if len(values) > ddof else math.nan,
        "max": float(values.max()) if len(values) else math.nan,
        "min": float(values.min()) if len(values) else math.nan,
    }


def mean_of(values: np.ndarray) -> float:
    """The mean; nan of nothing."""
    return float(np.mean(values)) if len(values) else math.nan


def correct(
    rows: Sequence[Trajectory], correction: Correction, current: Sequence[np.ndarray] | None = None
) -> dict[str, float]:
    """Fill `is_weights` and take what is rejected out of `loss_mask`; returns metrics, `rollout_corr/…`.

    Rows need `rollout_log_probs`, `loss_mask` and, unless `current` gives the trainer's log-probs ([L] each),
    `old_log_probs`; ValueError naming the first that lacks one. Statistics are over the policy tokens of all rows. With
    `correction.bypass` weights are kept only for loss_type=reinforce: in the ratio they would count twice.
    """
    mask = flat(rows, "response_mask")
    tokens = _policy_tokens(rows, mask, current)
    metrics: dict[str, float] = {}
    if correction.weighting is not None and (correction.reinforce or not correction.bypass):
        weights, metrics = importance_weights(tokens, correction.weighting)
        fill_flat(rows, "is_weights", on_tokens(weights, mask))
    if correction.rules:
        accepted, rejection_metrics = rejection(tokens, correction.rules)
        metrics |= rejection_metrics
        fill_flat(rows, "loss_mask", flat(rows, "loss_mask") & on_tokens(accepted, mask, bool))
    return correction_metrics(metrics)


def weights_of_the_update(rows: Sequence[Trajectory], correction: Correction) -> dict[str, float]:
    """Metrics, `rollout_corr/…`, of weights that the loss computed by itself (bypass mode with loss_type=reinforce).

    The rows' `old_log_probs` are those of the update's own first pass. {} where `correct` has said it all.
    """
    weighting = correction.weighting
    mine = correction.bypass and correction.reinforce and not correction.needs_mini_batch_pass
    rows = [row for row in rows if row.old_log_probs is not None and row.policy_tokens]
    if weighting is None or not mine or not rows:
        return {}
    tokens = _policy_tokens(rows, flat(rows, "response_mask"))
    return correction_metrics(importance_weights(tokens, weighting)[1])


def correction_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Under the names that are logged: `rollout_corr/…`."""
    return {f"rollout_corr/{name}": value for name, value in metrics.items()}


def _policy_tokens(rows: Sequence[Trajectory], mask: np.ndarray, current: Sequence[np.ndarray] | None = None) -> Tokens:
    """e of the policy tokens of all rows; `mask` [ΣL] says which they are."""
    policy = flat(rows, "old_log_probs") if current is None else np.concatenate([np.zeros(0), *current])
    error = policy.astype(np.float64) - flat(rows, "rollout_log_probs")
    owner = np.repeat(np.arange(len(rows)), [row.length for row in rows])
    return Tokens.of(error[mask], owner[mask])


def on_tokens(values: Any, mask: np.ndarray, dtype: Any = np.float32) -> np.ndarray:
    """A number, or one for each True of the mask, where the mask is True; 0 elsewhere. Shape of the mask."""
    out = np.zeros(mask.shape, dtype)
    out[mask] = values
    return out
