"""Dialogues of agents from files of ATIF (`verl.data.atif`), for supervised training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from verl.data import atif
from verl.data.files import DataError, written_whole
from verl.data.prepare import common


def main(argv: Sequence[str] | None = None) -> int:
    """Write train.jsonl: `messages`, `tools`, and the session and reward of each trajectory. DataError without files;
    UserError for one that is no trajectory."""
    flags = common.parser(
        "atif", "Dialogues of ATIF files (*.json below --local_dataset_path), for sft_trainer: train.jsonl"
    )
    flags.add_argument("--least_reward", type=float, help="leave out trajectories with less, or without a reward")
    args = common.parsed(flags, argv)
    paths = sorted(Path(args.local_dataset_path or ".").expanduser().rglob("*.json"))
    if not paths:
        raise DataError(f"{args.local_dataset_path}: no *.json file (--local_dataset_path)")
    lines = []
    for path in paths:
        document = atif.read(path)
        reward = (document.get("extra") or {}).get("reward")
        if args.least_reward is not None and (reward is None or reward < args.least_reward):
            continue
        about = {"session_id": document.get("session_id"), "reward": reward}
        lines.append(json.dumps(atif.dialogue(document) | {"extra_info": about}, ensure_ascii=False))
    lines = lines[: args.limit]
    if not lines:
        raise DataError(f"no trajectory has a reward of {args.least_reward} or more")
    target = args.directory / "train.jsonl"
    with written_whole(target) as beside:
        beside.write_text("\n".join(lines) + "\n")
    print(f"{target}: {len(lines)} of {len(paths)} trajectories")
    return 0
