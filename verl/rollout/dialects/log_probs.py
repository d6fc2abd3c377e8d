"""Log-probs of sampled tokens, as OpenAI's API gives them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from verl.engine.rollout.base import Completion
from verl.rollout.session import Session


@cache
def _bytes_of_characters() -> dict[str, int]:
    """What the characters of a byte-level vocabulary stand for."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}


def _bytes(tokenizer: Any, token: int, text: str) -> list[int]:
    """The bytes of a token, which alone may be no text."""
    if "\ufffd" not in text:
        return list(text.encode())
    piece, table = tokenizer.convert_ids_to_tokens(token), _bytes_of_characters()
    if piece.startswith("<0x"):
        return [int(piece[1:-1], 16)]
    return [table[c] for c in piece] if all(c in table for c in piece) else list(text.encode())


def entries(session: Session, done: Completion) -> list[dict[str, Any]]:
    """Of every sampled token, the one that ends the turn too."""
    tokenizer, each = session.setup.tokenizer, []
    for token, value in zip(done.token_ids.tolist(), done.log_probs.tolist(), strict=True):
        text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
        data = _bytes(tokenizer, token, text)
        each.append({"token": text, "logprob": value, "bytes": data, "top_logprobs": []})
    return each


def legacy_entries(session: Session, done: Completion) -> dict[str, Any]:
    """The same in the form of /completions."""
    each = entries(session, done)
    texts, values = [entry["token"] for entry in each], [entry["logprob"] for entry in each]
    offsets = np.cumsum([0, *map(len, texts)])[:-1].tolist()
    top = [{text: value} for text, value in zip(texts, values, strict=True)]
    return {"tokens": texts, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}
