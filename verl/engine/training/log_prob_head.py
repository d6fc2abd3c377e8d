"""From packed tokens to statistics of the response tokens, inside the forward of one module.

That is what sharding hooks on: while this module's forward runs, the weights that are outside of the layers
(embedding, last normalisation, head) are whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from verl.engine.training.log_prob import Head, TokenTensors, stats_of_logits, token_stats
from verl.models import load as models

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_T = TypeVar("_T")


class LogProbHead(torch.nn.Module):
    """`head` is the model's head as a formula, None to go through the model's own logits.

    Use: `scorer(scorer.stats, ids, …)`.
    """

    def __init__(self, module: PreTrainedModel, head: Head | None = None):
        super().__init__()
        self.module = module
        self.head = head

    def forward(self, work: Callable[..., _T], *args: Any, **options: Any) -> _T:
        """work(*args, **options), run where all weights outside of layers are whole."""
        return work(*args, **options)

    def stats(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        source: torch.Tensor,
        targets: torch.Tensor,
        *,
        temperature: float,
        entropy: bool,
        squares: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """int64 [S], [S], [R], [R] → log-probs, entropy, Σπ² float32 [R], the last two None unless asked for.

        source: index of the token whose hidden state predicts the target. The attention plan must be in force.
        A plain tuple: sharding looks for tensors in it.
        """
        inputs = {"input_ids": input_ids[None], "position_ids": positions[None], "use_cache": False}
        if self.head is None:
            logits = self.module(**inputs).logits[0][source].float() / temperature
            stats = stats_of_logits(logits, targets, entropy, squares)
        else:
            hidden = models.body(self.module)(**inputs).last_hidden_state[0]
            stats = token_stats(
                hidden.index_select(0, source),
                targets,
                current_head(self.module, self.head),
                temperature=temperature,
                entropy=entropy,
                sum_pi_squared=squares,
            )
        return stats.log_probs, stats.entropy, stats.sum_pi_squared


def tensors(
    stats: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
) -> TokenTensors:
    """What `LogProbHead.forward` returns, by name."""
    return TokenTensors(*stats)


def current_head(module: PreTrainedModel, head: Head) -> Head:
    """The formula around the weights that the model's head has right now: sharding exchanges them."""
    layer = module.get_output_embeddings()
    return replace(head, weight=layer.weight, bias=getattr(layer, "bias", None))
