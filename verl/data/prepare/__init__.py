"""Data sets in our format: `verl prepare NAME`, or the scripts in examples/data_preprocess. No torch here."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from verl.config.matching import nearest
from verl.errors import UserError

NAMES = {
    "gsm8k": "grade-school problems with a number as the answer",
    "math_dataset": "competition problems with a boxed answer",
    "geo3k": "geometry problems with a diagram each",
    "gsm8k_multiturn_sft": "GSM8K as dialogues for supervised training",
    "atif": "dialogues of agents in the Agent Trajectory Interchange Format, for supervised training",
    "arithmetic": "synthetic arithmetic in the GSM8K format, no download",
}
LATER = (
    *("gsm8k_multiturn_w_tool", "gsm8k_tool_agent_loop", "geo3k_multiturn_w_tool"),
    *("aime2024_multiturn_w_tool", "dapo_multiturn_w_tool", "preprocess_search_r1_dataset"),
    *("full_hh_rlhf", "hellaswag"),
)


def usage() -> str:
    """The names and what each makes."""
    lines = ["usage: verl prepare NAME [--local_save_dir DIR] [--local_dataset_path DIR] [--limit N] …", ""]
    return "\n".join(lines + [f"  {name:<22}{description}" for name, description in NAMES.items()])


def main(argv: Sequence[str] | None = None) -> int:
    """Run `verl prepare argv[0] argv[1:]…`; returns the exit status, 2 for the user's mistakes."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(usage())
        return 0 if args else 2
    name = args[0].removesuffix(".py")
    if name in LATER:
        print(f"verl prepare {name}: not in this release", file=sys.stderr)
        return 2
    if name not in NAMES:
        print(f"verl prepare: there is no {name!r}{nearest(name, list(NAMES))}\n\n{usage()}", file=sys.stderr)
        return 2
    return run(name, args[1:])


def run(name: str, argv: Sequence[str] | None = None) -> int:
    """One script by name, with errors as one line; `argv` None means the command line's."""
    module, function = ("gsm8k", "main_sft") if name == "gsm8k_multiturn_sft" else (name, "main")
    script = getattr(importlib.import_module(f"verl.data.prepare.{module}"), function)
    try:
        status: int = script(argv)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Whoever read the summary has seen enough; the files are written.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except (UserError, OSError) as error:
        print(f"verl prepare {name}: {error}", file=sys.stderr)
        return 2
