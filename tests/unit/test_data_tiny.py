"""The helpers the other tests stand on: tokenizer round trip, models of every architecture load again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import VOCAB_SIZE, tiny_model, tiny_tokenizer


def test_tokenizer_round_trip_and_special_ids(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tiny_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "<|im_start|>user\nhé llo  \n 12<|im_end|>\n"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (258, 256, VOCAB_SIZE)
    assert len(tokenizer("abc é", add_special_tokens=False)["input_ids"]) == len("abc é".encode())


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "qwen3_moe", "llama"])
@pytest.mark.parametrize("tied", [False, True])
def test_model_loads_again(tmp_path: Path, arch: str, tied: bool) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    path = tiny_model(tmp_path / "m", arch, tied=tied)
    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.config.model_type == arch and model.config.tie_word_embeddings is tied
    logits = model(torch.arange(7)[None]).logits
    assert logits.shape == (1, 7, 264) and torch.isfinite(logits).all()
