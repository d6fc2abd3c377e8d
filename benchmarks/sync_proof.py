"""What the proof of the first push costs: for a model of about a billion random parameters, on this machine.

    python benchmarks/sync_proof.py --layers 18 --json out.json

`in process`: the embedded sampler reads the trainer's tensors; the proof compares two columns of each packed copy.
`streamed`: an embedded sampler with weights of its own is sent all of them; the proof is what both sides hash. Each is
the difference of a push with the proof and one without, interleaved, medians of `--rounds`. Making the packed copies is
no part of it: a sampler makes them after every push.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(rounds):
        for proven in (False, True):
            started = time.perf_counter()
            push(proven)
            times[proven].append(time.perf_counter() - started)
    without, proven = (statistics.median(times[kind]) for kind in (False, True))
    return {"without": round(without, 3), "with": round(proven, 3), "proof": round(proven - without, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    from verl.platform import detect
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
    found: dict[str, Any] = {"device": platform.describe(), "parameters": count}
    for dtype in ("bfloat16", "float32"):
        sampler = sampler_on(module, dtype, owns_weights=False)
        found[f"in process, {dtype}"] = extra(pushes(InProcessSync(trainer, sampler), sampler), args.rounds)
        sampler.close()
        del sampler
    own = sampler_on(model_of(args.layers).to(platform.device()), "float32", owns_weights=True)
    found["streamed, float32"] = extra(pushes(StreamedSync(trainer, own), own), args.rounds)
    print(json.dumps(found, indent=1))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
