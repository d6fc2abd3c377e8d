"""What the tests add to vLLM's processes where it drafts tokens: a mended kernel, and a record of the drafts'
logits."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch

RECORD = "VERL_TEST_DRAFTS"
"""In the environment: the folder that gets the logits of drafts, once it is there."""


@functools.cache
def mend() -> None:
    """vLLM's stand-in for this kernel on a CPU writes into a copy of `output` where that is not int64."""
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.utils import cpu_triton_utils

    def expand(output: Any, values: Any, ends: Any, replaced: Any, by: Any, *_: Any, **__: Any) -> None:
        repeated = values.repeat_interleave(ends.long().diff(prepend=ends.new_zeros(1).long()))
        output.copy_(repeated.masked_fill(repeated == replaced, by))

    cpu_triton_utils._expand_kernel_impl = expand
    register_kernels({"vllm.v1.sample.rejection_sampler.expand_kernel": expand})


@functools.cache
def record() -> None:
    """Write, for each token that is drafted, the position of the state that it is drafted from, and the logits.

    DeepSeek's and GLM's layers blank the embedding that stands beside the state at position 0, which the formula does
    not say: meanwhile vLLM counts positions from 1. Rotations are relative.
    """
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    begin, draw = SpecDecodeBaseProposer.set_inputs_first_pass, SpecDecodeBaseProposer._sample_draft_tokens
    folder, drawn = Path(os.environ.get(RECORD) or "/nowhere"), {}

    def inputs(self: Any, **given: Any) -> Any:
        tokens, last, metadata = begin(self, **given)
        if folder.is_dir():
            drawn["positions"] = self.positions[last].clone()
            self.positions[:tokens] += 1
        return tokens, last, metadata

    def sample(self: Any, states: torch.Tensor, *rest: Any) -> Any:
        if folder.is_dir():
            drawn["logits"] = self.model.compute_logits(states).clone()
            torch.save(dict(drawn), folder / f"{len(list(folder.iterdir())):04}.pt")
        return draw(self, states, *rest)

    SpecDecodeBaseProposer.set_inputs_first_pass, SpecDecodeBaseProposer._sample_draft_tokens = inputs, sample
