"""Agent loops: how one response comes about from a prompt. The only part that knows of turns and tools.

A loop writes tokens through its session (`verl.rollout.session`): `self.session.chat` for dialogues, `self.generate` for token ids.
Sampled ids are kept as sampled and never re-tokenised. `single_turn_agent` asks once, `tool_agent` runs tools,
`environment_agent` plays with an environment. The names of the public system (`server_manager`, `ct_…`) are there for loops
written for it.
"""

from __future__ import annotations

import asyncio
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.config.schema.base import Map
from verl.engine.rollout.base import Completion, SamplingParams
from verl.errors import UserError
from verl.rollout.boundary import Boundaries
from verl.trajectory import SINGLE_TURN

if TYPE_CHECKING:
    from verl.rollout.session import Session


class EnvironmentFailed(RuntimeError):
    """What the policy acts in failed: the trajectory has no score, never one of 0, and is sampled again."""


@dataclass(slots=True)
class AgentLoopOutput:
    """What a loop hands back. Lists or arrays of equal length L for ids, mask (1 = policy) and log-probs.

    status: how the trajectory ended where the sampler does not say it (`verl.trajectory.STATUSES`). metrics: seconds of
    `tool_calls`; `token_scores` and `step_reward` of environments; others are kept.
    routed_experts: [≤ P + L, layers, k] from the first token of the prompt on; None: as its calls recorded them.
    """

    prompt_ids: Any
    response_ids: Any
    response_mask: Any
    response_logprobs: Any = None
    routed_experts: Any = None
    multi_modal_data: dict[str, Any] = field(default_factory=dict)
    reward_score: float | None = None
    num_turns: int = 2
    metrics: dict[str, Any] = field(default_factory=dict)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    mm_processor_kwargs: dict[str, Any] = field(default_factory=dict)
    status: str | None = None


class AgentLoopMetrics(Map):
    """Seconds and counts of a loop by name (`tool_calls`, `generate_sequences`, …), readable as attributes too."""


class DictConfigWrap:
    """A configuration as the constructor of a loop gets it: its `config`."""

    def __init__(self, config: Any):
        self.config = config


class ToolListWrap:
    """Tools as the constructor of a loop gets them, for users' own tests of it: their list, `tools`."""

    def __init__(self, tools: list[Any]):
        self.tools = tools


