"""A plug-in (model.external_lib) with an agent loop whose responses have the lengths that the work prescribes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from verl.engine.rollout.base import SamplingParams
from verl.rollout.agent_loop import AgentLoopOutput, SingleTurnAgent, register


@register("exact_length")
class ExactLength(SingleTurnAgent):
    """One response of `extra_info["lengths"][sample_index]` tokens."""

    async def run(self, sampling_params: SamplingParams, **row: Any) -> AgentLoopOutput:
        """See `AgentLoopBase.run`."""
        length = row["extra_info"]["lengths"][row["sample_index"]]
        return await super().run(replace(sampling_params, max_tokens=int(length), ignore_eos=True), **row)
