"""What the top of the report says: is the run going, how far, what came of it, and with what settings."""

from __future__ import annotations

import json
import re
import statistics
from typing import Any

from verl.report.read import Metrics, Record, Run, kind_of, number
from verl.tracking.run_folder import SECRET_NAME

ACCURACY = re.compile(r"^val-core/.+/acc/mean@\d+$")
REWARD = re.compile(r"^val-core/.+/reward/mean@\d+$")

EVALUATED = re.compile(r"^eval/.+/accuracy$")
SPEED = "generation/tokens_per_s"

FACTS = (
    ("File", "data.path"),
    ("Algorithm", "algorithm.adv_estimator"),
    ("Prompts per step", "data.train_batch_size"),
    ("Responses per prompt", "actor_rollout_ref.rollout.n"),
    ("Learning rate", "actor_rollout_ref.actor.optim.lr"),
    ("Mini-batch", "actor_rollout_ref.actor.ppo_mini_batch_size"),
    ("KL loss", "actor_rollout_ref.actor.use_kl_loss"),
    ("Prompt limit", "data.max_prompt_length"),
    ("Response limit", "data.max_response_length"),
    ("Sampler", "actor_rollout_ref.rollout.name"),
    ("Sampler", "rollout.name"),
    ("Responses per prompt", "rollout.n"),
    ("Temperature", "rollout.temperature"),
    ("Temperature", "actor_rollout_ref.rollout.temperature"),
    ("Seed", "data.seed"),
)


