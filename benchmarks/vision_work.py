"""The work of the benchmark with images: a small Qwen2.5-VL with random weights, its processor, prompts with images.

The folder is the one that `work.py` describes; `prompts.parquet` has a column `images`, and `work.json` says how many
each prompt has and which tokens are never sampled.
"""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import work

SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{%- for m in messages -%}{%- if m['content'] is string -%}{{ m['content'] }}{%- else -%}"
    "{%- for part in m['content'] -%}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if part['type'] == 'image' else part['text'] }}"
    "{%- endfor -%}{%- endif -%}{%- endfor -%}"
)
PATCH, MERGE = 14, 2
TOWER_LAYERS, TOWER_HIDDEN = 8, 256
SHAPE = work.Shape(prompts=8, tokens=64)


def build(folder: Path, images: int, side: int, shape: work.Shape = SHAPE) -> dict[str, Any]:
    """Write model, processor, prompts and work.json; returns the content of work.json.

    images: of each prompt, none for text alone; side: pixels of a side of an image, a multiple of 28.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    texts = work.questions(shape.prompts, None, shape.seed)
    tokenizer = work._tokenizer(texts, shape)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    _save_image_processor(folder / "model", side)
    model = _model(shape, tokenizer)
    model.save_pretrained(folder / "model")
    prompts, lengths = texts[: shape.prompts], work.response_lengths(shape)
    drawing = np.random.default_rng(shape.seed)
    rows = []
    for i, text in enumerate(prompts):
        row: dict[str, Any] = {
            "data_source": "bench",
            "prompt": [{"role": "user", "content": "<image>" * images + text}],
            "reward_model": {"style": "rule", "ground_truth": "0"},
            "extra_info": {"index": i, "lengths": lengths[i]},
        }
        if images:
            row["images"] = [{"bytes": _picture(drawing, side), "path": None} for _ in range(images)]
        rows.append(row)
    pq.write_table(pa.Table.from_pylist(rows), folder / "prompts.parquet")
    tokens = (side // (PATCH * MERGE)) ** 2
    content = {
        "shape": asdict(shape),
        "images": images,
        "tokens_of_an_image": tokens,
        "prompts": prompts,
        "lengths": lengths,
        "prompt_tokens": [len(tokenizer(text)["input_ids"]) + images * (tokens + 2) for text in prompts],
        "parameters": sum(p.numel() for p in model.parameters()),
        "never": tokenizer.convert_tokens_to_ids(list(SPECIAL)),
    }
    (folder / "work.json").write_text(json.dumps(content))
    return content


def _picture(drawing: np.random.Generator, side: int) -> bytes:
    """A PNG file of soft coloured patches."""
    from PIL import Image

    small = Image.fromarray(drawing.integers(0, 255, (8, 8, 3), np.uint8))
    out = io.BytesIO()
    small.resize((side, side), Image.Resampling.BICUBIC).save(out, "PNG")
    return out.getvalue()


def _save_image_processor(folder: Path, side: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    limits = {"min_pixels": (PATCH * MERGE) ** 2, "max_pixels": side * side}
    Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGE, **limits).save_pretrained(folder)


def _model(shape: work.Shape, tokenizer: Any) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    head = shape.hidden // shape.heads
    text = {
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": 4096,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [head // 4, head // 8, head // 8],
        },
    }
    tower = {
        "depth": TOWER_LAYERS,
        "hidden_size": TOWER_HIDDEN,
        "intermediate_size": 2 * TOWER_HIDDEN,
        "num_heads": 4,
        "out_hidden_size": shape.hidden,
        "patch_size": PATCH,
        "in_channels": 3,
        "spatial_merge_size": MERGE,
        "window_size": PATCH * 8,
        "fullatt_block_indexes": [TOWER_LAYERS // 2 - 1, TOWER_LAYERS - 1],
    }
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(SPECIAL))
    tokens = {"vision_start_token_id": start, "vision_end_token_id": end}
    tokens |= {"image_token_id": image, "video_token_id": video}
    torch.manual_seed(shape.seed)
    config = AutoConfig.for_model(
        "qwen2_5_vl", text_config=text, vision_config=tower, tie_word_embeddings=shape.tied, **tokens
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model
