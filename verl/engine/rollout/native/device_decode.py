"""Decode steps on a device that Triton compiles for: one upload, one graph, and results that nobody waits for.

    host      fill step n+1 ─→ one int32 matrix     settle step n ←─ tokens, log-probs (pinned)
                                    │                     ↑
    device    … step n ──────→ step n+1: ids from step n's tokens, forward, draw ─→ …

The keys and values of a step are written and read by kernels over block tables (`paged_kernels`), so neither the shapes
nor the addresses of a step depend on where the cache holds a response.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from verl.engine.rollout.native import step as step_rows
from verl.engine.rollout.native.architecture import Heads
from verl.engine.rollout.native.cache import KVBlockPool, KVCacheLayout
from verl.engine.rollout.native.graphs import DecodeGraphs
from verl.engine.rollout.native.scheduler import Request, Scheduler
from verl.models.attention import AttentionOptions
from verl.models.sampling_mask import decode_row
from verl.platform import platform_of
from verl.platform.operators import define, ops

define(
    "verl.engine.rollout.native.paged_kernels",
    "inputs(Tensor step, Tensor tokens, Tensor(a!) seen) -> (Tensor, Tensor)",
    "store(Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, Tensor step) -> ()",
    "partial(Tensor query, Tensor keys, Tensor values, Tensor step, Tensor(a!) out, Tensor(b!) lse, bool prompts, "
    "float scale, float softcap, int window) -> ()",
    "merge(Tensor parts, Tensor lse, Tensor step, Tensor? sinks, ScalarType dtype) -> Tensor",
)
define(
    "verl.engine.rollout.native.sampling_kernels",
    "penalise(Tensor logits, Tensor seen, Tensor step) -> Tensor",
    "threshold(Tensor logits, Tensor top_p, Tensor step) -> Tensor",
    "encode(Tensor logits, Tensor lowest, Tensor step, Tensor(a!) sets) -> ()",
    "chunk_sums(Tensor logits, Tensor lowest, Tensor step) -> (Tensor, Tensor, Tensor)",
    "draw(Tensor logits, Tensor uniform, Tensor lowest, Tensor step, Tensor largest, Tensor sums, Tensor best, "
    "Tensor(a!) tokens) -> ()",
)
_PROGRAMS = 256  # of one launch: sequences are cut until there are so many, at most into _MOST_SPLITS
_MOST_SPLITS = 16


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens that are being drawn, one for each of `requests`; `result` waits for them, their log-probs and the sets
    that they are drawn from (`verl.models.sampling_mask`), [] where none is recorded; `record` keeps the routes of the
    pass.
    known: drawn by torch's operators, so that a next step finds nothing of them on the device."""

    requests: Sequence[Request]
    result: Callable[[], tuple[list[int], list[float], list[bytes]]]
    record: Callable[[], None] = lambda: None
    known: bool = False


class StepKind(NamedTuple):
    """What a step has to do that others leave out: a graph for each."""

    penalised: bool = False
    recorded: bool = False

    @classmethod
    def of(cls, requests: Sequence[Request]) -> StepKind:
        """The kind of a step over these."""
        penalised = any(r.sampling.repetition_penalty != 1.0 for r in requests)
        return cls(penalised, recorded=any(map(_records, requests)))


class PagedPlan:
    """Attention of a decode step by kernels over block tables. `step`: the matrix on the device."""

    step: Tensor

    def __init__(self, pool: KVBlockPool):
        self._pool = pool

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """See `AttentionPlan`."""
        layer = self._pool.calls.number(module)
        keys, values = self._pool.layer(layer, key.shape[1], key.shape[-1], value.shape[-1])
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        return paged_attention(query, key, value, keys, values, self.step, options, self._pool.compute)


def paged_attention(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, step: Tensor, options: AttentionOptions,
    compute: torch.dtype,
) -> Tensor:  # fmt: skip
    """Store the new keys and values of a step and attend: query [1, Hq, rows, D] → [1, rows, Hq, Dv] in `compute`."""
    rows, heads = step.shape[1], keys.shape[2]
    splits = 1
    while rows * heads * splits < _PROGRAMS and splits < _MOST_SPLITS:
        splits *= 2
    ops.store(key, value, keys, values, step)
    shape = rows, query.shape[1], splits, 2
    lse = torch.empty(shape, dtype=torch.float32, device=step.device)
    parts = torch.empty(*shape, values.shape[-1], dtype=torch.float32, device=step.device)
    numbers = options.scaling, options.softcap or 0.0, options.sliding_window or 0
    for prompts in (True, False):
        ops.partial(query, keys, values, step, parts, lse, prompts, *numbers)
    return ops.merge(parts, lse, step, options.sinks, compute)


