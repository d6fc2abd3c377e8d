"""What a push of new weights costs: in process, and through shared memory to one and to two samplers.

    python benchmarks/weight_sync.py --millions 26 --buckets 4,16,64,256 --json out.json

Seconds and GB/s of each way, against this machine's memory copy of the same tensors in the same run, rounds
interleaved, medians. A push through shared memory copies twice (into a bucket, out of it); sender and reader work at
the same time when they have a core each. The reader copies into tensors of its own, as a sampler does. "in process"
moves nothing: its time is that of the sampler's packed copies, which every sampler makes after a push. GB/s counts each
weight once, however many samplers got it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

context = multiprocessing.get_context("forkserver")


def shapes(millions: float) -> list[tuple[str, tuple[int, ...]]]:
    """Tensors of a decoder of about that many million parameters: an embedding, then layers of seven matrices."""
    hidden = 512 if millions < 100 else 1024
    out: list[tuple[str, tuple[int, ...]]] = [("embed", (2048 if millions < 100 else 65536, hidden))]
    layer = [("q", (hidden, hidden)), ("k", (hidden // 2, hidden)), ("v", (hidden // 2, hidden)),
             ("o", (hidden, hidden)), ("gate", (3 * hidden, hidden)), ("up", (3 * hidden, hidden)),
             ("down", (hidden, 3 * hidden)), ("norm", (hidden,))]  # fmt: skip
    while sum(torch.Size(s).numel() for _, s in out) < millions * 1e6:
        number = (len(out) - 1) // len(layer)
        out += [(f"layers.{number}.{name}", shape) for name, shape in layer]
    return out


def reads(channel: str, reader: int, millions: float, dtype: torch.dtype, pushes: int) -> None:
    """A sampler's part: copy every push into tensors of its own."""
    from verl.weight_sync.channel import receive

    torch.set_num_threads(1)
    own = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes(millions)}
    for version in range(pushes):
        for name, tensor in receive(channel, reader, timeout=120, version=version):
            own[name].copy_(tensor)


class Pushes:
    """A sender with `readers` reader processes; calling it pushes once."""

    def __init__(
        self,
        weights: dict[str, torch.Tensor],
        millions: float,
        readers: int,
        bucket: int,
        half: bool,
        rounds: int,
    ):
        from verl.weight_sync.channel import BucketSender

        dtype = torch.bfloat16 if half else torch.float32
        channel = f"bench-{os.getpid()}-{readers}-{bucket}-{int(half)}"
        self._weights, self._version = weights, 0
        self._sender = BucketSender(channel, readers, bucket << 20, dtype=dtype, timeout=120)
        self._processes = [
            context.Process(target=reads, args=(channel, r, millions, dtype, rounds), daemon=True)
            for r in range(readers)
        ]
        for process in self._processes:
            process.start()

    def __call__(self) -> int:
        result = self._sender.send(self._weights.items(), self._version)
        self._version += 1
        return result.bytes


def in_process(layers: int = 8, hidden: int = 512) -> Callable[[], int]:
    """The push of a run on one device: the sampler makes its packed copies anew."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from verl.engine.rollout.native.engine import NativeEngine
    from verl.engine.training.fsdp.engine import FSDPEngine
    from verl.weight_sync.sender import InProcessSync

    config = Qwen3Config(
        vocab_size=2048, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, head_dim=64,
    )  # fmt: skip
    trainer = FSDPEngine(module=Qwen3ForCausalLM(config).eval())
    sampler = NativeEngine(trainer.module, eos_token_ids=[0], max_model_len=256, max_num_seqs=8)
    sync = InProcessSync(trainer, sampler)
    size = sum(p.numel() * 4 for p in trainer.module.parameters())
    versions = iter(range(10**6))

    def push() -> int:
        sync.push(next(versions))
        sampler._runner.linears.refresh()
        return size

    return push


def memory_copy(weights: dict[str, torch.Tensor]) -> Callable[[], int]:
    """Every tensor once, from one place to another, in this process."""
    there = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}

    def copy() -> int:
        for name, tensor in weights.items():
            there[name].copy_(tensor)
        return sum(t.numel() * t.element_size() for t in weights.values())

    return copy


def measure(ways: dict[str, Callable[[], int]], rounds: int) -> list[dict[str, Any]]:
    """Median seconds of each way; the first round warms up and does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    moved: dict[str, int] = {}
    for number in range(rounds + 1):
        for name, way in ways.items():
            started = time.perf_counter()
            moved[name] = way()
            if number:
                seconds[name].append(time.perf_counter() - started)
    limit = moved["memory copy"] / statistics.median(seconds["memory copy"]) / 1e9
    rows = []
    for name, times in seconds.items():
        middle = statistics.median(times)
        rate = moved[name] / middle / 1e9
        rows.append(
            {"way": name, "bytes": moved[name], "seconds": middle, "least": min(times), "gb_per_s": rate,
             "of_memory_copy": rate / limit}
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=26, help="parameters of the weights that are sent")
    parser.add_argument("--buckets", default="16,64", help="bucket sizes in MiB")
    parser.add_argument("--samplers", default="1,2", help="numbers of reading processes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    context.set_forkserver_preload(["torch", "verl.weight_sync.channel"])
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes(options.millions)}
    ways: dict[str, Callable[[], int]] = {"memory copy": memory_copy(weights), "in process": in_process()}
    for readers in map(int, options.samplers.split(",")):
        for bucket in map(int, options.buckets.split(",")):
            for half in (False, True):
                name = f"shared memory 1→{readers}, {bucket} MiB, {'bfloat16' if half else 'float32'}"
                ways[name] = Pushes(weights, options.millions, readers, bucket, half, options.rounds + 1)
    rows = measure(ways, options.rounds)
    print(f"{len(os.sched_getaffinity(0))} cores for all processes, load {os.getloadavg()[0]:.1f}\n")
    print(f"{'way':44} {'MB':>8} {'seconds':>9} {'GB/s':>7} {'of memory copy':>15}")
    for row in rows:
        print(
            f"{row['way']:44} {row['bytes'] / 1e6:8.0f} {row['seconds']:9.4f} {row['gb_per_s']:7.2f} "
            f"{row['of_memory_copy']:14.0%}"
        )
    if options.json is not None:
        about = {
            "torch": torch.__version__,
            "cores": len(os.sched_getaffinity(0)),
            "load": os.getloadavg()[0],
        }
        options.json.write_text(json.dumps({"about": about, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
