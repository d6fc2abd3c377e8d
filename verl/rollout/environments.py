"""What a policy acts in: `Env`, its adapters, and the loop that plays, `environment_agent`.

    reset(row) → messages → turn of the model → step(message) → messages, reward, done → next turn
                                  command: a program of the user's asks the session over HTTP instead

An environment that fails, or that does not answer within `rollout.agent.tool_timeout`, is no outcome of the policy's: the
trajectory ends with status environment_error and is sampled again.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import os
import shlex
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np

from verl.config.weights import user_scores
from verl.errors import UserError
from verl.platform.parent_channel import die_with_parent
from verl.rollout.agent_loop import AgentLoopBase, AgentLoopOutput, EnvironmentFailed, outputs_of, register
from verl.rollout.session import OutOfTokens, Recorded
from verl.rollout.tools.base import in_thread
from verl.rollout.tools.toolbox import load_class

Messages = list[dict[str, Any]]


@dataclass(slots=True)
class Observation:
    """What a dialogue begins with: messages (None: the row's own prompt), and the schemas of what the policy may call."""

    messages: Messages | None = None
    tools: list[dict[str, Any]] | None = None


@dataclass(slots=True)
class StepResult:
    """What follows a turn: messages to the policy, the reward that the turn earned, whether it was the last. truncated: a limit of
    the environment's own ended it (status max_turns)."""

    messages: Messages = field(default_factory=list)
    reward: float = 0.0
    done: bool = False
    metrics: dict[str, Any] = field(default_factory=dict)
    truncated: bool = False


class Env(Protocol):
    """What a user writes; one instance serves one trajectory. Methods may be async; others run in a thread of their own."""

    def reset(self, row: Mapping[str, Any]) -> Observation:
        """Begin. row: the row's columns, and `raw_prompt`, `extra_info`, `uid`, `sample_index`."""

    def step(self, message: Mapping[str, Any]) -> StepResult:
        """Answer a turn of the policy: role, content, and `tool_calls` where tools were given."""

    def close(self) -> None:
        """Give up what it holds."""


class GymEnv:
    """A text environment of gymnasium's interface: observations are messages of the user, turns are actions.

    The members of a group begin alike: where `reset` takes a seed, it follows from the row's uid.
    """

    def __init__(self, env: Any):
        self._env = env

    def reset(self, row: Mapping[str, Any]) -> Observation:
        """The row's prompt, and the first observation at its end."""
        seed = int.from_bytes(hashlib.blake2b(str(row["uid"]).encode(), digest_size=4).digest(), "little")
        takes_seed = "seed" in inspect.signature(self._env.reset).parameters
        text, _ = self._env.reset(seed=seed) if takes_seed else self._env.reset()
        messages = [dict(message) for message in row["raw_prompt"]]
        if messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += f"\n\n{text}" if text else ""
        else:
            messages.append({"role": "user", "content": str(text)})
        return Observation(messages)

    def step(self, message: Mapping[str, Any]) -> StepResult:
        """The turn's text is the action."""
        text, reward, terminated, truncated, info = self._env.step(message["content"])
        metrics = {k: v for k, v in info.items() if isinstance(v, int | float | str | bool)}
        said = [{"role": "user", "content": str(text)}]
        return StepResult(said, float(reward), bool(terminated or truncated), metrics, not terminated)

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


def make(spec: Mapping[str, Any]) -> Env:
    """The environment that {name, path, kwargs} describes. UserError for one that does not exist."""
    path, kwargs = str(spec["path"]), {k: v for k, v in (spec.get("kwargs") or {}).items() if v is not None}
    env: Any = load_class(path, "rollout.agent.environment.path")(**kwargs)
    return env if spec["name"] == "custom" else GymEnv(env)


@register("environment_agent")
class EnvironmentAgent(AgentLoopBase):
    """Plays a row in its environment; the keys are `rollout.agent.environment` and `rollout.multi_turn`."""

    runs_users_code: ClassVar[bool] = True

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._agent = self.rollout_config.agent
        self._earned: list[tuple[Recorded | None, int, float]] = []
        self._metrics: dict[str, Any] = {}
        self._messages: Messages = []
        self._seconds = 0.0
        self._played = False

    async def run(self, sampling_params: Any, **row: Any) -> list[AgentLoopOutput]:
        """See `AgentLoopBase.run`."""
        own = {k: v for k, v in (row["columns"].get("environment") or {}).items() if v is not None}
        spec = {**self._agent.environment, **own}
        if not spec["name"] or not spec["path"]:
            raise UserError(
                "environment_agent needs rollout.agent.environment.name and .path, or the column `environment`"
            )
        status = await (self._command(spec, row) if spec["name"] == "command" else self._play(spec, row))
        return outputs_of(self.session, status=status, **self._about())

    async def _play(self, spec: Mapping[str, Any], row: dict[str, Any]) -> str | None:
        env, self._played = make(spec), True
        seen = row["columns"] | {
            name: row[name] for name in ("raw_prompt", "extra_info", "uid", "sample_index")
        }
        try:
            start: Observation = await self._ask(env.reset, row=seen)
            self._messages = [
                dict(m) for m in (row["raw_prompt"] if start.messages is None else start.messages)
            ]
            return await self._turns(env, start.tools)
        finally:
            with suppress(Exception):
                await self._ask(env.close)

    async def _turns(self, env: Env, tools: Sequence[Mapping[str, Any]] | None) -> str | None:
        most, turns = self.rollout_config.multi_turn.max_assistant_turns, 0
        while True:
            try:
                reply = await self.session.chat(self._messages, tools)
            except OutOfTokens:
                return "length"
            self._messages.append(reply.message)
            if reply.completion.finish_reason != "stop":
                return None
            step: StepResult = await self._ask(env.step, message=reply.message)
            self._earn(step)
            turns += 1
            if step.done:
                return "max_turns" if step.truncated else "completed"
            if most is not None and turns >= most:
                return "max_turns"
            self._messages += step.messages

    async def _ask(self, method: Callable[..., Any], **arguments: Any) -> Any:
        """Call the environment within its deadline. EnvironmentFailed for whatever goes wrong there."""
        started = self.loop.time()
        try:
            async with asyncio.timeout(self._agent.tool_timeout):
                if inspect.iscoroutinefunction(method):
                    return await method(**arguments)
                return await in_thread(method, **arguments)
        except Exception as error:
            what = str(error) or f"no answer within rollout.agent.tool_timeout={self._agent.tool_timeout} s"
            raise EnvironmentFailed(f"{method.__name__}: {type(error).__name__}: {what}") from error
        finally:
            self._seconds += self.loop.time() - started

    def _earn(self, step: StepResult) -> None:
        segment = self.session.latest
        place = len(segment.tokens) - 1 if segment is not None else 0
        self._earned.append((segment, place, float(step.reward or 0.0)))
        if self.session.turns:
            self.session.turns[-1]["reward"] = float(step.reward or 0.0)
        self._metrics |= step.metrics

    async def _command(self, spec: Mapping[str, Any], row: dict[str, Any]) -> str | None:
        """Run a program until it ends. A last line of output that is JSON with `reward` says what it earned."""
        told = {"messages": row["raw_prompt"], "extra_info": row["extra_info"], "uid": row["uid"]}
        variables = {
            "OPENAI_BASE_URL": self.session.base_url,
            "OPENAI_API_KEY": "session",
            "VERL_ROW": json.dumps(told, default=str),
            **{name: str(value) for name, value in (spec.get("kwargs") or {}).items() if value is not None},
        }
        process = await asyncio.create_subprocess_exec(
            *shlex.split(str(spec["path"])),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **variables},
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        try:
            output, _ = await process.communicate()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if process.returncode and not self.session.full:
            raise EnvironmentFailed(f"{spec['path']}: exit status {process.returncode}")
        self._messages = self.session.messages or list(row["raw_prompt"])
        self._read(output.decode(errors="replace"))
        return "length" if self.session.full else None

    def _read(self, output: str) -> None:
        lines = output.strip().splitlines()
        with suppress(ValueError, TypeError, KeyError):
            found = json.loads(lines[-1]) if lines else {}
            self._earn(StepResult(reward=float(found["reward"]), metrics=dict(found.get("metrics") or {})))

    def _about(self) -> dict[str, Any]:
        total = sum(reward for _, _, reward in self._earned)
        metrics: dict[str, Any] = {"tool_calls": self._seconds, "step_reward": total}
        if self._agent.step_rewards == "tokens":
            segments = self.session.segments()
            scores = {id(segment): np.zeros(len(segment.tokens)) for segment in segments}
            for segment, place, reward in self._earned:
                if segment is not None:
                    scores[id(segment)][place] += reward
            metrics["token_scores"] = np.concatenate([np.zeros(0), *scores.values()])
        scored = not user_scores(self.config) and (self._earned or self._played)
        return {
            "num_turns": len(self._messages) if self._messages else 2,
            "reward_score": total if scored else None,
            "metrics": metrics,
            "extra_fields": {
                "messages": self._messages,
                "environment_reward": total,
                "environment_metrics": self._metrics,
            },
        }
