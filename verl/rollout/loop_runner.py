"""Runs agent loops in one process, the driver or one of their own: a session and a loop for each trajectory, its deadline, its end.

LoopRunner.run ─→ Session ─→ send (TrajectoryCalls, or a message to the driver)
              └→ the loop's run(sampling_params, **row) ─→ outputs with a status
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from functools import cached_property
from typing import Any

from verl.config.schema.base import Map, select
from verl.engine.rollout.base import SamplingParams
from verl.rollout import agent_loop
from verl.rollout.agent_loop import AgentLoopOutput, EnvironmentFailed, ServerManager
from verl.rollout.boundary import Boundaries
from verl.rollout.event_loop import users_code
from verl.rollout.session import Send, Session
from verl.trajectory import AGENT_LOOP_ARGUMENTS, SINGLE_TURN

ROLLOUT = "actor_rollout_ref.rollout"


class LoopRunner:
    """What the loops of a process share: tokenizer, boundaries between turns, tools. config: the run's checked configuration.

    longest: tokens of context and response together. tool_format: how the model writes calls. as_inference: a turn sees the dialogue as
    the template writes it, in a new segment where that is not what was written so far.
    """

    def __init__(self, tokenizer: Any = None, config: Any = None):
        self.tokenizer, self.config = tokenizer, config
        agent_loop.load_listed(self._key("agent.agent_loop_config_path"))
        self._timeout = self._key("agent.trajectory_timeout")
        self.longest: int | None = self._key("max_model_len")
        self.tool_format: str = self._key("multi_turn.format", "hermes")
        self.as_inference: bool = self._key("multi_turn.use_inference_chat_template", False)

    def _key(self, name: str, default: Any = None) -> Any:
        return select(self.config, f"{ROLLOUT}.{name}", default)

    @cached_property
    def boundaries(self) -> Boundaries:
        """What comes between turns, with the run's template."""
        kwargs = select(self.config, "data.apply_chat_template_kwargs")
        return Boundaries(self.tokenizer, kwargs, self._open_images)

    def _open_images(self) -> Any:
        """What makes the images of tools and environments the model's; None for a model that sees none."""
        from verl.data.media import ImageProcessor, load_processor

        model, kwargs = self.config.actor_rollout_ref.model, self.config.data.mm_processor_kwargs
        trusted = model.trust_remote_code
        processor = load_processor(model.path, self.tokenizer, kwargs, trust_remote_code=trusted)
        scored = self.config.reward_model.images
        return None if processor is None else ImageProcessor(processor, scored=scored)

    @cached_property
    def tools(self) -> Any:
        """The run's tools, or None where none is configured."""
        paths = [self._key(f"multi_turn.{name}") for name in ("tool_config_path", "function_tool_path")]
        if not any(paths):
            return None
        from verl.rollout.tools.toolbox import Toolbox

        return Toolbox.load(*paths)

    async def run(
        self, name: str, send: Send, sampling: SamplingParams, row: dict[str, Any]
    ) -> list[AgentLoopOutput]:
        """What the loop registered as `name` gives for a row: its keywords (see `AgentLoopBase.run`), `columns` among them, from
        which the others follow.

        A trajectory past its deadline, or one whose environment failed, gives what was written so far, with that status. Raises
        what the loop raises besides; TypeError if it returns anything but outputs.
        """
        session = Session(send, sampling, self)
        session.begin(row["raw_prompt"], row["prompt_ids"])
        params: Any = Map(asdict(sampling), logprobs=True) if agent_loop.is_users(name) else sampling
        columns = {key: value for key, value in row["columns"].items() if key not in AGENT_LOOP_ARGUMENTS}
        deadline = asyncio.timeout(self._timeout)
        loop: agent_loop.AgentLoopBase | None = None
        try:
            async with deadline:
                loop = self._loop(name, session)
                running = loop.run(params, **columns | row)
                outputs = await (running if name == SINGLE_TURN else users_code(running))
        except TimeoutError:
            if not deadline.expired():
                raise
            why = f"the trajectory took longer than rollout.agent.trajectory_timeout={self._timeout} s"
            outputs = _ended(session, loop, "timeout", why)
        except EnvironmentFailed as error:
            outputs = _ended(session, loop, "environment_error", str(error))
        finally:
            session.close()
        found = outputs if isinstance(outputs, list) else [outputs]
        for output in found:
            if not isinstance(output, AgentLoopOutput):
                raise TypeError(f"an agent loop returns AgentLoopOutput, not {type(output).__name__}")
        if session.turns and found:
            found[-1].metrics.setdefault("turns", session.turns)
            found[-1].extra_fields.setdefault("messages", session.messages)
        if found and (counts := +session.counts):
            found[-1].metrics["session_counts"] = dict(counts)
        return found

    @cached_property
    def _arguments(self) -> dict[str, Any]:
        """What the constructors of all loops get."""
        from verl.data.plugins import RLHFDataset

        return {
            "trainer_config": agent_loop.DictConfigWrap(self.config),
            "tokenizer": self.tokenizer,
            "processor": None,
            "dataset_cls": RLHFDataset,
            "data_config": agent_loop.DictConfigWrap(select(self.config, "data")),
            "hf_model_type": None,
        } | ({} if self.tools is None else {"tools": self.tools})

    def _loop(self, name: str, session: Session) -> agent_loop.AgentLoopBase:
        more = self._arguments | agent_loop.ARGUMENTS.get(name, {})
        return agent_loop.get(name)(server_manager=ServerManager(session), **more)


def _ended(
    session: Session, loop: agent_loop.AgentLoopBase | None, status: str, why: str
) -> list[AgentLoopOutput]:
    """What was written and earned until a trajectory was ended from outside."""
    known = loop.known_so_far() if loop is not None else {}
    fields = {**known.pop("extra_fields", {}), "failure": why}
    return session.outputs(status=status, extra_fields=fields, **known)
