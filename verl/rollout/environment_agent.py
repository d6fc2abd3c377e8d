"""`environment_agent`: plays a row in its environment.

    reset(row) → messages → turn of the model → step(message) → messages, reward, done → next turn
                  command, verifiers: a program of the user's, or an environment server, asks the session over HTTP
                  instead

An environment that fails, or that does not answer within `rollout.agent.tool_timeout`, is no outcome of the policy's:
the trajectory ends with status environment_error and is sampled again.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import shlex
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np

from verl.config.reward_weights import user_scores
from verl.data.rows import BadRow, without_nulls
from verl.errors import UserError
from verl.rollout import harbor, nemo_gym, openenv, verifiers_server
from verl.rollout.environments import Env, GymEnv, Messages, Observation, StepResult
from verl.rollout.event_loop import in_thread, thread_room, users_code
from verl.rollout.loops import AgentLoop, register
from verl.rollout.programs import run_program
from verl.rollout.record import EnvironmentFailed, Outcome, SegmentRecord
from verl.rollout.session import OutOfTokens, Session
from verl.rollout.tools.parsers import INVALID_TURNS, ToolCall
from verl.rollout.tools.toolbox import load_class, warn_once
from verl.rollout.turn_boundaries import without_images

_PATH_KEY = "rollout.agent.environment.path"
_ADAPTERS: dict[str, tuple[type, str, Callable[..., None]]] = {
    "openenv": (openenv.OpenEnv, "url", openenv.check),
    "nemo_gym": (nemo_gym.NemoGym, "url", nemo_gym.check),
    "harbor": (harbor.Task, "folder", harbor.check),
}
"""Environments of ours by name: the class, the argument that `path` is, and what checks a path."""
_LONGEST_VARIABLE = 2**17 - 16  # bytes: Linux starts no program with a longer `VERL_ROW=…`


def maker(spec: Mapping[str, Any]) -> Callable[[], Env | Awaitable[Env]]:
    """What makes the environment that {name, path, kwargs} describes. UserError for one that does not exist.

    It is async where `reset` is: what such a constructor opens belongs to the event loop."""
    path, kwargs = str(spec["path"]), dict(spec.get("kwargs") or {})
    if spec["name"] in _ADAPTERS:
        cls, kwargs = _ADAPTERS[spec["name"]][0], {_ADAPTERS[spec["name"]][1]: path, **kwargs}
    else:
        cls = load_class(path, _PATH_KEY)

    def make() -> Env:
        env: Any = cls(**kwargs)
        return GymEnv(env) if spec["name"] == "gym" else env

    async def make_on_the_loop() -> Env:
        return make()

    return make_on_the_loop if inspect.iscoroutinefunction(getattr(cls, "reset", None)) else make


def check(spec: Mapping[str, Any], tokenizer: str) -> None:
    """UserError for an environment that cannot be used: its class, program, server. tokenizer: path or name."""
    name, path, kwargs = spec["name"], str(spec["path"]), dict(spec.get("kwargs") or {})
    if name in _ADAPTERS:
        _check_kwargs(_ADAPTERS[name][0], name, path, **kwargs)
        _ADAPTERS[name][2](path, **(kwargs if name == "harbor" else {}))
    elif name == "verifiers":
        verifiers_server.check(spec, tokenizer)
    elif name == "command":
        program = next(iter(shlex.split(path)), "")
        if shutil.which(program) is None:
            raise UserError(f"{_PATH_KEY}: the program {program!r} is not found")
        if nulls := [key for key, value in kwargs.items() if value is None]:
            raise UserError(
                f"environment.kwargs.{nulls[0]}=null: the kwargs of a program are variables of its environment, "
                "which hold text"
            )
    else:
        factory = load_class(path, _PATH_KEY)
        _check_kwargs(factory, path, **kwargs)
        if name == "gym":
            try:
                env = factory(**kwargs)
            except Exception as error:
                raise UserError(f"{path} makes no environment: {type(error).__name__}: {error}") from error
            with suppress(Exception):
                env.close()


def _check_kwargs(factory: Callable[..., Any], name: str, *arguments: str, **kwargs: Any) -> None:
    try:
        inspect.signature(factory).bind(*arguments, **kwargs)
    except TypeError as error:
        raise UserError(f"environment.kwargs do not fit {name}: {error}") from error


@register("environment_agent")
class EnvironmentAgent(AgentLoop):
    """Plays a row in its environment; the keys are `rollout.agent.environment` and `rollout.multi_turn`."""

    runs_users_code: ClassVar[bool] = True

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._agent = self.rollout_config.agent
        self._earned: list[tuple[SegmentRecord | None, int, float]] = []
        self._metrics: dict[str, Any] = {}
        self._messages: Messages = []
        self._path = ""
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0
        self._played = False

    async def run(self, row: dict[str, Any], session: Session) -> Outcome:
        """See `AgentLoop.run`."""
        overrides = row["columns"].get("environment") or {}
        # Parquet fills the keys of other rows with nulls; a null of the configuration is the user's.
        spec = {**self._agent.environment, **without_nulls(overrides)}
        if not spec["name"] or not spec["path"]:
            raise UserError(
                "environment_agent needs rollout.agent.environment.name and .path, or the column `environment`"
            )
        self._path = spec["path"]
        play = {"command": self._command, "verifiers": self._verifiers}.get(spec["name"], self._play)
        status = await play(spec, row)
        return self._outcome(status)

    async def _play(self, spec: Mapping[str, Any], row: dict[str, Any]) -> str | None:
        make, self._played = maker(spec), True
        env: Env = await self._ask(make, object)
        fields = {name: row[name] for name in ("raw_prompt", "extra_info", "uid", "sample_index")}
        try:
            start: Observation = await self._ask(env.reset, Observation, row=row["columns"] | fields)
            opening_messages = row["raw_prompt"] if start.messages is None else start.messages
            if not opening_messages:
                raise EnvironmentFailed(f"{self._path}: reset gives no messages, and the row has no prompt")
            self._messages = [dict(message) for message in opening_messages]
            status = await self._turns(env, start.tools)
            if (final := getattr(env, "final", None)) is not None:
                self._earn(await self._ask(final, StepResult))
            return status
        finally:
            with suppress(Exception):
                await self._ask(env.close, object)

    async def _turns(self, env: Env, tools: Sequence[Mapping[str, Any]] | None) -> str | None:
        limits, turns, invalid = self.rollout_config.multi_turn, 0, 0
        most, users, most_calls = limits.max_assistant_turns, limits.max_user_turns, self._agent.max_calls
        while True:
            try:
                reply = await self.session.chat(self._messages, tools)
            except OutOfTokens as error:
                if not turns:
                    raise EnvironmentFailed(f"{self._path}: its first messages do not fit: {error}") from error
                return "length"
            except BadRow as error:
                problem = f"the chat template does not take the environment's messages: {error}"
                raise EnvironmentFailed(problem) from error
            self._messages.append(reply.message)
            if reply.completion.finish_reason != "stop":
                return None
            turns += 1
            if tools and most_calls is not None and self._counts["calls"] + len(reply.calls) > most_calls:
                return "max_calls"
            following = self._unread(reply.calls) if tools else []
            without_action = bool(following) and len(following) == len(reply.calls)
            if not without_action:
                step: StepResult = await self._ask(env.step, StepResult, message=reply.message)
                self._earn(step)
                if step.done:
                    return "max_turns" if step.truncated else "completed"
                following += step.messages
                without_action = bool(step.invalid)
            invalid = invalid + 1 if without_action else 0
            if invalid >= INVALID_TURNS:
                return "invalid_calls"
            if (most is not None and turns >= most) or (users is not None and turns > users):
                return "max_turns"
            self._messages += following

    def _unread(self, calls: Sequence[ToolCall]) -> Messages:
        """What answers the calls that cannot be read: the environment does not see them."""
        unread = [call for call in calls if call.error]
        self._counts.update(calls=len(calls), invalid=len(unread))
        return [{"role": "tool", "content": f"Error: {call.error}", "name": call.name} for call in unread]

    async def _ask(self, method: Callable[..., Any], gives: type, **arguments: Any) -> Any:
        """Call the environment within its deadline. EnvironmentFailed for whatever goes wrong there, an answer of
        another type too."""
        started, apart = self.loop.time(), not inspect.iscoroutinefunction(method)
        try:
            async with thread_room() if apart else nullcontext(), asyncio.timeout(self._agent.tool_timeout):
                reply = await users_code(in_thread(method, **arguments) if apart else method(**arguments))
            if not isinstance(reply, gives):
                other = " (gymnasium's interface is environment.name=gym)" if isinstance(reply, tuple) else ""
                raise TypeError(f"it has to give {gives.__name__}, not {type(reply).__name__}{other}")
            return reply
        except Exception as error:
            cause = str(error) or f"no answer within rollout.agent.tool_timeout={self._agent.tool_timeout} s"
            raise EnvironmentFailed(f"{self._path}: {method.__name__}: {type(error).__name__}: {cause}") from error
        finally:
            self._seconds += self.loop.time() - started

    def _earn(self, step: StepResult) -> None:
        segment = self.session.latest
        place = segment.response_length - 1 if segment is not None else 0
        self._earned.append((segment, place, step.reward))
        if self.session.turns:
            self.session.turns[-1]["reward"] = step.reward
        self._metrics |= step.metrics
        if step.invalid is not None:
            self._counts.update(calls=1, invalid=int(step.invalid))

    async def _command(self, spec: Mapping[str, Any], row: dict[str, Any]) -> str | None:
        """Run a program until it ends. A line of its output that is JSON with `reward` says what it earned."""
        task = {"messages": row["raw_prompt"], "extra_info": row["extra_info"], "uid": row["uid"]}
        data = json.dumps(task, default=str)
        with TemporaryDirectory(prefix="verl_row_") as folder:
            file = Path(folder) / "row.json"
            file.write_text(data)
            variables = {
                "OPENAI_BASE_URL": self.session.base_url,
                "ANTHROPIC_BASE_URL": self.session.base_url.removesuffix("/v1"),
                "OPENAI_API_KEY": "session",
                "ANTHROPIC_API_KEY": "session",
                "VERL_ROW_FILE": str(file),
                **({"VERL_ROW": data} if len(data) < _LONGEST_VARIABLE else {}),
                **{name: str(value) for name, value in (spec.get("kwargs") or {}).items()},
            }
            status, output, last_lines = await run_program(str(spec["path"]), variables)
        if status and not self.session.full:
            raise EnvironmentFailed(f"{spec['path']}: exit status {status}{last_lines}")
        if not self.session.segments():
            raise EnvironmentFailed(
                f"{spec['path']}: it ended without a request to the model: it has to ask the URL in OPENAI_BASE_URL or "
                f"ANTHROPIC_BASE_URL{last_lines}"
            )
        self._messages = self.session.messages or list(row["raw_prompt"])
        self._read(output)
        return self._status_of_program()

    def _status_of_program(self) -> str | None:
        """length only where the run's limits cut a turn, not where a request's own `max_tokens` did."""
        if self.session.full:
            return "length"
        return "completed" if self.session.finish_reason == "length" else None

    async def _verifiers(self, spec: Mapping[str, Any], row: dict[str, Any]) -> str | None:
        """Have an environment server play an episode through this session."""
        model, extra = self.config.actor_rollout_ref.model, row["extra_info"] or {}
        tokenizer = self.config.data.tokenizer or model.tokenizer_path or model.path
        server = verifiers_server.server_of(spec, tokenizer)
        self._played = True
        try:
            result = await server.run(self.session.base_url, extra.get("task"), extra.get("index"))
        except EnvironmentFailed:
            if self.session.full:
                return "length"
            raise
        self._messages = result["messages"]
        self._earn(StepResult(reward=result["reward"], metrics=result["metrics"]))
        return "max_turns" if result["stop"] == "max_turns" else self._status_of_program()

    def _read(self, output: str) -> None:
        """Take what a program earned from the last line of its output that says so."""
        for line in reversed(output.splitlines()):
            with suppress(ValueError):
                result = json.loads(line)
                if isinstance(result, dict) and "reward" in result:
                    break
        else:
            if not user_scores(self.config):
                missing = 'no line of its output is JSON with "reward": the rule of the row\'s data_source scores it'
                warn_once(self._path, "no reward", missing, of="program")
            return
        try:
            self._earn(StepResult(reward=float(result["reward"]), metrics=dict(result.get("metrics") or {})))
        except (TypeError, ValueError) as error:
            raise EnvironmentFailed(f"{self._path}: its line {line[:200]} gives no reward: {error}") from error

    def so_far(self) -> Outcome:
        """See `AgentLoop.so_far`."""
        return self._outcome()

    def _outcome(self, status: str | None = None) -> Outcome:
        total = sum(reward for _, _, reward in self._earned)
        metrics: dict[str, Any] = {"tool_calls": self._seconds, "step_reward": total}
        of_requests = {name: self.session.counts[name] for name in ("calls", "invalid")}
        if counts := self._counts + Counter(of_requests):
            metrics["tool_counts"] = dict(counts)
        if self._agent.step_rewards == "tokens":
            segments = self.session.segments()
            scores = {id(segment): np.zeros(segment.response_length) for segment in segments}
            for segment, place, reward in self._earned:
                if id(segment) in scores:  # the answer was not replaced
                    scores[id(segment)][place] += reward
            metrics["token_scores"] = np.concatenate([np.zeros(0), *scores.values()])
        scored = not user_scores(self.config) and (self._earned or self._played)
        # Of a program that was ended there is what its session saw.
        messages = self._messages or self.session.messages
        earned = {"environment_reward": total, "environment_metrics": self._metrics}
        fields = {"messages": without_images(messages)} | earned
        return Outcome(status, total if scored else None, fields, metrics, len(messages) or 2)
