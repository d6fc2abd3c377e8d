"""Where the time of decode steps and of one update goes on a device: kernels, waits, memory around captures.

    python benchmarks/gpu_profile.py --shape 0.6b --out FOLDER           # 20 decode steps, then one update
    python benchmarks/gpu_profile.py --shape 8b --only decode --out FOLDER
    python benchmarks/gpu_profile.py --shape tiny --device cpu --out FOLDER   # its own code, on a processor

Writes FOLDER/profile_SHAPE.json after each part, and traces (decode_SHAPE.json.gz, update_SHAPE.json.gz) for Perfetto.
Models have random weights. Seconds are of steps without the profiler; kernels and waits of steps with it. Shares are of
the limits that `limits.py` measures in the same process: of the bandwidth in decode steps, of the product rate (`mfu`,
three forward passes a token) in the update. The optimizer is AdamW, or plain SGD where its state does not fit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import gpu_loop
import limits
import numpy as np
import torch

from verl.engine.rollout.base import SamplingParams
from verl.models import attention
from verl.platform import Platform, detect

STEPS, WARM = 20, 40


def model_of(shape: Any, platform: Platform, dtype: torch.dtype) -> Any:
    """A Qwen3 of that shape, with random weights, on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "vocab_size": shape.vocab}
    sizes |= {"num_attention_heads": shape.heads, "num_key_value_heads": min(shape.kv_heads, shape.heads)}
    sizes |= {"num_hidden_layers": shape.layers, "head_dim": shape.head_dim or shape.hidden // shape.heads}
    config = AutoConfig.for_model("qwen3", tie_word_embeddings=shape.tied, **sizes)
    attention.register()
    with platform.device():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.set_attn_implementation(attention.IMPLEMENTATION)  # as models are that the trainer loaded
    return model


class Profile:
    """torch's profiler around a block; `summary` has device time by kernel and how often the host waited."""

    def __init__(self, platform: Platform, trace: Path):
        activities = {torch.profiler.ProfilerActivity.CPU}
        activities.add(getattr(torch.profiler.ProfilerActivity, platform.profiler_activity))
        self._platform, self._trace = platform, trace
        self._profile = torch.profiler.profile(activities=list(activities))

    def __enter__(self) -> Profile:
        self._platform.synchronize()
        self._began = time.perf_counter()
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._platform.synchronize()
        self.seconds = time.perf_counter() - self._began
        self._profile.__exit__(*error)

    def summary(self, steps: int) -> dict[str, Any]:
        """Per step: the 25 kernels that took longest, all kernels' time and number, and the host's waits by name."""
        self._profile.export_chrome_trace(str(self._trace))
        events = self._profile.key_averages()
        on_host = self._platform.on_host
        # a range of the host's that the device's time line repeats, such as the optimizer's step, is no kernel
        on_device = [e for e in events if on_host or e.device_type != torch.autograd.DeviceType.CPU]
        kernels = [e for e in on_device if not e.is_user_annotation]

        def own(event: Any) -> float:
            return event.self_cpu_time_total if on_host else event.self_device_time_total

        top = sorted(kernels, key=own, reverse=True)[:25]
        return {
            "profiled_s": self.seconds / steps,
            "kernels_s": sum(map(own, kernels)) / 1e6 / steps,
            "launches": sum(e.count for e in kernels) / steps,
            "top": [{"name": e.key[:100], "ms": own(e) / 1e3 / steps, "count": e.count / steps} for e in top],
            # a copy that the host waits for is an asynchronous one, then a synchronisation
            "waits": {e.key: e.count / steps for e in events if "Synchronize" in e.key or e.key == "cudaMemcpy"},
        }


@contextmanager
def watched_captures(platform: Platform) -> Iterator[list[dict[str, int]]]:
    """Bytes free by the driver before and after each capture of a graph in this block."""
    from verl.platform.cuda_graphs import GraphRecorder

    captures: list[dict[str, int]] = []
    record = GraphRecorder.__call__

    def watched(self: GraphRecorder, step: Any) -> Any:
        before = platform.memory()[0]
        replay = record(self, step)
        captures.append({"free_before": before, "free_after": platform.memory()[0]})
        return replay

    GraphRecorder.__call__ = watched  # type: ignore[method-assign]
    try:
        yield captures
    finally:
        GraphRecorder.__call__ = record  # type: ignore[method-assign]


def content_of(model: Any, shape: Any, prompts: Any, lengths: list[list[int]]) -> dict[str, Any]:
    """What `gpu_loop` counts bytes and products of."""
    content: dict[str, Any] = {"shape": asdict(shape), "parameters": sum(p.numel() for p in model.parameters())}
    return content | {"prompt_tokens": [len(prompt) for prompt in prompts], "lengths": lengths}


def decode(model: Any, shape: Any, platform: Platform, best: dict[str, Any], trace: Path) -> dict[str, Any]:
    """Prompts of 80 to 240 tokens, shape.responses of each: WARM steps, STEPS that are timed, STEPS that are
    profiled."""
    from verl.engine.rollout.native.engine import NativeEngine

    rows, rng = shape.prompts * shape.responses, np.random.default_rng(0)
    prompts = [rng.integers(3, shape.vocab, rng.integers(80, 240)).tolist() for _ in range(shape.prompts)]
    length, dtype = WARM + 2 * STEPS + 4, "bfloat16" if platform.supports(torch.bfloat16) else "float32"
    limits = {"max_model_len": 256 + length, "max_num_seqs": rows, "cache_tokens": rows * (256 + length)}
    engine = NativeEngine(model, eos_token_ids=[], dtype=dtype, **limits)
    step, seconds, profile = engine.step, [], Profile(platform, trace)

    def watched() -> None:
        number = len(seconds)
        if number == WARM + STEPS:
            profile.__enter__()
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
        if number == WARM + 2 * STEPS - 1:
            profile.__exit__(None, None, None)

    async def go() -> None:
        calls = []
        for row in range(rows):
            group, params = row // shape.responses, SamplingParams(max_tokens=length, seed=row)
            calls.append(engine.generate(prompts[group], params, request_id=f"{row}", group=f"{group}"))
        await asyncio.gather(*calls)

    engine.step = watched  # type: ignore[method-assign]
    with watched_captures(platform) as captures:
        asyncio.run(go())
    median = statistics.median(seconds[WARM : WARM + STEPS])
    found = {"rows": rows, "step_s": median, "tokens_per_s": rows / median, "captures": captures}
    # Responses have WARM + STEPS / 2 tokens in the median step; one pass is the difference of two counts.
    lengths = [[[WARM + STEPS // 2 + more] * shape.responses for _ in prompts] for more in (0, 1)]
    reads = [gpu_loop.decode_bytes(content_of(model, shape, prompts, given), dtype) for given in lengths]
    found["share_of_bandwidth"] = (reads[1] - reads[0]) / best["copy_bytes"] / median
    engine.sleep()
    return found | profile.summary(STEPS)


def update(model: Any, shape: Any, platform: Platform, best: dict[str, Any], trace: Path) -> dict[str, Any]:
    """One update on prompts of 160 tokens with shape.responses responses of 256 each: a first one, a timed, a
    profiled."""
    from verl.engine.training.fsdp.engine import FSDPEngine
    from verl.trajectory import Prompt, Trajectory

    rng = np.random.default_rng(0)

    def ids(count: int) -> np.ndarray:
        return rng.integers(3, shape.vocab, count)

    prompts = [Prompt(uid=f"0:{g}@0", ids=ids(160), messages=None) for g in range(max(1, shape.prompts // 4))]
    rows = [Trajectory(p, i, ids(256), np.ones(256, bool)) for p in prompts for i in range(shape.responses)]
    tokens = sum(row.length for row in rows)
    content = content_of(model, shape, [p.ids for p in prompts], [[256] * shape.responses] * len(prompts))
    kind = gpu_loop.optimizer_for(content, best["memory_gib"], platform.name)
    optim = {"lr": 1e-6, "optimizer": "AdamW" if kind == "adamw" else "SGD"}
    role = {"optim": optim, "ppo_max_token_len_per_gpu": 16384}
    engine = FSDPEngine(module=model.requires_grad_(True), role_cfg=role, device=platform)

    def go() -> float:
        platform.synchronize()
        began = time.perf_counter()
        engine.step(
            rows, lambda batch: (-batch.log_probs.sum() / tokens, {}), ("log_probs", "entropy"), temperature=1.0
        )
        platform.synchronize()
        return time.perf_counter() - began

    go()
    seconds = go()
    with Profile(platform, trace) as profile:
        go()
    found = {
        "response_tokens": tokens,
        "step_s": seconds,
        "tokens_per_s": tokens / seconds,
        "optimizer": optim["optimizer"],
    }
    found["mfu"] = 3 * gpu_loop.pass_flops(content, repeated=False) / best["matmul_flops"] / seconds
    return found | {"peak_gib": platform.peak_memory() / 2**30} | profile.summary(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="0.6b", choices=list(gpu_loop.SHAPES))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--only", choices=["decode", "update"])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    platform, shape = detect(args.device), gpu_loop.SHAPES[args.shape]
    platform.prepare()
    args.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"shape": args.shape, "date": time.strftime("%Y-%m-%d"), "card": platform.device_name()}
    dtype = "bfloat16" if platform.supports(torch.bfloat16) else "float32"
    best = limits.measure(args.device, dtype)
    result |= {"torch": torch.__version__, "limits": best}
    platform.empty_cache()
    model = model_of(shape, platform, torch.bfloat16 if args.only == "decode" else torch.float32)
    for name, part in (("decode", decode), ("update", update)):
        if args.only in (None, name):
            result[name] = part(model, shape, platform, best, args.out / f"{name}_{args.shape}.json.gz")
            (args.out / f"profile_{args.shape}.json").write_text(json.dumps(gpu_loop.rounded(result), indent=1) + "\n")
    shown = ("step_s", "tokens_per_s", "share_of_bandwidth", "mfu", "optimizer", "peak_gib")
    for name in ("decode", "update"):
        part = result.get(name, {})
        result[name] = {key: part[key] for key in shown if key in part}
    print(json.dumps(gpu_loop.rounded(result)))


if __name__ == "__main__":
    main()
