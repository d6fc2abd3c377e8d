"""One engine of each kind for the contract suites: started once, shared by the modules that ask for it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.vllm_cases import require_vllm, vllm_engine, vllm_model
from verl.config import load as load_config
from verl.engine.registry import ROLLOUT_ENGINES
from verl.engine.rollout.base import Completion
from verl.platform import detect

ENGINES = [
    "native",
    "users_sampler",
    pytest.param("vllm", marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
]


class Sampler:
    """A rollout engine that is a weight receiver too, and the model that it should compute (`reference`); `discard`
    gives the next test new ones."""

    def __init__(self, kind: str, path: Path):
        self._kind, self.path = kind, path

    @functools.cached_property
    def engine(self) -> Any:
        """At most 8 responses at a time, of at most 256 tokens with their prompt."""
        if self._kind == "vllm":
            return vllm_engine(self.path, load_format="auto")
        from tests.tiny import tiny_tokenizer
        from verl.engine.rollout.native.engine import NativeEngine

        if self._kind == "users_sampler":
            model = f"{{path: {self.path}, external_lib: tests.contract.engines_of_a_user}}"
            limits = "max_model_len: 256, max_num_seqs: 8, dtype: float32"
            rollout = f"{{name: users_sampler, {limits}}}"
            config = load_config([f"actor_rollout_ref={{model: {model}, rollout: {rollout}}}"])
            sampler = ROLLOUT_ENGINES[self._kind].build(config, tiny_tokenizer(), detect("cpu"))
            sampler.load_weights(self.reference.state_dict().items(), 0)
            return sampler
        limits = {"eos_token_ids": [258], "max_model_len": 256, "max_num_seqs": 8}
        return NativeEngine(load(self.path), tokenizer=tiny_tokenizer(), **limits)

    @functools.cached_property
    def reference(self) -> Any:
        return load(self.path)

    def discard(self) -> None:
        if "engine" in vars(self):
            self.engine.close()
        for name in ("engine", "reference"):
            vars(self).pop(name, None)

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
    if request.param == "vllm":
        require_vllm()
    made = Sampler(request.param, vllm_model(tmp_path_factory.mktemp(request.param) / "model"))
    yield made
    made.discard()
