"""Validation metrics: per prompt first, then the mean over the prompts of a source.

`{val-core|val-aux}/{data_source}/{variable}/{metric}` with the variables `reward` (the score) and every numeric
key the reward function returned. A response whose scoring failed counts as acc 0 and is left out of the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from verl.tracking.names import Number, plain, spread
from verl.tracking.step_metrics import AgentRecord, dialogue_metrics
from verl.trajectory import Trajectory

DRAWS = 1000
SEED = 42
ACC = "acc"
REWARD = "reward"
SUCCESS_ONLY = "acc_success_only"

Responses = list[Trajectory]


def validation_metrics(responses: Iterable[Trajectory], n: int | None = None) -> dict[str, Number]:
    """All validation metrics of the responses; {} without responses.

    `n`: responses per prompt (`val_kwargs.n`), which names the metrics (mean@n); by default the largest group's
    size. `val/accuracy` (the mean of `acc`, or of `reward` for a source whose function gives no `acc`) and
    `val/multimodal_score` are among them.
    """
    every = list(responses)
    if not every:
        return {}
    sources: dict[str, dict[str, Responses]] = {}
    for t in every:
        sources.setdefault(t.prompt.data_source, {}).setdefault(t.uid, []).append(t)
    n = n or max(len(group) for groups in sources.values() for group in groups.values())
    out: dict[str, Number] = {}
    accuracy: list[tuple[float, bool]] = []
    for source, by_uid in sources.items():
        groups = list(by_uid.values())
        out |= _source_metrics(source, groups, n)
        variable = ACC if _has_acc(groups) else REWARD
        accuracy += [(_mean(_values(group, variable)), bool(group[0].prompt.media)) for group in groups]
    out |= spread("val-aux/num_turns", [t.num_turns for t in every], ("min", "max", "mean"))
    out |= {f"val-aux/{name}": value for name, value in dialogue_metrics(AgentRecord.of(every)).items()}
    out["val/accuracy"] = _mean([value for value, _ in accuracy])
    if pictures := [value for value, media in accuracy if media]:
        out["val/multimodal_score"] = _mean(pictures)
    return out


def _source_metrics(source: str, groups: Sequence[Responses], n: int) -> dict[str, Number]:
    out: dict[str, Number] = {}
    failed = sum(not t.scored for group in groups for t in group)
    for variable in _variables(groups):
        for metric, value in _variable_metrics(groups, variable, n).items():
            core = variable in (ACC, REWARD) and metric.startswith((f"mean@{n}", f"best@{n}/", f"maj@{n}/"))
            out[f"{'val-core' if core else 'val-aux'}/{source}/{variable}/{metric}"] = value
    if undecided := sum(t.extra.get("undecided", 0) for group in groups for t in group):
        out[f"val-aux/{source}/undecided"] = undecided
    if failed:
        out[f"val-aux/{source}/errors"] = failed
        if _has_acc(groups):
            per_prompt = [_mean(_values(group, ACC, zero_failed=False)) for group in groups]
            out[f"val-aux/{source}/{SUCCESS_ONLY}/mean@{n}"] = _mean(per_prompt)
    return out


def _variables(groups: Sequence[Responses]) -> list[str]:
    """`reward`, `acc` if there is one, then the other numeric keys in the order they first come."""
    parts = [t.score_parts for group in groups for t in group if t.scored]
    keys = dict.fromkeys(str(k) for part in parts for k, v in part.items() if plain(v) is not None)
    first = [REWARD, ACC] if _has_acc(groups) else [REWARD]
    return [*first, *(key for key in keys if key not in (REWARD, ACC, "score"))]


def _has_acc(groups: Sequence[Responses]) -> bool:
    """True if responses have `acc`: the function returned it, or a plain number, or every response failed."""
    scored = [t for group in groups for t in group if t.scored]
    return not scored or any(_value(t, ACC) is not None for t in scored)


def _value(t: Trajectory, variable: str) -> float | None:
    """A variable of a response that was scored. A function that returned a number has `acc` = that number."""
    if variable == REWARD or (variable == ACC and not t.score_parts):
        return float(t.score) if t.score is not None else None
    number = plain(t.score_parts.get(variable))
    return None if number is None else float(number)


def _values(group: Responses, variable: str, zero_failed: bool = True) -> list[float]:
    """Values of a prompt's responses in order; failed ones are 0 for `acc` and left out of the rest."""
    failed = 0.0 if variable == ACC and zero_failed else None
    values = [_value(t, variable) if t.scored else failed for t in group]
    return [value for value in values if value is not None]


