"""Limits for the `rate_limited` manager: calls at once, calls and tokens in any 60 seconds."""

from __future__ import annotations

from collections import deque

WINDOW = 60.0


class RateGate:
    """Counts calls of all processes together. `now` is any monotonic clock in seconds.

    ValueError if a limit can never be met.
    """

    def __init__(
        self,
        max_concurrent: int | None,
        max_rpm: int | None = None,
        max_tpm: int | None = None,
        tokens: int = 2000,
    ):
        for name, value in (("max_concurrent", max_concurrent), ("max_rpm", max_rpm)):
            if value is not None and value < 1:
                raise ValueError(
                    f"reward_model.{name}={value}: no call could ever start; use 1 or more, or null"
                )
        if max_tpm is not None and max_tpm < tokens:
            raise ValueError(
                f"reward_model.max_tpm={max_tpm} is below estimated_tokens_per_request={tokens}: no call could start"
            )
        self._concurrent, self._rpm, self._tpm, self._tokens = max_concurrent, max_rpm, max_tpm, tokens
        self._running = 0
        self._starts: deque[float] = deque()

    def try_start(self, now: float) -> float | None:
        """0.0 if a call starts now (counted), seconds until one may, or None if one has to finish first."""
        if self._concurrent is not None and self._running >= self._concurrent:
            return None
        while self._starts and self._starts[0] <= now - WINDOW:
            self._starts.popleft()
        limits = [
            limit for limit in (self._rpm, self._tpm and self._tpm // self._tokens) if limit is not None
        ]
        if limits and len(self._starts) >= min(limits):
            return max(self._starts[len(self._starts) - min(limits)] + WINDOW - now, 1e-3)
        self._running += 1
        self._starts.append(now)
        return 0.0

    def finish(self) -> None:
        """A call that had started is over."""
        self._running -= 1
