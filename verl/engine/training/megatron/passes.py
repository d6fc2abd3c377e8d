"""Micro-batches through the stages of a model: megatron-core's pipeline schedule, outputs and loss on the last
stage."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cached_property
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config, unwrap_model

from verl.engine.training.base import ROUTES, MicroBatch, MicroLoss
from verl.engine.training.megatron.micro_batches import ModelBatch
from verl.engine.training.megatron.model import MegatronModel
from verl.engine.training.megatron.outputs import vocabulary_outputs
from verl.engine.training.megatron.routes import Routes
from verl.engine.training.process_group import waiting


class Passes:
    """The passes of a model. head, topk: as of the engine. replays: recorded experts are followed."""

    def __init__(self, model: MegatronModel, head: str, *, topk: int, replays: bool):
        self._model, self._head, self._topk, self._replays = model, head, topk, replays
        if replays:  # a model that it does not fit is refused before anything is sampled
            assert self.routes

    @cached_property
    def routes(self) -> Routes:
        """Of the model's routers; built on first use."""
        return Routes(self._model)

    def run(
        self,
        batches: list[ModelBatch],
        outputs: Collection[str],
        temperature: float,
        loss: MicroLoss | None,
        scale: float = 1.0,
    ) -> list[Any]:
        """All micro-batches through all stages; on the last stage what `finish` returned for each, in order."""
        routes = self.routes if self._replays or ROUTES in outputs else None
        if routes is not None:
            routes.begin(batches, trains=loss is not None, replays=ROUTES not in outputs)
        tower = self._model.tower
        if tower is not None:
            tower.begin(trains=loss is not None)
        config = get_model_config(self._model.chunks[0])
        config.finalize_model_grads_func = _sum_gradients
        if loss is not None and self._model.chunks[0].ddp_config.overlap_grad_reduce:
            # Gradients travel while the last micro-batch computes; until then they only add up.
            chunks = self._model.chunks
            several = len(chunks) > 1
            config.no_sync_func = [chunk.no_sync for chunk in chunks] if several else chunks[0].no_sync
            config.grad_sync_func = (
                [chunk.start_grad_sync for chunk in chunks] if several else chunks[0].start_grad_sync
            )

        def forward(batch_iterator: Iterator[ModelBatch], chunk: Any) -> tuple[torch.Tensor, Any]:
            batch = next(batch_iterator)
            if routes is not None:
                routes.batch = batch
            if tower is not None:
                tower.expect(batch)
            hidden = chunk(batch.input_ids, batch.positions, None, packed_seq_params=batch.packed)

            def finish(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
                computed = self._outputs(batch, hidden, unwrap_model(chunk), outputs, temperature)
                if loss is None:
                    return hidden.new_zeros(()), torch.zeros((), dtype=torch.int), computed
                return _loss(batch, hidden, computed, loss, scale)

            return hidden, finish

        iterators = [iter(batches) for _ in self._model.chunks]
        width = max(batch.input_ids.shape[1] for batch in batches)
        with waiting("the passes of a step"):
            return get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=self._model.chunks if len(iterators) > 1 else self._model.chunks[0],
                num_microbatches=len(batches),
                seq_length=width,
                micro_batch_size=batches[0].input_ids.shape[0],
                forward_only=loss is None,
            )

    def _outputs(
        self, batch: ModelBatch, hidden: torch.Tensor, module: Any, outputs: Collection[str], temperature: float
    ) -> dict[str, torch.Tensor]:
        """Outputs of the response tokens, float32 [R] or [R, k]; hidden [B, S, H] of the last layer."""
        outputs = [name for name in outputs if name != ROUTES]
        states = batch.predicting(hidden, parallel_state.get_context_parallel_group())
        if self._head != "lm":
            weight, bias = module.output_layer.weight.float(), module.output_layer.bias
            values = (states.float() * weight).sum(-1)
            return {"values" if self._head == "value" else "scores": values if bias is None else values + bias.float()}
        shared = module.share_embeddings_and_output_weights
        weight = module.shared_embedding_or_output_weight() if shared else module.output_layer.weight
        return vocabulary_outputs(
            states.to(weight.dtype),  # megatron-core turns the last stage's bfloat16 into float32
            weight,
            batch.pack.targets,
            outputs,
            temperature=temperature,
            vocabulary=self._model.vocabulary,
            barred=self._model.barred,
            candidates=batch.pack.candidates,
            topk=self._topk,
            mask=batch.pack.sampling_mask,
        )


def _sum_gradients(chunks: list[DistributedDataParallel], _tokens: Any = None, **options: Any) -> None:
    """Add gradients over ranks; they are divided by nothing, for the loss has its counts already."""
    finalize_model_grads(chunks, None, **options)


def _loss(
    batch: ModelBatch, hidden: torch.Tensor, computed: dict[str, torch.Tensor], loss: MicroLoss, scale: float
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """The scalar to differentiate, no count to divide by, and (value, metrics, whose rows)."""
    tied = hidden.sum() * 0.0 + sum(column.sum() * 0.0 for column in computed.values())
    scalar, metrics = loss(MicroBatch(batch.rows, **computed)) if batch.rows else (tied, {})  # type: ignore[arg-type]
    root = scalar + tied if torch.isfinite(scalar) else tied
    uids = ", ".join(dict.fromkeys(row.uid for row in batch.rows[:4]))
    return root * scale, torch.zeros((), dtype=torch.int), (float(scalar.detach()), metrics, f"prompts {uids}")