def _variable_metrics(groups: Sequence[Responses], variable: str, n: int) -> dict[str, float]:
    per_prompt: dict[str, list[float]] = {}
    votes = all("pred" in t.score_parts for group in groups for t in group)
    for group in groups:
        values = np.array(_values(group, variable), dtype=np.float64)
        preds = [str(t.score_parts["pred"]) for t in group] if votes and len(values) == len(group) else []
        metrics = prompt_metrics(values, n, preds) if len(values) else {}
        for name, value in metrics.items():
            per_prompt.setdefault(name, []).append(value)
    return {name: _mean(values) for name, values in per_prompt.items()} or {f"mean@{n}": math.nan}


def prompt_metrics(values: np.ndarray, n: int, preds: Sequence[str]) -> dict[str, float]:
    """mean, std, best and worst of one prompt's values [≤ n], and with `preds` what their majority gets."""
    out = {f"mean@{n}": float(values.mean())}
    if n > 1:
        out[f"std@{n}"] = float(values.std())
        for k in subset_sizes(n):
            drawn = values[draws(len(values), k)]
            out |= _mean_and_std(f"best@{k}", drawn.max(axis=1))
            out |= _mean_and_std(f"worst@{k}", drawn.min(axis=1))
    return out | _majority_metrics(values, preds, n) if preds and n > 1 else out


def _mean_and_std(name: str, values: np.ndarray) -> dict[str, float]:
    return {f"{name}/mean": float(values.mean()), f"{name}/std": float(values.std())}


def _majority_metrics(values: np.ndarray, preds: Sequence[str], n: int) -> dict[str, float]:
    """maj@k: in each draw the value of the first response that gives the draw's most frequent `pred`.

    Between equally frequent ones the one drawn first wins.
    """
    kinds, codes = np.unique(np.array(preds, dtype=str), return_inverse=True)
    row = np.arange(DRAWS)[:, None]
    out: dict[str, float] = {}
    for k in subset_sizes(n):
        chosen = draws(len(values), k)
        drawn = codes[chosen]
        counts = np.bincount((row * len(kinds) + drawn).ravel(), minlength=DRAWS * len(kinds))
        votes = counts.reshape(DRAWS, len(kinds))[row, drawn]
        out |= _mean_and_std(f"maj@{k}", values[chosen[row[:, 0], votes.argmax(axis=1)]])
    return out


def subset_sizes(n: int) -> list[int]:
    """2, 4, 8 … below n, and n."""
    return [*(2**i for i in range(1, n.bit_length()) if 2**i < n), n]


@lru_cache(maxsize=256)
def draws(size: int, k: int) -> np.ndarray:
    """int64 [1000, k]: numbers of responses drawn with replacement from `size`, the same for every prompt.

    The legacy generator seeded with 42 for each (size, k): the figures then equal those of published runs.
    """
    drawn = np.random.RandomState(SEED).choice(size, size=(DRAWS, k), replace=True)
    drawn.setflags(write=False)
    return drawn


def _mean(values: Sequence[float]) -> float:
    """Mean of the values that are there; NaN entries are prompts with nothing to average."""
    numbers = [value for value in values if not math.isnan(value)]
    return math.fsum(numbers) / len(numbers) if numbers else math.nan
