"""From packed tokens to outputs of the response tokens, inside the forward of one module.

That is what sharding hooks on: while this module's forward runs, the weights that are outside of the layers
(embedding, last normalisation, head) are whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from verl.engine.training.base import FURTHER, LOG_PROBS, SAMPLING_MASK
from verl.engine.training.log_prob import DEVICE_BLOCK_SCORES, OUTPUTS, LogitLayer, outputs_of_logits, token_outputs
from verl.engine.training.packing import Pack
from verl.errors import UserError
from verl.models import adapters, attention
from verl.models.attention import TokenSpan
from verl.models.inputs import model_inputs, special_token_ids
from verl.models.mtp import NAME as MTP
from verl.models.packed_attention import PackedPlan
from verl.models.pretrained import NotPacked, value_layer
from verl.models.sampling_mask import SamplingMask, encode_sets, truncate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_T = TypeVar("_T")
# The logit of a token that has no probability; finite, so that the entropy is.
BARRED = -1e9


class OutputHead(torch.nn.Module, ABC):
    """A model, and what makes outputs of its hidden states. Use: `head(head.compute, pack, …)`."""

    #: Names of what `compute` can give.
    outputs: tuple[str, ...] = ()
    #: The model's own head as a formula, None to go through its logits (or not to use it).
    layer: LogitLayer | None = None
    #: How many tokens `topk_log_probs` and `topk_ids` hold.
    topk: int = 0
    #: Whether the loss of the layer that predicts a token further trains that layer alone.
    further_detached: bool = True
    #: top_k, top_p and min_p of the sampler, for the output sampling_mask.
    truncation: tuple[int, float, float] | None = None

    def __init__(self, module: PreTrainedModel):
        super().__init__()
        self.module = module

    def forward(self, work: Callable[..., _T], *args: Any, **options: Any) -> _T:
        """work(*args, **options), run where all weights outside of layers are whole."""
        return work(*args, **options)

    @abstractmethod
    def compute(self, batch: Pack, outputs: Collection[str], temperature: float) -> dict[str, torch.Tensor]:
        """The requested outputs, float32 [R] or [R, k] each, of the pack's response tokens: what the hidden state
        `source` of a token says of its `targets` and `candidates`. The attention plan must be in force."""

    def bar(self, tokens: Iterable[int]) -> None:
        """Give these tokens no probability. Called before `find_layer`."""

    def find_layer(self) -> LogitLayer | None:
        """The `layer` that fits. Called once, on every rank, when the weights have their values."""
        return None

    def output_layer(self) -> torch.nn.Module | None:
        """The linear layer from hidden states to outputs; None where they are more than a linear function of them."""
        return None

    @torch.no_grad()
    def scales(self) -> dict[str, float]:
        """Weights that the output grows with, by name, and what to add to each: of the last normalisation, and the
        output layer's bias. {} where the output is not linear in them, as four tokens tell."""
        names, layer = {id(p): name for name, p in self.module.named_parameters()}, self.output_layer()
        if layer is None or adapters.is_adapted(layer):
            return {}
        seen: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
        hooks = [
            part.register_forward_hook(lambda part, x, y: seen.append((part, x[0], y)))
            for part in self.module.base_model.modules()
            if getattr(getattr(part, "weight", None), "ndim", 0) == 1
        ]
        try:
            with _four_tokens(self.module.get_input_embeddings().weight) as inputs:
                hidden = self.module.base_model(**inputs).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        last, x, y = seen[-1] if seen else (None, hidden, hidden)
        if last is None or not torch.equal(y, hidden) or getattr(last, "bias", None) is not None:
            return {}
        unit = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], eps=1e-6)
        biases = {names[id(layer.bias)]: 0.0} if getattr(layer, "bias", None) is not None else {}
        for offset in (0.0, 1.0):
            if torch.allclose(unit * (last.weight.float() + offset), hidden.float(), rtol=0.05, atol=0.05):
                return {names[id(last.weight)]: offset, **biases}
        return {}


