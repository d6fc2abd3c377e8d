"""The whole loop on one device, on random models of real shapes: how fast, of what limit, with how much memory.

    python benchmarks/gpu_loop.py [--shape 0.6b,1.7b,4b,8b] [--engine native,vllm] [--trl] [--steps 3] [--json FILE]
    python benchmarks/gpu_loop.py --shape tiny --device cpu            # seconds on a processor; what CI runs

For each shape and engine, in a process of its own: seconds from its start to the first token; then steps of GRPO with
responses of exactly --tokens tokens. Said of the median step, the first one left out:

- sampling: tokens a second; share of the bandwidth limit, i.e. the time that reading weights and keys and values once
  for each decoding pass takes at the copy rate measured in the same run (a prompt's once for all of its responses),
  over the time of sampling, prefill included;
- training: model FLOP utilisation, i.e. 3 forward passes' products (no recomputation) over time and measured product
  rate; `mfu` counts a group's prompt once, as it is computed, `mfu_as_repeated` once for each response;
- most memory by phase. With --trl, TRL's GRPOTrainer does the same work, in an environment of its own.

A side that fails (out of memory, engine not installed, later than --limit) is recorded as such; the others go on.
--json is written after each.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import work
from sides import HERE, Side, SideEnded, trl_python

QWEN3: dict[str, Any] = {"vocab": 151936, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
QWEN3 |= {"prompts": 32, "responses": 8, "tokens": 512}
SHAPES = {
    "tiny": work.Shape(prompts=2, responses=2, tokens=8, layers=2, hidden=64, intermediate=128, heads=4, vocab=512),
    "0.6b": work.Shape(layers=28, hidden=1024, intermediate=3072, heads=16, **QWEN3),
    "1.7b": work.Shape(layers=28, hidden=2048, intermediate=6144, heads=16, **QWEN3),
    "4b": work.Shape(layers=36, hidden=2560, intermediate=9728, heads=32, **QWEN3),
    "8b": work.Shape(layers=36, hidden=4096, intermediate=12288, heads=32, tied=False, **QWEN3),
}
PHASES = ("gen", "reward", "old_log_prob", "update_actor", "update_weights")
BYTES = {"float32": 4, "bfloat16": 2}


def weights_of(content: dict[str, Any]) -> float:
    """Weights that every token is multiplied with: all but the input embedding."""
    shape = content["shape"]
    return content["parameters"] - (0 if shape["tied"] else shape["vocab"] * shape["hidden"])


def pass_flops(content: dict[str, Any], *, repeated: bool) -> float:
    """FLOPs of one forward pass over the step's sequences: products, and attention over causal pairs.

    The head counts at all tokens of a response and at none of a prompt. `repeated`: each response with its own prompt.
    """
    shape = content["shape"]
    head = shape["vocab"] * shape["hidden"]
    body = weights_of(content) - head
    pair = 4.0 * shape["layers"] * shape["heads"] * (shape["head_dim"] or shape["hidden"] // shape["heads"])
    total = 0.0
    for prompt, responses in zip(content["prompt_tokens"], content["lengths"], strict=True):
        times = len(responses) if repeated else 1
        total += times * (2 * body * prompt + pair * prompt * (prompt + 1) / 2)
        for length in responses:
            total += 2 * (body + head) * length + pair * (length * prompt + length * (length + 1) / 2)
    return total


def decode_bytes(content: dict[str, Any], dtype: str) -> float:
    """Bytes that decoding has to read: all weights once a pass, a prompt's keys and values once a pass for all of its
    responses, those of each response still going."""
    shape = content["shape"]
    width = shape["head_dim"] or shape["hidden"] // shape["heads"]
    per_token = 2 * shape["layers"] * shape["kv_heads"] * width
    groups = list(zip(content["prompt_tokens"], content["lengths"], strict=True))
    longest = max(max(lengths) for _, lengths in groups)
    # The first token comes from the prefill.
    cached = sum(
        prompt * (max(lengths) - 1) + sum(length * (length - 1) / 2 for length in lengths) for prompt, lengths in groups
    )
    return BYTES[dtype] * ((longest - 1) * weights_of(content) + per_token * cached)


def optimizer_for(content: dict[str, Any], memory_gib: float, kind: str) -> str:
    """What fits: AdamW with float32 state (16 bytes a weight), SGD (8), else LoRA on the frozen model.

    Beside them: a bfloat16 copy of the weights, keys and values of all responses, a tenth for activations.
    """
    if kind == "cpu":
        return "adamw"
    longest = max(length for row in content["lengths"] for length in row)
    cache = decode_bytes(content, "bfloat16") - 2 * (longest - 1) * weights_of(content)
    room = memory_gib * 2**30 * 0.9 - 2 * cache / longest
    need = content["parameters"]
    return next((name for name, size in (("adamw", 16), ("sgd", 8)) if need * (size + 2) < room), "lora")


def keys_for(engine: str, optimizer: str, content: dict[str, Any]) -> list[str]:
    """Overrides beside those of the shared work."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    rows = sum(len(row) for row in content["lengths"])
    keys = [f"{rollout}.name={engine}", f"{rollout}.max_num_seqs={rows}", f"{actor}.optim.lr=1e-6"]
    if optimizer == "sgd":
        keys += [f"{actor}.optim.optimizer=SGD"]
    if optimizer == "lora":
        keys += ["actor_rollout_ref.model.lora_rank=64", "actor_rollout_ref.model.lora_alpha=64"]
    return keys


