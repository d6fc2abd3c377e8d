"""Metrics of a padded batch (`verl.DataProto`) and of lists of values, under the names of the public interface:
`verl.trainer.ppo.metric_utils` and `verl.utils.metric`. The loop computes the same of its trajectories
(`step_metrics`).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import numpy as np

from verl.algorithms.value_loss import explained_variance
from verl.tracking.names import merge_metrics, rule, spread
from verl.tracking.step_metrics import PER_TOKEN, lengths_at
from verl.tracking.validation_metrics import prompt_metrics


class AggregationType(Enum):
    """How the values of a metric become one."""

    MEAN, SUM, MIN, MAX = "mean", "sum", "min", "max"


class Metric:
    """Values of one metric, and how they become one. ValueError for values or metrics that do not go together."""

    def __init__(self, aggregation: str | AggregationType, value: Any = None):
        self.aggregation = AggregationType(aggregation)
        self.values: list[Any] = []
        self.extend([] if value is None else [value])

    def append(self, value: Any) -> None:
        """Add a number, a tensor of one, or all values of another metric."""
        self.extend(value if isinstance(value, Metric) else [value])

    def extend(self, values: Metric | Iterable[Any]) -> None:
        """Add several numbers."""
        if isinstance(values, Metric) and values.aggregation is not self.aggregation:
            raise ValueError(f"{self.aggregation} and {values.aggregation} do not go together")
        for value in values.values if isinstance(values, Metric) else values:
            if math.prod(np.shape(value)) != 1:
                raise ValueError(f"a metric takes single numbers, not {np.shape(value)}")
            self.values.append(value.item() if hasattr(value, "item") else value)

    def aggregate(self) -> float:
        """The one value."""
        return float(getattr(np, self.aggregation.value)(self.values))

    @staticmethod
    def aggregate_dp(metrics: Sequence[Metric]) -> float:
        """The value over ranks: extremes over all; sums and means of what the ranks have on average."""
        if len({len(metric.values) for metric in metrics}) > 1:
            raise ValueError("ranks have different numbers of values")
        table = np.array([metric.values for metric in metrics])
        aggregation = metrics[0].aggregation.value
        return float(getattr(np, aggregation)(table if aggregation in ("min", "max") else table.mean(axis=0)))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], aggregation: str | AggregationType) -> dict[str, Metric]:
        """A metric of each value."""
        return {name: cls(aggregation, value) for name, value in data.items()}

    def init_list(self) -> Metric:
        """One of the same kind, without values."""
        return Metric(self.aggregation)


@contextmanager
def simple_timer(name: str, timings: dict[str, float]) -> Iterator[None]:
    """Add the seconds of a block to `timings[name]`."""
    started = time.perf_counter()
    try:
        yield
    finally:
        timings[name] = timings.get(name, 0.0) + time.perf_counter() - started


def append_to_dict(data: dict[str, Any], new_data: Mapping[str, Any], prefix: str = "") -> None:
    """Add each value to the list, or the metric, of its name."""
    for name, value in new_data.items():
        start: Any = value.init_list() if isinstance(value, Metric) else []
        data.setdefault(f"{prefix}{name}", start).append(value)


def reduce_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """One number of each list: maximum, minimum or mean, as its name says; nan of an empty one."""
    out = {}
    for name, values in metrics.items():
        metric = values if isinstance(values, Metric) else Metric(rule(name))
        if metric is not values:
            metric.extend(np.ravel(values))
        out[name] = metric.aggregate() if metric.values else math.nan
    return out


def compute_data_metrics(batch: Any, use_critic: bool = True) -> dict[str, Any]:
    """Scores, rewards, advantages, returns, values and lengths of a batch, by the names that a step logs."""
    tensors, info = batch.batch, _compute_response_info(batch)
    mask = tensors["response_mask"].bool()
    out: dict[str, Any] = {"response/aborted_ratio": float((~mask.any(-1)).float().mean())}
    for name, column in (("score", "token_level_scores"), ("rewards", "token_level_rewards")):
        out |= spread(f"critic/{name}", tensors[column].sum(-1)[mask.any(-1)].numpy())
    for name in ("advantages", "returns", *(["values"] if use_critic else [])):
        out |= spread(f"critic/{name}", tensors[name][mask].numpy())
    for name in ("prompt", "response"):
        lengths, width = info[f"{name}_length"].numpy(), tensors[f"{name}s"].shape[-1]
        out |= lengths_at(f"{name}_length", lengths, width)
    out |= lengths_at("response_length_non_aborted", lengths[mask.any(-1).numpy()], width)
    if use_critic:
        returns, values = (tensors[name][mask].double().numpy() for name in ("returns", "values"))
        out["critic/vf_explained_var"] = explained_variance(returns, values)
    return out


def _compute_response_info(batch: Any) -> dict[str, Any]:
    width, mask = batch.batch["responses"].shape[-1], batch.batch["attention_mask"]
    prompts, responses = (part.sum(-1).float() for part in (mask[:, :-width], mask[:, -width:]))
    return {"response_mask": mask[:, -width:], "prompt_length": prompts, "response_length": responses}


def compute_timing_metrics(batch: Any, timing_raw: Mapping[str, float]) -> dict[str, float]:
    """timing_s/*, and timing_per_token_ms/* of the phases that go over tokens; 0 without a token."""
    info = _compute_response_info(batch)
    responses = float(info["response_length"].sum())
    tokens = {"gen": responses} | dict.fromkeys(PER_TOKEN, responses + float(info["prompt_length"].sum()))
    out = {f"timing_s/{name}": seconds for name, seconds in timing_raw.items()}
    for name in tokens.keys() & timing_raw.keys():
        out[f"timing_per_token_ms/{name}"] = 1000 * timing_raw[name] / tokens[name] if tokens[name] else 0.0
    return out


def compute_throughout_metrics(batch: Any, timing_raw: Mapping[str, float], n_gpus: int) -> dict[str, float]:
    """perf/{total_num_tokens, time_per_step, throughput}."""
    total, seconds = sum(batch.meta_info["global_token_num"]), timing_raw["step"]
    rate = total / (seconds * n_gpus)
    return {"perf/total_num_tokens": total, "perf/time_per_step": seconds, "perf/throughput": rate}


def extract_disk_offload_metrics(metrics: Any, prefix: str) -> dict[str, float]:
    """Metrics of offloading to disk, which this release does not do: those that the caller passes, reduced."""
    parts = [metrics] if isinstance(metrics, Mapping) else metrics
    rows = (row for part in parts for row in part.items())
    return reduce_metrics({f"{prefix}/{name}": v for name, v in rows if name.startswith("disk_offload")})


def bootstrap_metric(
    data: Sequence[Any],
    subset_size: int,
    reduce_fns: Sequence[Callable[[list[Any]], float]],
    n_bootstrap: int = 1000,
    seed: int = 42,
) -> list[tuple[float, float]]:
    """(mean, standard deviation) of each function over subsets drawn with replacement. ValueError without data."""
    chosen = np.random.RandomState(seed).choice(len(data), size=(n_bootstrap, subset_size), replace=True)
    samples = [[function([data[i] for i in rows]) for rows in chosen] for function in reduce_fns]
    return [(float(np.mean(values)), float(np.std(values))) for values in samples]


def calc_maj_val(data: Sequence[Mapping[str, Any]], vote_key: str, val_key: str) -> Any:
    """The value of the first row that has the most frequent vote."""
    winner, _ = Counter(row[vote_key] for row in data).most_common(1)[0]
    return next(row[val_key] for row in data if row[vote_key] == winner)


def process_validation_metrics(
    data_sources: Sequence[str],
    sample_uids: Sequence[str],
    infos_dict: Mapping[str, Sequence[Any]],
    seed: int = 42,
    expected_acc_counts: Mapping[str, int] | None = None,
) -> dict[str, dict[str, dict[str, float]]]:
    """source → variable → metric: of each prompt's responses, then the mean over the prompts; `seed` is 42 always.

    `expected_acc_counts`: source → how many values of `acc` it has; ValueError where it has another number.
    """
    accuracies = zip(data_sources, infos_dict.get("acc", ()), strict=False)
    counts = Counter(source for source, value in accuracies if value is not None)
    for source, expected in (expected_acc_counts or {}).items():
        if counts[source] != expected:
            raise ValueError(f"data source {source!r} has {counts[source]} values of acc, {expected} are expected")
    groups: dict[tuple[str, str], list[int]] = {}
    for row, key in enumerate(zip(data_sources, sample_uids, strict=True)):
        groups.setdefault(key, []).append(row)

    def of_prompt(values: Sequence[Any], rows: Sequence[int]) -> dict[str, float]:
        preds = [str(infos_dict["pred"][row]) for row in rows] if "pred" in infos_dict else []
        return prompt_metrics(np.array([values[row] for row in rows], np.float64), len(rows), preds)

    out: dict[str, dict[str, dict[str, float]]] = {source: {} for source, _ in groups}
    for name, values in infos_dict.items():
        if len(values) and not isinstance(values[0], str):
            for source, metrics in out.items():
                of_prompts = (of_prompt(values, rows) for (of, _), rows in groups.items() if of == source)
                metrics[name] = merge_metrics((scores, 1) for scores in of_prompts)
    return out