class DeviceDecoder:
    """forward: ids and positions int64 [rows], the plan → logits float32 [rows, V]. capture: None for no graphs."""

    def __init__(
        self,
        forward: Callable[[Tensor, Tensor, PagedPlan], Tensor],
        scheduler: Scheduler,
        max_model_len: int,
        capture: Callable[..., Callable[[], None]] | None,
    ):
        pool = scheduler.responses.pool
        self._forward, self._tables = forward, (scheduler.prompts, scheduler.responses)
        self._plan = PagedPlan(pool)
        self._platform = platform_of(pool.device)
        self._most_rows = step_rows.most_rows(max_model_len, pool.layout.cols)
        batch = step_rows.bucket(scheduler.most_running)
        self._step = torch.zeros(self._most_rows * batch, dtype=torch.int32, device=pool.device)
        # the tokens of a step and their log-probs; `_before` those of the step before, which a step reads
        self._tokens, self._before = torch.zeros(2, 2 * batch, dtype=torch.int32, device=pool.device)
        #: The tokens whose keys the blocks hold, [blocks, cols]: what repetition penalties look at.
        self.seen = torch.zeros(pool.layout.blocks, pool.layout.cols, dtype=torch.int32, device=pool.device)
        #: The sets that tokens are drawn from, [batch, ..], made when one is recorded.
        self._sets: Tensor | None = None
        # used in turn: a step is settled when the next one has been launched
        pinned = self._platform.pinned
        self._hosts = [[pinned(len(self._step)), pinned(len(self._tokens)), pinned(0)] for _ in range(2)]
        self.graphs = DecodeGraphs(self._run, capture) if capture is not None else None

    def decode(self, requests: Sequence[Request], drawing: dict[Request, int]) -> Drawn:
        """Launch a step that feeds each request's newest token and draws the next one. drawing: rows of the step
        before, which draws tokens that are not known here yet."""
        rows, kind = step_rows.bucket(len(requests)), StepKind.of(requests)
        if self.graphs is not None:
            rows = self.graphs.size_for(rows, kind)
        self._upload(requests, rows, kind, drawing)
        (self._run if self.graphs is None else self.graphs.run)(rows, kind)
        return self._fetch(requests, rows, kind)

    def logits(self, requests: Sequence[Request]) -> Tensor:
        """The logits [len(requests), V] of a step that feeds each request's newest token; all of them are known."""
        rows = len(requests)
        self._upload(requests, rows, StepKind.of(requests), {})
        return self._pass(rows)

    def draw(self, logits: Tensor, requests: Sequence[Request]) -> Drawn:
        """Launch a draw from logits [len(requests), V] that some other pass has made."""
        rows, kind = len(requests), StepKind.of(requests)
        self._upload(requests, rows, kind, None)
        self._draw(logits, rows, kind)
        return self._fetch(requests, rows, kind)

    def _upload(
        self, requests: Sequence[Request], rows: int, kind: StepKind, drawing: dict[Request, int] | None
    ) -> None:  # fmt: skip
        """Send the step's matrix, without its places where drawing is None, unless tokens are penalised, which needs
        them."""
        self._hosts.reverse()
        flat: np.ndarray = self._hosts[0][0].numpy()
        matrix = flat[: self._most_rows * rows].reshape(-1, rows)
        step_rows.fill_draws(matrix, requests)
        used = step_rows.TOKEN
        if kind.penalised or drawing is not None:
            used = step_rows.fill_places(matrix, requests, drawing or {}, self._tables)
        self._step[: used * rows].copy_(self._hosts[0][0][: used * rows], non_blocking=True)

    def _run(self, rows: int, kind: StepKind) -> None:
        self._draw(self._pass(rows), rows, kind)

    def _pass(self, rows: int) -> Tensor:
        self._plan.step = step = self._step[: self._most_rows * rows].view(-1, rows)
        ids, positions = ops.inputs(step, self._before, self.seen)
        return self._forward(ids, positions, self._plan)

    def _draw(self, logits: Tensor, rows: int, kind: StepKind) -> None:
        step = self._step[: self._most_rows * rows].view(-1, rows)
        uniform, top_p = self._step[: 4 * rows].view(torch.float64).view(2, rows)
        if kind.penalised:
            logits = ops.penalise(logits, self.seen, step)
        lowest = ops.threshold(logits, top_p, step)
        if kind.recorded:
            ops.encode(logits, lowest, step, self._room_for_sets(logits.shape[1])[:rows])
        sums = ops.chunk_sums(logits, lowest, step)
        ops.draw(logits, uniform, lowest, step, *sums, self._tokens[: 2 * rows].view(2, rows))

    def _room_for_sets(self, vocabulary: int) -> Tensor:
        if self._sets is None:
            batch, width = len(self._tokens) // 2, 1 + -(-vocabulary // 32)
            self._sets, self._vocabulary = self._tokens.new_zeros(batch, width), vocabulary
            for host in self._hosts:
                host[2] = self._platform.pinned(batch * width)
        return self._sets

    def _fetch(self, requests: Sequence[Request], rows: int, kind: StepKind) -> Drawn:
        _, host, host_sets = self._hosts[0]
        host = host[: 2 * rows]
        host.copy_(self._tokens[: 2 * rows], non_blocking=True)
        if kind.recorded and self._sets is not None:
            host_sets = host_sets.view(len(self._sets), -1)[: len(requests)]
            host_sets.copy_(self._sets[: len(requests)], non_blocking=True)
        self._before.copy_(self._tokens)
        wait = self._platform.marker()

        def result() -> tuple[list[int], list[float], list[bytes]]:
            wait()
            tokens, bits = host.numpy().reshape(2, rows)[:, : len(requests)]
            sets = []
            if kind.recorded:
                pairs = zip(requests, host_sets.numpy(), strict=True)
                sets = [decode_row(row, self._vocabulary) if _records(request) else b"" for request, row in pairs]
            return tokens.tolist(), bits.view(np.float32).tolist(), sets

        return Drawn(requests, result)


