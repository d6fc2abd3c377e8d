"""How far trainer and sampler are apart, added up response by response.

A step may have tens of millions of tokens: as whole arrays each operation would go through memory once, so responses
are taken in blocks that stay in the processor's cache. Spread is summed about the first block's mean, which keeps the
digits that a difference of large sums would lose.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl.algorithms.correction import LIMIT, correction_metrics, mean_of
from verl.config.layout import quantized_sampling, sampling_mask_from
from verl.config.schema.entries import Config
from verl.engine.registry import float_name
from verl.trajectory import Trajectory

_BLOCK = 1 << 15  # tokens: a few float64 arrays of it fit into a second-level cache
_SAMPLE = 61
Pair = tuple[np.ndarray, "np.ndarray | None"]


class Agreement:
    """Sums over policy tokens of old (the trainer's log-prob) and mu (the sampler's); e = old − mu, p and q their
    probabilities. Computed in float64."""

    def __init__(self) -> None:
        self.tokens = 0
        self._old: list[float] = []  # mean of each response
        self._mu: list[float] = []
        self._errors: list[float] = []  # sum of e of each response
        self._logs: list[np.ndarray] = []  # |e| of every token
        self._sums = dict.fromkeys(("e", "abs_e", "expm1_e", "chi2", "apart"), 0.0)
        self._about: tuple[float, float, float] | None = None
        self._moments = np.zeros(7)
        self._ends = np.array([math.inf, -math.inf] * 3)  # of p, q, |p − q|

    @classmethod
    def over(cls, pairs: Iterable[Pair]) -> Agreement:
        """From (old, mu) of each response, at least one token each; mu is None for all, or for none."""
        agreement = cls()
        pending: list[Pair] = []
        size = 0
        for pair in pairs:
            pending.append(pair)
            size += len(pair[0])
            if size >= _BLOCK:
                agreement._add(pending)
                pending, size = [], 0
        if pending:
            agreement._add(pending)
        return agreement

    def _add(self, pairs: list[Pair]) -> None:
        starts = np.cumsum([0, *(len(old) for old, _ in pairs)])
        sizes = np.diff(starts)
        old = np.concatenate([old for old, _ in pairs], dtype=np.float64)
        self.tokens += len(old)
        self._old += (np.add.reduceat(old, starts[:-1]) / sizes).tolist()
        sampler_log_probs = [mu for _, mu in pairs if mu is not None]
        if not sampler_log_probs:
            return
        mu = np.concatenate(sampler_log_probs, dtype=np.float64)
        error = old - mu
        self._mu += (np.add.reduceat(mu, starts[:-1]) / sizes).tolist()
        self._errors += np.add.reduceat(error, starts[:-1]).tolist()
        self._logs.append(np.abs(error))
        with np.errstate(over="ignore"):
            self._sums["e"] += float(error.sum())
            self._sums["abs_e"] += float(self._logs[-1].sum())
            expm1 = np.expm1(error)
            self._sums["expm1_e"] += float(expm1.sum())
            if self._logs[-1].max() > LIMIT:
                expm1 = np.expm1(np.clip(error, -LIMIT, LIMIT))
            self._sums["chi2"] += float(expm1 @ (expm1 + 2))  # expm1(2e)
        self._add_probabilities(np.exp(old), np.exp(mu))

    def _add_probabilities(self, ours: np.ndarray, theirs: np.ndarray) -> None:
        apart = np.abs(ours - theirs)
        for i, values in enumerate((ours, theirs, apart)):
            self._ends[2 * i] = min(self._ends[2 * i], values.min())
            self._ends[2 * i + 1] = max(self._ends[2 * i + 1], values.max())
        self._sums["apart"] += float(apart.sum())
        if self._about is None:
            self._about = (float(ours.mean()), float(theirs.mean()), float(apart.mean()))
        x, y, z = (v - about for v, about in zip((ours, theirs, apart), self._about, strict=True))
        self._moments += (x.sum(), y.sum(), z.sum(), x @ x, y @ y, z @ z, x @ y)

    def closeness(self) -> dict[str, float]:
        """training/rollout_probs_diff_…, …_pearson_corr, training/rollout_logprob_abs_diff/…; nan without tokens."""
        nan = math.nan
        n = self.tokens or nan
        x, y, z, xx, yy, zz, xy = self._moments
        varied = n > 1 and self._ends[0] < self._ends[1] and self._ends[2] < self._ends[3]
        spread = math.sqrt(max(0.0, xx - x * x / n) * max(0.0, yy - y * y / n)) if varied else 0.0
        correlation = float(np.clip((xy - x * y / n) / spread, -1.0, 1.0)) if spread else nan
        largest = [part.max() for part in self._logs] or [nan]
        return {
            "training/rollout_probs_diff_valid": 1 if self.tokens else 0,
            "training/rollout_probs_diff_max": float(self._ends[5]) if self.tokens else nan,
            "training/rollout_probs_diff_mean": self._sums["apart"] / n,
            "training/rollout_probs_diff_std": math.sqrt(max(0.0, zz - z * z / n) / (n - 1)) if n > 1 else nan,
            "training/rollout_actor_probs_pearson_corr": correlation,
            "training/rollout_logprob_abs_diff/mean": self._sums["abs_e"] / n,
            "training/rollout_logprob_abs_diff/max": float(np.max(largest)),
            "training/rollout_logprob_abs_diff/p99": high_percentile(self._logs, 99),
        }

    def divergence(self) -> dict[str, float]:
        """kl, k3_kl, {training,rollout}_{ppl,log_ppl}, log_ppl_{diff,abs_diff,diff_max,diff_min}, ppl_ratio,
        chi2_{token,seq}; of the trainer alone without the sampler's. nan without tokens."""
        old, n = np.array(self._old), self.tokens or math.nan
        with np.errstate(over="ignore"):
            metrics = {"training_ppl": mean_of(np.exp(-old)), "training_log_ppl": mean_of(-old)}
            if len(self._mu) != len(self._old):
                return metrics
            mu, errors = np.array(self._mu), np.array(self._errors)
            apart, sums = mu - old, self._sums
            return metrics | {
                "kl": -sums["e"] / n,
                "k3_kl": (sums["expm1_e"] - sums["e"]) / n,
                "rollout_ppl": mean_of(np.exp(-mu)),
                "rollout_log_ppl": mean_of(-mu),
                "log_ppl_diff": mean_of(apart),
                "log_ppl_abs_diff": mean_of(np.abs(apart)),
                "log_ppl_diff_max": float(np.max(apart)) if len(apart) else math.nan,
                "log_ppl_diff_min": float(np.min(apart)) if len(apart) else math.nan,
                "ppl_ratio": mean_of(np.exp(apart)),
                "chi2_token": sums["chi2"] / n,
                "chi2_seq": mean_of(np.expm1(2 * np.clip(errors, -LIMIT, LIMIT))),
            }


