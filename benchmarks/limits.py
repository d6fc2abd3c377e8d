"""What a device can do at most: matrix products and memory copies. Prints JSON.

    python benchmarks/limits.py [--device auto] [--dtype bfloat16]

Rates are medians of several runs of large operations: FLOP/s of a product, bytes read and written a second of a copy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

SIZE = {"cpu": 1024, "": 8192}
COPY = {"cpu": 64 << 20, "": 4 << 30}


def measure(device: str, dtype: str) -> dict:
    """{"device", "matmul_flops", "copy_bytes", "memory_gib"} of one device."""
    import torch

    from verl.platform import detect

    platform = detect(device)
    platform.prepare()
    place, kind = platform.device(), getattr(torch, dtype)
    size = SIZE.get(platform.name, SIZE[""])
    a, b = (torch.randn(size, size, device=place).to(kind) for _ in range(2))
    count = COPY.get(platform.name, COPY[""])
    source = torch.empty(count, dtype=torch.uint8, device=place)
    target = torch.empty_like(source)

    def seconds(work: Callable[[], object], repeats: int) -> float:
        times = []
        for _ in range(repeats + 2):
            platform.synchronize()
            start = time.perf_counter()
            work()
            platform.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times[2:])

    # Several products in a row: one alone is over before its launch is.
    products = 8 if platform.name != "cpu" else 1
    matmul = seconds(lambda: [torch.mm(a, b) for _ in range(products)], 7) / products
    copy = seconds(lambda: target.copy_(source), 7)
    return {
        "device": platform.describe(),
        "kind": platform.name,
        "dtype": dtype,
        "matmul_flops": 2 * size**3 / matmul,
        "copy_bytes": 2 * count / copy,
        "memory_gib": platform.memory()[1] / 2**30,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    print(json.dumps(measure(args.device, args.dtype)))


if __name__ == "__main__":
    main()
