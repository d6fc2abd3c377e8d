"""`python3 -m verl.trainer.main_generation`: resolve and check the configuration, then sample responses to a file's prompts."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from verl.config.command_line import resolve


def main(argv: Sequence[str] | None = None) -> int:
    """Generate as the arguments say; returns the exit status (0 done, 2 configuration, 3 machine, else the run's)."""
    try:
        config = resolve(argv, "generation")
    except SystemExit as left:
        return int(left.code or 0)
    from verl.trainer.generation import generate
    from verl.trainer.run import run_guarded

    return run_guarded(config, generate)


if __name__ == "__main__":
    sys.exit(main())
