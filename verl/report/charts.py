"""The charts of the page, in order. A chart without a value to show does not appear."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.report import summary
from verl.report.read import Metrics
from verl.tracking.metrics_table import regex_of

_MOST = 8
"""Most lines that a pattern gives."""


@dataclass(frozen=True, slots=True)
class Line:
    """A metric of `metrics_table` in a chart. In a pattern, `label` is empty: it is what `{…}` stands for.

    sparse: has a value at few steps; right: has the axis on the right; raw: is not smoothed.
    """

    metric: str
    label: str = ""
    sparse: bool = False
    right: bool = False
    raw: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """log: logarithmic axis; from_zero: the axis begins at 0; stack: areas whose total is that metric; quiet: lines that
    are 0 at every step are left out."""

    id: str
    title: str
    unit: str
    lines: tuple[Line, ...]
    wide: bool = False
    log: bool = False
    from_zero: bool = False
    stack: str = ""
    quiet: bool = False


_DIFF = "training/rollout_logprob_abs_diff"
_STALE = "training/off_policy/trajectory_staleness"
_PHASES = {
    "gen": "sampling",
    "reward": "reward",
    "old_log_prob": "old log-probs",
    "ref": "reference",
    "values": "values",
    "adv": "advantages",
    "update_critic": "update critic",
    "update_actor": "update actor",
    "update_weights": "weight sync",
    "testing": "validation",
    "save_checkpoint": "save",
}
SCORE = (
    Line("critic/score/mean", "mean score"),
    Line("critic/rewards/mean", "reward with KL"),
    Line("val/accuracy", "validation", sparse=True),
)
LOSS = (Line("train/loss", "training"), Line("val/loss", "validation", sparse=True))
LENGTH = (
    Line("response_length/mean", "mean"),
    Line("response_length/max", "longest"),
    Line("response_length/clip_ratio", "share cut off", right=True),
)
KL = (
    Line("actor/ppo_kl", "old to new"),
    Line("actor/kl_loss", "to reference"),
    Line("actor/reward_kl_penalty", "penalty in reward"),
)
CLIP = (
    Line("actor/pg_clipfrac", "clipped"),
    Line("actor/pg_clipfrac_lower", "clipped below (dual)"),
    Line("critic/vf_clipfrac", "values"),
)
GRADIENT = (
    Line("actor/grad_norm", "gradient norm"),
    Line("train/grad_norm", "gradient norm"),
    Line("actor/lr", "learning rate", right=True, raw=True),
    Line("train/lr", "learning rate", right=True, raw=True),
)
CRITIC = (
    Line("critic/vf_loss", "value loss"),
    Line("critic/vf_explained_var", "explained variance", right=True),
)
ERRORS = (Line("reward/errors", "errors", raw=True), Line("reward/timeouts", "timeouts", raw=True))
ENDS = (Line("agent/status/{status}", raw=True),)
LOG_PROBS = (
    Line(f"{_DIFF}/mean", "mean"),
    Line(f"{_DIFF}/p99", "99th percentile"),
    Line(f"{_DIFF}/max", "largest"),
)
PROBS = (Line("training/rollout_probs_diff_mean", "mean"), Line("training/rollout_probs_diff_max", "largest"))
STALENESS = (
    Line(f"{_STALE}/mean", "newest token, mean"),
    Line(f"{_STALE}_worst/mean", "oldest token, mean"),
    Line(f"{_STALE}_worst/max", "oldest token, largest"),
)
GROUPS = (
    Line("training/filter_groups/evicted_samples", "filtered out"),
    Line("training/dropped_groups", "too few scores"),
)
TIME = tuple(Line(f"timing_s/{phase}", label) for phase, label in _PHASES.items())
THROUGHPUT = (Line("perf/throughput", "tokens/s"), Line("perf/device_busy_ratio", "share busy", right=True))
SYNC = (Line("perf/weight_sync_gb_per_s", "GB/s"),)
MEMORY = (
    Line("perf/max_memory_allocated_gb", "device, allocated"),
    Line("perf/max_memory_reserved_gb", "device, reserved"),
    Line("perf/cpu_memory_used_gb", "host"),
)
CHARTS = (
    Chart("reward", "Reward", "", SCORE, wide=True),
    Chart("loss", "Loss", "", LOSS, wide=True),
    Chart(
        "validation",
        "Validation in detail",
        "",
        (Line("val-core/{source}/{variable}/{metric}", sparse=True),),
    ),
    Chart("length", "Response length", "tokens", LENGTH),
    Chart("kl", "KL divergence", "nats", KL, quiet=True),
    Chart("entropy", "Entropy", "nats per token", (Line("actor/entropy", "policy"),)),
    Chart("clip", "Clip fractions", "share of tokens", CLIP, quiet=True),
    Chart("grad", "Gradient norm and learning rate", "", GRADIENT),
    Chart("policy", "Policy loss", "", (Line("actor/pg_loss", "policy term"),)),
    Chart("critic", "Critic", "", CRITIC),
    Chart("extra", "Reward parts", "", (Line("reward_extra/{key}/mean"),)),
    Chart("errors", "Scoring that failed", "responses", ERRORS, quiet=True),
    Chart("ends", "How trajectories end", "share of trajectories", ENDS, quiet=True),
    Chart("sampler", "Sampler against trainer", "|difference of log-probs|", LOG_PROBS, log=True),
    Chart("probs", "Sampler against trainer", "|difference of probabilities|", PROBS, log=True),
    Chart("stale", "Staleness", "weight versions behind", STALENESS, quiet=True),
    Chart("filter", "Groups without signal", "groups", GROUPS, quiet=True),
    Chart("timing", "Where the time goes", "seconds per step", TIME, wide=True, stack="timing_s/step"),
    Chart("traintime", "Step time", "seconds", (Line("train/time", "step"),)),
    Chart("throughput", "Throughput", "tokens per second and device", THROUGHPUT, from_zero=True),
    Chart("sync", "Weights to the samplers", "GB/s", SYNC, from_zero=True, quiet=True),
    Chart("memory", "Memory", "GiB", MEMORY, from_zero=True),
)


def chart_list(metrics: Metrics) -> list[dict[str, Any]]:
    """The charts that a run has, as the page's script reads them: each with its lines in `series`."""
    charts = [_chart(chart, metrics) for chart in CHARTS]
    return [chart for chart in charts if chart["series"]]


