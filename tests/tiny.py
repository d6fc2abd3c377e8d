"""Tiny tokenizers and models for tests: made from nothing in milliseconds, no hub, no network.

The tokenizer is byte-level without merges: 256 byte tokens, then the special ones. Every text encodes and
decodes exactly, one token per UTF-8 byte, so lengths in tests are easy to predict.
"""

from __future__ import annotations

from importlib.util import find_spec
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
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
GLM_VISION = (
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|image|>",
    "<|video|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
)
KIMI_VISION = ("<|media_start|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>")
VISION_TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}",
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}"
    "{%- for part in message['content'] -%}"
    "{{ part['text'] or '<|vision_start|><|' + part['type'] + '_pad|><|vision_end|>' }}"
    "{%- endfor -%}{%- endif -%}{{ '<|im_end|>' + '\n' }}",
)
VOCAB_SIZE = 256 + len(SPECIAL)
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_EXPERTS |= {"shared_expert_intermediate_size": 24}
LINEAR_ATTENTION: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA | _EXPERTS,
    "qwen3_next": _DELTA | _EXPERTS,
    "olmo_hybrid": _DELTA,
    "kimi_linear": {
        "layer_types": _DELTA["layer_types"],
        "mlp_layer_types": ["dense", "dense"],
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 4,
        "head_dim": 4,
        "num_key_value_heads": 4,
        "v_head_dim": 12,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
}
"""Overrides of `tiny_config` for models whose layers of linear attention carry a state along each sequence."""
HAS_KIMI_VL = find_spec("transformers.models.kimi_k25") is not None
if find_spec("transformers.models.kimi_linear") is None:
    del LINEAR_ATTENTION["kimi_linear"]


