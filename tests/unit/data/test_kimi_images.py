"""Kimi-VL's images and tokenizer without its own code, against plain arithmetic and tiktoken itself."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.tiny import HAS_KIMI_VL
from verl.data.tokenizer import load_tokenizer

if not HAS_KIMI_VL:
    pytest.skip("this transformers has no parts of Kimi-VL", allow_module_level=True)

from verl.data.kimi_images import PIECES, KimiVLImageProcessor

TEXTS = ("Hello, WORLD's 12345 numbers", "你好world 汉字ABC", "  spaces\r\n\n and\ttabs  ", "don't I'LL Ünïcode")


def test_an_image_is_filled_to_whole_tokens_or_cropped() -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (13, 26, 3), np.uint8))
    values = np.asarray(image, np.float32) / 255
    for pad, rows, columns in ((True, 2, 4), (False, 1, 3)):
        processor = KimiVLImageProcessor(patch_size=4, pad_input=pad, image_mean=[0.5] * 3, image_std=[0.25] * 3)
        out = processor.preprocess([image, image])
        assert out["image_grid_thw"].tolist() == [[1, 2 * rows, 2 * columns]] * 2
        assert processor.get_number_of_image_patches(13, 26) == 4 * rows * columns == len(out["pixel_values"]) / 2
        whole = np.zeros((16, 32, 3), np.float32)
        whole[:13, :26] = values
        expected = whole if pad else values[2:10, 1:25]
        for n, patch in enumerate(out["pixel_values"][: 4 * rows * columns].reshape(-1, 3, 4, 4)):
            y, x = (4 * place for place in divmod(n, 2 * columns))
            mine = expected[y : y + 4, x : x + 4].transpose(2, 0, 1)
            assert np.allclose(patch, (mine - 0.5) / 0.25, atol=1e-6)


def test_a_large_image_is_scaled_down_and_one_without_a_token_refused() -> None:
    processor = KimiVLImageProcessor(patch_size=4, pad_input=True, in_token_limit=100)
    assert processor.get_number_of_image_patches(80, 160) == 8 * 14  # 28 × 56 pixels, in tokens of 8 × 8
    assert len(processor.preprocess([Image.new("RGB", (160, 80))])["pixel_values"]) == 8 * 14
    with pytest.raises(ValueError, match="has no token"):
        KimiVLImageProcessor(patch_size=4).get_number_of_image_patches(3, 80)


def test_a_published_tokenizer_is_read_without_its_code(tmp_path: Path) -> None:
    import tiktoken

    ranks = {bytes([n]): n for n in range(256)}
    for word in (b"el", b"ll", b"he", b"12", "你好".encode()[:2], "你好".encode()[:3], b" w", b"or"):
        ranks[word] = len(ranks)
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    (tmp_path / "tiktoken.model").write_text("\n".join(lines))
    special = {"[BOS]": len(ranks), "<|im_end|>": len(ranks) + 1, "<|media_pad|>": len(ranks) + 3}
    added = {str(n): {"content": name, "special": True} for name, n in special.items()}
    settings = {"added_tokens_decoder": added, "eos_token": "<|im_end|>", "tokenizer_class": "TikTokenTokenizer"}
    settings["auto_map"] = {"AutoTokenizer": ["tokenization_moonshot.TikTokenTokenizer", None]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_vl"}))
    tokenizer = load_tokenizer(tmp_path)
    theirs = tiktoken.Encoding("kimi", pat_str=PIECES, mergeable_ranks=ranks, special_tokens=special)
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == theirs.encode(text) and tokenizer.decode(ids) == text
    assert tokenizer.convert_tokens_to_ids(list(special)) == list(special.values())
    tokenizer.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "config.json").write_text(json.dumps({"model_type": "kimi_vl"}))
    again = load_tokenizer(tmp_path / "saved")
    assert all(again(text)["input_ids"] == tokenizer(text)["input_ids"] for text in TEXTS)
