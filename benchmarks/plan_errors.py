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

from plan_models import BENCHMARK, MODELS

from verl.config import load
from verl.planning import devices
from verl.planning.calibration import CALIBRATED, Calibration
from verl.planning.devices import GIB, Device
from verl.planning.memory import passing, state, total
from verl.planning.model import model_size
from verl.planning.plan import Plan
from verl.planning.plan import plan as make_plan
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


RESULTS = Path(__file__).parent / "results"
PROCESSOR = Device("cpu", 448e9, 225e9, 16e9, 12e9, 6e9, 1e9, forecast=False)
"""That of the committed results, one thread; they do not say the memory's bandwidth: 12 GB/s are assumed."""


def host_rows() -> list[tuple[str, float, float]]:
    """(what, planned, measured): this project's own steps on a processor, as benchmarks/results has them. The work is
    that of `work.py`: 26 M parameters, prompts of 67 tokens, 8 responses each."""
    rows = []
    for name, dtype in (("default", "bfloat16"), ("fp32", "float32")):
        measured = json.loads((RESULTS / f"grpo_step_{name}.json").read_text())["verl"]
        plan = host_plan(dtype, 16, 128)
        most = max(map(total, plan.memory.values())) / GIB
        rows.append((f"{dtype}, 128 responses of 128 tokens: sampling, s", plan.seconds["gen"], measured["sampling"]))
        rows.append((f"{dtype}: training, s", plan.seconds["update_actor"], measured["training"]))
        rows.append((f"{dtype}: peak, GiB", most, measured["peak_gib"]))
    growth = json.loads((RESULTS / "scaling.json").read_text())
    for count, seconds in growth["answers"]["cpu_s"].items():
        rows.append(
            (f"{count} responses of 64 tokens: step, s", host_plan("bfloat16", int(count) // 8, 64).step, seconds)
        )
    for length, seconds in growth["tokens"]["cpu_s"].items():
        rows.append((f"16 responses of {length} tokens: step, s", host_plan("bfloat16", 2, int(length)).step, seconds))
    return rows


def host_plan(dtype: str, prompts: int, response: int) -> Plan:
    """The plan of a benchmark's step."""
    words = [
        "data.train_files=x",
        "data.max_prompt_length=128",
        f"data.max_response_length={response}",
        f"data.train_batch_size={prompts}",
        "actor_rollout_ref.model.path=x",
        "actor_rollout_ref.rollout.n=8",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
        f"actor_rollout_ref.actor.fsdp_config.dtype={dtype}",
        "algorithm.adv_estimator=grpo",
        "trainer.device=cpu",
    ]
    return make_plan(load(words), BENCHMARK, PROCESSOR, prompt=67, response=response)


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
    print("| own step on a processor | planned | measured | error |", "|---|---|---|---|", sep="\n")
    for what, planned, measured in host_rows():
        print(f"| {what} | {planned:.2f} | {measured:.2f} | {planned / measured - 1:+.0%} |")
    print(f"own steps: median error {median([p / m - 1 for _, p, m in host_rows()]):.1%}")
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
