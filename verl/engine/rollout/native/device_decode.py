"""Decode steps on a device that Triton compiles for: one upload, one graph, and results that nobody waits for.

    host      fill step n+1 ─→ one int32 matrix     settle step n ←─ tokens, log-probs (pinned)
                                    │                     ↑
    device    … step n ──────→ step n+1: ids from step n's tokens, forward, draw ─→ …

The keys and values of a step are written and read by kernels over block tables (`paged_kernels`), so neither the shapes
nor the addresses of a step depend on where the cache holds a response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from verl.engine.rollout.native import ops
from verl.engine.rollout.native import step as step_rows
from verl.engine.rollout.native.cache import KVBlockPool, KVCacheLayout
from verl.engine.rollout.native.graphs import DecodeGraphs
from verl.engine.rollout.native.scheduler import Request, Scheduler
from verl.models.attention import AttentionOptions
from verl.platform import platform_of

_PROGRAMS = 256  # of one launch: sequences are cut until there are so many, at most into _MOST_SPLITS
_MOST_SPLITS = 16


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens that are being drawn, one for each of `requests`; `result` waits for them, their log-probs and the sets
    that they are drawn from (`verl.models.sampling_mask`), [] where none is recorded."""

    requests: Sequence[Request]
    result: Callable[[], tuple[list[int], list[float], list[bytes]]]


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
    kernels, rows, heads = torch.ops.verl_sampler, step.shape[1], keys.shape[2]
    splits = 1
    while rows * heads * splits < _PROGRAMS and splits < _MOST_SPLITS:
        splits *= 2
    kernels.store(key, value, keys, values, step)
    shape = rows, query.shape[1], splits, 2
    lse = torch.empty(shape, dtype=torch.float32, device=step.device)
    parts = torch.empty(*shape, values.shape[-1], dtype=torch.float32, device=step.device)
    numbers = options.scaling, options.softcap or 0.0, options.sliding_window or 0
    for prompts in (True, False):
        kernels.partial(query, keys, values, step, parts, lse, prompts, *numbers)
    return kernels.merge(parts, lse, step, options.sinks, compute)


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
        # used in turn: a step is settled when the next one has been launched
        pinned = self._platform.pinned
        self._hosts = [(pinned(len(self._step)), pinned(len(self._tokens))) for _ in range(2)]
        self.graphs = DecodeGraphs(self._run, capture) if capture is not None else None

    def decode(self, requests: Sequence[Request], drawing: dict[Request, int]) -> Drawn:
        """Launch a step that feeds each request's newest token and draws the next one. drawing: rows of the step
        before, which draws tokens that are not known here yet."""
        rows = step_rows.bucket(len(requests))
        self._upload(requests, rows, drawing)
        (self._run if self.graphs is None else self.graphs.run)(rows)
        return self._fetch(requests, rows)

    def logits(self, requests: Sequence[Request]) -> Tensor:
        """The logits of the step alone; every newest token is known."""
        self._upload(requests, len(requests), {})
        return self._logits(len(requests))

    def draw(self, logits: Tensor, requests: Sequence[Request]) -> Drawn:
        """Launch a draw from logits [len(requests), V] that some other pass has made."""
        rows = len(requests)
        self._hosts.reverse()
        matrix = self._matrix(rows)
        step_rows.fill_draws(matrix, requests)
        self._send(step_rows.TOKEN * rows)
        self._draw(logits, rows)
        return self._fetch(requests, rows)

    def _matrix(self, rows: int) -> np.ndarray:
        flat: np.ndarray = self._hosts[0][0].numpy()
        return flat[: self._most_rows * rows].reshape(-1, rows)

    def _upload(self, requests: Sequence[Request], rows: int, drawing: dict[Request, int]) -> None:
        self._hosts.reverse()
        matrix = self._matrix(rows)
        step_rows.fill_draws(matrix, requests)
        self._send(step_rows.fill_places(matrix, requests, drawing, self._tables) * rows)

    def _send(self, count: int) -> None:
        self._step[:count].copy_(self._hosts[0][0][:count], non_blocking=True)

    def _run(self, rows: int) -> None:
        self._draw(self._logits(rows), rows)

    def _logits(self, rows: int) -> Tensor:
        self._plan.step = step = self._step[: self._most_rows * rows].view(-1, rows)
        ids, positions = torch.ops.verl_sampler.inputs(step, self._before)
        return self._forward(ids, positions, self._plan)

    def _draw(self, logits: Tensor, rows: int) -> None:
        kernels, step = torch.ops.verl_sampler, self._step[: self._most_rows * rows].view(-1, rows)
        uniform, top_p = self._step[: 4 * rows].view(torch.float64).view(2, rows)
        lowest = kernels.threshold(logits, top_p, step)
        sums = kernels.chunk_sums(logits, lowest, step)
        kernels.draw(logits, uniform, lowest, step, *sums, self._tokens[: 2 * rows].view(2, rows))

    def _fetch(self, requests: Sequence[Request], rows: int) -> Drawn:
        host = self._hosts[0][1][: 2 * rows]
        host.copy_(self._tokens[: 2 * rows], non_blocking=True)
        self._before.copy_(self._tokens)
        wait = self._platform.marker()

        def result() -> tuple[list[int], list[float], list[bytes]]:
            wait()
            tokens, bits = host.numpy().reshape(2, rows)[:, : len(requests)]
            return tokens.tolist(), bits.view(np.float32).tolist(), []

        return Drawn(requests, result)


def compiles(device: torch.device, dtype: torch.dtype) -> str:
    """Load the kernels and try them on one response: why they cannot be used, "" if they give what torch gives."""
    platform = platform_of(device)
    if not platform.has_triton():
        return f"Triton does not compile for {platform.name} devices here"
    try:
        ops.load(device.type)
        return "" if _agrees(device, dtype) else "its kernels give other results than torch"
    except Exception as error:  # a compiler of its own, which fails in its own ways
        return f"its kernels do not compile: {type(error).__name__}: {error}"


@torch.no_grad()
def _agrees(device: torch.device, dtype: torch.dtype) -> bool:
    """A prompt of 20 tokens in two blocks and a response of 5 in a third."""
    layout = KVCacheLayout(1, 16, 3)
    numbers = torch.linspace(-3, 3, 4 * 2 * 16 * 64).view(4, 1, 2, 16, 64)
    keys, values = numbers.sin().to(device, dtype), (numbers * 3).cos().to(device, dtype)
    matrix = np.zeros((step_rows.most_rows(32, layout.cols), 1), np.int32)
    matrix[[step_rows.LENGTH, step_rows.PROMPT_LENGTH, step_rows.COUNT], 0] = 5, 20, 1
    matrix[step_rows.TABLES :, 0] = 2, 0, 2, 1
    query, key, value = (
        numbers.view(-1, 64)[n : n + h].view(1, h, 1, 64).to(device, dtype) for n, h in ((9, 4), (3, 2), (5, 2))
    )
    step = torch.from_numpy(matrix).to(device)
    computed = paged_attention(query, key, value, keys, values, step, AttentionOptions(0.2), dtype)

    def seen(stored: Tensor) -> Tensor:
        prompt, response = stored[:2, 0].transpose(0, 1).flatten(1, 2)[:, :20], stored[2, 0, :, :5]
        return torch.cat((prompt, response), 1).float().repeat_interleave(2, 0)

    weights = (query[0].float() @ seen(keys).transpose(1, 2) * 0.2).softmax(-1)
    expected = (weights @ seen(values)).transpose(0, 1)[None]
    return torch.allclose(computed.float(), expected, atol=1e-4 if dtype == torch.float32 else 2e-2)
