"""One trajectory's way to the sampler: every call that its agent loop makes goes through its session."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from verl.engine.rollout.base import Completion, SamplingParams
from verl.rollout.resumable import ResumableGeneration
from verl.trajectory import Prompt


class Session:
    """Numbers the calls of one trajectory, so that no two of them draw from the same random stream.

    The first calls of a group's sessions share the prefill of the prompt; later ones go to the replica that holds the
    session's prefix. `completions`: what came back so far, in the order it did. prefix: keeps requests apart whose prompts
    come from different files.
    """

    def __init__(self, requests: ResumableGeneration, prompt: Prompt, index: int, prefix: str = ""):
        self.completions: list[Completion] = []
        self._requests, self._prompt = requests, prompt
        self._group = f"{prefix}{prompt.uid}"
        self.id = f"{self._group}#{index}"
        self._calls = 0

    async def generate(self, prompt_ids: Any, sampling: SamplingParams) -> Completion:
        """Sample a continuation of `prompt_ids`, int64 [P]. Call k of a session draws by (seed, k, position in the call)."""
        call, self._calls = self._calls, self._calls + 1
        options: dict[str, Any] = {"request_id": self.id, "group": self._group}
        if call:
            sampling = replace(sampling, call=call)
            options = {"request_id": f"{self.id}.{call}", "session": self.id}
        result = await self._requests.generate(
            prompt_ids, sampling, media=self._prompt.media or None, **options
        )
        self.completions.append(result)
        return result
