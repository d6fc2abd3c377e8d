"""From ragged rows to packs: what one forward pass computes, without padding and with what rows share once.

    group of three responses     [prompt 0…P−1][response 1: P…][response 2: P…][response 3: P…]   positions restart
    a branch at token k of 1     [prompt][response 1: P…k−1][k…][branch: k…][response 2: P…] …

A row whose context begins as an earlier row goes on from that row's tokens: rows are a tree (`_Tree`) of spans.
The log-prob of a response token comes from the hidden state of the token before it, so the first token of every
response reads the prompt's last position, and a response's own last token is never computed at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from typing import Any

import numpy as np
import torch

from verl.models.attention import TokenSpan
from verl.models.inputs import ImageFeatures, VisionInputs, model_inputs, text_axes
from verl.models.packed_attention import PackedPlan
from verl.models.sampling_mask import SamplingMask
from verl.trajectory import UNKNOWN_EXPERT, Media, Segment, common_prefix


@dataclass(frozen=True, slots=True)
class MicroBatching:
    """How rows are cut into micro-batches: at most `tokens` tokens, or exactly `rows` responses if that is set.

    share_prompt: None computes what rows of a group that meet in a pack share once, the prompt first of all, True says
    so, False repeats it for each. replay: packs say to which experts their tokens went. one_by_one: one response per
    pack, for layers that carry a state along the row. limit: tokens that a pack may have where a prompt alone is larger
    than `tokens`. whole_groups: no group is cut, whatever its size (with `rows`: a multiple of the size of each).
    """

    tokens: int = 16384
    rows: int | None = None
    share_prompt: bool | None = None
    one_by_one: bool = False
    replay: bool = False
    limit: int = 0
    whole_groups: bool = False

    @property
    def shared(self) -> bool:
        return self.share_prompt is not False and not self.one_by_one


CANDIDATES = "teacher_topk_ids"


@dataclass(slots=True)
class Pack:
    """One forward pass.

    input_ids, positions   int64 [S]  tokens computed, and their numbers in their own sequences
    segments               how they see each other
    source, targets        int64 [R]  for every response token, row after row: the index of the hidden state
                           that predicts it, and the token
    candidates             int64 [R, k]  other tokens in its place (column `CANDIDATES`), None where rows have none
    sampling_mask          the sets that the targets were drawn from, None if all are the whole vocabulary
    routes                 int64 [S, layers, k]  recorded experts of the tokens computed; None if no row has any
    paths                  each row that has a token, with the (first, number of tokens) of the spans that make up what
                           is computed of it
    axes, media            where a row has images: int64 [3, S] that the model rotates by, and the images of each
                           context
    images                 number of images
    image_span             where the pack is a rank's share of one: which of the images' tokens are in it, (first, last)
    blank                  1 where the last token is an image of none of the rows, whose output counts for nothing
    """

    rows: Sequence[Segment]
    input_ids: torch.Tensor
    positions: torch.Tensor
    segments: list[TokenSpan]
    source: torch.Tensor
    targets: torch.Tensor
    candidates: torch.Tensor | None = None
    sampling_mask: SamplingMask | None = None
    routes: torch.Tensor | None = None
    paths: Sequence[tuple[Segment, list[tuple[int, int]]]] = ()
    axes: torch.Tensor | None = None
    media: Sequence[Media] = ()
    images: int = 0
    image_span: tuple[int, int] | None = None
    blank: int = 0

    def inputs(self, base: Any) -> dict[str, Any]:
        """Arguments of the forward of `base`, the model without its head. For a share the tower runs here, over all
        images."""
        media: dict[str, Any] = VisionInputs.tensors(self.media, self.input_ids.device)
        if self.image_span is not None:
            media = ImageFeatures.argument([ImageFeatures.of(base, media).part(*self.image_span)])
        return model_inputs(self.input_ids, self.positions if self.axes is None else self.axes, media)

    @property
    def size(self) -> int:
        return int(self.input_ids.shape[0])

    def plan(self, heads: int) -> PackedPlan:
        """The attention plan of this pack, for a model with that many query heads."""
        return PackedPlan(self.segments, self.positions, heads)


_LEAST = 16
"""So many tokens, or a whole context, are worth a span of their own."""


def _computed(row: Segment) -> int:
    """Tokens of a row's sequence that are computed: all but the last."""
    return len(row.context_ids) + row.length - 1 if row.length else 0


@dataclass(slots=True, eq=False)
class _Span:
    """Tokens first … end − 1 of a row's sequence, which other rows may have, too; `parent` are those before them."""

    row: Segment
    first: int
    end: int
    parent: _Span | None = None

    @property
    def path(self) -> list[_Span]:
        """The spans of a sequence that ends with this one."""
        path, span = [self], self.parent
        while span is not None:
            path.append(span)
            span = span.parent
        return path[::-1]


