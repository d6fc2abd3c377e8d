"""A plug-in (model.external_lib) with an agent loop whose responses have the lengths that the work prescribes."""

from __future__ import annotations

from typing import Any

from verl.rollout.agent_loop import AgentLoopOutput, SingleTurnAgent, register


@register("exact_length")
class ExactLength(SingleTurnAgent):
    """One response of `extra_info["lengths"][sample_index]` tokens."""

    async def run(self, sampling_params: Any, **row: Any) -> AgentLoopOutput:
        """See `AgentLoopBase.run`."""
        length = row["extra_info"]["lengths"][row["sample_index"]]
        exact = {**sampling_params, "max_tokens": int(length), "ignore_eos": True}
        return await super().run(exact, **row)
