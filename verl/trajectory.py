"""The data types that travel between the parts: Prompt, Trajectory, Segment, Batch. Plain numpy, no torch.

    Prompt ─1:n─ Trajectory ─1:n─ Segment    a trajectory is one attempt at a prompt: the unit of scores and advantages
                                             a segment is one token sequence for the model: the unit of forward passes

Token-level columns are ragged: every segment owns one array per column, of its own response length L. `COLUMNS` is the
one table of them; transport, padding, dumps and the plug-in view follow from it. A column read from a trajectory runs
over the response tokens of all its segments, in order; one written to it is split among them.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise, zip_longest
from typing import TYPE_CHECKING, Any
from uuid import uuid4
from weakref import ReferenceType, ref

import numpy as np


@dataclass(frozen=True, slots=True)
class Column:
    """A token-level column: one value (or `trailing` values) for every response token.

    dtype     of the arrays on the driver and on the way to a worker
    source    the pass that produces it: rollout, reward, old_log_prob, ref, teacher, values, adv, update
    public    its name in the view that plug-ins get (`verl.DataProto`, arguments of estimators)
    trailing  further dimensions, by name, e.g. ("k",)
    context   the context's tokens have values too: `Segment.context_columns`
    updates   the roles whose updates read it, whatever their loss declares besides
    """

    dtype: Any = np.float32
    source: str = "rollout"
    public: str = ""
    trailing: tuple[str, ...] = ()
    context: bool = False
    updates: tuple[str, ...] = ()


_ACTOR, _CRITIC, _BOTH = ("actor",), ("critic",), ("actor", "critic")
COLUMNS: dict[str, Column] = {
    "response_ids": Column(np.int64, public="responses"),
    "response_mask": Column(bool, public="response_mask"),
    "rollout_log_probs": Column(public="rollout_log_probs"),
    "sampling_mask": Column(object),
    "routed_experts": Column(np.int16, trailing=("layers", "k"), context=True),
    "old_log_probs": Column(source="old_log_prob", public="old_log_probs", updates=_ACTOR),
    "entropy": Column(source="old_log_prob", public="entropys"),
    "sum_pi_squared": Column(source="old_log_prob", public="sum_pi_squared"),
    "ref_log_probs": Column(source="ref", public="ref_log_prob", updates=_ACTOR),
    "teacher_log_probs": Column(source="teacher", public="teacher_log_probs"),
    "teacher_topk_ids": Column(np.int32, source="teacher", public="teacher_topk_ids", trailing=("k",)),
    "teacher_topk_log_probs": Column(source="teacher", public="teacher_topk_log_probs", trailing=("k",)),
    "teacher_other_ids": Column(np.int32, source="teacher", trailing=("k",)),
    "teacher_other_log_probs": Column(source="teacher", trailing=("k",)),
    "teacher_contrast_log_probs": Column(source="teacher", public="teacher_contrast_log_probs"),
    "values": Column(source="values", public="values", updates=_CRITIC),
    "scores": Column(source="reward"),
    "token_rewards": Column(source="adv", public="token_level_rewards"),
    "advantages": Column(source="adv", public="advantages", updates=_ACTOR),
    "returns": Column(source="adv", public="returns", updates=_CRITIC),
    "loss_mask": Column(bool, source="adv", public="loss_mask", updates=_BOTH),
    "is_weights": Column(source="adv", public="rollout_is_weights", updates=_ACTOR),
    "demonstration_weights": Column(source="update", updates=_ACTOR),
    "entropy_weights": Column(source="update", updates=_ACTOR),
    "observation_weights": Column(source="update", updates=_ACTOR),
    "mini_batch_values": Column(source="update", public="mini_batch_values", updates=_ACTOR),
    "policy_loss_number": Column(np.int16, source="update", updates=_ACTOR),
}
"""Every token-level column. response_mask is True where the policy wrote the token; rollout_log_probs are those of the
distribution sampled from, 0 where the mask is False; routed_experts are a token's experts in each layer that has some,
-1 where unknown (the last token of a response is never computed). sampling_mask says which tokens a draw from a
truncated distribution could have given, as `verl.models.sampling_mask` encodes it, b"" where it was not truncated.
policy_loss_number is there where data sources have policy losses of their own (`verl.algorithms.source_losses`). All
but the first two are absent (None) until their pass fills them."""

UNKNOWN_EXPERT = -1
"""In `routed_experts`: nobody saw the token; it goes where its router sends it."""

SINGLE_TURN = "single_turn_agent"

_ARGUMENTS = "self sampling_params prompt_ids raw_prompt uid sample_index columns"
AGENT_LOOP_ARGUMENTS = tuple(_ARGUMENTS.split())
"""Keywords of an agent loop's `run` with one meaning in every run. A data column of that name is in `columns`."""


