"""From ragged rows to packs: what one forward pass computes, without padding and with the prompt once per group.

    group of three responses     [prompt 0…P−1][response 1: P…][response 2: P…][response 3: P…]   positions restart

The log-prob of a response token comes from the hidden state of the token before it, so the first token of every
response reads the prompt's last position, and a response's own last token is never computed at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby
from typing import Any

import numpy as np
import torch

from verl.models.attention import TokenSpan
from verl.models.inputs import ImageFeatures, VisionInputs, model_inputs, text_axes
from verl.models.packed_attention import PackedPlan
from verl.models.sampling_mask import SamplingMask
from verl.trajectory import UNKNOWN_EXPERT, Media, Segment


@dataclass(frozen=True, slots=True)
class MicroBatching:
    """How rows are cut into micro-batches: at most `tokens` tokens, or exactly `rows` responses if that is set.

    share_prompt: None computes the prompt once for the responses of a group that meet in a pack, True says so,
    False repeats it for each. replay: packs say to which experts their tokens went. one_by_one: one response per pack,
    for layers that carry a state along the row. limit: tokens that a pack may have where a prompt alone is larger than
    `tokens`.
    """

    tokens: int = 16384
    rows: int | None = None
    share_prompt: bool | None = None
    one_by_one: bool = False
    replay: bool = False
    limit: int = 0

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
    runs                   the rows that have a token, those together that share their context's tokens
    axes, media            where a row has images: int64 [3, S] that the model rotates by, and its arguments for images
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
    runs: Sequence[Sequence[Segment]] = ()
    axes: torch.Tensor | None = None
    media: dict[str, torch.Tensor] = field(default_factory=dict)
    images: int = 0
    image_span: tuple[int, int] | None = None
    blank: int = 0

    def inputs(self, base: Any) -> dict[str, Any]:
        """Arguments of the forward of `base`, the model without its head. For a share the tower runs here, over all
        images."""
        media: dict[str, Any] = self.media
        if self.image_span is not None:
            media = ImageFeatures.argument([ImageFeatures.of(base, media).part(*self.image_span)])
        return model_inputs(self.input_ids, self.positions if self.axes is None else self.axes, media)

    @property
    def size(self) -> int:
        return int(self.input_ids.shape[0])

    def plan(self, heads: int) -> PackedPlan:
        """The attention plan of this pack, for a model with that many query heads."""
        return PackedPlan(self.segments, self.positions, heads)


def _cost(row: Segment) -> int:
    """Tokens a response adds to a pack that already holds its prompt."""
    return max(0, row.length - 1)


def _context_cost(row: Segment) -> int:
    return len(row.context_ids) if row.length else 0


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
    used = 0
    inside: Segment | None = None
    for i, row in enumerate(rows):
        opens = not how.shared or inside is None or not _same_context(inside, row)
        need = _cost(row) + (_context_cost(row) if opens else 0)
        new_group = i == 0 or rows[i - 1].uid != row.uid
        whole = new_group and used * 2 >= how.tokens and used + costs[i] > how.tokens >= costs[i]
        # Apart, the responses to a prompt that is larger than a pack would each compute it again.
        room = max(how.tokens, how.limit) if not opens and _context_cost(row) > how.tokens else how.tokens
        if not out or whole or used + need > room:
            out.append([])
            used, need = 0, _cost(row) + _context_cost(row)
        out[-1].append(row)
        used += need
        inside = row if row.length else inside
    return out


def _group_costs(rows: Sequence[Segment], how: MicroBatching) -> list[int]:
    """For each row the tokens of its whole run of neighbours with the same uid."""
    costs: list[int] = []
    for _, neighbours in groupby(rows, key=lambda row: row.uid):
        run = list(neighbours)
        contexts = _runs(run, how.shared)
        total = sum(_cost(r) for r in run) + sum(max(_context_cost(r) for r in same) for same in contexts)
        costs += [total] * len(run)
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
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    axes: list[np.ndarray] = []
    media: list[Media] = []
    segments: list[TokenSpan] = []
    source: list[np.ndarray] = []
    at = 0
    seeing = vision is not None and any(row.media is not None for row in present)

    def put(row: Segment, tokens: np.ndarray, first: int, prefix: tuple[int, int] = (0, 0)) -> int:
        nonlocal at
        start, at = at, at + len(tokens)
        ids.append(tokens)
        positions.append(np.arange(first, first + len(tokens)))
        segments.append(TokenSpan(start, at, prefix))
        if seeing:
            axes.append(_axes(row, first, len(tokens), vision))
            media.extend([row.media] if row.media is not None and not first else [])
        return start

    runs = _runs(present, how.shared)
    for run in runs:
        prompt = run[0].context_ids
        length = len(prompt)
        if not length:
            raise ValueError(f"prompt {run[0].uid} has no token; a response needs one before it")
        if len(run) == 1:
            start = put(run[0], np.concatenate((prompt, run[0].response_ids[:-1])), 0)
            source.append(np.arange(start + length - 1, start + length - 1 + run[0].length))
            continue
        first = put(run[0], prompt, 0)
        for row in run:
            start = put(row, row.response_ids[:-1], length, (first, first + length))
            places = np.arange(start - 1, start - 1 + row.length)
            places[0] = first + length - 1
            source.append(places)

    tensor = partial(_joined, device=device)
    laid = [row for run in runs for row in run]
    targets = tensor([row.response_ids for row in laid])
    packed = Pack(rows, tensor(ids), tensor(positions), segments, tensor(source), targets, runs=runs)
    packed.blank = int(blank)
    candidates = [getattr(row, CANDIDATES) for row in laid]
    if candidates and all(value is not None for value in candidates):
        packed.candidates = tensor(candidates)
    sets = [row.sampling_mask for row in laid]
    if any(recorded is not None for recorded in sets):
        whole = ([b""] * row.length if own is None else own for row, own in zip(laid, sets, strict=True))
        packed.sampling_mask = SamplingMask.of(list(chain.from_iterable(whole)), device)
    if how.replay and (routes := _routes(runs)):
        packed.routes = tensor(routes)
    if seeing:
        packed.axes = torch.from_numpy(np.concatenate(axes, axis=1)).to(device)
        packed.media = VisionInputs.tensors(media, device)
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


def _routes(runs: Sequence[Sequence[Segment]]) -> list[np.ndarray]:
    """The recorded experts of a pack's tokens in order, UNKNOWN_EXPERT where a row has none; empty if none has any."""
    parts = []
    for run in runs:
        parts.append((_context_routes(run[0]), len(run[0].context_ids)))
        parts += [(row.routed_experts, row.length - 1) for row in run]
    shape = next((values.shape[1:] for values, _ in parts if values is not None), None)
    if shape is None:
        return []
    unknown = np.int16(UNKNOWN_EXPERT)
    return [np.full((n, *shape), unknown) if values is None else values[:n] for values, n in parts]


