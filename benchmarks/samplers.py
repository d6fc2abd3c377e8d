"""One GRPO step, and a push of its weights, with each sampling engine, on the same work, alternating; medians.

    python benchmarks/samplers.py native vllm sglang=/path/of/its/environment/bin/python [--repeats 5] [--json out.json]

An engine that this environment cannot hold is named with the Python of one that can. The first step of each warms up.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from sides import HERE, Side, SideEnded, write_result


def processor() -> str:
    """Its name, where the system tells it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def main() -> None:
    import work

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engines", nargs="+", help="name, or name=python")
    parser.add_argument("--precision", choices=["default", "fp32"], default="fp32")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache/verl/bench")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = args.folder / "work_samplers"
    shape, sides = work.Shape(prompts=args.prompts, tokens=args.tokens), []
    for engine in args.engines:
        name, _, python = engine.partition("=")
        content = work.build(folder / name, shape, None)
        command = [python or sys.executable, str(HERE / "workers/verl_worker.py"), str(folder / name), "--precision"]
        command += [args.precision, "--threads", str(args.threads), f"actor_rollout_ref.rollout.name={name}"]
        sides.append(Side(name, command, args.threads))
    for number in range(args.repeats + 1):
        for side in sides:
            record = side.step()
            record |= {phase: record["timings"][phase] for phase in ("gen", "update_weights")}
            print(
                f"{side.name:7} step {number} {record['step']:7.2f} s  sampling {record['gen']:7.2f}  "
                f"weights {record['update_weights']:7.3f}",
                flush=True,
            )
    result = {"date": time.strftime("%Y-%m-%d"), "processor": processor(), "load": os.getloadavg()[1]}
    result |= {name: getattr(args, name) for name in ("precision", "prompts", "tokens", "threads", "repeats")}
    result["parameters"] = content["parameters"]
    for side in sides:
        result[side.name] = {k: round(side.median(k), 3) for k in ("step", "gen", "update_weights")}
        side.close()
    write_result(result, args.json)


if __name__ == "__main__":
    try:
        main()
    except SideEnded as error:
        raise SystemExit(str(error)) from None
