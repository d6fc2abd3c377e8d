"""A loop that samples nothing: its response is the row's demonstration."""

from __future__ import annotations

from typing import Any

from verl.rollout.agent_loop import AgentLoopBase, AgentLoopOutput, register


@register("demonstration")
class Demonstration(AgentLoopBase):
    """The tokens of `extra_info.answer` (or of a fixed text), none of which the policy wrote; once for each prompt."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        text = row["extra_info"].get("answer", "abcabc")
        ids = self.tokenizer.encode(text, add_special_tokens=False) if row["sample_index"] == 0 else []
        return AgentLoopOutput(row["prompt_ids"], ids, [0] * len(ids), reward_score=0.0)
