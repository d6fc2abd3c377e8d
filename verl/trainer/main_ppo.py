"""`python3 -m verl.trainer.main_ppo`: resolve and check the configuration, then train."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from verl.compat.spellings import PUBLIC
from verl.preflight.command import run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the arguments say; returns the exit status (0 done, 2 configuration, 3 machine, 4 last checkpoint not
    written, else the run's)."""
    return run_command(argv, "ppo", "verl.trainer.run:train_ppo", PUBLIC)


if __name__ == "__main__":
    sys.exit(main())
