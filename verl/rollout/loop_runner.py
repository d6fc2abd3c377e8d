"""Runs agent loops in one process, the driver or one of their own: a session and a loop for each trajectory, its
deadline, its end.

LoopRunner.run ─→ Session ─→ Attempt, or a copy of it and a message to the driver
              └→ the loop's run(row, session) ─→ Outcome
"""

from __future__ import annotations

import asyncio
from functools import cached_property
from typing import Any

from verl.config.schema.base import select
from verl.engine.rollout.base import SamplingParams
from verl.rollout import loops
from verl.rollout.boundary import Boundaries
from verl.rollout.event_loop import users_code
from verl.rollout.record import Outcome, Record
from verl.rollout.session import Session
from verl.trajectory import SINGLE_TURN

ROLLOUT = "actor_rollout_ref.rollout"


class LoopRunner:
    """What the loops of a process share: tokenizer, boundaries between turns, tools. config: the run's checked
    configuration.

    longest: tokens of context and response together. tool_format: how the model writes calls. as_inference: a turn sees
    the dialogue as the template writes it, in a new segment where that is not what was written so far.
    """

    def __init__(self, tokenizer: Any = None, config: Any = None):
        self.tokenizer, self.config = tokenizer, config
        loops.load_listed(self._key("agent.agent_loop_config_path"))
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

    async def run(self, name: str, record: Record, sampling: SamplingParams, row: dict[str, Any]) -> Outcome:
        """What the loop registered as `name` gives for a row (see `AgentLoop.run`), whose tokens are in the record.

        A trajectory past its deadline, or one whose environment failed, gives what was written so far, with that
        status. Raises what the loop raises besides; TypeError if it returns anything but an outcome.
        """
        session = Session(record, sampling, self)
        session.begin(row["raw_prompt"], row["prompt_ids"])
        deadline = asyncio.timeout(self._timeout)
        loop: loops.AgentLoop | None = None
        try:
            async with deadline:
                loop = loops.get(name).create(session, **loops.ARGUMENTS.get(name, {}))
                running = loop.outcome(row)
                outcome = await (running if name == SINGLE_TURN else users_code(running))
        except TimeoutError:
            if not deadline.expired():
                raise
            why = f"the trajectory took longer than rollout.agent.trajectory_timeout={self._timeout} s"
            outcome = _ended(loop, "timeout", why)
        except loops.EnvironmentFailed as error:
            outcome = _ended(loop, "environment_error", str(error))
        finally:
            session.close()
        if not isinstance(outcome, Outcome):
            raise TypeError(f"an agent loop returns an Outcome, not {type(outcome).__name__}")
        if session.turns:
            outcome.metrics.setdefault("turns", session.turns)
            outcome.fields.setdefault("messages", session.messages)
        if counts := +session.counts:
            outcome.metrics["session_counts"] = dict(counts)
        return outcome


def _ended(loop: loops.AgentLoop | None, status: str, why: str) -> Outcome:
    """The outcome of a trajectory that was ended from outside."""
    outcome = loop.so_far() if loop is not None else Outcome()
    outcome.status = status
    outcome.fields["failure"] = why
    return outcome
