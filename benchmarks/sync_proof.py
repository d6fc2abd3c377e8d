"""What the proof of the first push costs: for a model of about a billion random parameters, on this machine.

    python benchmarks/sync_proof.py --layers 18 --json out.json

`in process`: the embedded sampler reads the trainer's tensors; the proof compares two columns of each packed copy.
`streamed`: an embedded sampler with weights of its own is sent all of them; the proof is what both sides hash. Each is
the difference of a push with the proof and one without, interleaved, medians of `--rounds`. Making the packed copies is
no part of it: a sampler makes them after every push.

    python benchmarks/sync_proof.py --probe --threads 2 --json out.json

What the probe of every later push costs with the same model: the product's own rows (of 8 prompts of `--prompt` tokens,
4 responses to each), the trainer's log-probs of them, and the sampler's draws after a push, which forgot what was
cached. Beside it the least time of their products at the rate of a large product on this machine, and at
`--accelerator` operations a second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


def model_of(layers: int) -> Any:
    """A random decoder in float32: 50.3 M parameters a layer, 134 M in embedding and output."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=32768,
        tie_word_embeddings=False,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)


def sampler_on(module: Any, dtype: str, *, owns_weights: bool) -> Any:
    """An embedded sampler of few responses at a time."""
    from verl.engine.rollout.native.engine import NativeEngine

    limits = {"max_model_len": 256, "max_num_seqs": 4, "dtype": dtype, "owns_weights": owns_weights}
    return NativeEngine(module, eos_token_ids=[0], **limits)


def pushes(sync: Any, sampler: Any) -> Callable[[bool], None]:
    """A push, with the proof or without, and the copies that the next product needs."""
    from verl.weight_sync.verify import SAMPLED

    def push(proven: bool) -> None:
        sync._push(1, SAMPLED if proven else "")
        sampler._runner.linears.refresh()

    push(False)
    return push


def extra(push: Callable[[bool], Any], rounds: int) -> dict[str, Any]:
    """Seconds of a push with and without the proof."""
    from verl.platform import detect

    times: dict[bool, list[float]] = {True: [], False: []}
    platform = detect()
    for _ in range(rounds):
        for proven in (False, True):
            platform.synchronize()
            started = time.perf_counter()
            push(proven)
            platform.synchronize()
            times[proven].append(time.perf_counter() - started)
    without, proven = (statistics.median(times[kind]) for kind in (False, True))
    return {"without": round(without, 3), "with": round(proven, 3), "proof": round(proven - without, 3)}


def probe_of(module: Any, dtype: str, prompt: int, counted: Counter[str]) -> tuple[Any, Any, Any]:
    """The product's probe over a trainer and an embedded sampler on the same tensors; (probe, sampler, rows). counted:
    gets the tokens that the trainer computes."""
    from verl.config import load
    from verl.engine.training.fsdp import engine as fsdp
    from verl.trainer.sync_probe import SyncProbe
    from verl.trajectory import Batch, Prompt, Segment, Trajectory

    role = {"fsdp_config": {"dtype": dtype}, "ppo_max_token_len_per_gpu": 16384}
    trainer = fsdp.FSDPEngine(module=module, role_cfg=role, trainable=False)
    sampler = sampler_on(module, dtype, owns_weights=False)
    random = np.random.default_rng(0)

    def segment(context: np.ndarray) -> Any:
        response, mask = random.integers(1, 32768, 64), np.ones(64, bool)
        log_probs = random.uniform(-3, 0, 64).astype(np.float32)
        return Segment(context, response, mask, rollout_log_probs=log_probs)

    prompts = [Prompt(f"p{number}", random.integers(1, 32768, prompt), None) for number in range(8)]
    batch = Batch(Trajectory(p, i, segments=[segment(p.ids)]) for p in prompts for i in range(4))

    def forward(rows: Any, _phase: str, _outputs: Any) -> None:
        for pack in trainer._packs(rows.segments, trainer.forward_batching):
            counted["trainer"] += pack[0].size
        values = trainer.forward(rows.segments, temperature=1.0)["log_probs"]
        ends = np.cumsum([row.length for row in rows.segments])[:-1]
        for row, part in zip(rows.segments, np.split(values, ends), strict=True):
            row.put("old_log_probs", part)

    nothing = lambda *_, **__: nullcontext()  # noqa: E731
    parts: Any = SimpleNamespace(
        workers=SimpleNamespace(
            policy=SimpleNamespace(compute_dtype=str(trainer.compute_dtype), forward=forward), sampler=sampler
        ),
        phases=nothing,
        colocation=SimpleNamespace(computing=nothing),
        loop=SimpleNamespace(run=asyncio.run),
    )
    return SyncProbe(load(["algorithm.adv_estimator=grpo"]), parts), sampler, batch


