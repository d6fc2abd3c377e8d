"""One GRPO step, us against TRL's GRPOTrainer, on the same work, alternating; prints ratios of medians.

    python benchmarks/grpo_step.py [--precision default|fp32] [--lengths exact|geometric] [--threads 1] [--repeats 3]
    python benchmarks/grpo_step.py --shape 0.5b --prompts 4 --responses 4 --tokens 64 --kl 0.001 --threads 2
    python benchmarks/grpo_step.py --only verl --engines native vllm sglang=PYTHON --precision fp32 --prompts 4

Same random model, prompts, responses per prompt, exact response lengths, one optimizer step. TRL is installed by this
script in an environment of its own (--trl-python names an existing one). The first step of each side warms up. With
several --engines each sampling engine is a side; PYTHON is that of an environment which has the engine. `cpu` and
`peak_gib` are of the training process alone.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from sides import HERE, Side, SideEnded, trl_python, write_result


def matmul_gflops(threads: int, precision: str) -> float:
    """Measured product rate at the model's main shape, GFLOP/s, through the fastest library here: the step's limit."""
    dtype = "float32" if precision == "fp32" else "bfloat16"
    code = (
        "from verl.platform import detect;detect('cpu').prepare()\n"
        f"import torch,time;torch.set_num_threads({threads});d=torch.{dtype}\n"
        "a=torch.randn(2048,512).to(d);b=torch.randn(1536,512).to(d)\n"
        "for _ in range(5): a@b.T\n"
        "n=40;t=time.perf_counter()\n"
        "for _ in range(n): a@b.T\n"
        "print(n*2*2048*512*1536/(time.perf_counter()-t)/1e9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    import work

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", choices=["default", "fp32"], default="default")
    parser.add_argument("--lengths", choices=["exact", "geometric"], default="exact")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--data", type=Path, help="GSM8K's train.jsonl; synthetic prompts without it")
    parser.add_argument("--trl-python")
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache/verl/bench")
    parser.add_argument("--only", choices=["verl", "trl"])
    parser.add_argument("--engines", nargs="+", default=["native"], metavar="NAME[=PYTHON]")
    parser.add_argument("--shape", choices=work.SHAPES, default="26m")
    parser.add_argument("--kl", type=float, default=0.0, help="coefficient of a KL term in the loss")
    parser.add_argument("--prompts", type=int, default=work.Shape.prompts)
    parser.add_argument("--responses", type=int, default=work.Shape.responses)
    parser.add_argument("--tokens", type=int, default=work.Shape.tokens)
    parser.add_argument("--json", type=Path)
    args, extra = parser.parse_known_args()
    sizes = work.SHAPES[args.shape]
    shape = work.Shape(
        lengths=args.lengths, prompts=args.prompts, responses=args.responses, tokens=args.tokens, **sizes
    )
    common, sides = ["--precision", args.precision, "--threads", str(args.threads)], []
    if args.kl:
        actor = "actor_rollout_ref.actor"
        extra += [f"{actor}.use_kl_loss=True", f"{actor}.kl_loss_coef={args.kl}"]
    for engine in args.engines:
        name, _, python = engine.partition("=")
        folder = args.folder / f"work_{args.shape}_{args.lengths}_{name}"
        content = work.build(folder, shape, args.data)
        if args.only != "trl":
            worker = [python or sys.executable, str(HERE / "workers/verl_worker.py"), str(folder), *common, *extra]
            title = name if len(args.engines) > 1 else "verl"
            sides.append(Side(title, [*worker, f"actor_rollout_ref.rollout.name={name}"], args.threads))
    if args.only != "verl":
        python = trl_python(args.trl_python, args.folder)
        worker = [python, str(HERE / "workers/trl_worker.py"), str(folder), *common, "--beta", str(args.kl)]
        sides.append(Side("trl", worker, args.threads))
    rates = [matmul_gflops(args.threads, args.precision)]
    for number in range(args.repeats + 1):
        for side in sides:
            record = side.step()
            record["weights"] = record.get("timings", {}).get("update_weights", 0.0)
            print(
                f"{side.name:6} step {number} {record['step']:7.2f} s  sampling {record['sampling']:7.2f}  "
                f"training {record['training']:7.2f}  weights {record['weights']:6.3f}  cpu {record['cpu']:7.2f}  "
                f"peak {record['peak_gib']:.2f} GiB",
                flush=True,
            )
        rates.append(matmul_gflops(args.threads, args.precision))
    for side in sides:
        side.close()
    report(args, content, sides, statistics.median(rates))


def report(args: argparse.Namespace, content: dict, sides: list[Side], rate: float) -> None:
    import work

    by_name = {side.name: side for side in sides}
    flops = work.least_flops(content)
    least = sum(flops.values()) / rate / 1e9
    result = {"date": time.strftime("%Y-%m-%d"), "precision": args.precision, "lengths": args.lengths}
    result |= {"parameters": content["parameters"], "kl": args.kl}
    result |= {"prompts": args.prompts, "responses": args.responses, "tokens": args.tokens}
    result |= {"threads": args.threads, "matmul_gflops": round(rate, 1), "least_work_s": round(least, 2)}
    for side in sides:
        keys = ("step", "sampling", "training", "weights", "cpu", "peak_gib")
        result[side.name] = {k: round(side.median(k), 3 if k == "weights" else 2) for k in keys}
    if by_name.keys() == {"verl", "trl"}:
        ratio = {
            k: round(by_name["trl"].median(k) / by_name["verl"].median(k), 2)
            for k in ("step", "sampling", "training", "cpu")
        }
        result["ratio_trl_over_verl"] = ratio
    if "verl" in by_name:
        result["verl_share_of_matmul_limit"] = round(least / by_name["verl"].median("step"), 3)
    write_result(result, args.json)


if __name__ == "__main__":
    try:
        main()
    except SideEnded as error:
        raise SystemExit(str(error)) from None
