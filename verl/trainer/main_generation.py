"""`python3 -m verl.trainer.main_generation`: check the configuration, then sample responses to a file's prompts."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from verl.compat.spellings import PUBLIC
from verl.preflight.command import run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Generate as the arguments say; returns the exit status (0 done, 2 configuration, 3 machine, else the run's)."""
    return run_command(argv, "generation", "verl.trainer.generation:generate", PUBLIC)


if __name__ == "__main__":
    sys.exit(main())
