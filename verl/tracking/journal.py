"""What a step was made of, as a parquet file with a row for each segment: ids, masks, log-probs, scores, draws.

    journal/{step}.parquet      a column for each of `verl.trajectory.COLUMNS` that the step has, null where a row lacks it
                                about: what is not of tokens, as JSON; that of the trajectory on its first segment, and
                                that of the prompt on its first trajectory

Numbers come back bit for bit. Pixels are not kept: `about` of the file has the number of images.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.data.files import written_whole
from verl.errors import UserError
from verl.trajectory import COLUMNS, Batch, Prompt, Segment, Trajectory

if TYPE_CHECKING:
    import pyarrow as pa

_PROMPT = ("messages", "data_source", "ground_truth", "extra_info", "file", "row", "epoch", "agent_name", "columns")
_TRAJECTORY = ("finish_reason", "status", "text", "num_turns", "score", "score_parts", "score_error", "fields", "extra")
_SEGMENT = ("versions", "parent", "shared")
_CONTEXT, _ABOUT = "context.", "about"


class Journal:
    """The newest steps of a run, at most `limit` bytes of them. submit: runs (path, write) in a thread."""

    def __init__(self, folder: Path, limit: float, submit: Callable[[Path, Callable[[Path], None]], None]):
        self._folder, self._limit, self._submit = folder, limit, submit

    def add(self, step: int, batch: Batch, about: Mapping[str, Any]) -> None:
        """Write a step. Its columns must not change any more."""
        if self._limit:
            path = self._folder / f"{step}.parquet"
            self._submit(path, partial(self._write, batch=batch, about={"step": step, **about}))

    def _write(self, path: Path, batch: Batch, about: Mapping[str, Any]) -> None:
        write(path, batch, about)
        left = self._limit
        for _, other in sorted(steps(self._folder).items(), reverse=True):
            left -= other.stat().st_size
            if left < 0 and other != path:
                other.unlink()


def steps(folder: Path) -> dict[int, Path]:
    """The files of a journal by step."""
    return {int(path.stem): path for path in sorted(folder.glob("*.parquet")) if path.stem.isdecimal()}


def write(path: Path, batch: Batch, about: Mapping[str, Any]) -> None:
    """A file of these trajectories and their greedy baselines; `about` is of the step, JSON."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [*batch, *{id(t.baseline): t.baseline for t in batch if t.baseline is not None}.values()]
    first = len(batch)
    prompts: set[str] = set()
    segments: list[Segment] = []
    texts: list[str] = []
    for number, t in enumerate(rows):
        for segment in t.segments:
            note = {name: getattr(segment, name) for name in _SEGMENT}
            note["shapes"] = {n: values.shape[1:] for n, values in segment.columns.items() if values.ndim > 1}
            if segment is t.segments[0]:
                note["trajectory"] = {name: getattr(t, name) for name in _TRAJECTORY} | {"baseline": number >= first}
                if t.uid not in prompts:
                    note["prompt"] = {"ids": t.prompt.ids} | {name: getattr(t.prompt, name) for name in _PROMPT}
                    prompts.add(t.uid)
            segments.append(segment)
            texts.append(json.dumps(note, default=_plain))
    table: dict[str, Any] = {
        "uid": [segment.uid for segment in segments],
        "index": [segment.index for segment in segments],
        "context_ids": _lists([segment.context_ids for segment in segments]),
    }
    for name in COLUMNS:
        if any(name in segment.columns for segment in segments):
            table[name] = _lists([segment.columns.get(name) for segment in segments])
        if any(name in segment.context_columns for segment in segments):
            table[_CONTEXT + name] = _lists([segment.context_columns.get(name) for segment in segments])
    images = sum(segment.media.images for segment in segments if segment.media is not None)
    metadata = {"verl": json.dumps({**about, "images": images}, default=_plain)}
    arrow = pa.table({**table, _ABOUT: texts}).replace_schema_metadata(metadata)
    with written_whole(path) as beside:
        pq.write_table(arrow, beside, compression="zstd", compression_level=1)


