"""Rows for learning from preferences: a prompt, the response that was preferred, and the other one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl.data.files import RowFile
from verl.data.rows import BadRow, as_messages, check_readable
from verl.data.sft import SFTDataset, SFTRow, _Rendered

if TYPE_CHECKING:
    from verl.config.schema.data import SFTDataConfig

PROMPT = "prompt"
"""Column of the prompt where `data.prompt_key` is not set. Without it both responses are whole dialogues."""


@dataclass(frozen=True, slots=True)
class PairRow:
    """Two dialogues with the same beginning. The mask of each is True where it is learned: in assistant turns of its
    own. margin: how much better the chosen one is, 0 where the file does not say."""

    chosen: SFTRow
    rejected: SFTRow
    margin: float = 0.0


class PairDataset(SFTDataset):
    """`SFTDataset` of pairs: `dataset[i]` is a PairRow."""

    def _check_columns(self, file: RowFile) -> None:
        check_pair_columns(file, self.config)

    def _render(self, row: Mapping[str, Any]) -> list[_Rendered]:
        chosen, rejected, shared = pair_of_dialogues(row, self.config)
        margin_of(row, self.config)
        skipped = sum(message["role"] == "assistant" for message in chosen[:shared])
        return [self._turns(row, side, texts=True, skipped=skipped) for side in (chosen, rejected)]

    def _row(self, index: int) -> PairRow:
        has_margin = self.config.margin_key in self.source.columns
        margin = margin_of(self.source.row(index), self.config) if has_margin else 0.0
        chosen, rejected = self._sequences(index)
        return PairRow(chosen, rejected, margin)


def check_pair_columns(file: RowFile, config: SFTDataConfig) -> None:
    """DataError for a column that the `data` group `config` names and the file lacks."""
    keys = ("chosen_key", "rejected_key") if config.prompt_key is None else ("prompt_key", "chosen_key", "rejected_key")
    for key in keys:
        file.need(config[key], f"data.{key}")


def pair_of_dialogues(
    row: Mapping[str, Any], config: SFTDataConfig
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], int]:
    """(chosen, rejected, how many messages they begin with in common). Raises BadRow."""
    check_readable(row)
    for key in (config.image_key, config.video_key):
        if row.get(key):
            raise BadRow("media", f"column {key!r} is not empty: pairs are of texts")
    column = config.prompt_key or PROMPT
    prompt = as_messages(row[column], column) if row.get(column) is not None else []
    chosen, rejected = (_dialogue(prompt, row.get(key), key) for key in (config.chosen_key, config.rejected_key))
    same = [a == b for a, b in zip(chosen, rejected, strict=False)]
    shared = same.index(False) if False in same else len(same)
    for key, side in ((config.chosen_key, chosen), (config.rejected_key, rejected)):
        if len(side) == shared:
            raise BadRow("no difference", f"column {key!r} holds nothing that the other response does not hold")
        if side[shared]["role"] != "assistant":
            raise BadRow("different prompts", f"column {key!r} differs from the other response in message {shared}")
    return chosen, rejected, shared


def _dialogue(prompt: Sequence[dict[str, Any]], cell: Any, key: str) -> list[dict[str, Any]]:
    """A response, text or messages, after the prompt, unless it is a dialogue that begins with it."""
    if isinstance(cell, str) and cell.strip() and not prompt:
        raise BadRow("prompt missing", f"column {key!r} is a text, and there is no prompt before it")
    messages = as_messages(cell, key)
    if isinstance(cell, str):
        messages = [{"role": "assistant", "content": cell}]
    return messages if messages[: len(prompt)] == prompt else [*prompt, *messages]


def margin_of(row: Mapping[str, Any], config: SFTDataConfig) -> float:
    """The margin of a row, 0 without. Raises BadRow."""
    value = row.get(config.margin_key)
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadRow("wrong column type", f"column {config.margin_key!r} is {value!r:.60}, not a number")
    return float(value)
