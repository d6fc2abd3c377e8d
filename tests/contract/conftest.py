"""One engine of each kind for the contract suites: started once, shared by the modules that ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.vllm_cases import vllm_engine, vllm_model
from verl.engine.rollout.base import Completion

ENGINES = ["native", pytest.param("vllm", marks=[pytest.mark.slow, pytest.mark.timeout(600)])]


@dataclass
class Sampler:
    """A rollout engine that is a weight receiver too, and the model that it should compute (`reference`)."""

    engine: Any
    reference: Any
    path: Path

    @torch.no_grad()
    def logits(self, prompt: list[int], response: list[int]) -> torch.Tensor:
        """Of the reference at each position of the response, float32 [L, V]."""
        ids = torch.tensor([prompt + response])
        return self.reference(ids).logits[0, len(prompt) - 1 : -1].float()

    def difference(self, prompt: list[int], done: Completion) -> float:
        """Largest difference of the response's log-probs to the reference's, at temperature 1."""
        response = done.token_ids.tolist()
        table = self.logits(prompt, response).log_softmax(-1)
        ours = table.gather(1, torch.tensor(response)[:, None])[:, 0].numpy()
        return float(np.abs(ours - done.log_probs).max())


def load(path: Path) -> Any:
    """The model in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(scope="session", params=ENGINES)
def sampler(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sampler]:
    """At most 8 responses at a time, of at most 256 tokens with their prompt."""
    path = vllm_model(tmp_path_factory.mktemp(request.param) / "model")
    if request.param == "vllm":
        from verl.config.engine_packages import EnginePackageError, check_vllm

        try:
            check_vllm()
        except EnginePackageError as error:
            pytest.skip(str(error))
        engine = vllm_engine(path, load_format="auto")
    else:
        from tests.tiny import tiny_tokenizer
        from verl.engine.rollout.native import NativeEngine

        engine = NativeEngine(
            load(path), eos_token_ids=[258], max_model_len=256, max_num_seqs=8, tokenizer=tiny_tokenizer()
        )
    yield Sampler(engine, load(path), path)
    engine.close()
