"""Runs the Hugging Face model for the sampler: ids and positions in, float32 logits of the wanted rows out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from verl.engine.rollout.native.architecture import AttentionCalls, takes_logits_to_keep
from verl.engine.rollout.native.decode_plan import DecodePlan
from verl.engine.rollout.native.graphs import DecodeGraphs, warn_of, why_not
from verl.engine.rollout.native.linear import FastLinears
from verl.engine.rollout.native.prefill_plan import PrefillPlan
from verl.engine.rollout.native.request import Request
from verl.engine.rollout.native.scheduler import Prefill, Scheduler
from verl.models import attention
from verl.models.inputs import model_inputs

if TYPE_CHECKING:
    from verl.platform.cuda import GraphRecorder


class Runner:
    """The model, its fast linear layers, and the two ways to call it."""

    def __init__(self, model: torch.nn.Module, scheduler: Scheduler, dtype: torch.dtype):
        self.model = model
        self._chooses = takes_logits_to_keep(model)
        self.device = next(model.parameters()).device
        self.linears = FastLinears(model, dtype)
        self._dtype = dtype
        self._responses = scheduler.responses
        self._pool = scheduler.responses.pool
        self._calls = AttentionCalls()
        self._decode = DecodePlan(scheduler.prompts, scheduler.responses, self._calls)
        self._graphs: DecodeGraphs | None = None
        self._forbidden: torch.Tensor | None = None

    def capture_with(self, capture: GraphRecorder) -> None:
        """Decode from captured graphs from now on, if the model is not known to be unfit for them."""
        if reason := why_not(self.model):
            warn_of(reason)
            return
        self._graphs = DecodeGraphs(lambda i, p: self._forward(i, p, self._decode, 0), self._decode, capture)

    def release(self) -> None:
        """Hold nothing but the model: the cache's memory goes, and so do graphs that read it and copies of weights."""
        if self._graphs is not None:
            self._graphs.clear()
        self._decode.forget()
        self.linears.release()

    def forbid(self, token_ids: Sequence[int]) -> None:
        """Tokens that are never sampled."""
        self._forbidden = torch.tensor(sorted(set(token_ids)), device=self.device) if token_ids else None

    @contextmanager
    def ready(self) -> Iterator[None]:
        """The model as the sampler wants it (evaluation mode, our attention, fast products), put back at the end."""
        lower, keep = self._dtype != torch.float32, self._graphs is None
        cast = torch.autocast(self.device.type, dtype=self._dtype, enabled=lower, cache_enabled=keep)
        with torch.no_grad(), attention.sampling_mode(self.model), self.linears.active(), cast:
            yield

    def prefill(self, work: Prefill) -> torch.Tensor:
        """Logits for `work.sampled`, float32 [len(sampled), V]."""
        ids = np.concatenate([np.array(span.ids, np.int64) for span in work.spans])
        positions = np.concatenate([span.positions for span in work.spans])
        rows = np.array([row for _, row in work.sampled], np.int64)
        # several responses may start from one row, and one from an earlier row than the response before it (its prompt's
        # last): the head runs once for each row, in their order
        wanted, back = np.unique(rows, return_inverse=True)
        plan = PrefillPlan(self._pool, work.spans, self._calls)
        keep = self._tensor(wanted if len(wanted) else np.zeros(1, np.int64))
        logits = self._forward(self._tensor(ids), self._tensor(positions), plan, keep)
        in_order = np.array_equal(wanted, rows)
        return logits[: len(rows)] if in_order else logits.index_select(0, self._tensor(back))

    def decode(self, requests: Sequence[Request]) -> torch.Tensor:
        """Logits after the newest token of each request (ascending slots), float32 [N, V]."""
        slots = np.array([r.slot for r in requests], np.int64)
        filled = slots if self._graphs is None else self._filled(int(slots[-1]))
        at = np.searchsorted(filled, slots)
        columns = np.zeros((4, len(filled)), np.int64)
        rows = [(r.tokens[-1], len(r.tokens), r.group.slot, len(r.prompt)) for r in requests if r.group]
        columns[:, at] = np.array(rows).T
        ids, lengths, prompt_slots, prompt_lengths = columns
        positions = np.maximum(prompt_lengths + lengths - 1, 0)
        if self._graphs is None:
            self._decode.prepare(slots, lengths, prompt_slots, prompt_lengths)
            return self._forward(self._tensor(ids), self._tensor(positions), self._decode, 0)
        self._decode.prepare(filled, lengths, prompt_slots, prompt_lengths, rounded=True)
        logits = self._graphs.run(self._tensor(ids), self._tensor(positions))
        return logits.index_select(0, self._tensor(at))

    def _filled(self, last: int) -> np.ndarray:
        """The slots that captured graphs have rows for, int64: all of each block_row up to that of slot `last`. A block_row whose
        responses are all finished has no memory that a row of it could write to."""
        rows = self._pool.layout.rows
        block_rows = np.flatnonzero([bool(blocks) for blocks in self._responses.blocks[: last // rows + 1]])
        return (block_rows[:, None] * rows + np.arange(rows)).reshape(-1)

    def _forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        plan: attention.AttentionPlan,
        keep: torch.Tensor | int,
    ) -> torch.Tensor:
        choice = {"logits_to_keep": keep} if self._chooses else {}
        self._calls.start()
        with attention.use(plan):
            out = self.model(**model_inputs(ids, positions), **choice)
        self._calls.finish()
        rows = out.logits[0]
        if not self._chooses and isinstance(keep, torch.Tensor):
            rows = rows.index_select(0, keep)
        logits = rows.float()
        if self._forbidden is not None:
            logits.index_fill_(1, self._forbidden, -torch.inf)
        return logits

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
