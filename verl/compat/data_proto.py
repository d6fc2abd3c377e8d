"""A batch in the shape that plug-ins of the public system expect: `verl.DataProto`.

Padded tensors under the public names, everything else as object arrays, scalars in `meta_info`. It is made when a
plug-in asks and belongs to the plug-in: what is written to it does not reach the run's batch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from verl.trajectory import COLUMNS, Batch, Trajectory

# Public name → column; ids and mask have a width of their own.
_COLUMNS = {c.public: n for n, c in COLUMNS.items() if c.public not in ("", "responses", "response_mask")}


class Tensors(dict[str, torch.Tensor]):
    """Tensors by name whose first dimension is the row, with what plug-ins use of a tensordict."""

    @property
    def batch_size(self) -> torch.Size:
        """[rows]; [0] without a column."""
        return torch.Size([len(next(iter(self.values()), ()))])

    def select(self, *names: str) -> Tensors:
        """The named columns. KeyError for one that is not there."""
        return Tensors({name: self[name] for name in names})


@dataclass
class DataProtoItem:
    """One row: `batch` tensors without the first dimension, `non_tensor_batch` values, `meta_info`."""

    batch: dict[str, torch.Tensor]
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any]


class DataProto:
    """Rows as `batch` (tensors [N, …]), `non_tensor_batch` (object arrays [N]) and `meta_info` (dict).

    An int selects a `DataProtoItem`; a slice, a list, a bool or int array or tensor selects a DataProto. The three
    mappings may be written to. ValueError if first dimensions differ.
    """

    def __init__(
        self,
        batch: Mapping[str, torch.Tensor] | None = None,
        non_tensor_batch: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ):
        self.batch = Tensors(batch or {})
        self.non_tensor_batch = {name: _objects(values) for name, values in (non_tensor_batch or {}).items()}
        self.meta_info = dict(meta_info or {})
        self.check_consistency()

    def check_consistency(self) -> None:
        """ValueError if first dimensions differ."""
        sizes = {name: len(value) for name, value in self._columns().items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"columns of a DataProto have different lengths: {sizes}")

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> DataProto:
        """From tensors and arrays or lists whose first dimension is the row."""
        return cls(tensors, non_tensors, meta_info)

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None, **_: Any
    ) -> DataProto:
        """As `from_dict`, tensors and the other columns in one mapping."""
        tensors = {name: value for name, value in data.items() if isinstance(value, torch.Tensor)}
        return cls(tensors, {name: value for name, value in data.items() if name not in tensors}, meta_info)

    @classmethod
    def from_trajectories(cls, rows: Batch) -> DataProto:
        """The view of a batch.

        `batch`: prompts [N, P] (padded on the left), responses [N, L] (on the right, L ≥ 1), input_ids, position_ids,
        attention_mask [N, P + L] int64, response_mask float32, token_level_scores, and every column that all rows
        carry, float32. `non_tensor_batch`: uid, data_source, reward_model, extra_info, raw_prompt, __num_turns__,
        reward_scores (rewards of tools and turns, as rollout_reward_scores too), the row's other columns, what the
        agent loop returned in extra_fields (messages, tool_metrics, …), and what the reward function returned.
        """
        return cls(_tensors(rows), _objects_of(rows), rows.meta)

    def having(self, **columns: torch.Tensor) -> DataProto:
        """The same rows with further, or other, tensors."""
        return DataProto({**self.batch, **columns}, self.non_tensor_batch, self.meta_info)

    def select_idxs(self, rows: Any) -> DataProto:
        """The rows of a list, an array or a tensor of numbers or bools."""
        return self[rows]  # type: ignore[no-any-return]

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """The named columns and entries (None: all of them) as a new DataProto. KeyError for one that is not there."""
        names = (batch_keys, non_tensor_batch_keys, meta_info_keys)
        parts = [_named(mapping, chosen) for mapping, chosen in zip(self._mappings, names, strict=True)]
        return DataProto(*(copy.deepcopy(parts) if deepcopy else parts))

    def pop(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> DataProto:
        """Take the named columns and entries (None: none of them) out. KeyError for one that is not there."""
        names = [list(chosen or ()) for chosen in (batch_keys, non_tensor_batch_keys, meta_info_keys)]
        taken = self.select(names[0], names[1], names[2])
        for mapping, chosen in zip(self._mappings, names, strict=True):
            for name in chosen:
                del mapping[name]
        return taken

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> DataProto:
        """Rename tensors in place."""
        old, new = ([keys] if isinstance(keys, str) else list(keys) for keys in (old_keys, new_keys))
        for before, after in zip(old, new, strict=True):
            self.batch[after] = self.batch.pop(before)
        return self

    def union(self, other: DataProto) -> DataProto:
        """Add the columns and entries of `other` in place. ValueError for one that both have with different values."""
        for mine, theirs in zip(self._mappings, other._mappings, strict=True):
            for name in mine.keys() & theirs.keys():
                if not _equal(mine[name], theirs[name]):
                    raise ValueError(f"union: {name!r} has different values in the two")
            mine.update(theirs)
        self.check_consistency()
        return self

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Every row `repeat_times` times: one after the other, or with interleave=False the whole again and again."""
        rows = np.arange(len(self))
        return self.select_idxs(rows.repeat(repeat_times) if interleave else np.tile(rows, repeat_times))

    def chunk(self, chunks: int) -> list[DataProto]:
        """So many equal parts. ValueError where the rows cannot be divided."""
        if len(self) % chunks:
            raise ValueError(f"{len(self)} rows cannot be divided into {chunks} equal parts")
        return self.split(max(1, len(self) // chunks))

    def split(self, split_size: int) -> list[DataProto]:
        """Parts of `split_size` rows, the last one of the rest."""
        return [self[start : start + split_size] for start in range(0, len(self), split_size)]

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """The rows of `[start:end:step]`."""
        return self[start:end:step]  # type: ignore[no-any-return]

    def reorder(self, indices: torch.Tensor) -> None:
        """Put the rows in this order, in place."""
        ordered = self.select_idxs(indices)
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    def to(self, device: Any) -> DataProto:
        """Move the tensors, in place."""
        self.batch = Tensors({name: value.to(device) for name, value in self.batch.items()})
        return self

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """The rows of several batches with the same columns, one after the other; `meta_info` is that of the first.
        KeyError where one lacks a column of the first."""
        first = data[0]
        tensors = {name: torch.cat([part.batch[name] for part in data]) for name in first.batch}
        objects = {
            name: np.concatenate([part.non_tensor_batch[name] for part in data]) for name in first.non_tensor_batch
        }
        return DataProto(tensors, objects, first.meta_info)

    @property
    def _mappings(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        return self.batch, self.non_tensor_batch, self.meta_info

    def _columns(self) -> dict[str, Any]:
        return {**self.batch, **self.non_tensor_batch}

    def __len__(self) -> int:
        return len(next(iter(self._columns().values()), ()))

    def __iter__(self) -> Iterator[DataProtoItem]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, rows: Any) -> Any:
        if isinstance(rows, int | np.integer):
            if not -len(self) <= rows < len(self):
                raise IndexError(f"row {rows} of a DataProto with {len(self)} rows")
            return DataProtoItem(
                {name: value[rows] for name, value in self.batch.items()},
                {name: value[rows] for name, value in self.non_tensor_batch.items()},
                self.meta_info,
            )
        chosen = np.arange(len(self))[rows if isinstance(rows, slice) else np.asarray(rows)]
        index = torch.from_numpy(chosen)
        return DataProto(
            {name: value[index] for name, value in self.batch.items()},
            {name: value[chosen] for name, value in self.non_tensor_batch.items()},
            self.meta_info,
        )


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """(the rows, the first ones again until `size_divisor` divides their number; how many were added)."""
    added = -len(data) % size_divisor
    return (data[np.arange(len(data) + added) % len(data)] if added else data), added


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Without the last `pad_size` rows."""
    return data[: len(data) - pad_size]  # type: ignore[no-any-return]


def _named(mapping: dict[str, Any], names: Iterable[str] | None) -> dict[str, Any]:
    return dict(mapping) if names is None else {name: mapping[name] for name in names}


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        same = first.shape == second.shape
        return same and bool(((first == second) | (first != first) & (second != second)).all())
    if isinstance(first, np.ndarray) and first.dtype == object:
        return len(first) == len(second) and all(map(_equal, first, second))
    numbers = isinstance(first, np.ndarray) and first.dtype.kind in "fc"
    return np.array_equal(first, second, equal_nan=True) if numbers else bool(np.all(first == second))


def _objects(values: Any) -> np.ndarray:
    """One object per row; nested lists stay lists."""
    if isinstance(values, np.ndarray):
        return values
    out = np.empty(len(values), dtype=object)
    out[:] = list(values)
    return out


def _tensors(rows: Batch) -> dict[str, torch.Tensor]:
    prompt_width = int(rows.prompt_lengths.max(initial=0))
    width = int(rows.lengths.max(initial=1))  # users index the last token of empty responses, too
    prompt_mask = np.arange(prompt_width) >= prompt_width - rows.prompt_lengths[:, None]
    prompts = np.zeros(prompt_mask.shape, np.int64)
    prompts[prompt_mask] = np.concatenate([np.zeros(0, np.int64), *(t.context_ids for t in rows)])
    responses = rows.padded("response_ids", dtype=np.int64, width=width)
    response_mask = np.arange(width) < rows.lengths[:, None]
    attention = np.concatenate([prompt_mask, response_mask], axis=1).astype(np.int64)
    columns = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": np.concatenate([prompts, responses], axis=1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clip(min=0),
        "response_mask": rows.padded("response_mask", width=width),
    }
    if len(rows) and all(t.scored for t in rows):
        columns["token_level_scores"] = _scores_on_last(rows, width)
    for name, column in _COLUMNS.items():
        if len(rows) and rows.has(column):
            columns[name] = rows.padded(column, width=width)
    return {name: torch.from_numpy(values) for name, values in columns.items()}


def _scores_on_last(rows: Batch, width: int) -> np.ndarray:
    """The score of each response on its last policy token, float32 [N, width]."""
    scores = np.zeros((len(rows), width), np.float32)
    for row, t in zip(scores, rows, strict=True):
        row[np.flatnonzero(t.response_mask)[-1:]] = t.score
    return scores


def _objects_of(rows: Batch) -> dict[str, np.ndarray]:
    records = [_record(t) for t in rows]
    names = dict.fromkeys(name for record in records for name in record)
    return {name: _objects([record.get(name) for record in records]) for name in names}


def _record(t: Trajectory) -> dict[str, Any]:
    """Non-tensor values of one row; the public names win over columns and parts of the same name."""
    prompt, scores = t.prompt, t.extra.get("reward_scores", {})
    return {
        **prompt.columns,
        **t.fields,
        **t.score_parts,
        "uid": t.uid,
        "data_source": prompt.data_source,
        "reward_model": {"style": "rule", "ground_truth": prompt.ground_truth},
        "extra_info": prompt.extra_info,
        "raw_prompt": prompt.messages,
        "agent_name": prompt.agent_name,
        "__num_turns__": t.num_turns,
        "reward_scores": scores,
        "rollout_reward_scores": scores,
    }