def _records(request: Request) -> bool:
    """Whether the sets that its tokens are drawn from are recorded."""
    return request.sampling.record_mask and request.sampling.truncated


def compiles(device: torch.device, dtype: torch.dtype, heads: Iterable[Heads]) -> str:
    """Try the kernels on one response for each kind of attention call: why they cannot be used, "" if they give what
    torch gives."""
    platform = platform_of(device)
    if not platform.has_triton():
        return f"Triton does not compile for {platform.name} devices here"
    try:
        wrong = [shape for shape in heads if not _agrees(device, dtype, *shape)]
    except Exception as error:  # a compiler of its own, which fails in its own ways
        return f"its kernels do not compile: {type(error).__name__}: {error}"
    return f"its kernels give other results than torch for heads {wrong[0]}" if wrong else ""


@torch.no_grad()
def _agrees(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, width: int, value_width: int) -> bool:
    """A prompt of 70 tokens in two blocks and a response of 5 in a third."""
    layout, kinds = KVCacheLayout(1, 64, 3), platform_of(device).key_dtype(dtype)
    matrix = np.zeros((step_rows.most_rows(128, layout.cols), 1), np.int32)
    matrix[[step_rows.LENGTH, step_rows.PROMPT_LENGTH, step_rows.COUNT], 0] = 5, 70, 1
    matrix[step_rows.TABLES :, 0] = 2, 0, 2, 1

    def made(number: int, *shape: int) -> Tensor:
        values = torch.arange(math.prod(shape), dtype=torch.float64).add(number).mul(number).sin()
        return values.view(shape).to(device, dtype)

    keys, values = (made(n, 3, 1, kv_heads, 64, w) for n, w in ((2, width), (3, value_width)))
    keys = keys.to(kinds)
    query, key, value = (
        made(n, 1, h, 1, w) for n, h, w in ((5, heads, width), (6, kv_heads, width), (7, kv_heads, value_width))
    )
    scale = width**-0.5
    step = torch.from_numpy(matrix).to(device)
    computed = paged_attention(query, key, value, keys, values, step, AttentionOptions(scale), dtype)

    def seen(stored: Tensor) -> Tensor:
        prompt, response = stored[:2, 0].transpose(0, 1).flatten(1, 2)[:, :70], stored[2, 0, :, :5]
        return torch.cat((prompt, response), 1).float().repeat_interleave(heads // kv_heads, 0)

    weights = (query[0].float() @ seen(keys).transpose(1, 2) * scale).softmax(-1)
    expected = (weights @ seen(values)).transpose(0, 1)[None]
    return torch.allclose(computed.float(), expected, atol=1e-4 if dtype == torch.float32 else 2e-2)