class LogProbHead(OutputHead):
    """The language model's own head."""

    outputs = OUTPUTS

    def __init__(self, module: PreTrainedModel):
        super().__init__(module)
        # As in the sampler: the distribution is that over the tokens that can be sampled.
        self._barred = special_token_ids(module.config)

    def bar(self, tokens: Iterable[int]) -> None:
        """See `OutputHead.bar`."""
        self._barred = sorted({*self._barred, *tokens})

    def compute(self, batch: Pack, outputs: Collection[str], temperature: float) -> dict[str, torch.Tensor]:
        """See `OutputHead.compute`; of softmax(logits / temperature)."""
        if FURTHER in outputs and (self.layer is None or batch.media):
            beside = "images" if batch.media else "a model whose head verl does not know as a formula"
            raise UserError(f"model.mtp.enable_train=True with {beside} is not here; set it to False")
        inputs = batch.inputs(self.module.base_model)
        options = {"candidates": batch.candidates, "topk": self.topk, "mask": batch.sampling_mask}
        finds = SAMPLING_MASK in outputs
        if self.layer is None:
            logits = self.module(**inputs).logits[0][batch.source].float() / temperature
            if self._barred:
                logits = logits.index_fill(1, torch.tensor(self._barred, device=logits.device), BARRED)
            if finds:
                options["mask"] = batch.sampling_mask = self._sets(batch.targets, lambda rows: logits[rows].clone())
            return outputs_of_logits(logits, batch.targets, outputs, **options)
        states = self.module.base_model(**inputs).last_hidden_state
        hidden = states[0].index_select(0, batch.source)
        # Sharding exchanges the weights.
        output_layer = self.module.get_output_embeddings()
        layer = replace(self.layer, weight=output_layer.weight, bias=self._bias(output_layer))
        if finds:
            options["mask"] = batch.sampling_mask = self._sets(
                batch.targets, lambda rows: layer.logits(hidden[rows]) / temperature
            )
        computed = token_outputs(hidden, batch.targets, layer, outputs, temperature=temperature, **options)
        if FURTHER in outputs:
            computed[FURTHER] = self._further(batch, states, layer)
        return computed

    def _further(self, batch: Pack, states: torch.Tensor, layer: LogitLayer) -> torch.Tensor:
        """Log-probs of the targets by the layer that predicts a token further: from the state before `source` and the
        token at it. The last token of a sequence in a pack stands beside one of another, and nothing reads what comes
        of it."""
        embedded = self.module.get_input_embeddings()(batch.input_ids.roll(-1))[None]
        if self.further_detached:
            states, embedded = states.detach(), embedded.detach()
            layer = replace(
                layer, weight=layer.weight.detach(), bias=None if layer.bias is None else layer.bias.detach()
            )
        out = getattr(self.module, MTP)(embedded, states, (batch.positions + 1)[None])[0]
        before = out.index_select(0, (batch.source - 1).clamp(min=0))
        log_probs = token_outputs(before, batch.targets, layer, LOG_PROBS, temperature=1.0)["log_probs"]
        return torch.where(batch.positions[batch.source] > 0, log_probs, 0.0)

    def _sets(self, targets: torch.Tensor, logits: Callable[[slice], torch.Tensor]) -> SamplingMask:
        """The sets that `truncation` leaves of each row's logits, its target always among them."""
        assert self.truncation is not None
        sets: list[bytes] = []
        size = max(1, DEVICE_BLOCK_SCORES // self.module.config.get_text_config().vocab_size)
        for start in range(0, len(targets), size):
            z = logits(slice(start, start + size))
            truncate(z, *(np.full(len(z), limit) for limit in self.truncation))
            sets += encode_sets((z > -torch.inf).scatter_(1, targets[start : start + size, None], True))
        return SamplingMask(sets, targets.device)

    def find_layer(self) -> LogitLayer | None:
        """The head as a formula, or None if the model's own logits say otherwise on a probe."""
        layer = self.module.get_output_embeddings()
        if not isinstance(getattr(layer, "weight", None), torch.Tensor) or adapters.is_adapted(layer):
            return None
        config = self.module.config.get_text_config()
        scale = float(getattr(config, "logit_scale", None) or 1.0)
        scale /= float(getattr(config, "logits_scaling", None) or 1.0)
        softcap = getattr(config, "final_logit_softcapping", None)
        bias = getattr(layer, "bias", None)
        logit_layer = LogitLayer(layer.weight, bias, scale, float(softcap) if softcap else None)
        return logit_layer if self._agrees(logit_layer) else None

    def output_layer(self) -> torch.nn.Module | None:
        """See `OutputHead.output_layer`."""
        return None if self.layer is None or self.layer.softcap else self.module.get_output_embeddings()

    def _bias(self, layer: torch.nn.Module) -> torch.Tensor | None:
        """The layer's bias, with what bars special tokens."""
        bias: torch.Tensor | None = getattr(layer, "bias", None)
        if not self._barred:
            return bias
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        barred = torch.zeros(weight.shape[0], device=weight.device)
        barred[self._barred] = BARRED
        return barred if bias is None else bias + barred

    @torch.no_grad()
    def _agrees(self, layer: LogitLayer) -> bool:
        """Compare with the model's logits on four tokens, as closely as the weights' data type allows."""
        expected, hidden = _probe(self.module, layer.weight)
        tolerance = 1e-4 if hidden.dtype == torch.float32 else 3e-2
        return torch.allclose(layer.logits(hidden), expected, rtol=tolerance, atol=tolerance)


def _probe(module: PreTrainedModel, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's own logits of four tokens, float32, and their hidden states. weight: of embedding or head."""
    with _four_tokens(weight) as inputs:
        logits = module(**inputs).logits.float()
        return logits, module.base_model(**inputs).last_hidden_state


@contextmanager
def _four_tokens(weight: torch.Tensor) -> Iterator[dict[str, Any]]:
    """Inputs of a model. weight: of embedding or head."""
    positions, vocabulary = torch.arange(4, device=weight.device), int(weight.shape[0])
    with attention.use(PackedPlan([TokenSpan(0, 4)], positions, 1)):
        yield model_inputs((positions + 1) * 7 % vocabulary, positions)


class ValueHead(OutputHead):
    """A linear layer from hidden state to one number, in float32: the value before the token the state predicts."""

    outputs = ("values",)

    def output_layer(self) -> torch.nn.Module:
        """See `OutputHead.output_layer`."""
        return value_layer(self.module)

    def compute(self, batch: Pack, outputs: Collection[str], temperature: float) -> dict[str, torch.Tensor]:
        """See `OutputHead.compute`; the temperature plays no part."""
        base = self.module.base_model
        hidden = base(**batch.inputs(base)).last_hidden_state[0].index_select(0, batch.source)
        layer: Any = value_layer(self.module)
        weight = layer.weight.float()
        if adapters.is_adapted(layer):
            a, b = (part[adapters.NAME].weight.float() for part in (layer.lora_A, layer.lora_B))
            weight = weight + layer.scaling[adapters.NAME] * (b @ a)
        values = (hidden.float() * weight).sum(-1)
        return {self.outputs[0]: values if layer.bias is None else values + layer.bias.float()}


class ScoreHead(ValueHead):
    """The head of a sequence classifier with one label: the score of the sequence before each response token."""

    outputs = ("scores",)

    @torch.no_grad()
    def find_layer(self) -> LogitLayer | None:
        """None. NotPacked where the model's own score of a probe is none of ours: its head is no linear layer alone."""
        layer, embedding = value_layer(self.module), self.module.get_input_embeddings().weight
        expected, hidden = _probe(self.module, embedding)
        # Which of the tokens counts depends on the padding token.
        if layer is None or not torch.isclose(layer(hidden).float(), expected, rtol=1e-2, atol=1e-2).any():
            raise NotPacked(f"{type(self.module).__name__}: its head is more than a linear layer")
        return None


HEADS: dict[str, type[OutputHead]] = {"lm": LogProbHead, "value": ValueHead, "score": ScoreHead}