class _Tree:
    """The rows of a micro-batch by what they share. size: tokens computed; ends: the last span of each row."""

    def __init__(self, rows: Sequence[Segment] = (), *, shared: bool):
        self._shares = shared
        self.ends: list[_Span] = []
        self._rows: list[Segment] = []
        self.size = 0
        for row in rows:
            self.add(row)

    def shared(self, row: Segment) -> tuple[int, int]:
        """How many tokens a row shares with the rows that are there, and the number of the one that has most of
        them."""
        best = 0, -1
        for number in reversed(range(len(self._rows) if self._shares else 0)):
            other = self._rows[number]
            if other.uid != row.uid or (best[0] >= len(row.context_ids) and best[0] >= row.shared):
                break
            best = max(best, (_shared(row, other), number))
        return best

    def add(self, row: Segment) -> None:
        """One more row that has a token."""
        count, number = self.shared(row)
        parent: _Span | None = None
        if count:
            parent = next(span for span in self.ends[number].path if span.end >= count)
            if parent.end > count:  # it is cut in two: what is behind the branch goes on from what is before
                before = _Span(parent.row, parent.first, count, parent.parent)
                parent.first, parent.parent, parent = count, before, before
        end = _computed(row)
        self.ends.append(_Span(row, count, end, parent) if parent is None or end > count else parent)
        self._rows.append(row)
        self.size += end - count


def _shared(row: Segment, other: Segment) -> int:
    """How many tokens of a row's context, and of what it shares behind that, are computed with another row."""
    context, theirs = row.context_ids, other.context_ids
    if row.media is not other.media:
        return 0
    count = len(context)
    if context is not theirs:
        count = common_prefix(context, theirs)
        if count == len(theirs):
            count += common_prefix(context[count:], other.response_ids[:-1])
        least = min(len(context), len(theirs)) if row.media is not None else min(len(context), _LEAST)
        count = count if count >= least else 0
    if count == len(context) < row.shared:
        count = common_prefix(_sequence(row)[: row.shared], _sequence(other))
    ours, routes = _sequence_routes(row, count), _sequence_routes(other, count)
    if ours is None or routes is None:
        return count if ours is routes else 0
    return count if np.array_equal(ours, routes) else 0


def split_rows(rows: Sequence[Segment], how: MicroBatching) -> list[list[Segment]]:
    """Cut rows, in order, into micro-batches. A response longer than the budget gets one of its own.

    A group goes to the next micro-batch as a whole if it fits there and this one is at least half full, since
    cutting it would compute its prompt twice.
    """
    if how.one_by_one or how.rows is not None:
        size = 1 if how.one_by_one else max(1, int(how.rows or 1))
        return [list(rows[i : i + size]) for i in range(0, len(rows), size)]
    costs = _group_costs(rows, how)
    out: list[list[Segment]] = []
    tree = _Tree(shared=how.shared)
    for i, row in enumerate(rows):
        shared, _ = tree.shared(row) if row.length else (0, -1)
        new_group = i == 0 or rows[i - 1].uid != row.uid
        worth = how.whole_groups or (tree.size * 2 >= how.tokens >= costs[i])
        whole = new_group and worth and tree.size + costs[i] > how.tokens
        # Apart, the responses to a prompt that is larger than a pack would each compute it again.
        context = len(row.context_ids)
        room = max(how.tokens, how.limit) if shared == context > how.tokens else how.tokens
        if not out or whole or (tree.size + _computed(row) - shared > room and not how.whole_groups):
            out.append([])
            tree = _Tree(shared=how.shared)
        out[-1].append(row)
        if row.length:
            tree.add(row)
    return out


def _group_costs(rows: Sequence[Segment], how: MicroBatching) -> list[int]:
    """For each row the tokens of its whole run of neighbours with the same uid."""
    costs: list[int] = []
    for _, neighbours in groupby(rows, key=lambda row: row.uid):
        run = list(neighbours)
        costs += [_Tree([row for row in run if row.length], shared=how.shared).size] * len(run)
    return costs


