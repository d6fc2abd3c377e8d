"""TRL's GRPOTrainer on the shared work, one step for each line on stdin. Runs in its own environment.

python trl_worker.py WORK_DIR --precision default|fp32 --threads N [--device cpu|auto] [--optimizer NAME]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path


def device_peak_gib() -> float | None:
    """Most memory taken of an accelerator; None without one."""
    import torch

    if not torch.accelerator.is_available():
        return None
    return torch.accelerator.max_memory_allocated() / 2**30


def peak_gib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 2**20
    return float("nan")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("--precision", default="default")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--optimizer", help="TRL's name of it; its default without")
    args = parser.parse_args()
    if args.threads:
        os.environ["OMP_NUM_THREADS"] = str(args.threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    sys.path.insert(0, str(Path(__file__).parent))
    from bench_reward import score_text

    if args.threads:
        torch.set_num_threads(args.threads)
    work = json.loads((args.work / "work.json").read_text())
    shape = work["shape"]
    index = {prompt: i for i, prompt in enumerate(work["prompts"])}
    fp32 = args.precision == "fp32"
    tokenizer = AutoTokenizer.from_pretrained(args.work / "model")
    model = AutoModelForCausalLM.from_pretrained(args.work / "model", dtype=torch.float32)
    total = shape["prompts"] * shape["answers"]
    longest = max(max(row) for row in work["lengths"])
    settings = {
        "output_dir": str(args.work / "trl_out"),
        "use_cpu": args.device == "cpu",
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": total // 8,
        "num_generations": shape["answers"],
        "max_completion_length": longest,
        "max_steps": 1000,
        "beta": 0.0,
        "learning_rate": 1e-6,
        "logging_steps": 1000,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 1,
    }
    if fp32:
        settings |= {"bf16": False, "gradient_checkpointing": False}
    if args.optimizer:
        settings["optim"] = args.optimizer
    state = {"sampling": 0.0, "lengths": []}

    class Exact(LogitsProcessor):
        """Ends row i at its own length and not before."""

        def __init__(self, prompt_width: int, lengths: list[int]):
            self.width, self.lengths = prompt_width, torch.tensor(lengths)

        def __call__(self, input_ids, scores):
            # Nothing here waits for a device.
            done = input_ids.shape[1] - self.width
            self.lengths = self.lengths.to(scores.device)
            last = self.lengths <= done + 1
            scores.masked_fill_(last[:, None], float("-inf"))
            scores[:, 0] = torch.where(last, 0.0, float("-inf"))
            return scores

    class Wait(TrainerCallback):
        def on_step_begin(self, *_args, **_kwargs):
            if not sys.stdin.readline():
                os._exit(0)
            state["sampling"], state["start"] = 0.0, time.perf_counter()
            state["cpu"] = time.process_time()

        def on_step_end(self, *_args, **_kwargs):
            step = time.perf_counter() - state["start"]
            print(
                json.dumps(
                    {
                        "step": step,
                        "sampling": state["sampling"],
                        "training": step - state["sampling"],
                        "cpu": time.process_time() - state["cpu"],
                        "peak_gib": peak_gib(),
                        "device_peak_gib": device_peak_gib(),
                        "tokens": state["lengths"],
                    }
                ),
                file=out,
                flush=True,
            )

    def reward(completions, **_kwargs):
        state["lengths"] = sum(len(row) for row in _kwargs.get("completion_ids", []))
        return [score_text(text) for text in completions]

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(**settings),
        train_dataset=Dataset.from_list([{"prompt": p} for p in work["prompts"]]),
        processing_class=tokenizer,
        callbacks=[Wait()],
    )
    generate, sample = model.generate, trainer._generate_and_score_completions

    def generate_exact(*positional, **kwargs):
        ids = kwargs.get("input_ids", positional[0] if positional else None)
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        seen: dict[str, int] = {}
        lengths = []
        for text in texts:
            number = seen.get(text, 0)
            seen[text] = number + 1
            lengths.append(work["lengths"][index[text]][number])
        return generate(*positional, **kwargs, logits_processor=[Exact(ids.shape[1], lengths)])

    def timed(inputs):
        start = time.perf_counter()
        result = sample(inputs)
        state["sampling"] += time.perf_counter() - start
        return result

    model.generate = generate_exact
    trainer._generate_and_score_completions = timed
    print(json.dumps({"ready": True}), file=out, flush=True)
    trainer.train()


if __name__ == "__main__":
    main()
