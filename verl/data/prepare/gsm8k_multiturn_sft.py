"""GSM8K as dialogues of two turns for supervised training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.data.prepare import common, gsm8k


def rows(local: str | None, split: str) -> list[dict[str, Any]]:
    """All rows of a split: `messages` of a user and an assistant turn, extra_info as gsm8k."""
    out = []
    for index, (where, question, answer) in enumerate(gsm8k.raw(local, split)):
        prompt = gsm8k.row(question, answer, split, index, where)
        reply = {"role": "assistant", "content": answer}
        out.append({"messages": [*prompt["prompt"], reply], "extra_info": prompt["extra_info"]})
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """The script."""
    about = "GSM8K as dialogues for sft_trainer"
    return common.two_splits("gsm8k_multiturn_sft", about, rows, argv, "gsm8k_sft")
