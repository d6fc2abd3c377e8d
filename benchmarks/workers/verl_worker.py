"""Our whole loop on the shared work, one step for each line on stdin, with the default settings.

python verl_worker.py WORK_DIR --precision default|fp32 --threads N [--device cpu|auto|cuda|npu] [key=value …]

Besides the times of a step, a record has the most memory that each phase used (`memory`: this process, where the device
can count anew; `device_used`: all that is taken of the device after the phase, other processes' too).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PHASES = ("gen", "old_log_prob", "ref", "update_actor", "update_weights")


def peak_gib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 2**20
    return float("nan")


def overrides(work_dir: Path, work: dict, precision: str, device: str = "cpu") -> list[str]:
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
        f"actor_rollout_ref.rollout.n={shape['responses']}",
        "actor_rollout_ref.rollout.name=native",
        "actor_rollout_ref.rollout.agent.default_agent_loop=exact_length",
        f"custom_reward_function.path={Path(__file__).parent / 'bench_reward.py'}",
        f"trainer.default_local_dir={work_dir / 'verl_out'}",
        "trainer.resume_mode=disable",
        "trainer.total_training_steps=1000",
        f"trainer.device={device}",
        "trainer.val_before_train=False",
        "trainer.logger=[]",
    ]
    if precision == "fp32":
        keys += ["actor_rollout_ref.actor.fsdp_config.dtype=float32"]
    return keys


class Memory:
    """Memory of the phases of a step, GiB."""

    def __init__(self, platform: Any):
        self.platform = platform
        self.peak: dict[str, float] = {}
        self.used: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Frame a phase."""
        if phase not in PHASES:
            yield
            return
        if not self.platform.on_host:
            self.platform.module.reset_peak_memory_stats()
        yield
        self.platform.synchronize()
        free, total = self.platform.memory()
        self.peak[phase] = self.platform.peak_memory() / 2**30
        self.used[phase] = (total - free) / 2**30


def first_token(parts: Any, prompt: list[int]) -> None:
    """Sample one token."""
    from verl.engine.rollout.base import SamplingParams

    params = SamplingParams(max_tokens=1, ignore_eos=True)
    parts.loop.run(parts.workers.sampler.generate(prompt, params, request_id="first"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("--precision", default="default")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    args, extra = parser.parse_known_args()
    if args.threads:
        os.environ["OMP_NUM_THREADS"] = str(args.threads)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from verl.platform.host_resources import prepare_process

    prepare_process()
    sys.path.insert(0, str(Path(__file__).parent))
    import exact_length
    import torch

    assert exact_length.ExactLength  # registered
    from verl.config import load
    from verl.platform import detect
    from verl.tracking.hooks import RunHooks
    from verl.tracking.timer import Phases
    from verl.tracking.tracker import Tracking
    from verl.trainer.parts import build_parts
    from verl.trainer.ppo_trainer import PPOTrainer

    class Measured(PPOTrainer):
        """Keeps the batch of the step that was done last."""

        def sample(self, step: int) -> Any:
            self.sampled = super().sample(step)
            return self.sampled

    if args.threads:
        torch.set_num_threads(args.threads)
    work = json.loads((args.work / "work.json").read_text())
    config = load([*overrides(args.work, work, args.precision, args.device), *extra])
    tracking = Tracking(config, args.work / "verl_out")
    with asyncio.Runner() as loop:
        parts, total = build_parts(config, tracking, loop, Phases(), RunHooks(tracking.event, tracking.notice))
        trainer = Measured(config, parts, total)
        memory = parts.phases.mark = Memory(detect(args.device))
        parts.workers.weight_sync.push(0)
        first_token(parts, [2] * 16)
        print(json.dumps({"ready": True, "device": parts.workers.describe}), file=out, flush=True)
        for line in sys.stdin:
            assert line
            trainer.step += 1
            wall, cpu = time.perf_counter(), time.process_time()
            trainer._train_step(trainer.step)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            timings = parts.phases.timings()
            sampling = timings["gen"] + timings["reward"]
            tokens = int(trainer.sampled.lengths.sum())
            record = {
                "step": wall,
                "sampling": sampling,
                "training": wall - sampling,
                "cpu": cpu,
                "peak_gib": peak_gib(),
            }
            record |= {
                "tokens": tokens,
                "timings": timings,
                "memory": memory.peak,
                "device_used": memory.used,
            }
            print(json.dumps(record), file=out, flush=True)
        parts.rewards.close()
        parts.workers.close()


if __name__ == "__main__":
    main()