def probe_cost(module: Any, dtype: str, rounds: int, prompt: int, accelerator: float) -> dict[str, Any]:
    """Seconds of both sides of a probe, medians, and the least that their products take. cpu_s: of all threads, which
    other programs on the machine change less."""
    counted: Counter[str] = Counter()
    from verl.platform import detect

    probe, sampler, batch = probe_of(module, dtype, prompt, counted)
    probe.begin(batch)
    counted.clear()
    probe.before_update(0)
    trained = counted["trainer"]
    sampled = sum(len(row.ids) for row in probe._rows)
    times: dict[str, list[tuple[float, float]]] = {"trainer": [], "sampler": []}
    platform = detect()

    def timed(side: str, call: Callable[[], Any]) -> None:
        platform.synchronize()
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        platform.synchronize()
        times[side].append((time.perf_counter() - wall, time.process_time() - cpu))

    for version in range(1, rounds + 1):
        probe._level, probe._seconds = True, 0.0
        timed("trainer", probe.before_push)
        sampler.weights_updated(version)
        sampler._runner.linears.refresh()  # the copies of a push are no part of the probe
        timed("sampler", lambda version=version: probe.after_push(version))
    sampler.close()
    matrices = sum(p.numel() for p in module.parameters() if p.ndim == 2) - module.get_input_embeddings().weight.numel()
    body = matrices - module.get_output_embeddings().weight.numel()
    drawn = sum(row.count for row in probe._rows)
    operations = {"trainer": 2 * (body * trained + (matrices - body) * drawn)}
    operations["sampler"] = 2 * (body * (sampled + drawn) + (matrices - body) * drawn)
    rate = product_rate(dtype)
    out: dict[str, Any] = {"rows": len(probe._rows), "product_gflops": round(rate / 1e9)}
    for side, seconds in times.items():
        out[side] = {
            "tokens": trained if side == "trainer" else sampled + drawn,
            "seconds": round(statistics.median(wall for wall, _ in seconds), 3),
            "cpu_s": round(statistics.median(cpu for _, cpu in seconds), 3),
            "products_s": round(operations[side] / rate, 3),
            "forecast_accelerator_s": round(operations[side] / accelerator, 4),
        }
    return out


def product_rate(dtype: str) -> float:
    """Operations a second of a product of the model's width on this machine, the best of five."""
    from verl.platform import detect

    platform, kind = detect(), getattr(torch, dtype)
    x, weight = (torch.randn(rows, 2048, device=platform.device()).to(kind) for rows in (1024, 6144))
    packed = platform.pack_weight(weight) if platform.has_packed_products(kind) else None
    seconds = []
    for _ in range(6):
        platform.synchronize()
        started = time.perf_counter()
        _ = torch.mm(x, weight.T) if packed is None else platform.packed_product(x, packed, None)
        platform.synchronize()
        seconds.append(time.perf_counter() - started)
    return 2 * 1024 * 2048 * 6144 / min(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--probe", action="store_true", help="time the probe of later pushes instead")
    parser.add_argument("--prompt", type=int, default=150, help="tokens of a prompt of the probe")
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument("--accelerator", type=float, default=1e14, help="operations a second for a forecast")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    from verl.platform import detect
    from verl.platform.host_resources import processor
    from verl.weight_sync.sender import InProcessSync, StreamedSync

    platform = detect()
    platform.prepare()
    module = model_of(args.layers).to(platform.device())
    trainer: Any = SimpleNamespace(
        module=module,
        release_cached_memory=lambda: None,
        named_weights=lambda: iter(module.state_dict().items()),
    )
    count = sum(p.numel() for p in module.parameters())
    found: dict[str, Any] = {"device": platform.describe(), "processor": processor()[0], "parameters": count}
    for dtype in ("bfloat16", "float32") if args.probe else ():
        found[f"probe, {dtype}"] = probe_cost(module, dtype, args.rounds, args.prompt, args.accelerator)
        print(json.dumps(found, indent=1), flush=True)
    for dtype in () if args.probe else ("bfloat16", "float32"):
        sampler = sampler_on(module, dtype, owns_weights=False)
        found[f"in process, {dtype}"] = extra(pushes(InProcessSync(trainer, sampler), sampler), args.rounds)
        sampler.close()
        del sampler
    own = None if args.probe else sampler_on(model_of(args.layers).to(platform.device()), "float32", owns_weights=True)
    if own is not None:
        found["streamed, float32"] = extra(pushes(StreamedSync(trainer, own), own), args.rounds)
        print(json.dumps(found, indent=1))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
