"""A read view of a batch in the shape that plug-ins of the public system expect: `verl.DataProto`.

Padded tensors under the public names, everything else as object arrays, scalars in `meta_info`. It is made
when a plug-in asks and never travels; nothing written to it goes back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from verl.trajectory import COLUMNS, Batch, Trajectory

# Public name → column; ids and mask have a width of their own.
_COLUMNS = {c.public: n for n, c in COLUMNS.items() if c.public not in ("", "responses", "response_mask")}


class DataProtoItem:
    """One row: `batch` tensors without the first dimension, `non_tensor_batch` values, `meta_info`."""

    def __init__(
        self,
        batch: Mapping[str, torch.Tensor],
        non_tensor_batch: Mapping[str, Any],
        meta_info: Mapping[str, Any],
    ):
        self.batch = MappingProxyType(dict(batch))
        self.non_tensor_batch = MappingProxyType(dict(non_tensor_batch))
        self.meta_info = MappingProxyType(dict(meta_info))


class DataProto:
    """Rows as `batch` (tensors [N, …]), `non_tensor_batch` (object arrays [N]) and `meta_info` (dict).

    An int selects a `DataProtoItem`; a slice, a list, a bool or int array or tensor selects a DataProto.
    The three mappings are read-only. ValueError if first dimensions differ.
    """

    def __init__(
        self,
        batch: Mapping[str, torch.Tensor] | None = None,
        non_tensor_batch: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ):
        self.batch = MappingProxyType(dict(batch or {}))
        self.non_tensor_batch = MappingProxyType({k: _objects(v) for k, v in (non_tensor_batch or {}).items()})
        self.meta_info = MappingProxyType(dict(meta_info or {}))
        sizes = {name: len(value) for name, value in self.batch.items()}
        sizes |= {name: len(value) for name, value in self.non_tensor_batch.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"columns of a DataProto have different lengths: {sizes}")
        self._size = next(iter(sizes.values()), 0)

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> DataProto:
        """From tensors and arrays or lists whose first dimension is the row."""
        return cls(tensors, non_tensors, meta_info)

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

    def __len__(self) -> int:
        return self._size

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
    prompts[prompt_mask] = np.concatenate([np.zeros(0, np.int64), *(t.prompt.ids for t in rows)])
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
