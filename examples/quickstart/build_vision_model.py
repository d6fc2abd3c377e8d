"""Build a small Qwen2.5-VL model, its tokenizer and its image processor from nothing: no hub, no download.

    python examples/quickstart/build_vision_model.py --out DIR [--hidden 128] [--layers 3]

An image has one token for each 16 × 16 pixels.
"""

from __future__ import annotations

import argparse
from pathlib import Path

PATCH = 8
VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
SPECIAL = ["<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", *VISION]
TEMPLATE = (
    "{%- for m in messages -%}{{ '<|' + m['role'] + '|>' }}"
    "{%- if m['content'] is string -%}{{ m['content'] }}{%- else -%}{%- for part in m['content'] -%}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if part['type'] == 'image' else part['text'] }}"
    "{%- endfor -%}{%- endif -%}"
    "{%- if m['role'] == 'assistant' -%}{{ '<|end|>' }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)


def build_tokenizer(out: Path) -> dict[str, int]:
    """One token for each printable character, and the special ones; returns the numbers of these."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|end|>", pad_token="<|pad|>", chat_template=TEMPLATE
    )
    fast.save_pretrained(out)
    return {token: fast.convert_tokens_to_ids(token) for token in SPECIAL}


def build_model(out: Path, ids: dict[str, int], *, hidden: int, layers: int, seed: int) -> int:
    """Save a randomly initialised Qwen2.5-VL; returns its parameters."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    heads = hidden // 32
    text = {
        "vocab_size": 320,
        "hidden_size": hidden,
        "intermediate_size": hidden * 3,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        "initializer_range": 0.05,
        "eos_token_id": ids["<|end|>"],
        "pad_token_id": ids["<|pad|>"],
        "bos_token_id": None,
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": PATCH,
        "out_hidden_size": hidden,
        "window_size": 2 * PATCH * 4,
        "fullatt_block_indexes": [1],
        "initializer_range": 0.05,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=True,
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = ids["<|end|>"]
    model.generation_config.pad_token_id = ids["<|pad|>"]
    model.save_pretrained(out)
    return sum(p.numel() for p in model.parameters())


def main() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    ids = build_tokenizer(args.out)
    size = (2 * PATCH) ** 2
    processor = Qwen2VLImageProcessorPil(patch_size=PATCH, min_pixels=size, max_pixels=64 * size)
    processor.save_pretrained(args.out)
    parameters = build_model(args.out, ids, hidden=args.hidden, layers=args.layers, seed=args.seed)
    print(f"{args.out}: Qwen2.5-VL, {parameters / 1e6:.2f} M parameters")


if __name__ == "__main__":
    main()
