"""When a response is over: end tokens, stop strings, the token budget."""

from __future__ import annotations

from typing import Any

from verl.engine.rollout.native.request import Request

_BYTES_PER_CHARACTER = 4


class Stopper:
    """Decides after each token. Stop strings need the tokenizer; the string stays in the response."""

    def __init__(self, tokenizer: Any | None):
        self._tokenizer = tokenizer
        self._pieces: dict[int, str] = {}

    def reason(self, request: Request) -> str:
        """ "stop", "length", or "" to go on."""
        token = request.tokens[-1]
        if token in request.stop_ids:
            return "stop"
        stops = request.sampling.stop
        if stops and self._may_end(token, stops) and self._ended(_response(request), stops):
            return "stop"
        return "length" if len(request.tokens) >= request.max_tokens else ""

    def check(self, stops: tuple[str, ...]) -> None:
        """Raises ValueError for stop strings that cannot be looked for."""
        if stops and self._tokenizer is None:
            raise ValueError("stop strings need a tokenizer: give NativeEngine one, or use stop_token_ids")
        if any(not stop for stop in stops):
            raise ValueError("an empty stop string would end every response at once: remove it")

    def _may_end(self, token: int, stops: tuple[str, ...]) -> bool:
        """Whether a stop string can end inside this token. Cheap; a part of a character may end anything."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._decode([token])
        return not piece or "\ufffd" in piece or any(stop[-1] in piece for stop in stops)

    def _ended(self, tokens: list[int], stops: tuple[str, ...]) -> bool:
        """Whether the text of the last tokens holds a stop string. As many tokens as its bytes always suffice."""
        window = _BYTES_PER_CHARACTER * (max(map(len, stops)) + 1)
        text = self._decode(tokens[-window:])
        return any(stop in text for stop in stops)

    def _decode(self, tokens: list[int]) -> str:
        assert self._tokenizer is not None
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))


def _response(request: Request) -> list[int]:
    """The response's tokens, those that the prompt ends with included."""
    start = request.sampling.start
    return (
        [*request.prompt[len(request.prompt) - start :].tolist(), *request.tokens]
        if start
        else request.tokens
    )
