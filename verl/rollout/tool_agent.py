"""`tool_agent`: the model calls tools until it answers, or a limit ends the dialogue.

turn of the model → calls in it → run, up to max_parallel_calls at once → their messages → next turn
                 ↘ none: the interaction's answer (a user's message) → next turn, or the end
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from verl.config.schema.rollout import RolloutConfig
from verl.data.rows import TOOL_AGENT, BadRow, ChatRenderer, RowTools, tools_of_row
from verl.errors import UserError
from verl.rollout.loops import AgentLoop, register
from verl.rollout.record import Outcome
from verl.rollout.session import OutOfTokens, Reply, Session
from verl.rollout.tools.interactions import Partner, load_interactions
from verl.rollout.tools.parsers import INVALID_TURNS, OWN_PARSERS, PARSERS, ToolCall, parse
from verl.rollout.tools.tool import ToolError
from verl.rollout.tools.toolbox import Content, Toolbox, ToolRun, warn_once
from verl.rollout.turn_boundaries import Boundaries, without_images


@register("tool_agent")
class ToolAgent(AgentLoop):
    """Tools and an interaction around `session.chat`; the keys are `rollout.multi_turn` and `rollout.agent`."""

    runs_users_code: ClassVar[bool] = True

    def __init__(self, session: Session, **arguments: Any):
        super().__init__(session, **arguments)
        self.toolbox = session.setup.tools or Toolbox([])
        self._turns = self.rollout_config.multi_turn
        self._agent = self.rollout_config.agent

    async def run(self, row: dict[str, Any], session: Session) -> Outcome:
        """See `AgentLoop.run`."""
        if not isinstance(row["raw_prompt"], list):
            raise UserError("tool_agent needs prompts that are messages")
        extra = row["extra_info"] or {}
        schemas = tools_of_row(self.toolbox.schemas, extra, row["columns"].get("tools"))
        names = [schema["function"]["name"] for schema in schemas]
        self.toolbox.warn_of_unknown(extra.get("tools_kwargs") or {})
        self.tools = ToolRun(
            {name: self.toolbox.by_name[name] for name in names},
            extra.get("tools_kwargs"),
            timeout=self._agent.tool_timeout,
            longest=self._turns.max_tool_response_length,
            side=self._turns.tool_response_truncate_side,
        )
        self.tools.show_images = self.session.setup.boundaries.image_parts
        self.partner = self._partner(extra.get("interaction_kwargs"))
        self.messages: list[dict[str, Any]] = [dict(message) for message in row["raw_prompt"]]
        self.session.begin(self.messages, row["prompt_ids"], schemas)
        self.turns = 0
        try:
            status = await self._dialogue(schemas)
        finally:
            await self.tools.close()
            if self.partner is not None:
                await self.partner.close()
        return self._outcome(status)

    def so_far(self) -> Outcome:
        """See `AgentLoop.so_far`: nothing before the first turn."""
        return self._outcome() if self.session.turns else Outcome()

    def _partner(self, kwargs: Any) -> Partner | None:
        if not (name := (kwargs or {}).get("name")):
            return None
        if not self._turns.interaction_config_path:
            why = (
                "rows name it in interaction_kwargs and there is no multi_turn.interaction_config_path: nobody answers"
            )
            warn_once(str(name), "no file", why, of="interaction")
            return None
        interactions = load_interactions(self._turns.interaction_config_path)
        if name not in interactions:
            raise UserError(f"interaction_kwargs.name={name!r}: known are {', '.join(interactions) or 'none'}")
        arguments = {key: value for key, value in kwargs.items() if value is not None}
        return Partner(interactions[name], arguments, self._agent.tool_timeout)

    async def _dialogue(self, schemas: list[dict[str, Any]]) -> str | None:
        """Turn after turn; the status, None where the sampler's finish reason says it."""
        invalid = answered = 0
        while True:
            try:
                reply = await self.session.chat(self.messages, schemas)
            except OutOfTokens:
                return "length"
            except BadRow as error:
                raise UserError(f"the chat template does not take the tools' messages: {error}") from error
            self.turns += 1
            self.messages.append(reply.message)
            if reply.completion.finish_reason != "stop":
                return None
            if not reply.calls and self.partner is None:
                return "completed"
            valid = [c for c in reply.calls if not c.error and c.name in self.tools.names]
            invalid = invalid + 1 if reply.calls and not valid else 0
            if status := self._limit(answered, invalid, len(reply.calls)):
                return status
            following = await self._following(reply)
            self._note_rewards()
            if not following:
                return "completed"
            self.messages += following
            answered += 1

    async def _following(self, reply: Reply) -> list[dict[str, Any]]:
        """The messages that answer a turn: of its tools, or of the interaction. []: the dialogue is over."""
        if reply.calls:
            room = asyncio.Semaphore(self._turns.max_parallel_calls)
            answers = await asyncio.gather(*(self._call(call, room) for call in reply.calls))
            return [_tool_message(call, answer) for call, answer in zip(reply.calls, answers, strict=True)]
        assert self.partner is not None
        text = await self.partner.answer(without_images(self.messages))
        return [] if text is None else [{"role": "user", "content": text}]

    async def _call(self, call: ToolCall, room: asyncio.Semaphore) -> Content:
        async with room:
            return await self.tools.call(call)

    def _note_rewards(self) -> None:
        """What the calls and the answer to the last turn earned, for the report."""
        rewards = self.tools.rewards + (self.partner.rewards if self.partner is not None else [])
        earned = sum(rewards) - sum(turn.get("reward", 0.0) for turn in self.session.turns)
        if any(rewards):
            self.session.turns[-1]["reward"] = round(earned, 6)

    def _limit(self, answered: int, invalid: int, asked: int) -> str | None:
        """The status of a trajectory that may not go on: what the last turn asks for is not done."""
        most, users = self._turns.max_assistant_turns, self._turns.max_user_turns
        calls = self._agent.max_calls
        if invalid >= INVALID_TURNS:
            return "invalid_calls"
        if calls is not None and self.tools.counts["calls"] + asked > calls:
            return "max_calls"
        if (most is not None and self.turns >= most) or (users is not None and answered >= users):
            return "max_turns"
        return None

    def _outcome(self, status: str | None = None) -> Outcome:
        rewards = {"tool_rewards": self.tools.rewards}
        if self.partner is not None:
            rewards["turn_scores"] = self.partner.rewards
        metrics = {"tool_calls": self.tools.seconds, "tool_counts": dict(self.tools.counts)}
        measured = self.tools.metrics + (self.partner.metrics if self.partner is not None else [])
        fields = {"messages": without_images(self.messages), "tool_metrics": measured}
        return Outcome(
            status,
            fields=rewards | fields,
            metrics=metrics | {"reward_scores": rewards},
            num_turns=len(self.messages),
        )