def limits(device: str, dtype: str) -> dict[str, Any]:
    """See limits.py; in a process of its own, so that nothing of it stays on the device."""
    command = [sys.executable, str(HERE / "limits.py"), "--device", device, "--dtype", dtype]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the device's limits cannot be measured:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def build(folder: Path, shape: work.Shape, device: str) -> dict[str, Any]:
    """The shared work, made in a process of its own."""
    command = [sys.executable, str(HERE / "work.py"), str(folder), json.dumps(asdict(shape)), device]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SideEnded(f"the work cannot be built:\n{done.stderr[-2000:]}")
    return json.loads((folder / "work.json").read_text())


def run(
    name: str, command: list[str], steps: int, threads: int | None, limit: float | None = None
) -> tuple[Side | None, str]:
    """A side after its steps, or why there is none."""
    try:
        side = Side(name, command, threads, limit)
        for number in range(steps + 1):
            record = side.step()
            print(f"  {name}: step {number} {record['step']:.2f} s", file=sys.stderr, flush=True)
        side.close()
        return side, ""
    except SideEnded as error:
        return None, str(error)[-1500:]


def ours(side: Side, content: dict[str, Any], best: dict[str, Any]) -> dict[str, Any]:
    """What a run of ours comes to, held against the device's limits."""
    records = side.records[1:]
    tokens = sum(sum(row) for row in content["lengths"])

    def phase(name: str) -> float:
        return statistics.median(r["timings"].get(name, 0.0) for r in records)

    gen, update = phase("gen"), phase("update_actor")
    rate, copy = best["matmul_flops"], best["copy_bytes"]
    return {
        "device": side.ready["device"],
        "start_to_first_token_s": side.start_s,
        "step_s": statistics.median(r["step"] for r in records),
        "phases_s": {name: phase(name) for name in PHASES},
        "sampling_tokens_per_s": tokens / gen,
        "sampling_share_of_bandwidth": decode_bytes(content, best["dtype"]) / copy / gen,
        "mfu": 3 * pass_flops(content, repeated=False) / update / rate,
        "mfu_as_repeated": 3 * pass_flops(content, repeated=True) / update / rate,
        "peak_gib_by_phase": {k: max(r["memory"].get(k, 0.0) for r in records) for k in records[0]["memory"]},
        "device_used_gib_by_phase": records[-1]["device_used"],
    }


def theirs(side: Side, content: dict[str, Any]) -> dict[str, Any]:
    """TRL's step."""
    tokens = sum(sum(row) for row in content["lengths"])
    found = {f"{k}_s": side.median(k) for k in ("step", "sampling", "training")}
    found |= {"start_s": side.start_s, "sampling_tokens_per_s": tokens / found["sampling_s"]}
    peaks = [r.get("device_peak_gib") for r in side.records]
    return found | {"peak_gib": max((p for p in peaks if p is not None), default=side.records[-1]["peak_gib"])}


