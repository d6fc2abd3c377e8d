"""A sequence classifier in batches padded to their longest sequence: for one that cannot be packed (an encoder such as
BERT, or a head of several layers). Every rank holds all of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from verl.engine.registry import Placement
from verl.engine.training.process_group import this_rank
from verl.engine.training.settings import compute_dtype
from verl.models.pretrained import load_model
from verl.platform import Platform
from verl.trajectory import Segment


class PaddedClassifier:
    """What `TrainingEngine` is to a role that only scores, in batches of at most `tokens`, padding included. UserError if
    the model cannot be loaded.
    """

    holds_outputs = True

    def __init__(
        self, model_path: str | Path, *, model_cfg: Any, tokens: int, placement: Placement, device: Platform
    ) -> None:
        device.prepare()
        self.platform, self.device = device, device.device()
        self.dp_rank = this_rank()
        dtype = compute_dtype(placement, device)
        self._module: Any = load_model(model_path, model_cfg, dtype, head="score", packed=False)
        self._module.requires_grad_(False)
        self.onload()
        self._tokens = tokens
        self._padding = self._module.config.get_text_config().pad_token_id
        self._leaves = placement.param_offload

    @torch.no_grad()
    def forward(
        self, rows: Sequence[Segment], outputs: Collection[str] = ("scores",), *, temperature: float
    ) -> dict[str, np.ndarray]:
        """{"scores": float32 [ΣL]}: of each row the score of its tokens without the last, on every response token."""
        sequences = [np.concatenate((row.context_ids, row.response_ids[:-1])) for row in rows]
        scores = np.zeros(len(rows), np.float32)
        for batch in self._batches([len(ids) for ids in sequences]):
            scores[batch] = self._scores([sequences[i] for i in batch])
        return {"scores": np.repeat(scores, [row.length for row in rows])}

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Positions of the sequences of each batch, the longest first, which those of like length join."""
        remaining = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        while remaining:
            rows = 1 if self._padding is None else max(1, self._tokens // lengths[remaining[0]])
            yield remaining[:rows]
            remaining = remaining[rows:]

    def _scores(self, sequences: Sequence[np.ndarray]) -> np.ndarray:
        rows = [torch.from_numpy(ids) for ids in sequences]
        ids = pad_sequence(rows, batch_first=True, padding_value=self._padding or 0).to(self.device)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).to(self.device)
        logits = self._module(input_ids=ids, attention_mask=mask).logits
        return np.asarray(logits[:, 0].float().cpu())

    def onload(self, *, optimizer: bool = False) -> None:
        """See `TrainingEngine.onload`."""
        self._module.to(self.device)

    def offload(self) -> None:
        """See `TrainingEngine.offload`."""
        if self._leaves:
            self._module.to("cpu")
            self.platform.empty_cache()