def tiny_tokenizer(
    path: Path | str | None = None,
    *,
    template: str | None = CHAT_TEMPLATE,
    special: tuple[str, ...] = SPECIAL,
    begin: bool = False,
) -> Any:
    """A byte-level PreTrainedTokenizerFast; saved as a tokenizer directory when `path` is given.

    eos is <|im_end|>, pad is <|endoftext|>; with `begin` every text begins with <|im_start|>. Special tokens follow the
    256 bytes in the order of SPECIAL.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(special))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=4096
    )
    if template is not None:
        tokenizer.chat_template = template
    if begin:
        from tokenizers.processors import TemplateProcessing

        tokenizer.bos_token = token = "<|im_start|>"
        both = [(token, tokenizer.bos_token_id)]
        core.post_processor = tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{token} $A", special_tokens=both
        )
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


def tiny_vision_model(
    path: Path | str,
    arch: str = "qwen2_5_vl",
    *,
    seed: int = 0,
    patch: int = 4,
    head: int | None = None,
    deepstack: tuple[int, ...] = (0,),
) -> Path:
    """Save a random vision-language model (fp32), its tokenizer and its image processor; returns the path.

    arch: "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe" or "qwen2_vl"; "glm4v", "glm46v" or "glm4v_moe"; "kimi_vl". An
    image has one token for each 2·patch × 2·patch pixels, 4 to 64 of them. head: elements of an attention head; 32 is
    the smallest of vLLM's kernels on a CPU. deepstack: layers of the image encoder whose outputs qwen3's text layers
    get.
    """
    if arch.startswith("glm"):
        return _tiny_glm(Path(path), arch, seed, head or 16)
    if arch == "kimi_vl":
        return _tiny_kimi(Path(path), seed, patch, head)
    from transformers import AutoConfig
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    path, start = Path(path), VOCAB_SIZE
    vision: dict[str, Any] = {
        "depth": max(1, *deepstack) + 1,
        "hidden_size": 16,
        "num_heads": 2,
        "patch_size": patch,
        "in_channels": 3,
    }
    if arch == "qwen2_vl":
        vision |= {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
    else:
        vision |= {"out_hidden_size": 32, "intermediate_size": 32}
    if arch == "qwen2_5_vl":
        vision |= {"window_size": patch * 4, "fullatt_block_indexes": [1]}
    if arch.startswith("qwen3"):
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": list(deepstack)}
    linear = LINEAR_ATTENTION.get(f"{arch}_text", {})
    if linear:
        del vision["deepstack_visual_indexes"]
    text = tiny_config("qwen3_moe" if arch.endswith("moe") else "qwen3", vocab_size=272).to_dict()
    kept = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    kept += ("vocab_size", "max_position_embeddings", "eos_token_id", "pad_token_id", "bos_token_id")
    kept += ("moe_intermediate_size", "num_experts", "num_experts_per_tok", "decoder_sparse_step")
    shape = {key: text[key] for key in kept if key in text}
    if not arch.startswith("qwen3"):  # head size follows from hidden_size: 8
        shape["head_dim"] = 8
    if arch.endswith("moe"):  # not square, so that it shows which way round they are
        shape |= {"moe_intermediate_size": 24, "norm_topk_prob": True}
    if head is not None:
        shape |= {"head_dim": head, "num_attention_heads": 32 // head, "num_key_value_heads": 32 // head}
    quarter = shape["head_dim"] // 8
    sections = [quarter, quarter // 2, quarter // 2] if linear else [2 * quarter, quarter, quarter]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    if arch.startswith("qwen3"):  # as published; transformers does it in any case, vLLM looks
        rope["mrope_interleaved"] = True
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    config = AutoConfig.for_model(
        arch,
        text_config=linear | shape | {"rope_parameters": linear.get("rope_parameters", {}) | rope},
        vision_config=vision,
        tie_word_embeddings=False,
        **{name: start + number for number, name in enumerate(names)},
    )
    _save_vision_model(path, config, seed)
    tiny_tokenizer(path, template=VISION_TEMPLATE, special=SPECIAL + VISION)
    side = 2 * patch
    Qwen2VLImageProcessorPil(patch_size=patch, min_pixels=4 * side * side, max_pixels=64 * side * side).save_pretrained(
        path
    )
    return path


def _save_vision_model(path: Path, config: Any, seed: int) -> None:
    import torch
    from transformers import AutoModelForImageTextToText

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim > 1:
                    weight.mul_(3.0)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 258, 256
    model.save_pretrained(path)


def _tiny_glm(path: Path, arch: str, seed: int, head: int) -> Path:
    """GLM-4.1V ("glm4v"), 4.6V ("glm46v") or 4.5V ("glm4v_moe"), whose second layer has four experts."""
    from transformers import AutoConfig
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
    from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil

    vision = {"depth": 2, "hidden_size": 16, "num_heads": 2, "patch_size": 4, "image_size": 64}
    text = {
        "vocab_size": 272,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 32 // head,
    }
    text |= {
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "eos_token_id": 258,
        "pad_token_id": 256,
        "attention_bias": True,  # as published; transformers has the biases whatever this says, vLLM only then
    }
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [head // 8, head // 16, head // 16],
    }
    if arch.endswith("moe"):
        text |= {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "head_dim": head,  # this and the next as published; vLLM reads them
            "use_qk_norm": False,
        }
    names = ("image_start", "image_end", "image", "video", "video_start", "video_end")
    config = AutoConfig.for_model(
        arch,
        text_config=text | {"rope_parameters": rope},
        vision_config=vision | {"out_hidden_size": 32, "intermediate_size": 48},
        **{f"{name}_token_id": VOCAB_SIZE + number for number, name in enumerate(names)},
    )
    _save_vision_model(path, config, seed)
    template = VISION_TEMPLATE.replace(
        "'<|vision_start|><|' + part['type'] + '_pad|><|vision_end|>'",
        "'<|begin_of_image|><|image|><|end_of_image|>'",
    )
    tiny_tokenizer(path, template=template, special=SPECIAL + GLM_VISION)
    processor = Glm46VImageProcessorPil if arch == "glm46v" else Glm4vImageProcessorPil
    # Its limits count the two frames that an image is made to.
    limits = {"shortest_edge": 2 * 4 * 64, "longest_edge": 2 * 64 * 64}
    processor(patch_size=4, size=limits).save_pretrained(path)
    return path


def _tiny_kimi(path: Path, seed: int, patch: int, head: int | None) -> Path:
    """Kimi-VL, whose second layer has four experts."""
    from verl.data.kimi_images import KimiVLImageProcessor
    from verl.models.kimi_vl import KimiVLConfig

    text = {"vocab_size": 272, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 24}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1}
    text |= {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    text |= {"kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    if head is not None:  # latent vectors as wide as vLLM's kernel for them takes
        text |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": head, "v_head_dim": head}
    text |= {"max_position_embeddings": 2048, "eos_token_id": 258, "pad_token_id": 256, "bos_token_id": None}
    text |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "tie_word_embeddings": False}
    vision = {"patch_size": patch, "init_pos_emb_height": 6, "init_pos_emb_width": 6, "num_attention_heads": 2}
    vision |= {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24}
    config = KimiVLConfig(text_config=text, vision_config=vision, media_placeholder_token_id=VOCAB_SIZE + 3)
    _save_vision_model(path, config, seed)
    template = VISION_TEMPLATE.replace(
        "'<|vision_start|><|' + part['type'] + '_pad|><|vision_end|>'",
        "'<|media_start|>image<|media_content|><|media_pad|><|media_end|>'",
    )
    tiny_tokenizer(path, template=template, special=SPECIAL + KIMI_VISION)
    KimiVLImageProcessor(patch_size=patch, pad_input=True, in_token_limit=256).save_pretrained(path)
    return path


def unseeing(model: Path) -> None:
    """Make a vision model's projection give nothing: every image is the same to the language model."""
    from safetensors.torch import load_file, save_file

    file = model / "model.safetensors"
    held = {name: t * 0 if "merger" in name else t for name, t in load_file(file).items()}
    save_file(held, file, metadata={"format": "pt"})