_STATUSES = "completed length max_turns max_calls invalid_calls timeout environment_error aborted"
STATUSES = tuple(_STATUSES.split())
"""How a trajectory ended, in the words of `rollout.agent.on_status`."""


VIDEO_SECONDS = "video_seconds"


@dataclass(eq=False)
class Media:
    """What a context holds besides tokens: made once from a row by the model's processor, then shared by reference.

    inputs  arguments of the model's forward by name: pixel_values float32 [patches, numbers of one],
            image_grid_thw int64 [images, 3], in the order of the context. A video is an image whose grid has several
            rows of time; with a video VIDEO_SECONDS float32 [images] has the seconds between such rows, 0 for an image
    tokens  of the context that stand for images
    token   their id
    small   the images scaled down, as encoded files, for the report
    files   the images as JPEG files for what scores the responses; empty unless `reward_model.images`
    key     of its own, by which another process knows it again
    stored  where other processes find `inputs`, once they were sent there: a reference into an object store
    puts    how often they were sent there
    parts   of what was `joined`: what each image is sent and encoded as
    """

    inputs: dict[str, np.ndarray]
    tokens: int = 0
    small: tuple[bytes, ...] = ()
    files: tuple[bytes, ...] = ()
    key: str = field(default_factory=lambda: uuid4().hex)
    stored: Any = field(default=None, repr=False)
    puts: int = 0
    token: int = -1
    parts: tuple[Media, ...] = ()

    @classmethod
    def joined(cls, parts: Sequence[Media], **fields: Any) -> Media:
        """The images of several, one after the other."""
        inputs = [part.inputs for part in parts]
        if any(VIDEO_SECONDS in arrays for arrays in inputs):
            inputs = [{VIDEO_SECONDS: np.zeros(part.images, np.float32)} | part.inputs for part in parts]
        return cls(
            {name: np.concatenate([arrays[name] for arrays in inputs]) for name in inputs[0]},
            sum(part.tokens for part in parts),
            sum((part.small for part in parts), ()),
            sum((part.files for part in parts), ()),
            parts=tuple(parts),
            **fields,
        )

    @property
    def leaves(self) -> tuple[Media, ...]:
        """`parts`, or itself."""
        return self.parts or (self,)

    @property
    def images(self) -> int:
        """Number of images."""
        return len(self.inputs["image_grid_thw"])

    @property
    def tokens_of_images(self) -> list[int]:
        """`tokens`, image by image."""
        if not self.inputs:
            return []
        patches = self.inputs["image_grid_thw"].prod(-1)
        return list((patches * self.tokens // max(1, patches.sum())).tolist())

    def uris(self) -> list[str]:
        """`files` as data URIs."""
        return data_uris(self.files)

    def drop_pixels(self) -> None:
        """Nobody computes with the images any more: only what is counted and shown of them stays."""
        self.inputs, self.stored = {"image_grid_thw": self.inputs["image_grid_thw"]}, None
        for part in self.parts:
            part.drop_pixels()

    def blanked(self) -> Media:
        """The same places with nothing to see in them."""
        nothing = np.zeros_like(self.inputs["pixel_values"])
        return Media(self.inputs | {"pixel_values": nothing}, self.tokens)


def data_uris(files: Iterable[bytes]) -> list[str]:
    """JPEG files as data URIs."""
    return [f"data:image/jpeg;base64,{b64encode(file).decode()}" for file in files]


@dataclass(slots=True, eq=False)
class Prompt:
    """One row of the data, rendered and tokenised once.

    `uid` is unique within a run: "{file number}:{row}@{epoch}". `ids` is int64 [P].
    `file` and `row` (0-based) are for error messages; `number` is the row as a sampler of the data set gives it.
    """

    uid: str
    ids: np.ndarray
    messages: Any
    data_source: str = ""
    ground_truth: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    file: str = ""
    row: int = -1
    epoch: int = 0
    number: int = -1
    agent_name: str | None = None
    media: Media | None = None
    columns: dict[str, Any] = field(default_factory=dict)


class _Columns:
    """Token-level columns as attributes, for both of the classes that have them."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    def column(self, name: str) -> np.ndarray | None:
        """A column of `COLUMNS`, None where it is absent."""
        raise NotImplementedError

    def put(self, name: str, values: np.ndarray | None) -> None:
        """Set a column, or remove it with None."""
        raise NotImplementedError


def _attribute(name: str) -> property:
    return property(lambda self: self.column(name), lambda self, values: self.put(name, values))


for _name in COLUMNS:
    setattr(_Columns, _name, _attribute(_name))


class Segment(_Columns):
    """One token sequence that the model saw: context, then the response with its columns.

    context_ids  int64 [P]; the same array object for the segments of a group that share it
    columns      name of `COLUMNS` → array [L, …]; also readable and writable as attributes, None where absent
    context_columns  the same of the context's tokens, [P, …], for columns that have them; shared like context_ids
    versions     weight versions that wrote tokens, oldest first, without repeats
    media        images in the context, None without
    parent, shared  the context begins with the first `shared` tokens of the trajectory's segment `parent`, a number;
                 None, 0 if of none
    uid, index   key of the group, number of the trajectory in it
    trajectory   the trajectory that it is part of, as long as that is in use; None on a worker: it gets only segments
    """

    def __init__(
        self,
        context_ids: np.ndarray,
        response_ids: np.ndarray,
        response_mask: np.ndarray,
        *,
        versions: tuple[int, ...] = (0,),
        media: Media | None = None,
        parent: int | None = None,
        shared: int = 0,
        uid: str = "",
        index: int = 0,
        **columns: np.ndarray | None,
    ):
        self.context_ids = context_ids
        self.versions, self.media = versions, media
        self.parent, self.shared = parent, shared
        self.uid, self.index = uid, index
        self._trajectory: ReferenceType[Trajectory] | None = None
        self.columns: dict[str, np.ndarray] = {"response_ids": response_ids, "response_mask": response_mask}
        self.context_columns: dict[str, np.ndarray] = {}
        for name, values in columns.items():
            self.put(name, values)

    @property
    def trajectory(self) -> Trajectory | None:
        """Held weakly: a step's gigabytes go when the batch goes, and wait for no garbage collection."""
        return None if self._trajectory is None else self._trajectory()

    @trajectory.setter
    def trajectory(self, trajectory: Trajectory) -> None:
        self._trajectory = ref(trajectory)

    @property
    def length(self) -> int:
        """Number of response tokens L."""
        return len(self.columns["response_ids"])

    @property
    def segments(self) -> list[Segment]:
        """Itself: what takes trajectories apart takes segments too."""
        return [self]

    def column(self, name: str) -> np.ndarray | None:
        """The column, [L, …]; None where it is absent."""
        return self.columns.get(name)

    def put(self, name: str, values: np.ndarray | None) -> None:
        """Set a column, or remove it with None. KeyError for a name that is not in `COLUMNS`."""
        if name not in COLUMNS:
            raise KeyError(f"{name!r} is not in verl.trajectory.COLUMNS")
        if values is None:
            self.columns.pop(name, None)
        else:
            self.columns[name] = values


class Trajectory(_Columns):
    """One attempt at a prompt. Give `segments`, or the ids, mask and columns of a single one in the prompt's context.

    finish_reason  how it ended: stop, length, abort, or lost (by the sampler: never scored, in no statistic)
    status         one of STATUSES: what the loop says, or else what follows from finish_reason
    num_turns      turns of the dialogue, the user's included
    score          float, or None while unscored or when scoring failed (then `score_error` says why)
    score_parts    what else the reward function returned
    fields         what the agent loop returned in extra_fields: dumped, and shown to the reward function
    extra          notes of the parts that handled it: interruptions, token_scores, step_reward (added to the score),
                   reward_scores, score_failure, agent_loop (unless it is the single turn), resamples, without_gradient
    baseline       the greedy response to the prompt, where the estimator compares with one (remax); never trained on

    Columns are attributes: those of all segments joined, None unless every segment has them.
    """

    def __init__(
        self,
        prompt: Prompt,
        index: int,
        response_ids: np.ndarray | None = None,
        response_mask: np.ndarray | None = None,
        *,
        segments: Sequence[Segment] | None = None,
        finish_reason: str = "stop",
        status: str | None = None,
        versions: tuple[int, ...] = (0,),
        text: str | None = None,
        num_turns: int = 2,
        score: float | None = None,
        score_parts: dict[str, Any] | None = None,
        score_error: str | None = None,
        timing: dict[str, float] | None = None,
        fields: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
        **columns: np.ndarray | None,
    ):
        if segments is None:
            if response_ids is None or response_mask is None:
                raise TypeError("a trajectory needs segments, or response_ids and response_mask")
            whole = Segment(prompt.ids, response_ids, response_mask, versions=versions, media=prompt.media)
            for name, values in columns.items():
                whole.put(name, values)
            segments = [whole]
        self.prompt, self.index = prompt, index
        self.segments = list(segments)
        for segment in self.segments:
            segment.uid, segment.index, segment.trajectory = prompt.uid, index, self
        self.finish_reason, self.num_turns, self.text = finish_reason, num_turns, text
        self.status = status or {"length": "length", "abort": "aborted"}.get(finish_reason, "completed")
        self.score, self.score_error = score, score_error
        self.score_parts, self.timing = score_parts or {}, timing or {}
        self.fields, self.extra = fields or {}, extra or {}
        self.baseline: Trajectory | None = None

    @property
    def uid(self) -> str:
        """The group's key."""
        return self.prompt.uid

    @property
    def context_ids(self) -> np.ndarray:
        """The first segment's context, int64 [P]."""
        return self.segments[0].context_ids

    @property
    def media(self) -> Media | None:
        """The first segment's images."""
        return self.segments[0].media

    @property
    def shared(self) -> int:
        """The first segment's tokens that another one has, too."""
        return self.segments[0].shared

    @property
    def length(self) -> int:
        """Number of response tokens L of all segments."""
        return sum([len(segment.columns["response_ids"]) for segment in self.segments])

    @property
    def longest(self) -> int:
        """Number of response tokens of the longest segment: limits of a response are limits of each."""
        return max(segment.length for segment in self.segments)

    @property
    def policy_tokens(self) -> int:
        """Number of tokens the policy wrote, K."""
        return sum([int(np.count_nonzero(segment.columns["response_mask"])) for segment in self.segments])

    @property
    def versions(self) -> tuple[int, ...]:
        """Weight versions that wrote tokens, oldest first, without repeats."""
        return tuple(sorted({version for segment in self.segments for version in segment.versions}))

    @property
    def scored(self) -> bool:
        """True once a finite score is there; a failed score never becomes a number."""
        return self.score is not None and math.isfinite(self.score)

    def column(self, name: str) -> np.ndarray | None:
        """The column of all segments joined, [L, …]; None unless every segment has it."""
        if len(self.segments) == 1:
            return self.segments[0].columns.get(name)
        parts = [segment.columns.get(name) for segment in self.segments]
        return None if any(part is None for part in parts) else np.concatenate(parts)  # type: ignore[arg-type]

    def put(self, name: str, values: np.ndarray | None) -> None:
        """Split a column [L, …] among the segments, or remove it from all with None."""
        if values is None or len(self.segments) == 1:
            for segment in self.segments:
                segment.put(name, values)
            return
        ends = np.cumsum([segment.length for segment in self.segments])
        for segment, part in zip(self.segments, np.split(values, ends[:-1]), strict=True):
            segment.put(name, part)


class Batch:
    """Trajectories of one step, members of a group adjacent, groups in draw order.

    `meta` holds scalars about the batch (temperature, step, weight version).
    """

    def __init__(self, trajectories: Iterable[Trajectory], meta: dict[str, Any] | None = None):
        self.trajectories: list[Trajectory] = list(trajectories)
        self.meta: dict[str, Any] = dict(meta or {})

    def __len__(self) -> int:
        return len(self.trajectories)

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    def __getitem__(self, i: int) -> Trajectory:
        return self.trajectories[i]

    @property
    def segments(self) -> list[Segment]:
        """All segments, as `segments_of` orders them."""
        return segments_of(self.trajectories)

    @property
    def lengths(self) -> np.ndarray:
        """Response lengths of the trajectories, int64 [N]."""
        return np.fromiter((t.length for t in self.trajectories), np.int64, len(self))

    @property
    def prompt_lengths(self) -> np.ndarray:
        """Lengths of what the first turns were sampled after (the prompt, or what an environment opened the dialogue
        with), int64 [N]."""
        return np.fromiter((len(t.context_ids) for t in self.trajectories), np.int64, len(self))

    @property
    def uids(self) -> np.ndarray:
        """Group keys, object [N]."""
        return np.array([t.uid for t in self.trajectories], dtype=object)

    def groups(self) -> list[list[Trajectory]]:
        """Trajectories by group, in order. A uid that comes back later joins its first group."""
        groups: dict[str, list[Trajectory]] = {}
        for t in self.trajectories:
            groups.setdefault(t.uid, []).append(t)
        return list(groups.values())

    def has(self, column: str) -> bool:
        """True if every segment carries the token-level column."""
        return all(column in segment.columns for t in self.trajectories for segment in t.segments)

    def padded(self, column: str, dtype: Any = np.float32, width: int | None = None) -> np.ndarray:
        """A row for each trajectory, all its segments joined: [N, width or max L, …] with zeros on the right."""
        lengths = self.lengths
        size = int(lengths.max()) if len(lengths) and width is None else int(width or 0)
        values = [t.column(column) for t in self.trajectories]
        trailing = values[0].shape[1:] if values and values[0] is not None else ()
        out = np.zeros((len(self), size, *trailing), dtype=dtype)
        for row, values_of_row, t in zip(out, values, self.trajectories, strict=True):
            row[: t.length] = values_of_row
        return out

    def fill(self, column: str, padded: np.ndarray) -> None:
        """Take a padded array [N, ≥ max L] apart into the ragged column."""
        dtype = COLUMNS[column].dtype
        for row, t in zip(padded, self.trajectories, strict=True):
            t.put(column, np.ascontiguousarray(row[: t.length], dtype=dtype))


def segments_of(trajectories: Iterable[Trajectory]) -> list[Segment]:
    """Segments of trajectories whose groups are adjacent. In a group first all first segments, then all second ones, …;
    of those at one place the ones with the same context are adjacent: it is computed once. One that begins as another
    of its trajectory follows that."""
    out: list[Segment] = []
    for _, group in groupby(trajectories, key=lambda t: t.uid):
        branches: dict[Segment, list[Segment]] = {}
        roots = []
        for t in group:
            roots.append([segment for segment in t.segments if segment.parent is None])
            for segment in t.segments:
                if segment.parent is not None:
                    branches.setdefault(t.segments[segment.parent], []).append(segment)
        for at_one_place in zip_longest(*roots):
            following = _by_context([segment for segment in at_one_place if segment is not None])[::-1]
            while following:
                out.append(segment := following.pop())
                following += branches.get(segment, ())[::-1]
    return out


def _by_context(segments: list[Segment]) -> list[Segment]:
    """These, those with the same context next to each other, in the order in which the contexts come."""
    if all(segment.context_ids is segments[0].context_ids for segment in segments):
        return segments
    groups: dict[tuple[bytes, int], list[Segment]] = {}
    for segment in segments:
        groups.setdefault((segment.context_ids.tobytes(), id(segment.media)), []).append(segment)
    return [segment for same in groups.values() for segment in same]


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common beginning of two arrays of ids."""
    size = min(len(a), len(b))
    equal = a[:size] == b[:size]
    return size if equal.all() else int(np.argmin(equal))


Row = Trajectory | Segment


def flat(rows: Sequence[Row], column: str) -> np.ndarray:
    """A column of all rows, row after row: [ΣL, …]. ValueError naming the first row without it."""
    parts = []
    for row in rows:
        values = getattr(row, column)
        if values is None:
            hint = "; its agent loop must return response_logprobs" if column == "rollout_log_probs" else ""
            raise ValueError(f"response {row.index} of {row.uid} has no {column}{hint}")
        parts.append(values)
    return np.concatenate(parts) if parts else np.zeros(0, COLUMNS[column].dtype)


def fill_flat(rows: Sequence[Row], column: str, values: np.ndarray) -> None:
    """Inverse of `flat`: split [ΣL, …] among the rows. ValueError if the number of tokens differs."""
    ends = np.cumsum([row.length for row in rows])
    total = int(ends[-1]) if len(ends) else 0
    if len(values) != total:
        raise ValueError(f"{column}: {len(values)} values for {total} tokens")
    values = np.asarray(values, dtype=COLUMNS[column].dtype)
    for end, row in zip(ends.tolist(), rows, strict=True):
        row.put(column, values[end - row.length : end])


def split_groups(groups: Sequence[list[Trajectory]], parts: int) -> list[list[list[Trajectory]]]:
    """Split groups, in order, into `parts` runs whose sizes differ by at most one group; none is cut."""
    parts = max(1, min(parts, len(groups)))
    size, extra = divmod(len(groups), parts)
    starts = [number * size + min(number, extra) for number in range(parts + 1)]
    return [list(groups[start:end]) for start, end in pairwise(starts)]
