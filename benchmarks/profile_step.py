"""Where a step's time goes on a processor: shares of products, attention, norms, head, optimizer, copies and Python.

    python benchmarks/profile_step.py [--dtype float32,bfloat16] [--prompts 16] [--tokens 32] [--json FILE]

One thread. Sampling: prompts × 8 responses of so many tokens by the embedded sampler; training: an update on responses
of 128 tokens to two prompts. Seconds of torch.profiler's events, which other work on the machine lengthens alike.
VERL_COMPILED_KERNELS=off leaves compiled kernels out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parent))

import rollout
from sides import write_result

KINDS = {
    "attention": r"attention|bmm|softmax|TiledAttention|index_select|lerp|sigmoid",
    "products": r"::mm$|addmm|linear|matmul|_reorder",
    "norms, gates, rotations": r"[Nn]orm|swiglu|silu|[Rr]otat|vecdot|::mv$|rsqrt",
    "head": r"head_|TokenOutputs|logsumexp|draw|searchsorted|cumsum|gather|scatter|::exp",
    "optimizer": r"adamw|foreach|fill_|zero_",
    "copies, sums": r"copy_|::to$|_to_copy|add|mul|div|cat|clone|contiguous|empty|view|reshape|transpose|slice"
    r"|as_strided",
}


def shares(work: Callable[[], Any]) -> dict[str, float]:
    """Share of each kind in the wall-clock seconds of the work; what no event of torch's is in is Python's."""
    work()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        begin = time.perf_counter()
        work()
        seconds = time.perf_counter() - begin
    totals: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        kind = next((kind for kind, names in KINDS.items() if re.search(names, event.key)), "other operators")
        totals[kind] += event.self_cpu_time_total / 1e6
    totals["Python"] = max(0.0, seconds - sum(totals.values()))
    return {kind: round(total / seconds, 3) for kind, total in sorted(totals.items(), key=lambda item: -item[1])}


def training(model: Any, dtype: str) -> Callable[[], Any]:
    """An update on 16 responses."""
    from verl.engine.training.fsdp.engine import FSDPEngine
    from verl.trajectory import Segment

    engine = FSDPEngine(module=model, role_cfg={"fsdp_config": {"dtype": dtype}}, device="cpu")
    random, rows = np.random.default_rng(0), []
    for prompt in range(2):
        context = random.integers(2, 2000, 67)
        for _ in range(8):
            row = Segment(context, random.integers(2, 2000, 128), np.ones(128, bool))
            row.uid = str(prompt)
            rows.append(row)

    def loss(batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        return -(batch.log_probs.sum() + 0.01 * batch.entropy.sum()) / 2048, {}

    return lambda: engine.step(rows, loss, ("log_probs", "entropy"), temperature=1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32,bfloat16")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    from verl.platform import detect
    from verl.platform.host_resources import processor, tune_allocator

    tune_allocator()
    platform = detect("cpu")
    platform.prepare()
    result: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "processor": processor()[0]}
    result["device"] = platform.describe()
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(40, 143, (args.prompts,), generator=generator).tolist()
    prompts = [torch.randint(0, 2048, (n,), generator=generator).tolist() for n in lengths]
    for dtype in args.dtype.split(","):
        model = rollout.build_model(2048)
        setting = rollout.Setting(prompts, 8, args.tokens, dtype, False)
        result[dtype] = {"sampling": shares(rollout.native(setting, model)), "training": shares(training(model, dtype))}
        print(dtype, json.dumps(result[dtype], indent=1), flush=True)
    write_result(result, args.json)


if __name__ == "__main__":
    main()
