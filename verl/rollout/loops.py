"""Agent loops: how one response comes about from a prompt. The only part that knows of turns and tools.

A loop writes tokens through its session (`verl.rollout.session`): `session.chat` for dialogues, `session.generate` for
token ids, and returns an `Outcome`. Sampled ids are kept as sampled and never tokenised again. `single_turn_agent` asks
once, `tool_agent` runs tools, `environment_agent` plays with an environment. Loops with the signatures of the public
system are `verl.compat.agent_loop`'s, which users import as `verl.rollout.agent_loop` or by its public path.
"""

from __future__ import annotations

import asyncio
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from verl.engine.rollout.base import SamplingParams
from verl.errors import UserError
from verl.rollout import dialects  # noqa: F401 - what sessions speak over HTTP
from verl.rollout.event_loop import users_code
from verl.rollout.record import EnvironmentFailed, Outcome, Record
from verl.rollout.session import LoopSetup, OutOfTokens, Session
from verl.trajectory import SINGLE_TURN


class AgentLoop(ABC):
    """Base of every loop; one instance serves one response. `session` samples with this response's seed and group.

    `tokenizer`, `config` and `tools` are the run's; further keywords of the constructor come from the file that lists
    the loop.
    """

    runs_users_code: ClassVar[bool] = False

    def __init__(self, session: Session, **arguments: Any):
        self.session = session
        self.config: Any = session.setup.config
        self.tokenizer = session.setup.tokenizer
        self.rollout_config: Any = None if self.config is None else self.config.actor_rollout_ref.rollout

    @classmethod
    def create(cls, session: Session, **arguments: Any) -> AgentLoop:
        """A loop for one response."""
        return cls(session, **arguments)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop, for `run_in_executor`."""
        return asyncio.get_running_loop()

    @abstractmethod
    async def run(self, row: dict[str, Any], session: Session) -> Outcome:
        """Produce one response to a row: `prompt_ids`, `raw_prompt`, `data_source`, `extra_info`, `uid`,
        `sample_index`, and `columns`, the row's other columns by name."""

    async def outcome(self, row: dict[str, Any]) -> Outcome:
        """Run, by whatever signature the loop has."""
        return await self.run(row, self.session)

    def so_far(self) -> Outcome:
        """The outcome of a trajectory that is ended from outside: past its deadline, or its environment failed."""
        return Outcome()


_LOOPS: dict[str, type[AgentLoop]] = {}
_ELSEWHERE = {"tool_agent": "verl.rollout.tool_agent", "environment_agent": "verl.rollout.environment_agent"}


def _source(cls: type[AgentLoop]) -> tuple[Any, str]:
    """The file of its `run`, and its name."""
    code = getattr(cls.run, "__code__", None)
    return cls if code is None else code.co_filename, cls.__qualname__


def register(name: str) -> Callable[[type[AgentLoop]], type[AgentLoop]]:
    """Class decorator: make a loop known under a name. ValueError if another class has the name; the same class of the
    same file, imported under another module name (by path, say), takes the earlier one's place."""

    def add(cls: type[AgentLoop]) -> type[AgentLoop]:
        registered = _LOOPS.get(name, cls)
        if registered is not cls and _source(registered) != _source(cls):
            raise ValueError(f"agent loop {name!r} is already registered by {registered.__qualname__}")
        _LOOPS[name] = cls
        return cls

    return add


def get(name: str) -> type[AgentLoop]:
    """The loop registered under a name. ValueError naming the known ones."""
    if name in _ELSEWHERE:
        importlib.import_module(_ELSEWHERE[name])
    if name not in _LOOPS:
        raise ValueError(f"unknown agent loop {name!r}; known: {', '.join(sorted({*_LOOPS, *_ELSEWHERE}))}")
    return _LOOPS[name]


def runs_apart(name: str) -> bool:
    """True if the loop runs code of the user's: it, if another process can import it, or its tools or environment."""
    cls = get(name)
    return cls.__module__.partition(".")[0] not in ("verl", "__main__") or cls.runs_users_code


ARGUMENTS: dict[str, dict[str, Any]] = {}
"""Name → the further keywords of the constructor, of a loop that a file listed."""


def of_module(module: str) -> list[str]:
    """Names of the loops that a module and its submodules registered."""
    return [name for name, cls in _LOOPS.items() if f"{cls.__module__}.".startswith(f"{module}.")]


def load_listed(path: str | None) -> list[str]:
    """Register the loops of a YAML list of `{name, _target_: module.Class, …keywords}`; returns their names. UserError
    for what it cannot use."""
    if not path:
        return []
    import yaml

    try:
        entries = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or []
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    if not isinstance(entries, list):
        raise UserError(f"{path}: it must hold a list of {{name, _target_: module.Class}}")
    for entry in entries:
        try:
            loop_name = entry["name"]
            arguments = {key: value for key, value in entry.items() if key not in ("name", "_target_")}
            module, _, name = entry["_target_"].rpartition(".")
            cls = getattr(importlib.import_module(module), name)
            if not issubclass(cls, AgentLoop):
                raise TypeError("it is no AgentLoop")
        except Exception as error:  # of the user's module, too
            raise UserError(
                f"{path}: the entry {entry!r} names no class that can be imported ({type(error).__name__}: {error}); "
                "it needs name and _target_: module.Class"
            ) from error
        _LOOPS[loop_name], ARGUMENTS[loop_name] = cls, arguments
    return [entry["name"] for entry in entries]


@register(SINGLE_TURN)
class SingleTurnAgent(AgentLoop):
    """One prompt, one response."""

    async def run(self, row: dict[str, Any], session: Session) -> Outcome:
        """Sample once."""
        await session.generate(row["prompt_ids"])
        return Outcome()


async def run(setup: LoopSetup, name: str, record: Record, sampling: SamplingParams, row: dict[str, Any]) -> Outcome:
    """What the loop registered as `name` gives for a row (see `AgentLoop.run`), whose tokens are in the record.

    A trajectory past its deadline, one whose environment failed, or one whose loop asked for a turn without room gives
    what was written so far, with that status. Raises what the loop raises besides; TypeError if it returns anything but
    an outcome.
    """
    session = Session(record, sampling, setup)
    session.begin(row["raw_prompt"], row["prompt_ids"])
    deadline = asyncio.timeout(setup.timeout)
    loop: AgentLoop | None = None
    ended: tuple[str, str | None] | None = None
    try:
        async with deadline:
            loop = get(name).create(session, **ARGUMENTS.get(name, {}))
            running = loop.outcome(row)
            outcome = await (running if name == SINGLE_TURN else users_code(running))
    except TimeoutError:
        if not deadline.expired():
            raise
        ended = (
            "timeout",
            f"the trajectory took longer than rollout.agent.trajectory_timeout={setup.timeout} s",
        )
    except EnvironmentFailed as error:
        ended = "environment_error", str(error)
    except OutOfTokens:
        if not session.segments():
            raise
        ended = "length", None
    finally:
        session.close()
    if ended is not None:  # from outside
        outcome = loop.so_far() if loop is not None else Outcome()
        outcome.status, failure = ended
        if failure is not None:
            outcome.fields["failure"] = failure
    if not isinstance(outcome, Outcome):
        raise TypeError(f"an agent loop returns an Outcome, not {type(outcome).__name__}")
    if session.turns:
        outcome.metrics.setdefault("turns", session.turns)
        outcome.fields.setdefault("messages", session.messages)
    if counts := +session.counts:
        outcome.metrics["session_counts"] = dict(counts)
    return outcome