def keep_routes(batch: Pack, routes: np.ndarray) -> None:
    """Put the experts that a pack's tokens went to, int16 [S, layers, k], on its rows and their contexts."""
    at = 0
    for run in batch.runs:
        context = routes[at : at + len(run[0].context_ids)]
        at += len(context)
        for row in run:
            part, at = routes[at : at + row.length - 1], at + row.length - 1
            row.put("routed_experts", np.pad(part, ((0, 1), (0, 0), (0, 0)), constant_values=UNKNOWN_EXPERT))
            row.context_columns["routed_experts"] = context


def keep_sampling_mask(batch: Pack, sets: Sequence[bytes]) -> None:
    """Put the sets of a pack's targets on its rows."""
    at = 0
    for row in (row for run in batch.runs for row in run):
        row.put("sampling_mask", np.array(sets[at : at + row.length], object))
        at += row.length


def _runs(rows: Sequence[Segment], shared: bool) -> list[list[Segment]]:
    """Neighbours with the same context, or every row alone."""
    out: list[list[Segment]] = []
    for row in rows:
        if shared and out and _same_context(out[-1][0], row):
            out[-1].append(row)
        else:
            out.append([row])
    return out


def _same_context(a: Segment, b: Segment) -> bool:
    same = a.context_ids is b.context_ids or np.array_equal(a.context_ids, b.context_ids)
    return a.uid == b.uid and a.media is b.media and same and _context_routes(a) is _context_routes(b)


def _context_routes(row: Segment) -> np.ndarray | None:
    return None if row.routed_experts is None else row.context_columns["routed_experts"]