def one_shape(
    name: str,
    args: argparse.Namespace,
    best: dict[str, Any],
    folder: Path,
    extra: list[str],
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """All sides on one shape; `keep` gets what is known after each."""
    given = {k: v for k in ("prompts", "responses", "tokens") if (v := getattr(args, k)) is not None}
    shape = replace(SHAPES[name], **given)
    where = folder / name
    print(f"{name}: building the work …", file=sys.stderr, flush=True)
    try:
        content = build(where, shape, best["kind"])
    except SideEnded as error:
        return {"failed": str(error)}
    optimizer = args.optimizer or optimizer_for(content, best["memory_gib"], best["kind"])
    result: dict[str, Any] = {
        "parameters": content["parameters"],
        "optimizer": optimizer,
        "work": {k: getattr(shape, k) for k in ("prompts", "responses", "tokens")},
        "prompt_tokens": content["prompt_tokens"],
    }
    common = [str(where), "--threads", str(args.threads or 0), "--device", best["kind"]]
    common += ["--precision", "fp32"] if best["dtype"] == "float32" else []
    for engine in args.engine.split(","):
        if engine != "native" and importlib.util.find_spec(engine) is None:
            result[engine] = {"failed": f"{engine} is not installed here"}
            continue
        command = [sys.executable, str(HERE / "workers/verl_worker.py"), *common]
        command += [*keys_for(engine, optimizer, content), *extra]
        side, why = run(engine, command, args.steps, args.threads, args.limit)
        result[engine] = ours(side, content, best) if side else {"failed": why}
        keep(result)
    if args.trl and optimizer == "lora":
        result["trl"] = {"failed": "not compared: only adapters fit on this device"}
    elif args.trl:
        more = ["--optimizer", "sgd"] if optimizer == "sgd" else []
        command = [
            trl_python(args.trl_python, args.folder),
            str(HERE / "workers/trl_worker.py"),
            *common,
            *more,
        ]
        side, why = run("trl", command, args.steps, args.threads, args.limit)
        result["trl"] = theirs(side, content) if side else {"failed": why}
    trl = result.get("trl", {}).get("step_s")
    for engine in args.engine.split(","):
        if trl and "step_s" in result[engine]:
            result[f"ratio_trl_over_{engine}"] = trl / result[engine]["step_s"]
    return result


def rounded(value: Any) -> Any:
    """Four significant digits, for people."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="0.6b,1.7b,8b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--engine", default="native", help="native, vllm")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=list(BYTES), default="bfloat16")
    parser.add_argument("--steps", type=int, default=3, help="that count; one more warms up")
    for key in ("prompts", "responses", "tokens"):
        parser.add_argument(f"--{key}", type=int)
    parser.add_argument("--optimizer", choices=["adamw", "sgd", "lora"], help="else what fits into the memory")
    parser.add_argument("--limit", type=float, help="seconds that a side may take with all its steps")
    parser.add_argument("--threads", type=int, help="else what the libraries choose")
    parser.add_argument("--trl", action="store_true")
    parser.add_argument("--trl-python", help="of an environment that has TRL")
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache/verl/bench", help="of TRL's environment")
    parser.add_argument("--json", type=Path)
    args, extra = parser.parse_known_args()
    names = args.shape.split(",")
    if unknown := [n for n in names if n not in SHAPES]:
        parser.error(f"--shape {', '.join(unknown)}: choose from {', '.join(SHAPES)}")
    best = limits(args.device, args.dtype)
    result: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "limits": best, "shapes": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:

            def keep(found: dict[str, Any], name: str = name) -> None:
                result["shapes"][name] = found
                if args.json:  # a session may end
                    args.json.write_text(json.dumps(rounded(result), indent=1) + "\n")

            found = one_shape(name, args, best, Path(folder), extra, keep)
            found["matmul_flops_after"] = limits(args.device, args.dtype)["matmul_flops"]
            keep(found)
            print(json.dumps(rounded(found), indent=1), flush=True)
    if not args.json:
        print(json.dumps(rounded(result), indent=1))


if __name__ == "__main__":
    main()
