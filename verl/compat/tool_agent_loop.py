"""`ToolAgentLoop` of the public system, for its subclasses: a dialogue with tools as states and their handlers.

    PENDING → GENERATING ⇄ PROCESSING_TOOLS
                   ↓
              TERMINATED

`tool_agent` itself is `verl.rollout.tool_agent`; this loop keeps the tokens of a dialogue in `AgentData`, where
handlers of a subclass read and write them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from enum import Enum
from typing import Any
from uuid import uuid4

from verl.compat.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.compat.tool_parsers import FunctionCall, ToolParser
from verl.errors import UserError
from verl.rollout.tools.tool import ToolResponse, normalize_function_tool_return, plain
from verl.rollout.tools.toolbox import truncated


class AgentState(Enum):
    """What comes next."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    TERMINATED = "terminated"
    INTERACTING = "interacting"


class AgentData:
    """A dialogue: its messages, and the tokens of prompt and responses so far (`prompt_ids`; the mask and the log-probs
    are of what follows the prompt)."""

    def __init__(
        self,
        messages: list[dict[str, Any]],
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        metrics: dict[str, Any] | None = None,
        request_id: str = "",
        tools_kwargs: dict[str, Any] | None = None,
    ):
        self.messages, self.request_id = messages, request_id
        self.image_data, self.video_data, self.audio_data = image_data, video_data, audio_data
        self.mm_processor_kwargs, self.metrics = mm_processor_kwargs or {}, {} if metrics is None else metrics
        self.tools_kwargs = tools_kwargs or {}
        self.prompt_ids: list[int] = []
        self.response_ids: list[int] = []
        self.response_mask: list[int] = []
        self.response_logprobs: list[float] = []
        self.routed_experts: Any = None
        self.turn_scores: list[float] = []
        self.tool_rewards: list[float] = []
        self.user_turns = self.assistant_turns = 0
        self.tool_calls: list[FunctionCall] = []
        self.extra_fields: dict[str, Any] = {}


