"""The other processes of `driver_cost.py`, without a model: ranks, and sampler hosts that respond from a text."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from verl.engine.rollout.base import Completion, RolloutEngine, SamplingParams
from verl.workers.rollout_worker import RolloutWorker

VOCABULARY = 16_384
END = "<|end|>"
STREAM = "stream.npy"
"""Name of the file with the ids that responses are cut from."""


def prepare(folder: Path, texts: Iterable[Path]) -> int:
    """Train a byte-level BPE on the texts, save it with their ids; returns the size of its vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, "<|pad|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    files = sorted(texts)
    core.train([str(path) for path in files], trainer)
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, pad_token="<|pad|>").save_pretrained(folder)
    np.save(folder / STREAM, np.array(core.encode("\n".join(f.read_text() for f in files)).ids, np.int32))
    return int(core.get_vocab_size())


class Canned(RolloutEngine):
    """Responses are pieces of `stream` that end with an end token; lengths spread evenly from half to one and a half
    times `tokens`, the time a response takes evenly over `seconds`."""

    version = 1

    def __init__(self, stream: np.ndarray, tokens: int, seconds: float):
        self._stream, self._tokens, self._seconds = stream, tokens, seconds

    async def generate(
        self,
        prompt_ids: Sequence[int] | np.ndarray,
        sampling: SamplingParams,
        *,
        request_id: str,
        group: str | None = None,
        media: dict[str, Any] | None = None,
    ) -> Completion:
        """The seed decides."""
        rng = np.random.default_rng(sampling.seed)
        length = int(rng.integers(self._tokens // 2, self._tokens + self._tokens // 2))
        await asyncio.sleep(rng.uniform(0, self._seconds))
        start = int(rng.integers(0, len(self._stream) - length))
        ids = self._stream[start : start + length].astype(np.int64)
        ids[-1] = 0
        return Completion(ids, np.full(length, -0.5, np.float32), "stop", versions=(self.version,))

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """Nothing is ever aborted."""

    def load_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """There are none."""

    def sleep(self) -> None:
        """Nothing to give back."""

    def wake(self) -> None:
        """Nothing to take."""


class Teller(RolloutWorker):
    """A sampler host with such an engine; everything else is the real one's."""

    async def begin(self, folder: str, tokens: int, seconds: float) -> None:
        """Takes the place of `start`."""
        from verl.data.rows import text_of
        from verl.data.tokenizer import load_tokenizer

        self._decode = partial(text_of, load_tokenizer(folder))
        self.engine = Canned(np.load(Path(folder) / STREAM), tokens, seconds)


class Echo:
    """A rank."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def receive_rows(self, payload: dict[str, np.ndarray], *inputs: dict[str, np.ndarray]) -> None:
        """Decode, as a rank does."""
        from verl.workers import payloads

        self.rows = payloads.decode(payload, inputs)

    def forward(self, phase: str, role: str, outputs: Mapping[str, str]) -> dict[str, np.ndarray]:
        """Zeros in every column."""
        size = sum(row.length for row in self.rows)
        return {column: np.zeros(size, np.float32) for column in outputs.values()}

    def update(self, role: str, columns: Any, minis: list[Any]) -> dict[str, Any]:
        """Nothing is learnt."""
        from verl.engine.training.base import TrainStepResult

        return {"results": [TrainStepResult({}, 1.0)] * len(minis), "columns": {}}

    def run(self, role: str, method: str) -> float:
        """`advance`: a rate."""
        return 0.0