def lookup(config: Record, path: str) -> Any:
    """Value at a dotted path, None where the path ends early."""
    value: Any = config
    for key in path.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def flatten(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """(dotted key, value as text) in the file's order; values of keys that look like secrets are hidden."""
    if isinstance(value, dict) and (value or not prefix):
        return [row for k, v in value.items() for row in flatten(v, f"{prefix}.{k}" if prefix else str(k))]
    if value is not None and SECRET_NAME.search(prefix):
        return [(prefix, "hidden")]
    return [(prefix, json.dumps(value) if value is None or isinstance(value, bool) else str(value))]


def present(metrics: Metrics, name: str) -> list[tuple[int, float]]:
    """(step, value) where the step has the name."""
    column = metrics.columns.get(name, [])
    return [(s, v) for s, v in zip(metrics.steps, column, strict=False) if v is not None]


def accuracy_name(metrics: Metrics) -> str | None:
    """The metric that stands for validation."""
    return next((name for name in ("val/accuracy", "val/loss") if name in metrics.columns), None)


def validation_label(metrics: Metrics, name: str) -> str:
    """What the metric of `accuracy_name` is called: without any `acc`, the overall number is a mean reward."""
    if name == "val/loss":
        return "Validation loss"
    accuracies = [column for column in metrics.columns if ACCURACY.match(column)]
    rewards = [column for column in metrics.columns if REWARD.match(column)]
    sources = {column.rsplit("/", 2)[0] for column in accuracies + rewards}
    over = f", mean of {len(sources)} data sources" if name == "val/accuracy" and len(sources) > 1 else ""
    return f"Validation {'accuracy' if accuracies or not rewards else 'reward'}{over}"


def total_steps(run: Run) -> int | None:
    """Planned number of steps: from the start event, else the config."""
    for event in reversed(run.events.marks):
        for key in ("total_training_steps", "total_steps"):
            if isinstance(event.get(key), int):
                return event[key]
    planned = lookup(run.config, "trainer.total_training_steps")
    return planned if isinstance(planned, int) and planned > 0 else None


def status(run: Run) -> Record:
    """`state` (waiting, running, finished, failed), the `word` to show for it, and `why` it failed, from the end event
    or the steps.

    The page decides whether a run without an end still lives: it knows the time when it is read.
    """
    lives = [e for e in run.events.marks if kind_of(e) in ("run_start", "resumed", "run_end")]
    if lives and kind_of(lives[-1]) == "run_end":
        state = str(lives[-1].get("status", "finished"))
        why = str(lives[-1].get("text") or lives[-1].get("message") or "")
        return {"state": "finished" if state == "finished" else "failed", "word": state, "why": why}
    steps, total = run.metrics.steps, total_steps(run)
    state, word = ("running", "running") if steps else ("waiting", "starting")
    if steps and total is not None and steps[-1] >= total:
        state = word = "finished"
    return {"state": state, "word": word, "why": ""}


def elapsed(metrics: Metrics) -> float | None:
    """Seconds of work: the steps' own times, so that the pause before a resume does not count."""
    for name in ("timing_s/step", "train/time"):
        if name in metrics.columns:
            return sum(v for v in metrics.columns[name] if v is not None)
    times = [t for t in metrics.times if t is not None]
    return times[-1] - times[0] if len(times) > 1 else None


def headline(metrics: Metrics) -> list[Record]:
    """The figures on top: `{label, name, from, to, value, better, note}`, only those the run has."""
    figures = _single_figures(metrics)
    if not figures and (name := accuracy_name(metrics)):
        label, points = validation_label(metrics, name), present(metrics, name)
        figures.append(_change(label, name, points, window=1, up=name != "val/loss"))
    for label, key, up in (("Mean score", "critic/score/mean", True), ("Training loss", "train/loss", False)):
        if points := present(metrics, key):
            figures.append(_change(label, key, points, window=max(1, len(points) // 20), up=up))
    step = "timing_s/step" if present(metrics, "timing_s/step") else "train/time"
    for label, key, unit in (
        ("Throughput", "perf/throughput", "tokens/s per device"),
        ("Step time", step, "s"),
    ):
        if recent := [v for _, v in present(metrics, key)][-50:]:
            note = "median of the last " + (f"{len(recent)} steps" if len(recent) > 1 else "step")
            median = statistics.median(recent)
            figures.append({"label": label, "name": key, "value": median, "unit": unit, "note": note})
    return figures


def _single_figures(metrics: Metrics) -> list[Record]:
    """Of evaluation and generation, which train nothing: the accuracy by data source; speed and lengths."""
    last = {name: column[-1] for name, column in metrics.columns.items() if column and column[-1] is not None}
    figures: list[Record] = []
    for name in [name for name in last if EVALUATED.match(name)][:4]:
        source = name.removeprefix("eval/").removesuffix("/accuracy")
        note = f"interval {last[f'{name}_low']:.3g} to {last[f'{name}_high']:.3g}"
        figures.append(_figure(f"Accuracy, {source}", name, last, "", note))
    if SPEED in last:
        figures.append(_figure("Sampling", SPEED, last, "tokens/s", f"{last['generation/num_prompts']:g} prompts"))
        note = f"longest {last['response_length/max']:g}, {last['response_length/clip_ratio']:.0%} cut at the limit"
        figures.append(_figure("Mean response", "response_length/mean", last, "tokens", note))
    return figures


def _figure(label: str, name: str, values: Record, unit: str, note: str) -> Record:
    return {"label": label, "name": name, "value": values[name], "unit": unit, "note": note}


def _change(label: str, name: str, points: list[tuple[int, float]], window: int, up: bool) -> Record:
    if len(points) == 1:
        step, value = points[0]
        return {"label": label, "name": name, "value": value, "unit": "", "note": f"at step {step}"}
    first = statistics.fmean(v for _, v in points[:window])
    last = statistics.fmean(v for _, v in points[-window:])
    step, best = (max if up else min)(points, key=lambda p: p[1])
    note = f"means of the first and last {window} steps" if window > 1 else f"best {best:.4g} at step {step}"
    return {"label": label, "name": name, "from": first, "to": last, "up": up, "note": note}


def facts(run: Run) -> list[tuple[str, str]]:
    """Key settings as (label, text); those the config lacks are left out."""
    values = [(label, lookup(run.config, path)) for label, path in FACTS]
    switched = [(label, ("off", "on")[v] if isinstance(v, bool) else v) for label, v in values]
    return [(label, str(value)) for label, value in switched if value is not None]


def model_name(run: Run) -> str:
    """Last two parts of the model's path, as a person would say it."""
    for path in ("actor_rollout_ref.model.path", "model.path", "model.partial_pretrain"):
        value = lookup(run.config, path)
        if isinstance(value, str) and value:
            return "/".join(value.rstrip("/").split("/")[-2:])
    return ""


def device_name(run: Run) -> str:
    """What the run computed on: what its start or plan event says, else the config."""
    for event in reversed(run.events.marks):
        if isinstance(event.get("device"), str):
            return event["device"]
    device = lookup(run.config, "trainer.device")
    count = number(lookup(run.config, "trainer.n_gpus_per_node"))
    nodes = number(lookup(run.config, "trainer.nnodes"))
    if not device:
        return ""
    many = int((count or 1) * (nodes or 1))
    return f"{many} × {device}" if many > 1 else str(device)
