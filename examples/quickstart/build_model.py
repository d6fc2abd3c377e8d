"""Build a small Qwen3-architecture model and its tokenizer from nothing: no hub, no download.

    python examples/quickstart/build_model.py --out DIR [--texts FILE] [--hidden 192] [--layers 6]

The tokenizer is a byte-level BPE trained on the given texts, digits kept apart, with a short chat template.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

TEMPLATE = (
    "{%- for m in messages -%}"
    "{{ '<|' + m['role'] + '|>' + m['content'] }}"
    "{%- if m['role'] == 'assistant' -%}{{ '<|end|>' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)
SPECIAL = ["<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"]


def build_tokenizer(texts: Iterable[str], out: Path, vocab_size: int = 384) -> int:
    """Train a byte-level BPE with single digits, save it with its chat template; returns the vocabulary size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>", chat_template=TEMPLATE
    )
    fast.save_pretrained(out)
    return len(fast)


def build_model(out: Path, vocab_size: int, *, hidden: int, layers: int, seed: int = 0) -> int:
    """Save a randomly initialised Qwen3 with that many hidden units and layers; returns its parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=-(-vocab_size // 64) * 64,
        hidden_size=hidden,
        intermediate_size=hidden * 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=max(1, hidden // 64),
        head_dim=32,
        max_position_embeddings=512,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        initializer_range=0.05,
        eos_token_id=0,
        pad_token_id=1,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(out)
    return sum(p.numel() for p in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", type=Path, help="text file to train the tokenizer on, one text a line")
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    texts = args.texts.read_text().splitlines() if args.texts else [chr(c) for c in range(32, 127)]
    vocab = build_tokenizer(texts, args.out)
    parameters = build_model(args.out, vocab, hidden=args.hidden, layers=args.layers, seed=args.seed)
    print(f"{args.out}: Qwen3, {parameters / 1e6:.2f} M parameters, vocabulary {vocab}")


if __name__ == "__main__":
    main()
