"""Tiny tokenizers and models for tests: made from nothing in milliseconds, no hub, no network.

The tokenizer is byte-level without merges: 256 byte tokens, then the special ones. Every text encodes and
decodes exactly, one token per UTF-8 byte, so lengths in tests are easy to predict.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking -%}{{ '<think>\n\n</think>\n\n' }}{%- endif -%}"
    "{%- endif -%}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
VOCAB_SIZE = 256 + len(SPECIAL)


def tiny_tokenizer(path: Path | str | None = None, *, template: str | None = CHAT_TEMPLATE) -> Any:
    """A byte-level PreTrainedTokenizerFast; saved as a tokenizer directory when `path` is given.

    eos is <|im_end|>, pad is <|endoftext|>. Special tokens follow the 256 bytes in the order of SPECIAL.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=4096
    )
    if template is not None:
        tokenizer.chat_template = template
    if path is not None:
        Path(path).mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(str(path))
    return tokenizer


def tiny_config(arch: str = "qwen3", *, vocab_size: int = 264, tied: bool = False, **overrides: Any) -> Any:
    """A transformers config of two small layers with grouped-query attention (4 heads, 2 key-value heads)."""
    from transformers import AutoConfig

    shape: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": 258,
        "pad_token_id": 256,
    }
    if arch == "qwen3_moe":
        shape |= {
            "moe_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
        }
    if arch == "qwen2":  # derives the head size from hidden_size
        del shape["head_dim"]
    return AutoConfig.for_model(arch, **(shape | overrides))


def tiny_model(
    path: Path | str,
    arch: str = "qwen3",
    *,
    vocab_size: int = 264,
    tied: bool = False,
    seed: int = 0,
    scale: float | None = None,
    **overrides: Any,
) -> Path:
    """Save a random model (fp32) with its tokenizer as a Hugging Face directory; returns the path.

    arch: "qwen3", "qwen2", "llama", "qwen3_moe", or any model type with the usual shape keys; `overrides`
    go to the config. vocab_size may exceed the tokenizer's 261 (padded rows exist in real models too).
    `scale` multiplies all weight matrices, to make the distribution less flat than the initial one.
    """
    import torch
    from transformers import AutoModelForCausalLM

    path = Path(path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = tiny_config(arch, vocab_size=vocab_size, tied=tied, **overrides)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if scale is not None:
            with torch.no_grad():
                for weight in model.parameters():
                    if weight.ndim > 1:
                        weight.mul_(scale)
    model.generation_config.eos_token_id = config.eos_token_id
    model.generation_config.pad_token_id = config.pad_token_id
    model.save_pretrained(path)
    tiny_tokenizer(path)
    return path
