"""`python3 -m verl.trainer.main_ppo`: resolve and check the configuration, then train."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from verl.config.command_line import resolve


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the arguments say; returns the exit status (0 done, 2 configuration, 3 machine, 4 last checkpoint not written, else the run's)."""
    try:
        config = resolve(argv, "ppo")
    except SystemExit as left:
        return int(left.code or 0)
    from verl.trainer.run import run_ppo

    return run_ppo(config)


if __name__ == "__main__":
    sys.exit(main())