def _tool_message(call: ToolCall, content: Content) -> dict[str, Any]:
    message = {"role": "tool", "content": content, "name": call.name}
    return message if call.error else message | {"tool_call_id": call.id}


def checked_tools(rollout: RolloutConfig, tokenizer: Any, kwargs: Any) -> RowTools | None:
    """What prompts of `tool_agent` are rendered with; None without tools. ToolError for tools, interactions, a template
    or a parser that cannot be used. tokenizer: None where the template is not to be had."""
    turns = rollout.multi_turn
    load_interactions(turns.interaction_config_path)
    if not (turns.tool_config_path or turns.function_tool_path):
        return None
    schemas = Toolbox.load(turns.tool_config_path, turns.function_tool_path).schemas
    if schemas and tokenizer is not None:
        boundaries, offered = Boundaries(tokenizer, kwargs), list(schemas.values())
        if sample_call := _check_template(boundaries.chat, offered, turns.format):
            _check_room(boundaries, offered, sample_call, rollout.response_length)
    return RowTools(schemas, rollout.agent.default_agent_loop == TOOL_AGENT)


def _check_room(boundaries: Boundaries, schemas: list[dict[str, Any]], written: str, longest: int) -> None:
    """ToolError if the shortest call (`written` by the template) and its answer leave no token for a turn after
    them."""
    chat = boundaries.chat
    call = ToolCall(schemas[0]["function"]["name"], {}, id="call_0")
    turn = {"role": "assistant", "content": "", "tool_calls": [call.message()]}
    answer = boundaries.between(turn, [_tool_message(call, "")], schemas, chat.tokenizer.eos_token_id)
    if answer is None:
        return
    called, answered = len(chat.ids(written)), len(answer[0])
    if called + answered >= longest:
        raise ToolError(
            f"data.max_response_length={longest} cannot hold a turn after a call of a tool: the shortest call "
            f"has {called} tokens, the message with its answer {answered} more; "
            f"raise it to {2 * (called + answered)} or more"
        )


def _check_template(chat: ChatRenderer, schemas: list[dict[str, Any]], tool_format: str) -> str | None:
    """A call as the template writes it, None if it writes none."""
    ask = [{"role": "user", "content": "Hello."}]
    try:
        plain, offered = chat.text(ask), chat.text(ask, tools=schemas)
    except BadRow as error:
        raise ToolError(f"the chat template fails with tools: {error}") from error
    if plain == offered:
        raise ToolError(
            "the model's chat template has no support for tools: they do not appear in the prompt. "
            "Name a template that has: actor_rollout_ref.model.custom_chat_template"
        )
    sample_call = _written_call(chat, ask, offered, schemas)
    built_in = PARSERS.keys() - OWN_PARSERS.keys()
    if sample_call is None or tool_format not in built_in or _reads(tool_format, sample_call, schemas):
        return sample_call
    fitting = [name for name in PARSERS if _reads(name, sample_call, schemas)] or ["none of the known"]
    problem = f"multi_turn.format={tool_format} cannot read a call as the model's chat template writes it"
    raise ToolError(f"{problem}; {' or '.join(fitting)} can")


def _written_call(
    chat: ChatRenderer, ask: list[dict[str, Any]], before: str, schemas: list[dict[str, Any]]
) -> str | None:
    """A call as the template writes it behind `before`, the text of `ask` with tools; None if it writes none."""
    call = ToolCall(schemas[0]["function"]["name"], {"text": "a"}, id="call_0").message()
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        text = chat.text([*ask, turn], generation=False, tools=schemas)
    except BadRow:
        return None
    if not text.startswith(before):
        return None
    return str(text[len(before) :].partition(chat.tokenizer.eos_token or "\0")[0])


def _reads(tool_format: str, text: str, schemas: list[dict[str, Any]]) -> bool:
    calls = parse(tool_format, text, schemas)[1]
    return [call.name for call in calls] == [schemas[0]["function"]["name"]] and not calls[0].error