def pack(
    rows: Sequence[Segment],
    how: MicroBatching,
    device: torch.device | str = "cpu",
    vision: VisionInputs | None = None,
    *,
    tower: bool = False,
) -> Pack:
    """Lay out one micro-batch. Rows without response tokens take no place; their prompt neither.

    vision: of a vision-language model. A context's images are there as often as the context, once where it is shared.
    tower: other ranks run the tower, so without images there is one of a single token, which no row sees.
    """
    present = [row for row in rows if row.length]
    blank = tower and vision is not None and all(row.media is None for row in present)
    if blank and vision is not None:
        present.append(_blank_row(present, vision))
    if empty := next((row for row in present if not len(row.context_ids)), None):
        raise ValueError(f"prompt {empty.uid} has no token; a response needs one before it")
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    axes: list[np.ndarray] = []
    media: list[Media] = []
    segments: list[TokenSpan] = []
    source: list[np.ndarray] = []
    paths: list[tuple[Segment, list[tuple[int, int]]]] = []
    places: dict[_Span, tuple[int, int]] = {}
    at = 0
    seeing = vision is not None and any(row.media is not None for row in present)
    for row, end in zip(present, _Tree(present, shared=how.shared).ends, strict=True):
        path = end.path
        for number, span in enumerate(path):
            if span in places:
                continue
            start, at = at, at + span.end - span.first
            places[span] = start, at
            ids.append(_sequence(span.row)[span.first : span.end])
            positions.append(np.arange(span.first, span.end))
            segments.append(TokenSpan(start, at, tuple(places[before] for before in path[:number])))
            if seeing:
                axes.append(_axes(span.row, span.first, span.end - span.first, vision))
                media.extend([span.row.media] if span.row.media is not None and not span.first else [])
        computed = [places[span] for span in path]
        paths.append((row, [(start, end - start) for start, end in computed]))
        source.append(np.concatenate([np.arange(*place) for place in computed])[len(row.context_ids) - 1 :])

    tensor = partial(_joined, device=device)
    targets = tensor([row.response_ids for row in present])
    packed = Pack(rows, tensor(ids), tensor(positions), segments, tensor(source), targets, paths=paths)
    packed.blank = int(blank)
    candidates = [getattr(row, CANDIDATES) for row in present]
    if candidates and all(value is not None for value in candidates):
        packed.candidates = tensor(candidates)
    sets = [row.sampling_mask for row in present]
    if any(recorded is not None for recorded in sets):
        drawn_from = ([b""] * row.length if own is None else own for row, own in zip(present, sets, strict=True))
        packed.sampling_mask = SamplingMask.of(list(chain.from_iterable(drawn_from)), device)
    if how.replay and (routes := _routes(places)):
        packed.routes = tensor(routes)
    if seeing:
        packed.axes = torch.from_numpy(np.concatenate(axes, axis=1)).to(device)
        packed.media = media
        packed.images = sum(item.images for item in media) - packed.blank
    return packed


def _joined(parts: Sequence[np.ndarray], device: torch.device | str) -> torch.Tensor:
    joined = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    return torch.from_numpy(joined.astype(np.int64, copy=False)).to(device)


def _blank_row(rows: Sequence[Segment], vision: VisionInputs) -> Segment:
    """A row of nobody's with an image of one token; with candidates where the others have them."""
    nothing = np.zeros(1, np.int64)
    likely = next((ids for row in rows if (ids := getattr(row, CANDIDATES)) is not None), None)
    columns = {} if likely is None else {CANDIDATES: np.zeros_like(likely[:1])}
    context = np.array([vision.image_token])
    return Segment(context, nothing, nothing.astype(bool), media=vision.blank, **columns)


def _axes(row: Segment, first: int, count: int, vision: VisionInputs | None) -> np.ndarray:
    """Positions int64 [3, count] of the tokens of a row's sequence from number `first` on."""
    if row.media is None or vision is None:
        return text_axes(first, count)
    try:
        return vision.context(row.context_ids, row.media).axes(first, count)
    except ValueError as error:
        raise ValueError(f"response {row.index} of {row.uid}: {error}") from error


def _sequence(row: Segment) -> np.ndarray:
    """The tokens of a row that are computed."""
    return np.concatenate((row.context_ids, row.response_ids[:-1]))


def _sequence_routes(row: Segment, count: int) -> np.ndarray | None:
    """The recorded experts of a row's first `count` tokens."""
    if row.routed_experts is None:
        return None
    context = row.context_columns["routed_experts"]
    return context[:count] if count <= len(context) else np.concatenate((context, row.routed_experts))[:count]


def _routes(spans: Iterable[_Span]) -> list[np.ndarray]:
    """The recorded experts of a pack's tokens in order, UNKNOWN_EXPERT where a row has none; empty if none has any."""
    parts = [(_sequence_routes(span.row, span.end), span.first, span.end) for span in spans]
    shape = next((values.shape[1:] for values, _, _ in parts if values is not None), None)
    if shape is None:
        return []
    unknown = np.int16(UNKNOWN_EXPERT)
    return [np.full((b - a, *shape), unknown) if values is None else values[a:b] for values, a, b in parts]


def keep_routes(batch: Pack, routes: np.ndarray) -> None:
    """Put the experts that a pack's tokens went to, int16 [S, layers, k], on its rows and their contexts."""
    contexts: dict[tuple[int, int], np.ndarray] = {}
    for row, path in batch.paths:
        computed = np.concatenate([routes[start : start + count] for start, count in path])
        context, part = np.split(computed, [len(row.context_ids)])
        row.put("routed_experts", np.pad(part, ((0, 1), (0, 0), (0, 0)), constant_values=UNKNOWN_EXPERT))
        # The same array for rows that share their context, without the rest.
        row.context_columns["routed_experts"] = contexts.setdefault((id(row.context_ids), path[0][0]), context.copy())


def keep_sampling_mask(batch: Pack, sets: Sequence[bytes]) -> None:
    """Put the sets of a pack's targets on its rows."""
    at = 0
    for row, _ in batch.paths:
        row.put("sampling_mask", np.array(sets[at : at + row.length], object))
        at += row.length
