"""Ask a service for JSON: a deadline, a limit on the size of its answer, and further tries with growing pauses."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from verl.reward.outcome import ServiceFailed

PAUSES = (1.0, 2.0, 4.0)
"""Seconds before each further try."""
LONGEST_ANSWER = 64 << 20
_WORTH_ANOTHER_TRY = (408, 425, 429)
_SHOWN = 300


def post_json(
    url: str,
    body: Mapping[str, Any],
    *,
    timeout: float,
    headers: Mapping[str, str] | None = None,
    problem: Callable[[Any], str | None] = lambda answer: None,
) -> Any:
    """The JSON that `url` answers to `body`. ServiceFailed says why there is none.

    `timeout` in seconds limits one try, from the connection to the last byte. `problem` returns what is wrong with
    an answer, None if it is usable. Refusals (status 4xx) are not tried again.
    """
    if not url.startswith(("http://", "https://")):
        raise ServiceFailed(f"{url!r} is no http:// or https:// address")
    data = json.dumps(body).encode("ascii")
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})})
    for pause in (*PAUSES, None):
        try:
            answer = _once(request, timeout)
            if (wrong := problem(answer)) is None:
                return answer
            reason = wrong
        except (OSError, http.client.HTTPException) as error:
            reason = str(getattr(error, "reason", None) or error) or type(error).__name__
        if pause is not None:
            time.sleep(pause)
    raise ServiceFailed(f"{url} gave no usable answer in {len(PAUSES) + 1} tries: {reason[:_SHOWN]}")


def _once(request: urllib.request.Request, timeout: float) -> Any:
    """The answer to one try. OSError where it gives none and another may; ServiceFailed for a refusal."""
    deadline = time.monotonic() + timeout
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            text = _read(response, deadline)
    except urllib.error.HTTPError as error:
        with error:
            answer = f"status {error.code}: {error.read(_SHOWN).decode('utf-8', 'replace')}"
        if error.code < 500 and error.code not in _WORTH_ANOTHER_TRY:
            raise ServiceFailed(f"{request.full_url} refuses: {answer}") from None
        raise OSError(answer) from None
    try:
        return json.loads(text)
    except ValueError:
        raise OSError(f"it is no JSON: {text[:_SHOWN].decode('utf-8', 'replace')}") from None


def _read(response: http.client.HTTPResponse, deadline: float) -> bytes:
    parts, size = [], 0
    while part := response.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if time.monotonic() > deadline or size > LONGEST_ANSWER:
            raise OSError("it takes too long" if size <= LONGEST_ANSWER else "it is too long")
    return b"".join(parts)