def sampler_metrics(rows: Iterable[Trajectory]) -> dict[str, float]:
    """Every metric that compares log-probs of sampler and trainer, over the rows that have both of them.

    training/rollout_probs_diff_{valid,max,mean,std}, training/rollout_actor_probs_pearson_corr,
    training/rollout_logprob_abs_diff/{mean,max,p99}, rollout_corr/…; policy tokens only, float64.
    """
    pairs = (
        (_policy(row.old_log_probs, row), _policy(row.rollout_log_probs, row))
        for row in rows
        if row.old_log_probs is not None and row.rollout_log_probs is not None and row.policy_tokens
    )
    agreement = Agreement.over(pairs)
    return agreement.closeness() | correction_metrics(agreement.divergence())


def _policy(values: np.ndarray, row: Trajectory) -> np.ndarray:
    """The row's values of policy tokens."""
    mask = np.asarray(row.response_mask, bool)
    return values if mask.all() else values[mask]


@dataclass(frozen=True, slots=True)
class Bounds:
    """What rounding explains of differences between two computations of the same, and no more; differences of log-probs
    in nats. docs/weight-sync.md has the table, and what was measured.

    far      |sampler's log-prob − trainer's| of a batch: the largest or the mean, and its bound
    noise    of the probe at each push: least and most difference under the same weights that is taken for rounding
    known    B of the known adapter: moves far above rounding, and most greedy tokens stay as they are
    loss     of a loss, and of a gradient's product, from its value at ratio 1: share of the mean size of their terms
    update   of norms and losses of the same update, cut otherwise: relative
    """

    far: tuple[str, float]
    noise: tuple[float, float]
    known: float
    loss: float
    update: float


BOUNDS = {
    "float32": Bounds(("max", 1e-3), (1e-5, 1e-4), 0.003, 1e-3, 1e-3),
    "half": Bounds(("mean", 0.1), (3e-3, 3e-2), 0.01, 0.1, 0.05),
    "quantized": Bounds(("mean", 0.3), (1e-2, 5e-2), 0.02, 0.1, 0.05),
}
"""By the lower precision of the two sides. "quantized": weights or cache of the sampler in 8 bits."""


def precision_of(*dtypes: str) -> str:
    """The key of `BOUNDS` for these data types."""
    return "float32" if all(float_name(name) == "float32" for name in dtypes) else "half"


def precision_of_run(rollout: Any, trainer_dtype: str) -> str:
    """The key of `BOUNDS` for the sampler of the group `rollout` and a trainer that computes in this data type."""
    return "quantized" if quantized_sampling(rollout) else precision_of(rollout.dtype or trainer_dtype, trainer_dtype)