class ToolAgentLoop(AgentLoopBase):
    """Handlers take `AgentData` and return the next `AgentState`. tools: what `load_all_tools` gives, as its
    `tools`."""

    def __init__(self, *args: Any, tools: Any = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        turns = self.rollout_config.multi_turn
        self.max_user_turns, self.max_assistant_turns = turns.max_user_turns, turns.max_assistant_turns
        self.max_parallel_calls = turns.max_parallel_calls
        self.max_tool_response_length = turns.max_tool_response_length
        self.tool_response_truncate_side = turns.tool_response_truncate_side
        self.tools = {tool.name: tool for tool in getattr(tools, "tools", None) or []}
        self.tool_schemas: list[dict[str, Any]] = plain([tool.tool_schema for tool in self.tools.values()])
        self.tool_parser_name = turns.format
        self.tool_parser = ToolParser.get_tool_parser(turns.format, self.tokenizer)

    async def run(self, sampling_params: Any, **row: Any) -> AgentLoopOutput:  # type: ignore[override]
        """Handle states until TERMINATED; prompt, responses and their mask as one output."""
        data = AgentData(
            [dict(message) for message in row["raw_prompt"]],
            request_id=uuid4().hex,
            tools_kwargs=row.get("tools_kwargs") or (row.get("extra_info") or {}).get("tools_kwargs"),
        )
        state = AgentState.PENDING
        while state is not AgentState.TERMINATED:
            if state is AgentState.PENDING:
                state = await self._handle_pending_state(data, sampling_params)
            elif state is AgentState.GENERATING:
                state = await self._handle_generating_state(data, sampling_params)
            elif state is AgentState.PROCESSING_TOOLS:
                state = await self._handle_processing_tools_state(data)
            else:
                raise UserError(f"{type(self).__name__}: no handler of ToolAgentLoop takes the state {state}")
        prompt = len(data.prompt_ids) - len(data.response_mask)
        end = self.response_length
        return AgentLoopOutput(
            prompt_ids=data.prompt_ids[:prompt],
            response_ids=data.prompt_ids[prompt:][:end],
            response_mask=data.response_mask[:end],
            response_logprobs=data.response_logprobs[:end] or None,
            num_turns=data.user_turns + data.assistant_turns + 1,
            metrics=data.metrics,
            extra_fields=data.extra_fields | {"turn_scores": data.turn_scores, "tool_rewards": data.tool_rewards},
        )

    async def _handle_pending_state(self, agent_data: AgentData, sampling_params: Any) -> AgentState:
        """The prompt's tokens."""
        agent_data.prompt_ids = await self.apply_chat_template(agent_data.messages, self.tool_schemas)
        return AgentState.GENERATING

    async def _handle_generating_state(
        self, agent_data: AgentData, sampling_params: Any, ignore_termination: bool = False
    ) -> AgentState:
        """A turn of the model and its calls. ignore_termination: also past a limit of tokens or turns."""
        room = self.response_length - len(agent_data.response_mask)
        if room < 1:
            return AgentState.TERMINATED
        room = min(room, self.rollout_config.single_turn_response_length or room)
        output = await self.server_manager.generate(
            request_id=agent_data.request_id,
            prompt_ids=agent_data.prompt_ids,
            sampling_params={**sampling_params, "max_tokens": room},
        )
        agent_data.response_ids = list(output.token_ids)
        agent_data.prompt_ids = agent_data.prompt_ids + agent_data.response_ids
        agent_data.response_mask += [1] * len(agent_data.response_ids)
        agent_data.response_logprobs += output.log_probs or []
        agent_data.assistant_turns += 1
        spent = len(agent_data.response_mask) >= self.response_length
        turns = (agent_data.assistant_turns, self.max_assistant_turns), (agent_data.user_turns, self.max_user_turns)
        if not ignore_termination and (spent or any(most and count >= most for count, most in turns)):
            return AgentState.TERMINATED
        schemas = [tool.tool_schema for tool in self.tools.values()]
        content, agent_data.tool_calls = await self.tool_parser.extract_tool_calls(agent_data.response_ids, schemas)
        agent_data.messages.append(self._build_assistant_message(content, agent_data))
        return AgentState.PROCESSING_TOOLS if agent_data.tool_calls else AgentState.TERMINATED

    def _build_assistant_message(self, content: str, agent_data: AgentData) -> dict[str, Any]:
        """The model's turn as a message of the dialogue."""
        message: dict[str, Any] = {"role": "assistant", "content": content or ""}
        calls = [
            {"type": "function", "function": _function(call)} | ({"id": call.tool_call_id} if call.tool_call_id else {})
            for call in agent_data.tool_calls
        ]
        return message | ({"tool_calls": calls} if calls else {})

    async def _handle_processing_tools_state(self, agent_data: AgentData) -> AgentState:
        """The first `max_parallel_calls` calls of the turn at once, their answers as messages and tokens. UserError for
        a tool that gives an image: `tool_agent` shows them."""
        calls = agent_data.tool_calls[: self.max_parallel_calls]
        answers = await asyncio.gather(*(self._call_tool(call, agent_data.tools_kwargs, agent_data) for call in calls))
        before, messages = list(agent_data.messages), list[dict[str, Any]]()
        for call, (response, reward, _) in zip(calls, answers, strict=True):
            if not response.is_text_only():
                raise UserError(f"{call.name} gave images: a subclass of ToolAgentLoop shows none; tool_agent does")
            named = {"tool_call_id": call.tool_call_id} if call.tool_call_id else {}
            messages.append({"role": "tool", "content": response.text or "", **named})
            if reward is not None:
                agent_data.tool_rewards.append(reward)
        agent_data.messages += messages
        merged, mask, log_probs = await self.ct_merge_context_msg(
            before,
            agent_data.messages,
            agent_data.prompt_ids,
            agent_data.response_mask,
            agent_data.response_logprobs or None,
            tools=self.tool_schemas,
        )
        if len(mask) >= self.response_length:
            return AgentState.TERMINATED
        agent_data.prompt_ids, agent_data.response_mask = merged.token_ids, mask
        agent_data.response_logprobs = log_probs or []
        agent_data.user_turns += 1
        return AgentState.GENERATING

    async def _call_tool(
        self, tool_call: FunctionCall, tools_kwargs: dict[str, Any], agent_data: AgentData
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """(response, reward, metrics) of one call on an instance of its own. What goes wrong is told to the model."""
        tool = self.tools.get(tool_call.name)
        if tool is None:
            text = f"Unknown function '{tool_call.name}'. Available tools: {', '.join(self.tools) or 'none'}"
            return ToolResponse(text=text), 0.0, {}
        try:
            arguments = json.loads(tool_call.arguments)
        except (ValueError, TypeError) as error:
            return ToolResponse(text=f"Invalid JSON in arguments for '{tool_call.name}': {error}"), 0.0, {}
        instance: str | None = None
        try:
            create_kwargs = (tools_kwargs.get(tool_call.name) or {}).get("create_kwargs") or {}
            instance, _ = await tool.create(create_kwargs=create_kwargs)
            result = await tool.execute(instance, arguments, agent_data=agent_data)
            response, reward, metrics = normalize_function_tool_return(result)
        except Exception as error:
            return ToolResponse(text=f"Error executing tool '{tool_call.name}': {error}"), 0.0, {}
        finally:
            if instance is not None:
                await tool.release(instance)
        text = response.text and truncated(
            response.text, self.max_tool_response_length, self.tool_response_truncate_side
        )
        return ToolResponse(text, response.image, response.video), reward, metrics


def _function(call: FunctionCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, TypeError):
        arguments = None
    return {"name": call.name, "arguments": arguments if isinstance(arguments, Mapping) else {}}
