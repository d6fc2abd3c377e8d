"""The work that benchmarks share: model, prompts, response lengths. Written to a folder both sides read.

work/
  model/           Qwen3, random weights, and its tokenizer
  prompts.parquet  rows of the chat format, `extra_info.lengths` = tokens of each response
  work.json        prompts (text), lengths, shape
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

INSTRUCTION = ' Let\'s think step by step and output the final response after "####".'
TEMPLATE = "{%- for m in messages -%}{{ m['content'] }}{%- endfor -%}"


@dataclass
class Shape:
    """Sizes of the work; the defaults are the 26 M parameter model and a step of 16 prompts."""

    prompts: int = 16
    responses: int = 8
    tokens: int = 128
    lengths: str = "exact"  # exact | geometric
    layers: int = 8
    hidden: int = 512
    intermediate: int = 1536
    heads: int = 8
    kv_heads: int = 4
    vocab: int = 2048
    seed: int = 0
    head_dim: int = 0  # 0: hidden / heads
    tied: bool = True
    dtype: str = "float32"  # of the weights on disk


SHAPES: dict[str, dict[str, int]] = {
    "26m": {},
    "0.5b": {"layers": 24, "hidden": 896, "intermediate": 4864, "heads": 14, "kv_heads": 2, "vocab": 151936},
}
"""Sizes of models by name; 0.5b is the shape of Qwen2.5-0.5B."""


def questions(count: int, data: Path | None, seed: int) -> list[str]:
    """GSM8K questions if the data is there, else synthetic ones of similar length."""
    if data is not None and data.is_file():
        rows = [json.loads(line)["question"] for line in data.read_text().splitlines()]
    else:
        names = ["Ann", "Bo", "Cy", "Dee"]
        rng = np.random.default_rng(seed)
        rows = [
            " ".join(
                f"{names[int(rng.integers(4))]} buys {int(rng.integers(2, 99))} apples for "
                f"{int(rng.integers(2, 99))} cents each and gives away {int(rng.integers(2, 9))} of them."
                for _ in range(4)
            )
            for _ in range(2000)
        ]
    picked = np.random.default_rng(seed).permutation(len(rows))[: max(count, 2000)]
    return [rows[i] + INSTRUCTION for i in picked]


def response_lengths(shape: Shape) -> list[list[int]]:
    """Tokens of each response: all equal, or geometric with mean 64 and at most 256."""
    if shape.lengths == "exact":
        return [[shape.tokens] * shape.responses] * shape.prompts
    rng = np.random.default_rng(shape.seed)
    drawn = np.clip(rng.geometric(1 / 64, (shape.prompts, shape.responses)), 1, 256)
    return [[int(v) for v in row] for row in drawn]


def build(folder: Path, shape: Shape, data: Path | None, device: str = "cpu") -> dict:
    """Write model, tokenizer, prompts and work.json; returns the content of work.json.

    `device`: where the random weights are drawn, which for billions of them is faster on an accelerator.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    texts = questions(shape.prompts, data, shape.seed)
    tokenizer = _tokenizer(texts, shape)
    tokenizer.save_pretrained(folder / "model")
    model = _model(shape, device)
    model.save_pretrained(folder / "model")
    prompts = texts[: shape.prompts]
    lengths = response_lengths(shape)
    rows = [
        {
            "data_source": "bench",
            "prompt": [{"role": "user", "content": text}],
            "reward_model": {"style": "rule", "ground_truth": "0"},
            "extra_info": {"index": i, "lengths": lengths[i]},
        }
        for i, text in enumerate(prompts)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "prompts.parquet")
    work = {
        "shape": asdict(shape),
        "prompts": prompts,
        "lengths": lengths,
        "prompt_tokens": [len(tokenizer(text)["input_ids"]) for text in prompts],
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    (folder / "work.json").write_text(json.dumps(work))
    return work


def _tokenizer(texts: list[str], shape: Shape) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(shape.vocab, 4096),
        special_tokens=["<|end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>", chat_template=TEMPLATE
    )


def _model(shape: Shape, device: str) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(shape.seed)
    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim or shape.hidden // shape.heads,
        max_position_embeddings=max(2048, 1024 + shape.tokens),
        tie_word_embeddings=shape.tied,
        eos_token_id=0,
        pad_token_id=1,
        bos_token_id=None,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, shape.dtype))
    with torch.device(device):
        model = Qwen3ForCausalLM(config)
    torch.set_default_dtype(before)
    return model


def least_flops(work: dict) -> dict[str, float]:
    """FLOPs of the step with every token computed once: 2·P a token forward, 6·P a token of training."""
    shape, n = work["shape"], work["shape"]["responses"]
    weights = work["parameters"] - (1 if shape["tied"] else 2) * shape["vocab"] * shape["hidden"]
    prompt, response = sum(work["prompt_tokens"]), sum(sum(row) for row in work["lengths"])
    head = shape["vocab"] * shape["hidden"]
    sampling = 2 * weights * (prompt + response) + 2 * head * response
    assert n > 0
    return {"sampling": float(sampling), "training": float(3 * sampling)}


def main() -> None:
    """Build in a process of its own: `work.py FOLDER SHAPE_AS_JSON DEVICE`."""
    import sys

    build(Path(sys.argv[1]), Shape(**json.loads(sys.argv[2])), None, sys.argv[3])


if __name__ == "__main__":
    main()
