"""What a push of new weights from two training ranks costs, through shared memory to one sampler.

    python benchmarks/weight_sync_ranks.py --json out.json

With megatron-core where it is installed: make test-megatron makes its environment.

Each way has two ranks on gloo that gather whole tensors, of which the first writes them into buckets of 16 MiB, and one
reader that copies them into tensors of its own, in float32. Medians; the first round warms up. On fewer than three
cores the processes wait for each other, so compare the rows with each other, not with those of `weight_sync.py`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests import ranks

WAYS = {
    "fsdp, 2 ranks": ("fsdp", {}),
    "megatron, tensor parallel 2": ("megatron", {"tensor_model_parallel_size": 2}),
    "megatron, pipeline parallel 2": ("megatron", {"pipeline_model_parallel_size": 2}),
}
BUCKET = 16 << 20


def model(directory: Path) -> None:
    """A Qwen3 of 109 M parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=32768, hidden_size=1024, intermediate_size=3072, num_hidden_layers=6, num_attention_heads=16,
        num_key_value_heads=8, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(directory)


def reads(channel: str, pushes: int) -> None:
    """The sampler's part."""
    from verl.weight_sync.channel import receive

    own: dict[str, Any] = {}
    for version in range(pushes):
        for name, tensor in receive(channel, 0, timeout=300, version=version):
            if name not in own:
                own[name] = tensor.clone()
            own[name].copy_(tensor)


def pushes(strategy: str, sizes: dict[str, int], path: str, channel: str, rounds: int) -> list[tuple[int, float]]:
    """On a rank: (bytes, seconds) of each push."""
    if strategy == "megatron":
        import tests.megatron_on_cpu  # noqa: F401 — what megatron-core asks of CUDA
    import torch.distributed as dist

    from verl.engine.registry import TRAINING_ENGINES
    from verl.weight_sync.channel import BucketSender

    record = TRAINING_ENGINES[strategy]
    role = {"fsdp_config": {"dtype": "float32"}, "megatron": {"dtype": "float32", **sizes}}
    engine = record.build(path, role_cfg=role, placement=record.placement(role), device="cpu", trainable=False)
    sender = BucketSender(channel, 1, BUCKET, timeout=300) if dist.get_rank() == 0 else None
    out = []
    for version in range(rounds):
        started, weights = time.perf_counter(), engine.named_weights()
        moved = sender.send(weights, version).bytes if sender is not None else 0
        for _ in weights:
            continue
        out.append((moved, time.perf_counter() - started))
    return out


def measure(name: str, path: str, rounds: int) -> dict[str, Any]:
    """One row."""
    strategy, sizes = WAYS[name]
    channel = f"bench-ranks-{os.getpid()}-{list(WAYS).index(name)}"
    reader = multiprocessing.get_context("forkserver").Process(target=reads, args=(channel, rounds), daemon=True)
    reader.start()
    timed = ranks.run(pushes, 2, strategy, sizes, path, channel, rounds, timeout=500.0)[0][1:]
    reader.join()
    moved, seconds = timed[0][0], [taken for _, taken in timed]
    middle = statistics.median(seconds)
    return {"way": name, "bytes": moved, "seconds": middle, "least": min(seconds), "gb_per_s": moved / middle / 1e9}


def processor() -> str:
    """As the kernel names it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model(Path(folder))
        rows = [measure(name, folder, options.rounds + 1) for name in WAYS]
    print(f"{'way':32} {'MB':>6} {'seconds':>8} {'GB/s':>6}")
    for row in rows:
        print(f"{row['way']:32} {row['bytes'] / 1e6:6.0f} {row['seconds']:8.3f} {row['gb_per_s']:6.2f}")
    cores = len(os.sched_getaffinity(0))
    about = {"torch": torch.__version__, "cores": cores, "processor": processor(), "load": os.getloadavg()[0]}
    if options.json is not None:
        options.json.write_text(json.dumps({"about": about, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