def first_step_bound(config: Config, trainer_dtype: str) -> tuple[str, float] | None:
    """What a run's first batch is held to: `Bounds.far` of the precision in use. trainer_dtype: in which the policy's
    ranks compute.

    None where both may differ by design (bypass mode, a distribution that is truncated by one side or not the one
    sampled from),
    and where the user has set a limit.
    """
    rollout = config.actor_rollout_ref.rollout
    truncated = rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0
    replayed = sampling_mask_from(config) == "sampler"
    other = (
        (truncated and not replayed) or rollout.repetition_penalty != 1 or rollout.logprobs_mode != "processed_logprobs"
    )
    if other or config.algorithm.rollout_correction.bypass_mode:
        return None
    if config.trainer.logprob_diff_limit is not None:
        return None
    return BOUNDS[precision_of_run(rollout, trainer_dtype)].far


def first_step_disagreement(
    metrics: Mapping[str, Any], bound: tuple[str, float] | None, rows: Iterable[Trajectory] = ()
) -> str:
    """Why a run's first batch shows that sampler and trainer do not compute the same model; "" if it does not.

    Finds what checksums of a weight sync cannot: tied or fused weights that the sampler derived from old ones, a stale
    cache. `bound`: of `first_step_bound`. rows: of the batch, to say where they differ. A batch with responses of an
    earlier version of the weights shows nothing.
    """
    if bound is None or metrics.get("training/off_policy/trajectory_staleness_worst/max", 0) > 0:
        return ""
    kind, limit = bound
    difference = metrics.get(f"training/rollout_logprob_abs_diff/{kind}")
    if difference is None or not difference > limit:  # nan: nothing was compared, or the update is refused
        return ""
    where = f"; {apart}" if (apart := where_apart(rows)) else ""
    return (
        "sampler and trainer do not compute the same model: in the first batch after a weight sync their log-probs "
        f"differ by {difference:.3g} nats ({kind}), rounding of their precisions explains at most {limit:g}{where}. "
        "Weights reached the sampler in a wrong form, or it computes this architecture differently: report it, and try "
        "rollout.name=native; trainer.logprob_diff_limit=1e9 goes on regardless"
    )


def where_apart(rows: Iterable[Trajectory]) -> str:
    """Where in the responses log-probs of sampler and trainer begin to differ clearly, and what that points to; ""
    where they do not."""
    apart = [
        (row, np.abs(row.old_log_probs - row.rollout_log_probs) * row.response_mask)
        for row in rows
        if row.old_log_probs is not None and row.rollout_log_probs is not None and row.policy_tokens
    ]
    limit = 0.3 * max((float(values.max()) for _, values in apart), default=0.0)
    first, later, following = 0, 0, 0
    for row, values in apart:
        if not values.max() > limit:
            continue
        turns = np.flatnonzero(np.diff(row.response_mask.astype(np.int8), prepend=0) == 1)
        start = int(turns[np.searchsorted(turns, at := int(np.argmax(values > limit)), side="right") - 1])
        if at - start > 1:
            later += 1
        elif start == turns[0]:
            first += 1
        else:
            following += 1
    causes = {
        "the beginning of a response: another prompt (template, image, positions), or other weights": first,
        "the beginning of a later turn: what stands between the turns is another (template, results of "
        "tools)": following,
        "the middle of a response: positions, masks, routes or cached keys and values of decoded tokens": later,
    }
    cause = max(causes, key=causes.__getitem__)
    return f"they part in {causes[cause]} of {len(apart)} responses at {cause}" if causes[cause] else ""


def high_percentile(parts: Sequence[np.ndarray], percent: float) -> float:
    """numpy's percentile (linear between neighbours) of all values of `parts` together; nan of none, or if one is. No
    part is empty.

    Only what is above a bound guessed from a sample is sorted, everything if the guess was too high.
    """
    if not parts or any(np.isnan(part.max()) for part in parts):
        return math.nan
    count = sum(map(len, parts))
    place = percent / 100 * (count - 1)
    sample = np.concatenate([part[::_SAMPLE] for part in parts])
    bound = np.percentile(sample, 0.98 * percent) if len(sample) * (100 - percent) >= 1000 else -math.inf
    top = np.concatenate([part[part > bound] for part in parts])
    low = math.floor(place) - (count - len(top))
    if low < 0:
        return float(np.percentile(np.concatenate(parts), percent))
    neighbours = [low, min(low + 1, len(top) - 1)]
    first, second = np.partition(top, neighbours)[neighbours].tolist()
    return first + (place - math.floor(place)) * (second - first)
