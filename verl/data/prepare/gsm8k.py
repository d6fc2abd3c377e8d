"""GSM8K: grade-school problems whose answers end in `#### number`; as dialogues, too, for supervised training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from verl.data.files import DataError
from verl.data.prepare import common
from verl.data.rows import GSM8K, final_number

REPO = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def row(question: str, answer: str, split: str, index: int, where: str) -> dict[str, Any]:
    """One row of the chat format. Raises DataError, with `where`, if the answer holds no `#### number`."""
    truth = final_number(answer)
    if truth is None:
        raise DataError(f"{where}: the answer holds no `#### number`: …{answer[-80:]!r}")
    text = f"{question} {INSTRUCTION}"
    return common.chat_row(GSM8K, text, truth, split, index, answer=answer, question=question)


def raw(local: str | None, split: str) -> Iterator[tuple[str, str, str]]:
    """(where, question, answer) of every raw row, from a directory or from the hub."""
    find = partial(common.find_split, local) if local else partial(common.from_hub, REPO)
    return common.raw_texts(find(split, config="main"), ("question", "answer"))


def rows(local: str | None, split: str) -> list[dict[str, Any]]:
    """All rows of a split in the chat format."""
    return [row(q, a, split, i, where) for i, (where, q, a) in enumerate(raw(local, split))]


def main(argv: Sequence[str] | None = None) -> int:
    """The script. Raises DataError for raw data that cannot be used."""
    return common.two_splits("gsm8k", "GSM8K in the chat format: train.parquet, test.parquet", rows, argv)


def dialogues(local: str | None, split: str) -> list[dict[str, Any]]:
    """All rows of a split: `messages` of a user and an assistant turn, extra_info as in `rows`."""
    out = []
    for prompt in rows(local, split):
        reply = {"role": "assistant", "content": prompt["extra_info"]["answer"]}
        out.append({"messages": [*prompt["prompt"], reply], "extra_info": prompt["extra_info"]})
    return out


def main_sft(argv: Sequence[str] | None = None) -> int:
    """The script for dialogues."""
    about = "GSM8K as dialogues for sft_trainer"
    return common.two_splits("gsm8k_multiturn_sft", about, dialogues, argv, "gsm8k_sft")
