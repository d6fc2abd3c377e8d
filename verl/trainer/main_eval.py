"""`python3 -m verl.trainer.main_eval`: resolve and check the configuration, then score the responses of a file."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from verl.config.command_line import resolve


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate as the arguments say; returns the exit status (0 done, 2 configuration, 3 machine, else the run's)."""
    try:
        config = resolve(argv, "eval")
    except SystemExit as left:
        return int(left.code or 0)
    from verl.trainer.evaluation import evaluate
    from verl.trainer.run import run_guarded

    return run_guarded(config, evaluate)


if __name__ == "__main__":
    sys.exit(main())
