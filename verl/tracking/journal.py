"""What a step was made of, as a parquet file with a row for each segment: ids, masks, log-probs, scores, draws.

    journal/{step}.parquet      a column for each of `verl.trajectory.COLUMNS` that the step has, null where a row lacks
                                it
                                about: what is not of tokens, as JSON; that of the trajectory on its first segment, and
                                that of the prompt on its first trajectory
    pixel_values                of the images that a segment is the first to have, float32 as uint32: a dictionary of
                                the few values that pixels have, and indices into it, compressed

Numbers come back bit for bit.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.data.files import written_whole
from verl.errors import UserError
from verl.trajectory import COLUMNS, Batch, Media, Prompt, Segment, Trajectory

if TYPE_CHECKING:
    import pyarrow as pa

_PROMPT = ("messages", "data_source", "ground_truth", "extra_info", "file", "row", "epoch", "agent_name", "columns")
_TRAJECTORY = ("finish_reason", "status", "text", "num_turns", "score", "score_parts", "score_error", "fields", "extra")
_SEGMENT = ("versions", "parent", "shared")
_CONTEXT, _ABOUT, _PIXELS = "context.", "about", "pixel_values"


class Journal:
    """The newest steps of a run, at most `limit` bytes of them. submit: runs (path, write) in a thread."""

    def __init__(self, folder: Path, limit: float, submit: Callable[[Path, Callable[[Path], None]], None]):
        self._folder, self._limit, self._submit = folder, limit, submit
        # Bytes of each step. To ask the file system after each step made a step 15 ms longer for every 1,000 files.
        self._sizes: dict[int, int] | None = None

    def add(self, step: int, batch: Batch, about: Mapping[str, Any]) -> None:
        """Write a step. Its columns must not change any more."""
        if self._limit:
            path = self._folder / f"{step}.parquet"
            self._submit(path, partial(self._write, batch=batch, about={"step": step, **about}))

    def _write(self, path: Path, batch: Batch, about: Mapping[str, Any]) -> None:
        write(path, batch, about)
        if self._sizes is None:
            self._sizes = {step: other.stat().st_size for step, other in steps(self._folder).items()}
        newest = int(path.stem)
        self._sizes[newest] = path.stat().st_size
        while len(self._sizes) > 1 and sum(self._sizes.values()) > self._limit:
            oldest = min(self._sizes.keys() - {newest})
            (self._folder / f"{oldest}.parquet").unlink(missing_ok=True)
            del self._sizes[oldest]


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
    stored: set[Media] = set()
    pixels: list[np.ndarray | None] = []
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
                    note["prompt"]["media"] = _keys(t.prompt.media)
                    prompts.add(t.uid)
            fresh = [] if segment.media is None else [m for m in segment.media.leaves if m not in stored]
            stored.update(fresh)
            note["media"], note["images"] = _keys(segment.media), [_image_note(leaf) for leaf in fresh]
            arrays = [_pixels(leaf).reshape(-1).view(np.uint32) for leaf in fresh]
            pixels.append(np.concatenate(arrays) if arrays else None)
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
    if stored:
        table[_PIXELS] = _lists(pixels)
    metadata = {"verl": json.dumps(about, default=_plain)}
    arrow = pa.table({**table, _ABOUT: texts}).replace_schema_metadata(metadata)
    with written_whole(path) as beside:
        pq.write_table(arrow, beside, compression="zstd", compression_level=1)


def _keys(media: Media | None) -> list[str]:
    return [] if media is None else [leaf.key for leaf in media.leaves]


def _pixels(leaf: Media) -> np.ndarray:
    return leaf.inputs.get(_PIXELS, np.zeros((0, 0), np.float32))


def _image_note(leaf: Media) -> dict[str, Any]:
    """What is kept of images beside their pixels."""
    inputs = {name: [str(a.dtype), a.tolist()] for name, a in leaf.inputs.items() if name != _PIXELS}
    note = {"key": leaf.key, "tokens": leaf.tokens, "token": leaf.token, "inputs": inputs}
    return note | {"small": [b64encode(file).decode() for file in leaf.small], "shape": _pixels(leaf).shape}


def _read_images(notes: Iterable[Mapping[str, Any]], pixels: np.ndarray | None, seen: dict[str, Media]) -> None:
    """Add to `seen` the images that a segment is the first to have."""
    start = 0
    for note in notes:
        assert pixels is not None
        size = int(np.prod(note["shape"]))
        values = pixels[start : start + size].astype(np.uint32, copy=False).view(np.float32).reshape(note["shape"])
        start += size
        inputs = {_PIXELS: values} | {name: np.array(v, dtype) for name, (dtype, v) in note["inputs"].items()}
        small = tuple(map(b64decode, note["small"]))
        seen[note["key"]] = Media(inputs, note["tokens"], small, key=note["key"], token=note["token"])


def _media(keys: list[str], seen: dict[str, Media]) -> Media | None:
    """The images of these keys: the same object each time."""
    name = " ".join(keys)
    if len(keys) > 1 and name not in seen:
        seen[name] = Media.joined([seen[key] for key in keys])
    return seen[name] if keys else None


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
        names = {"context_ids", *wanted, *(n for n in table.column_names if n.startswith(_CONTEXT) or n == _PIXELS)}
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
    seen: dict[str, Media] = {}
    made: list[tuple[dict[str, Any], Prompt, int, list[Segment]]] = []
    for arrays, uid, index, text in rows:
        about = json.loads(text)
        _read_images(about.get("images", ()), arrays.pop(_PIXELS, None), seen)
        if "prompt" in about:
            fields = about["prompt"]
            media = _media([key for key in fields.pop("media", []) if key in seen], seen)
            prompts[uid] = Prompt(uid, np.array(fields.pop("ids"), np.int64), media=media, **fields)
        if "trajectory" in about:
            made.append((about["trajectory"], prompts[uid], index, []))
        made[-1][3].append(segment := _segment(arrays, about, prompts[uid], _media(about.get("media", []), seen)))
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


def _segment(arrays: dict[str, Any], about: dict[str, Any], prompt: Prompt, media: Media | None) -> Segment:
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
        media=media,
    )
    for name, values in arrays.items():
        if name.startswith(_CONTEXT) and values is not None:
            segment.context_columns[name.removeprefix(_CONTEXT)] = shaped(name)
    return segment
