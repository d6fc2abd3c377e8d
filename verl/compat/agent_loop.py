"""Agent loops with the signatures of the public system: `run(sampling_params, **row)` returns arrays of ids, masks and
log-probs.

The session has recorded every token that the sampler gave; what an output holds is looked for there (`outcome_of`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.config.schema.base import Map, select
from verl.engine.rollout.base import Completion, SamplingParams
from verl.errors import UserError
from verl.rollout.loops import AgentLoop, EnvironmentFailed, get, register
from verl.rollout.record import Excerpt, Outcome, Record, common_prefix
from verl.rollout.turn_boundaries import Boundaries
from verl.trajectory import AGENT_LOOP_ARGUMENTS

if TYPE_CHECKING:
    from verl.rollout.session import Session

__all__ = ["EnvironmentFailed", "Outcome", "get", "register"]


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
        """Sample a continuation of `prompt_ids`. request_id is not needed: the session keeps its prefix in one replica.
        UserError for images and the like: they would not reach the model."""
        for name in _MEDIA:
            value = more.get(name)
            if value is not None and (not hasattr(value, "__len__") or len(value)):
                raise UserError(
                    f"server_manager.generate takes no {name}: the row's own images are there already, "
                    "others are shown through session.chat (docs/agents.md)"
                )
        completion = await self.session.generate(prompt_ids, sampling_params)
        reason = "aborted" if completion.finish_reason == "abort" else "completed"
        return TokenOutput(
            completion.token_ids.tolist(),
            completion.log_probs.tolist(),
            None,
            reason,
            completion.num_preempted,
        )


AsyncLLMServerManager = ServerManager  # by the public name


class AgentLoopBase(AgentLoop):
    """Base of loops; one instance serves one response.

    `session` samples with this response's seed and group, `generate` is its method; `tokenizer` and `config` are the
    run's. The constructor has the public system's arguments: a subclass hands on what it gets.
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
        self.rollout_config: Any = None if self.config is None else self.config.actor_rollout_ref.get("rollout")
        self.server_manager = server_manager
        # A user's own test of a loop gives a server manager that has `generate` alone.
        self.session: Session = getattr(server_manager, "session", None)  # type: ignore[assignment]
        self.generate: Any = getattr(self.session, "generate", None)
        self.tokenizer, self.processor = tokenizer, processor
        self.dataset_cls, self.hf_model_type = dataset_cls, hf_model_type
        rollout = self.rollout_config or {}
        self.prompt_length, self.response_length = rollout.get("prompt_length"), rollout.get("response_length")
        data = {} if self.data_config is None else self.data_config
        self.apply_chat_template_kwargs = data.get("apply_chat_template_kwargs", {})

    @cached_property
    def _boundaries(self) -> Boundaries:
        if self.session is not None:
            return self.session.setup.boundaries
        return Boundaries(self.tokenizer, self.apply_chat_template_kwargs)

    @classmethod
    def create(cls, session: Session, **arguments: Any) -> AgentLoopBase:
        """With the keywords of the public system's constructor."""
        from verl.data.plugins import RLHFDataset

        setup = session.setup
        keywords: dict[str, Any] = {
            "trainer_config": DictConfigWrap(setup.config),
            "server_manager": ServerManager(session),
            "tokenizer": setup.tokenizer,
            "processor": None,
            "dataset_cls": RLHFDataset,
            "data_config": DictConfigWrap(select(setup.config, "data")),
            "hf_model_type": None,
        } | ({} if setup.tools is None else {"tools": setup.tools})
        return cls(**keywords | arguments)

    async def outcome(self, row: dict[str, Any]) -> Outcome:
        """Run with the row's columns as keywords; what was returned, as an outcome."""
        sampling: Any = Map(asdict(self.session.sampling), logprobs=True)
        columns = {key: value for key, value in row["columns"].items() if key not in AGENT_LOOP_ARGUMENTS}
        extra = row["extra_info"] or {}
        of_dataset = {  # keywords that the public data set makes of `extra_info`
            "index": extra.get("index", 0),
            "tools_kwargs": extra.get("tools_kwargs") or {},
            "interaction_kwargs": extra.get("interaction_kwargs") or {},
        }
        returned: Any = await self.run(sampling, **of_dataset | columns | row)
        if isinstance(returned, Outcome):
            return returned
        outputs = returned if isinstance(returned, list) else [returned]
        record: Any = self.session.record
        return outcome_of(record, outputs, record.row_images)

    def so_far(self) -> Outcome:
        """See `known_so_far`."""
        fields = self.known_so_far()
        renamed = {"extra_fields": "fields", "reward_score": "reward"}
        return Outcome(**{renamed.get(name, name): value for name, value in fields.items()})

    @abstractmethod
    async def run(  # type: ignore[override]
        self, sampling_params: SamplingParams, **row: Any
    ) -> AgentLoopOutput | list[AgentLoopOutput] | Outcome:
        """Produce one response to the row, as one output or, where history was dropped or rewritten, a list of them,
        one for each token sequence that the model saw: `prompt_ids`, `raw_prompt`, `data_source`, `extra_info`, `uid`,
        `sample_index`, then the row's other columns, as keywords; `columns` has all of those by name."""

    def known_so_far(self) -> dict[str, Any]:
        """Fields of `AgentLoopOutput` (num_turns, metrics, extra_fields, reward_score) of a trajectory that was ended
        from outside: past its deadline, or its environment failed."""
        return {}

    async def apply_chat_template(self, messages: list[dict[str, Any]], tools: Any = None, **media: Any) -> list[int]:
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
        """(object with `token_ids`, mask, log-probs) after the messages that follow the model's turn:
        `updated_messages` begin with `previous_messages`, whose last is that turn. UserError where the template has no
        boundary there."""
        ids = list(runtime_token_ids)
        following = updated_messages[len(previous_messages) :]
        between = self._boundaries.between(previous_messages[-1], following, tools, ids[-1])
        if between is None:
            raise UserError("the chat template rewrites earlier turns: return the next turn as an output of its own")
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
            added = assistant_logprobs or [0.0] * len(assistant_token_ids)
            log_probs = [*(response_logprobs or [0.0] * len(response_mask)), *added]
        return SimpleNamespace(token_ids=ids), [*response_mask, *[1] * len(assistant_token_ids)], log_probs

    async def process_vision_info(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """{}: the row's own images reach the model without it, others through `session.chat`."""
        return {}

    process_multi_modal_info = process_vision_info


def rollout_trace_op(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator that marks a method for tracing, which this release does not do: the method itself."""
    return function


class SingleTurnAgent(AgentLoopBase):
    """One prompt, one response: the public system's loop of that name."""

    async def run(  # type: ignore[override]
        self, sampling_params: SamplingParams, **row: Any
    ) -> AgentLoopOutput:
        """Sample once and mark every token as the policy's."""
        completion: Completion = await self.generate(row["prompt_ids"], sampling_params)
        return AgentLoopOutput(
            prompt_ids=row["prompt_ids"],
            response_ids=completion.token_ids,
            response_mask=np.ones(len(completion.token_ids), bool),
            response_logprobs=completion.log_probs,
        )


# -- what an output is made of -----------------------------------------------------------------------------------------


def outcome_of(record: Record, outputs: Sequence[AgentLoopOutput], row_images: int) -> Outcome:
    """The outcome of outputs; reward, fields and metrics of later ones win.

    Tokens of an output that the record does not have lose the policy's mark, counted in the metric `unrecorded_tokens`.
    TypeError for anything but outputs, ValueError for arrays of different lengths and for images that the model did not
    see.
    """
    for output in outputs:
        if not isinstance(output, AgentLoopOutput):
            raise TypeError(f"an agent loop returns AgentLoopOutput, not {type(output).__name__}")
    if not outputs:
        raise ValueError("the agent loop returned no output")
    outcome = Outcome(outputs[-1].status, num_turns=max(output.num_turns for output in outputs))
    for output in outputs:
        outcome.metrics |= output.metrics
        outcome.fields |= output.extra_fields
        if output.reward_score is not None:
            outcome.reward = output.reward_score
        images = [shown for shown in output.multi_modal_data.values() if shown is not None]
        shown = sum(len(entry) if isinstance(entry, list | tuple) else 1 for entry in images)
        if shown not in (0, row_images):
            raise ValueError(
                "agent loop gave multi_modal_data: images are shown through session.chat, see docs/agents.md"
            )
    sequences = [_arrays(output) for output in outputs]
    if not _is_record(record, sequences):
        spans = _sampled_spans(record)
        outcome.excerpts, unrecorded = [], 0
        for (context, ids, mask), output in zip(sequences, outputs, strict=True):
            parts, unknown = _parts(record, context, ids, mask, spans)
            routes = output.routed_experts
            routes = None if routes is None else np.asarray(routes, np.int16)
            outcome.excerpts.append(Excerpt(context, parts, routes))
            unrecorded += unknown
        if unrecorded:
            outcome.metrics["unrecorded_tokens"] = unrecorded
    return outcome


def _arrays(output: AgentLoopOutput) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids of the context and of the response, int64, and its mask, bool."""
    ids, mask = np.asarray(output.response_ids, np.int64), np.asarray(output.response_mask, bool)
    lengths = {"response_mask": len(mask)}
    if output.response_logprobs is not None:
        lengths["response_logprobs"] = len(output.response_logprobs)
    for name, length in lengths.items():
        if length != len(ids):
            raise ValueError(f"agent loop gave {len(ids)} response_ids, {length} {name}")
    return np.asarray(output.prompt_ids, np.int64), ids, mask


def _is_record(record: Record, sequences: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> bool:
    """True if these are the segments of the record, token by token."""
    if len(sequences) != len(record.written):
        return False
    for (context, ids, mask), segment in zip(sequences, record.written, strict=True):
        response, sampled, _ = segment.response()
        pairs = ((context, segment.context), (ids, response), (mask, sampled))
        if not all(np.array_equal(reported, recorded) for reported, recorded in pairs):
            return False
    return True


def _sampled_spans(record: Record) -> list[tuple[int, int, np.ndarray]]:
    """(number of the segment, number of the span, ids) of every completion, in the order in which they came."""
    by_call = {
        span.call: (segment.number, number, span.ids)
        for segment in record.segments
        for number, span in enumerate(segment.spans)
        if span.sampled
    }
    return [by_call[call] for call in sorted(by_call)]


def _parts(
    record: Record,
    context: np.ndarray,
    ids: np.ndarray,
    mask: np.ndarray,
    spans: list[tuple[int, int, np.ndarray]],
) -> tuple[list[tuple[int, int, int] | np.ndarray], int]:
    """What an output is made of, and how many tokens it marks as the policy's that no call gave.

    Tokens of the policy count as sampled where, in order, they are the beginning of a completion that is not used up
    yet, of equal ones that which was asked for with the tokens before; those that are used are taken out of `spans`.
    """
    whole = np.concatenate([context, ids])

    def fits(place: int, span: tuple[int, int, np.ndarray]) -> bool:
        segment = record.segments[span[0]]
        return np.array_equal(whole[:place], segment.ids(segment.spans[span[1]].start))

    parts: list[tuple[int, int, int] | np.ndarray] = []
    unknown = at = 0
    while at < len(ids):
        num_inserted = int(np.argmax(np.append(mask[at:], True)))
        if num_inserted:
            parts.append(ids[at : at + num_inserted])
            at += num_inserted
            continue
        run = ids[at : at + int(np.argmin(np.append(mask[at:], False)))]
        sizes = [common_prefix(run, completion) for _, _, completion in spans] or [0]
        best = int(np.argmax(sizes))
        equal = [i for i, size in enumerate(sizes) if size == sizes[best] > 0]
        if len(equal) > 1:
            best = next((i for i in equal if fits(len(context) + at, spans[i])), best)
        if sizes[best]:
            segment, number, _ = spans.pop(best)
            parts.append((segment, number, sizes[best]))
        else:
            parts.append(ids[at : at + 1])
            unknown += 1
        at += max(1, sizes[best])
    return parts, unknown
