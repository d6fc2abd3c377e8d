"""Our whole loop on the shared work, one step for each line on stdin, with the default settings.

python verl_worker.py WORK_DIR --precision default|fp32 --threads N [key=value …]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path


def peak_gib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 2**20
    return float("nan")


def overrides(work_dir: Path, work: dict, precision: str) -> list[str]:
    shape = work["shape"]
    longest = max(max(row) for row in work["lengths"])
    keys = [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={work_dir / 'prompts.parquet'}",
        "data.val_files=null",
        f"data.train_batch_size={shape['prompts']}",
        f"data.max_prompt_length={max(work['prompt_tokens'])}",
        f"data.max_response_length={longest}",
        f"actor_rollout_ref.model.path={work_dir / 'model'}",
        f"actor_rollout_ref.rollout.n={shape['answers']}",
        "actor_rollout_ref.rollout.name=native",
        "actor_rollout_ref.rollout.agent.default_agent_loop=exact_length",
        f"custom_reward_function.path={Path(__file__).parent / 'bench_reward.py'}",
        f"trainer.default_local_dir={work_dir / 'verl_out'}",
        "trainer.resume_mode=disable",
        "trainer.total_training_steps=1000",
        "trainer.device=cpu",
        "trainer.val_before_train=False",
        "trainer.logger=[]",
    ]
    if precision == "fp32":
        keys += ["actor_rollout_ref.actor.fsdp_config.dtype=float32"]
    return keys


def register_exact_length() -> None:
    """An agent loop whose answers have the lengths that the work prescribes."""
    from verl.rollout.agent_loop import AgentLoopOutput, SingleTurnAgent, register

    @register("exact_length")
    class ExactLength(SingleTurnAgent):
        async def run(self, sampling_params, **row) -> AgentLoopOutput:
            length = row["extra_info"]["lengths"][row["sample_index"]]
            return await super().run(replace(sampling_params, max_tokens=length, ignore_eos=True), **row)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("--precision", default="default")
    parser.add_argument("--threads", type=int, default=1)
    args, extra = parser.parse_known_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from verl.platform.environment import prepare_process

    prepare_process()
    import torch

    from verl.config import load
    from verl.tracking.tracker import Tracking
    from verl.trainer.ppo_trainer import PPOTrainer
    from verl.trainer.run import build_parts

    torch.set_num_threads(args.threads)
    register_exact_length()
    work = json.loads((args.work / "work.json").read_text())
    config = load([*overrides(args.work, work, args.precision), *extra])
    tracking = Tracking(config, args.work / "verl_out")
    with asyncio.Runner() as loop:
        parts, total = build_parts(config, tracking, loop)
        trainer = PPOTrainer(config, parts, total)
        parts.weight_sync.push(0)
        print(json.dumps({"ready": True}), file=out, flush=True)
        for line in sys.stdin:
            assert line
            trainer.step += 1
            wall, cpu = time.perf_counter(), time.process_time()
            trainer._one_step(trainer.step)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            timings = parts.phases.timings()
            sampling = timings["gen"] + timings["reward"]
            tokens = int(trainer.last_batch.lengths.sum())
            record = {
                "step": wall,
                "sampling": sampling,
                "training": wall - sampling,
                "cpu": cpu,
                "peak_gib": peak_gib(),
            }
            print(json.dumps(record | {"tokens": tokens, "timings": timings}), file=out, flush=True)
        parts.rewards.close()
        parts.sampler.close()


if __name__ == "__main__":
    main()
