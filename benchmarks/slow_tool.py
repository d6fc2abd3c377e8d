"""A slow tool and the sampler: who works when, with max_staleness=0 and 1, and with a tool that is not slow, over many
open trajectories.

    python benchmarks/slow_tool.py [--groups 63] [--steps 5] [--slow 3.0] [--staleness 0 1] [--svg docs/slow_tool.svg]

A small random model plays three turns in `workers/slow_env.py`, where one step in ten takes `--slow` seconds. One
process samples, one trains, one runs the environments. What a slow tool costs is the difference to the same run with
`--slow 0`. 63 groups of 8 are 504 trajectories a step, about 1,000 open with max_staleness=1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples/quickstart")]

from async_timeline import figures, load, records, svg  # noqa: E402


def prepare(out: Path, rows: int) -> None:
    """A model of 1 M random weights and prompts of a word."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from build_model import build_model, build_tokenizer

    build_model(out / "model", build_tokenizer(["go on"], out / "model"), hidden=128, layers=4)
    prompts = [
        {
            "data_source": "slow",
            "prompt": [{"role": "user", "content": f"{i}"}],
            "reward_model": {"style": "rule", "ground_truth": ""},
        }
        for i in range(rows)
    ]
    pq.write_table(pa.Table.from_pylist(prompts), out / "prompts.parquet")


def train(out: Path, staleness: int, slow: float, args: argparse.Namespace) -> Path:
    """One run; returns its folder. RuntimeError with the end of its log if it fails."""
    rollout, run = "actor_rollout_ref.rollout.", out / f"staleness_{staleness}_{slow}"
    words = [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={out / 'prompts.parquet'}",
        "data.val_files=null",
        f"data.train_batch_size={args.groups}",
        "data.max_prompt_length=16",
        "data.max_response_length=128",
        f"actor_rollout_ref.model.path={out / 'model'}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={args.groups}",
        f"{rollout}n=8",
        f"{rollout}name=native",
        f"{rollout}stop_token_ids={list(range(5, 37))}",
        f"{rollout}agent.num_workers=1",
        f"{rollout}agent.environment.name=custom",
        f"{rollout}agent.environment.path={HERE / 'workers/slow_env.py:Slow'}",
        f"{rollout}nnodes=1",
        f"{rollout}n_gpus_per_node=1",
        f"trainer.default_local_dir={run}",
        f"trainer.max_staleness={staleness}",
        f"trainer.total_training_steps={args.steps}",
        "trainer.resume_mode=disable",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.val_before_train=False",
        "trainer.save_freq=-1",
        "trainer.logger=[]",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SLOW_STEP_S": str(slow)}
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"staleness {staleness}: exit {done.returncode}\n{done.stderr[-3000:]}")
    return run


def main() -> None:
    """Run both, print their figures, draw their timelines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=63)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--slow", type=float, default=3.0)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    timelines = {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        prepare(out, args.groups * args.steps)
        for staleness, slow in itertools.product(args.staleness, (args.slow, 0.0)):
            run = train(out, staleness, slow, args)
            name = f"max_staleness={staleness}, " + (f"a step in ten takes {slow:g} s" if slow else "no slow step")
            timelines[name] = load(run)
            found = records(run)
            ratio = found[args.steps]["agent/prefix_reuse_ratio"]
            print(name, json.dumps(figures(timelines[name], found) | {"prefix_reuse_ratio": ratio}), flush=True)
    if args.svg:
        args.svg.write_text(svg(timelines), encoding="utf-8")


if __name__ == "__main__":
    main()
