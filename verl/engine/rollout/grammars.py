"""Constrained decoding: the tokens that a grammar allows next, by llguidance (`pip install 'verl[grammar]'`).

A grammar is a text in llguidance's form of Lark. The tokens that it leaves of a draw are recorded like those of
truncated sampling (`verl.models.sampling_mask`), so that the trainer normalises over the same ones as the sampler.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np

_MOST = 64  # compiled grammars that are kept


def installed() -> bool:
    """Whether grammars can be used here."""
    return find_spec("llguidance") is not None


def check(grammar: str) -> None:
    """ValueError for a grammar that cannot be used."""
    from llguidance import LLMatcher

    if problem := LLMatcher.validate_grammar(grammar):
        raise ValueError(f"the schema cannot be followed: {problem}")


class Grammars:
    """The grammars of a tokenizer. ends: tokens that end a response; None: the tokenizer's own."""

    def __init__(self, tokenizer: Any, ends: Sequence[int] | None = None):
        self._tokenizer, self._ends = tokenizer, ends
        self._compiled: dict[str, Any] = {}

    @cached_property
    def _vocabulary(self) -> Any:
        from llguidance.hf import from_tokenizer

        return from_tokenizer(self._tokenizer, eos_token=sorted(self._ends) if self._ends else None)

    def begin(self, grammar: str, written: Sequence[int] = ()) -> Progress:
        """A response that follows a grammar. written: its tokens so far. ValueError if there is no tokenizer, no
        llguidance, or the grammar cannot be used."""
        if self._tokenizer is None or not installed():
            raise ValueError("a grammar needs the model's tokenizer and llguidance: pip install 'verl[grammar]'")
        if grammar not in self._compiled:
            from llguidance import LLMatcher

            matcher = LLMatcher(self._vocabulary, grammar, log_level=0)
            if matcher.is_error():
                raise ValueError(f"the grammar cannot be used: {matcher.get_error()}")
            while len(self._compiled) >= _MOST:
                del self._compiled[next(iter(self._compiled))]
            self._compiled[grammar] = matcher
        progress = Progress(self._compiled[grammar].deep_copy(), self._vocabulary.vocab_size)
        for token in written:
            progress.take(token)
        return progress

    def sets(self, grammar: str, written: Sequence[int], token_ids: Sequence[int], vocabulary: int) -> np.ndarray:
        """The sets that these tokens were drawn from behind `written`, object [L], as
        `verl.models.sampling_mask.encode_set` writes them."""
        from verl.models.sampling_mask import encode_set

        progress, sets = self.begin(grammar, written), np.empty(len(token_ids), object)
        for number, token in enumerate(token_ids):
            ids = np.flatnonzero(progress.allowed(vocabulary)).astype(np.int32)
            sets[number] = encode_set(ids, vocabulary)
            progress.take(token)
        return sets


class Progress:
    """How far a response has followed its grammar."""

    def __init__(self, matcher: Any, size: int):
        self._matcher, self._size = matcher, size
        self._bits = np.zeros((1, -(-size // 32)), np.int32)

    def allowed(self, vocabulary: int) -> np.ndarray:
        """The tokens that may follow, bool [vocabulary]; those that end the response where the grammar is complete."""
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self._matcher, self._bits)
        if self._matcher.is_error():
            raise ValueError(f"the grammar cannot be followed: {self._matcher.get_error()}")
        bits = np.unpackbits(self._bits.view(np.uint8)[0], count=vocabulary, bitorder="little").astype(bool)
        bits[self._size :] = False  # rows of the model that are no tokens
        return bits

    def take(self, token: int) -> None:
        """One more token of the response. What ends the response ends the grammar, too."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
