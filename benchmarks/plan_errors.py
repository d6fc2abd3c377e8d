"""How far the planner is from measured training steps of another system, and the fit of its constants.

    python benchmarks/plan_errors.py MEASUREMENTS.json            # a table of rows with errors, medians of both halves
    python benchmarks/plan_errors.py MEASUREMENTS.json --fit      # fit the constants to the even rows first

Rows with an even index calibrate, rows with an odd one judge. `--leave-out` fits to the rows of all other models and
judges those of one, for each model in turn: no row of the judged model has been seen.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from plan_models import MODELS

from verl.planning import devices
from verl.planning.calibration import CALIBRATED, Calibration
from verl.planning.devices import GIB, Device
from verl.planning.memory import passing, state, total
from verl.planning.model import model_size
from verl.planning.timing import training_seconds, update_work
from verl.planning.workload import Role

Row = dict[str, Any]
MEMORY = ("layer", "routed", "gathered", "root", "logit")
START = Calibration(layer=0.5, routed=10, gathered=3, root=2, logit=16, dense=0.5, expert=0.4, attention=0.5)
START = replace(START, traffic=0.5, adapters=1.0, launch=5e-4)
"""Where a fit begins: round guesses."""
TIME = ("dense", "expert", "attention", "traffic", "adapters", "launch")


def role_of(row: Row) -> Role:
    """The training role of a measured row."""
    supervised = row["task"] == "sft"
    return Role(
        model=model_size(MODELS[row["model"]]),
        ranks=row["num_gpus"],
        gathers=True,
        adapter=row["lora_rank"] or 0,
        micro_tokens=row["seq_len"],
        offload_activations=row["activation_checkpointing"] == "Offload",
        full_logits=supervised,
    )


def memory(row: Row, c: Calibration = CALIBRATED) -> float:
    """Predicted GiB of a device at the peak."""
    role = role_of(row)
    return (total(state(role)) + total(passing(role, row["seq_len"], True, c))) / GIB


def seconds(row: Row, c: Calibration = CALIBRATED, shares: dict[str, Device] | None = None) -> float:
    """Predicted seconds of a step."""
    role = role_of(row)
    name = row["device"].removeprefix("NVIDIA ")
    device = devices.named(name)
    device = (shares or {}).get(device.name, device)
    tokens = row["seq_len"] * row["micro_batches"] * row["num_gpus"]
    return training_seconds(role, update_work(role), tokens, row["seq_len"], device, c)


def descend(loss: Callable[[list[float]], float], start: list[float]) -> list[float]:
    """A minimum of a function of positive numbers, coordinate by coordinate in factors."""
    best, least, step = list(start), loss(start), 0.4
    while step > 0.003:
        moved = False
        for at in range(len(best)):
            for factor in (math.exp(step), math.exp(-step)):
                tried = [*best[:at], best[at] * factor, *best[at + 1 :]]
                if (value := loss(tried)) < least:
                    best, least, moved = tried, value, True
        step = step if moved else step / 2
    return best


def fit(rows: list[Row]) -> tuple[Calibration, dict[str, Device]]:
    """Constants, and devices' shares, that bring the logarithms of predictions closest to the measured ones (sum of
    absolute differences; a weak pull to the start keeps what the rows say nothing of)."""
    start = [getattr(START, name) for name in MEMORY]

    def of(values: list[float]) -> Calibration:
        return replace(CALIBRATED, **dict(zip(MEMORY, values, strict=True)))

    def loss(values: list[float]) -> float:
        c = of(values)
        off = sum(abs(math.log(memory(row, c) / row["peak_memory_gib"])) for row in rows)
        return off + 0.01 * sum(abs(math.log(v / s)) for v, s in zip(values, start, strict=True))

    c = of(descend(loss, start))
    names = [("RTX A6000", "share"), ("B200", "share"), ("B200", "sparse")]
    first = [getattr(START, name) for name in TIME] + [1.0 for _ in names]

    def timed(values: list[float]) -> tuple[Calibration, dict[str, Device]]:
        scaled = {name: devices.named(name) for name, _ in names}
        for (name, field), value in zip(names, values[len(TIME) :], strict=True):
            scaled[name] = replace(scaled[name], **{field: value})
        return replace(c, **dict(zip(TIME, values, strict=False))), scaled

    def loss_of_time(values: list[float]) -> float:
        if max(values[:3]) > 0.85:  # no kernel is faster
            return math.inf
        fitted, scaled = timed(values)
        off = sum(abs(math.log(seconds(row, fitted, scaled) / row["step_time_s"])) for row in rows)
        return off + 0.01 * sum(abs(math.log(v / s)) for v, s in zip(values, first, strict=True))

    return timed(descend(loss_of_time, first))


def errors(rows: list[Row], c: Calibration, shares: dict[str, Device] | None) -> list[tuple[float, float]]:
    """(memory, time) relative errors of rows."""
    return [(memory(r, c) / r["peak_memory_gib"] - 1, seconds(r, c, shares) / r["step_time_s"] - 1) for r in rows]


def median(values: list[float]) -> float:
    """Of magnitudes."""
    return statistics.median(map(abs, values))


def main() -> None:
    """Print the table and the medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--leave-out", action="store_true")
    args = parser.parse_args()
    rows = json.loads(args.file.read_text())["rows"]
    c, shares = fit(rows[::2]) if args.fit else (CALIBRATED, None)
    if args.fit:
        print(c, *((d.name, d.share, d.sparse) for d in (shares or {}).values()), sep="\n")
    print("| row | device | model | task | tokens | GiB measured | planned | error | s measured | planned | error |")
    print("|---" * 11 + "|")
    for index, row in enumerate(rows):
        size, taken = memory(row, c), seconds(row, c, shares)
        of_size, of_time = size / row["peak_memory_gib"] - 1, taken / row["step_time_s"] - 1
        what = row["task"] + (" LoRA" if row["lora_rank"] else "")
        what += ", offload" if row["activation_checkpointing"] == "Offload" else ""
        device = f"{row['num_gpus']} × {row['device'].removeprefix('NVIDIA ').split(' 80GB')[0]}"
        print(
            f"| {index} | {device} | {row['model'].split('/')[1]} | {what} | {row['seq_len']} "
            f"| {row['peak_memory_gib']:.1f} | {size:.1f} | {of_size:+.0%} "
            f"| {row['step_time_s']:.1f} | {taken:.1f} | {of_time:+.0%} |"
        )
    for name, half in (("calibrating", rows[::2]), ("judging", rows[1::2])):
        sizes, times = zip(*errors(half, c, shares), strict=True)
        print(f"{name}: median error of memory {median(sizes):.1%}, of time {median(times):.1%} ({len(half)} rows)")
    if args.leave_out:
        off: list[tuple[float, float]] = []
        for model in MODELS:
            fitted = fit([row for row in rows[::2] if row["model"] != model])
            judged = errors([row for row in rows if row["model"] == model], *fitted)
            off += judged
            sizes, times = zip(*judged, strict=True)
            print(f"never seen, {model}: memory {median(sizes):.1%}, time {median(times):.1%} ({len(judged)} rows)")
        sizes, times = zip(*off, strict=True)
        print(f"models never seen: median error of memory {median(sizes):.1%}, of time {median(times):.1%}")


if __name__ == "__main__":
    main()
