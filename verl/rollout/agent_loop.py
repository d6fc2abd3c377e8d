"""Agent loops: how one response comes about from a prompt. The only part that knows of turns and tools.

A loop asks the engine for tokens through `self.generate` and returns token ids with a mask; sampled ids are
kept as sampled and never re-tokenised. `single_turn_agent` asks once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl.engine.rollout.base import Completion, SamplingParams
from verl.trajectory import AGENT_LOOP_ARGUMENTS

Generate = Callable[..., Awaitable[Completion]]


@dataclass(slots=True)
class AgentLoopOutput:
    """What a loop hands back. Lists or arrays of equal length L for ids, mask (1 = policy) and log-probs.

    `routed_experts`: [≤ P + L, layers, k] from the first token of the prompt on; None: as its calls recorded them.
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


class AgentLoopBase(ABC):
    """Base of every loop; one instance serves one response.

    `generate(prompt_ids, sampling)` samples with this response's seed and group; `tokenizer` and `config` are
    the run's.
    """

    def __init__(self, generate: Generate, tokenizer: Any = None, config: Any = None, **kwargs: Any):
        self.generate = generate
        self.tokenizer = tokenizer
        self.config = config

    @abstractmethod
    async def run(
        self, sampling_params: SamplingParams, **row: Any
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Produce one response to the row, as one output or, where history was dropped or rewritten, a list of them, one for
        each token sequence that the model saw: `prompt_ids`, `raw_prompt`, `data_source`, `extra_info`, `uid`,
        `sample_index`, then the row's other columns, as keywords; `columns` has all of those by name."""


def keywords(columns: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """The keywords of `run` for a row: its columns, `own` (AGENT_LOOP_ARGUMENTS without the first two), and all columns as
    `columns`."""
    row = {name: value for name, value in columns.items() if name not in AGENT_LOOP_ARGUMENTS}
    return row | {"columns": columns} | own


_LOOPS: dict[str, type[AgentLoopBase]] = {}


def register(name: str) -> Callable[[type[AgentLoopBase]], type[AgentLoopBase]]:
    """Class decorator: make a loop known under a name. ValueError if another class has the name."""

    def add(cls: type[AgentLoopBase]) -> type[AgentLoopBase]:
        if _LOOPS.get(name, cls) is not cls:
            raise ValueError(f"agent loop {name!r} is already registered by {_LOOPS[name].__qualname__}")
        _LOOPS[name] = cls
        return cls

    return add


def get(name: str) -> type[AgentLoopBase]:
    """The loop registered under a name. ValueError naming the known ones."""
    if name not in _LOOPS:
        raise ValueError(f"unknown agent loop {name!r}; known: {', '.join(sorted(_LOOPS))}")
    return _LOOPS[name]


def is_users(name: str) -> bool:
    """True if a module of the user's defines the loop, one that another process can import."""
    return get(name).__module__.partition(".")[0] not in ("verl", "__main__")


@register("single_turn_agent")
class SingleTurnAgent(AgentLoopBase):
    """One prompt, one response."""

    async def run(self, sampling_params: SamplingParams, **row: Any) -> AgentLoopOutput:
        """Sample once and mark every token as the policy's."""
        completion = await self.generate(row["prompt_ids"], sampling_params)
        return AgentLoopOutput(
            prompt_ids=row["prompt_ids"],
            response_ids=completion.token_ids,
            response_mask=np.ones(len(completion.token_ids), bool),
            response_logprobs=completion.log_probs,
        )