def _lists(parts: list[np.ndarray | None]) -> pa.Array:
    """A list for each array, flat; null for None."""
    import pyarrow as pa

    flat = [None if part is None else part.reshape(-1) for part in parts]
    values = np.concatenate([part for part in flat if part is not None] or [np.zeros(0)])
    kind = pa.binary() if values.dtype == object else None
    ends = accumulate((0 if part is None else len(part) for part in flat), initial=0)
    missing = np.array([part is None for part in flat] + [False])
    offsets = pa.array(np.array(list(ends), np.int64), mask=missing)
    return pa.LargeListArray.from_arrays(offsets, pa.array(values, kind))


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def read(path: Path, *, computed: bool = False) -> tuple[Batch, dict[str, Any]]:
    """The trajectories of a file, and `about`. computed: also the columns that passes and updates made of what was
    sampled. UserError for a file that is damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
        wanted = {n for n in COLUMNS if n in table.column_names and (computed or COLUMNS[n].source == "rollout")}
        names = {"context_ids", *wanted, *(n for n in table.column_names if n.startswith(_CONTEXT))}
        arrays = {name: _parts(table.column(name)) for name in names}
        facts = [table.column(name).to_pylist() for name in ("uid", "index", _ABOUT)]
        about = json.loads(table.schema.metadata[b"verl"])
        rows = (
            ({n: values[i] for n, values in arrays.items()}, *each) for i, each in enumerate(zip(*facts, strict=True))
        )
        return Batch(_trajectories(rows), {"step": about["step"]}), about
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: no recorded step ({type(error).__name__}: {error}); remove it") from error


def _parts(column: Any) -> list[np.ndarray | None]:
    """The list of each row as an array, None for null."""
    import pyarrow as pa

    lists = column.combine_chunks()
    values = lists.values
    flat = np.array(values.to_pylist(), object) if pa.types.is_binary(values.type) else values.to_numpy(False)
    offsets, there = lists.offsets.to_numpy(), lists.is_valid().to_numpy(False)
    return [flat[offsets[i] : offsets[i + 1]].copy() if there[i] else None for i in range(len(lists))]


def _trajectories(rows: Iterable[tuple[dict[str, Any], str, int, str]]) -> list[Trajectory]:
    prompts: dict[str, Prompt] = {}
    contexts: dict[tuple[str, str, bytes], np.ndarray] = {}
    made: list[tuple[dict[str, Any], Prompt, int, list[Segment]]] = []
    for arrays, uid, index, text in rows:
        about = json.loads(text)
        if "prompt" in about:
            fields = about["prompt"]
            prompts[uid] = Prompt(uid, np.array(fields.pop("ids"), np.int64), **fields)
        if "trajectory" in about:
            made.append((about["trajectory"], prompts[uid], index, []))
        made[-1][3].append(segment := _segment(arrays, about, prompts[uid]))
        for name, values in segment.context_columns.items():  # one array for all that share the context, as before
            segment.context_columns[name] = contexts.setdefault((uid, name, values.tobytes()), values)
    trajectories, baselines = [], {}
    for fields, prompt, index, segments in made:
        baseline = fields.pop("baseline")
        trajectory = Trajectory(prompt, index, segments=segments, **fields)
        if baseline:
            baselines[prompt.uid] = trajectory
        else:
            trajectories.append(trajectory)
    for trajectory in trajectories:
        trajectory.baseline = baselines.get(trajectory.uid)
    return trajectories


def _segment(arrays: dict[str, Any], about: dict[str, Any], prompt: Prompt) -> Segment:
    def shaped(name: str) -> np.ndarray:
        column, values = name.removeprefix(_CONTEXT), arrays[name]
        return values.astype(COLUMNS[column].dtype, copy=False).reshape(-1, *about["shapes"].get(column, ()))

    context = arrays["context_ids"].astype(np.int64)
    columns: dict[str, Any] = {n: shaped(n) for n, values in arrays.items() if n in COLUMNS and values is not None}
    segment = Segment(
        prompt.ids if np.array_equal(context, prompt.ids) else context,
        **columns,
        versions=tuple(about["versions"]),
        parent=about["parent"],
        shared=about["shared"],
    )
    for name, values in arrays.items():
        if name.startswith(_CONTEXT) and values is not None:
            segment.context_columns[name.removeprefix(_CONTEXT)] = shaped(name)
    return segment
