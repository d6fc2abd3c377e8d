"""TRL's GRPOTrainer on the shared work, one step for each line on stdin. Runs in its own environment.

python trl_worker.py WORK_DIR --precision default|fp32 --threads N [--device cpu|auto] [--optimizer NAME] [--beta 0.0]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO


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


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("--precision", default="default")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--beta", type=float, default=0.0, help="coefficient of the KL term")
    parser.add_argument("--optimizer", help="TRL's name of it; its default without")
    return parser.parse_args()


def settings(args: argparse.Namespace, work: dict[str, Any]) -> dict[str, Any]:
    """Of TRL's GRPOConfig: its defaults but for the work, and for what reports and saves."""
    shape = work["shape"]
    total = shape["prompts"] * shape["responses"]
    batch = min(8, total)
    chosen: dict[str, Any] = {
        "output_dir": str(args.work / "trl_out"),
        "use_cpu": args.device == "cpu",
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": total // batch,
        "num_generations": shape["responses"],
        "max_completion_length": max(max(row) for row in work["lengths"]),
        "max_steps": 1000,
        "beta": args.beta,
        "learning_rate": 1e-6,
        "logging_steps": 1000,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 1,
    }
    if args.precision == "fp32":
        chosen |= {"bf16": False, "gradient_checkpointing": False}
    if args.optimizer:
        chosen["optim"] = args.optimizer
    return chosen


class Exact:
    """A logits processor that ends row i at its own length and not before, and samples none of the tokens `never`.
    Nothing in it waits for a device."""

    def __init__(self, prompt_width: int, lengths: list[int], never: list[int]):
        import torch

        self.width, self.lengths, self.never = prompt_width, torch.tensor(lengths), never

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        import torch

        done = input_ids.shape[1] - self.width
        self.lengths = self.lengths.to(scores.device)
        last = self.lengths <= done + 1
        scores.masked_fill_(last[:, None], float("-inf"))
        scores[:, 0] = torch.where(last, 0.0, float("-inf"))
        scores[:, self.never] = float("-inf")
        return scores


def exactly(generate: Callable[..., Any], tokenizer: Any, work: dict[str, Any]) -> Callable[..., Any]:
    """`generate` with each response as long as the work says."""
    index = {prompt: i for i, prompt in enumerate(work["prompts"])}

    def generate_exact(*positional: Any, **kwargs: Any) -> Any:
        ids = kwargs.get("input_ids", positional[0] if positional else None)
        seen: dict[str, int] = {}
        lengths = []
        for text in tokenizer.batch_decode(ids, skip_special_tokens=True):
            number = seen.get(text, 0)
            seen[text] = number + 1
            lengths.append(work["lengths"][index[text]][number])
        exact = Exact(ids.shape[1], lengths, work.get("never", []))
        return generate(*positional, **kwargs, logits_processor=[exact])

    return generate_exact


def rows_with_images(folder: Path, work: dict[str, Any]) -> list[dict[str, Any]]:
    """The prompts as TRL takes them: messages, and Pillow images that it puts before the text."""
    import io

    import pyarrow.parquet as pq
    from PIL import Image

    cells = pq.read_table(folder / "prompts.parquet", columns=["images"])["images"].to_pylist()
    return [
        {
            "prompt": [{"role": "user", "content": text}],
            "images": [Image.open(io.BytesIO(cell["bytes"])) for cell in images],
        }
        for text, images in zip(work["prompts"], cells, strict=True)
    ]


def text_of(completion: str | list[dict[str, Any]]) -> str:
    """Of messages, as TRL hands to rewards where prompts are messages, the response's text."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


class Clock:
    """Times of the step under way; one record for each step."""

    def __init__(self, out: TextIO):
        self.out, self.sampling, self.tokens = out, 0.0, 0

    def begin(self) -> None:
        """Waits for the next line on stdin."""
        if not sys.stdin.readline():
            os._exit(0)
        self.sampling, self.tokens = 0.0, 0
        self.start, self.cpu = time.perf_counter(), time.process_time()

    def timed(self, sample: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`sample`, its time counted as sampling."""

        def counted(inputs: Any) -> Any:
            start = time.perf_counter()
            result = sample(inputs)
            self.sampling += time.perf_counter() - start
            return result

        return counted

    def end(self) -> None:
        """Prints the record."""
        step = time.perf_counter() - self.start
        record = {
            "step": step,
            "sampling": self.sampling,
            "training": step - self.sampling,
            "cpu": time.process_time() - self.cpu,
            "peak_gib": peak_gib(),
            "device_peak_gib": device_peak_gib(),
            "tokens": self.tokens,
        }
        print(json.dumps(record), file=self.out, flush=True)


def main() -> None:
    args = arguments()
    if args.threads:
        os.environ["OMP_NUM_THREADS"] = str(args.threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoProcessor,
        AutoTokenizer,
        TrainerCallback,
    )
    from trl import GRPOConfig, GRPOTrainer

    sys.path.insert(0, str(Path(__file__).parent))
    from bench_reward import score_text

    if args.threads:
        torch.set_num_threads(args.threads)
    work = json.loads((args.work / "work.json").read_text())
    tokenizer = processing = AutoTokenizer.from_pretrained(args.work / "model")
    kind, rows = AutoModelForCausalLM, [{"prompt": p} for p in work["prompts"]]
    if work.get("images"):
        processing = AutoProcessor.from_pretrained(args.work / "model")
        tokenizer, kind = processing.tokenizer, AutoModelForImageTextToText
        rows = rows_with_images(args.work, work)
    model = kind.from_pretrained(args.work / "model", dtype=torch.float32)
    clock = Clock(out)

    class Steps(TrainerCallback):
        def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
            clock.begin()

        def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
            clock.end()

    def reward(completions: list[Any], completion_ids: Any = (), **_kwargs: Any) -> list[float]:
        clock.tokens = sum(len(row) for row in completion_ids)
        return [score_text(text_of(completion)) for completion in completions]

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(**settings(args, work)),
        train_dataset=Dataset.from_list(rows),
        processing_class=processing,
        callbacks=[Steps()],
    )
    model.generate = exactly(model.generate, tokenizer, work)
    trainer._generate_and_score_completions = clock.timed(trainer._generate_and_score_completions)
    print(json.dumps({"ready": True}), file=out, flush=True)
    trainer.train()


if __name__ == "__main__":
    main()