def _chart(chart: Chart, metrics: Metrics) -> dict[str, Any]:
    columns, title = metrics.columns, chart.title
    series = [line for pattern in chart.lines for line in _lines(pattern, columns)]
    if chart.quiet:
        series = [line for line in series if any(columns[line["name"]])]
    if chart.id == "validation":
        series = [line for line in series if columns[line["name"]] != columns.get("val/accuracy")]
    for line in series if chart.id == "reward" else ():
        if line["name"] == "val/accuracy":
            line["label"] = summary.validation_label(metrics, "val/accuracy").lower()
            title = f"Reward and {line['label']}"
    if chart.id == "reward" and columns.get("critic/rewards/mean") == columns.get("critic/score/mean"):
        series = [line for line in series if line["name"] != "critic/rewards/mean"]
    shown = {"id": chart.id, "title": title, "unit": chart.unit, "wide": chart.wide, "log": chart.log}
    return shown | {"zero": chart.from_zero, "stack": chart.stack, "series": series}


def _lines(line: Line, columns: dict[str, list[float | None]]) -> list[dict[str, Any]]:
    regex, out = regex_of(line.metric), []
    for name in columns:
        if regex.fullmatch(name):
            before, _, rest = line.metric.partition("{")
            value = name.removeprefix(before).removesuffix(rest.partition("}")[2]).removesuffix("/mean")
            label = line.label or (value.replace("_", " ") if line.raw else value)
            out.append(
                {"name": name, "label": label, "sparse": line.sparse, "right": line.right, "raw": line.raw}
            )
    return out[:_MOST]