@dataclass(slots=True)
class TokenOutput:
    """What the public system's `server_manager.generate` gives."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


_MEDIA = ("image_data", "video_data", "audio_data")


class ServerManager:
    """The public system's way to the sampler, over a session. Images and the like are those of the row's prompt."""

    def __init__(self, session: Session):
        self.session = session

    async def generate(
        self, request_id: str, *, prompt_ids: Any, sampling_params: Mapping[str, Any], **more: Any
    ) -> TokenOutput:
        """Sample a continuation of `prompt_ids`. request_id is not needed: the session keeps its prefix in one replica. UserError for
        images and the like: they would not reach the model."""
        for name in _MEDIA:
            given = more.get(name)
            if given is not None and (not hasattr(given, "__len__") or len(given)):
                raise UserError(
                    f"server_manager.generate takes no {name}: the row's own images are there already, others are shown "
                    "through session.chat (docs/agents.md)"
                )
        done = await self.session.generate(prompt_ids, sampling_params)
        reason = "aborted" if done.finish_reason == "abort" else "completed"
        return TokenOutput(done.token_ids.tolist(), done.log_probs.tolist(), None, reason, done.num_preempted)


AsyncLLMServerManager = ServerManager  # by the public name


class AgentLoopBase(ABC):
    """Base of every loop; one instance serves one response.

    `session` samples with this response's seed and group, `generate` is its method; `tokenizer` and `config` are the run's.
    The constructor has the public system's arguments: a subclass hands on what it gets.
    """

    def __init__(
        self,
        trainer_config: Any = None,
        server_manager: Any = None,
        tokenizer: Any = None,
        processor: Any = None,
        dataset_cls: Any = None,
        data_config: Any = None,
        hf_model_type: str | None = None,
        **kwargs: Any,
    ):
        self.config = getattr(trainer_config, "config", trainer_config)
        self.data_config = getattr(data_config, "config", data_config)
        self.rollout_config: Any = (
            None if self.config is None else self.config.actor_rollout_ref.get("rollout")
        )
        self.server_manager = server_manager
        # A user's own test of a loop gives a server manager that has `generate` alone.
        self.session: Session = getattr(server_manager, "session", None)  # type: ignore[assignment]
        self.generate: Any = getattr(self.session, "generate", None)
        self.tokenizer, self.processor = tokenizer, processor
        self.dataset_cls, self.hf_model_type = dataset_cls, hf_model_type
        data = {} if self.data_config is None else self.data_config
        self.apply_chat_template_kwargs = data.get("apply_chat_template_kwargs", {})

    @cached_property
    def _boundaries(self) -> Boundaries:
        if self.session is not None:
            return self.session.runner.boundaries
        return Boundaries(self.tokenizer, self.apply_chat_template_kwargs)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop, for `run_in_executor`."""
        return asyncio.get_running_loop()

    @abstractmethod
    async def run(
        self, sampling_params: SamplingParams, **row: Any
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Produce one response to the row, as one output or, where history was dropped or rewritten, a list of them, one for
        each token sequence that the model saw: `prompt_ids`, `raw_prompt`, `data_source`, `extra_info`, `uid`,
        `sample_index`, then the row's other columns, as keywords; `columns` has all of those by name."""

    def known_so_far(self) -> dict[str, Any]:
        """Fields of `AgentLoopOutput` (num_turns, metrics, extra_fields, reward_score) of a trajectory that was ended from outside: past
        its deadline, or its environment failed."""
        return {}

    async def apply_chat_template(
        self, messages: list[dict[str, Any]], tools: Any = None, **media: Any
    ) -> list[int]:
        """Ids of a whole dialogue with the generation prompt."""
        return [int(i) for i in self._boundaries.whole(messages, tools)[0]]

    ct_build_initial_tokens = apply_chat_template

    async def ct_merge_non_assistant_msg(
        self,
        previous_messages: list[dict[str, Any]],
        updated_messages: list[dict[str, Any]],
        runtime_token_ids: list[int],
        response_mask: list[int],
        response_logprobs: list[float] | None = None,
        tools: Any = None,
        **media: Any,
    ) -> tuple[Any, list[int], list[float] | None]:
        """(object with `token_ids`, mask, log-probs) after the messages that follow the model's turn: `updated_messages` begin with
        `previous_messages`, whose last is that turn. UserError where the template has no boundary there."""
        ids = list(runtime_token_ids)
        following = updated_messages[len(previous_messages) :]
        between = self._boundaries.between(previous_messages[-1], following, tools, ids[-1])
        if between is None:
            raise UserError(
                "the chat template rewrites earlier turns: return the next turn as an output of its own"
            )
        added = [int(i) for i in between[0]]
        log_probs = None if response_logprobs is None else [*response_logprobs, *[0.0] * len(added)]
        return SimpleNamespace(token_ids=ids + added), [*response_mask, *[0] * len(added)], log_probs

    ct_merge_context_msg = ct_merge_non_assistant_msg  # its later public name

    async def ct_merge_assistant_token(
        self,
        runtime_token_ids: list[int],
        assistant_token_ids: list[int],
        response_mask: list[int],
        response_logprobs: list[float] | None = None,
        assistant_logprobs: list[float] | None = None,
    ) -> tuple[Any, list[int], list[float] | None]:
        """(object with `token_ids`, mask, log-probs) after sampled tokens."""
        ids = [*runtime_token_ids, *assistant_token_ids]
        log_probs = None
        if response_logprobs is not None or assistant_logprobs is not None:
            given = assistant_logprobs or [0.0] * len(assistant_token_ids)
            log_probs = [*(response_logprobs or [0.0] * len(response_mask)), *given]
        return SimpleNamespace(token_ids=ids), [*response_mask, *[1] * len(assistant_token_ids)], log_probs

    async def process_vision_info(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """{}: the row's own images reach the model without it, others through `session.chat`."""
        return {}

    process_multi_modal_info = process_vision_info


_LOOPS: dict[str, type[AgentLoopBase]] = {}
_ELSEWHERE = {"tool_agent": "verl.rollout.tool_agent", "environment_agent": "verl.rollout.environments"}


def _source(cls: type[AgentLoopBase]) -> tuple[Any, str]:
    """The file of its `run`, and its name."""
    code = getattr(cls.run, "__code__", None)
    return cls if code is None else code.co_filename, cls.__qualname__


def register(name: str) -> Callable[[type[AgentLoopBase]], type[AgentLoopBase]]:
    """Class decorator: make a loop known under a name. ValueError if another class has the name; the same class of the same file,
    imported under another module name (by path, say), takes the earlier one's place."""

    def add(cls: type[AgentLoopBase]) -> type[AgentLoopBase]:
        taken = _LOOPS.get(name, cls)
        if taken is not cls and _source(taken) != _source(cls):
            raise ValueError(f"agent loop {name!r} is already registered by {taken.__qualname__}")
        _LOOPS[name] = cls
        return cls

    return add


def get(name: str) -> type[AgentLoopBase]:
    """The loop registered under a name. ValueError naming the known ones."""
    if name in _ELSEWHERE:
        importlib.import_module(_ELSEWHERE[name])
    if name not in _LOOPS:
        raise ValueError(f"unknown agent loop {name!r}; known: {', '.join(sorted({*_LOOPS, *_ELSEWHERE}))}")
    return _LOOPS[name]


def is_users(name: str) -> bool:
    """True if a module of the user's defines the loop, one that another process can import."""
    return get(name).__module__.partition(".")[0] not in ("verl", "__main__")


def runs_apart(name: str) -> bool:
    """True if the loop runs code of the user's: it, or its tools or environment."""
    return is_users(name) or getattr(get(name), "runs_users_code", False)


ARGUMENTS: dict[str, dict[str, Any]] = {}
"""Name → the further keywords of the constructor, of a loop that a file listed."""


def load_listed(path: str | None) -> None:
    """Register the loops of a YAML list of `{name, _target_: module.Class, …keywords}`. UserError for what it cannot use."""
    if not path:
        return
    import yaml

    try:
        listed = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or []
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    if not isinstance(listed, list):
        raise UserError(f"{path}: it must hold a list of {{name, _target_: module.Class}}")
    for entry in listed:
        try:
            loop_name = entry["name"]
            arguments = {key: value for key, value in entry.items() if key not in ("name", "_target_")}
            module, _, name = entry["_target_"].rpartition(".")
            cls = getattr(importlib.import_module(module), name)
            if not issubclass(cls, AgentLoopBase):
                raise TypeError("it is no AgentLoopBase")
        except Exception as error:  # of the user's module, too
            raise UserError(
                f"{path}: the entry {entry!r} names no class that can be imported ({type(error).__name__}: {error}); "
                "it needs name and _target_: module.Class"
            ) from error
        _LOOPS[loop_name], ARGUMENTS[loop_name] = cls, arguments


@register(SINGLE_TURN)
class SingleTurnAgent(AgentLoopBase):
    """One prompt, one response."""

    async def run(self, sampling_params: SamplingParams, **row: Any) -> AgentLoopOutput:
        """Sample once and mark every token as the policy's."""
        completion: Completion = await self.generate(row["prompt_ids"], sampling_params)
        return AgentLoopOutput(
            prompt_ids=row["prompt_ids"],
            response_ids=completion.token_ids,
            response_mask=np.ones(len(completion.token_ids), bool),
            response_logprobs=completion.log_probs,
        )
