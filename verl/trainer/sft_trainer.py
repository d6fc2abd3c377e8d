"""Supervised fine-tuning: `python3 -m verl.trainer.sft_trainer key=value …`, or with torchrun on many devices."""

from __future__ import annotations

import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from verl.compat.spellings import PUBLIC
from verl.config import SFTConfig
from verl.errors import UserError
from verl.platform.host_resources import prepare_process
from verl.preflight.command import resolve
from verl.tracking.console import spare
from verl.trainer.run import EXIT_FAILED, EXIT_USER, import_plugins, run_guarded


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the arguments say; returns the exit status (0 done, 2 configuration, 3 machine, 4 last checkpoint not
    written, else the run's)."""
    rank, local = (int(os.environ.get(name, 0)) for name in ("RANK", "LOCAL_RANK"))
    hidden = None if local == 0 else StringIO()  # what this prints is shown once a machine
    try:
        with redirect_stdout(hidden or sys.stdout), redirect_stderr(hidden or sys.stderr):
            config = resolve(argv, "sft", PUBLIC)
    except SystemExit as error:
        return int(error.code or 0)
    work = "verl.trainer.sft_loop:train_sft"
    return run_guarded(config, work) if rank == 0 else follow(config, work)


def follow(config: SFTConfig, work: str) -> int:
    """`run_guarded` on a rank other than 0, which keeps no records."""
    prepare_process()
    spare()
    try:
        import_plugins(config)
        records = NoRecords(Path(config.trainer.default_local_dir).expanduser())
        pkgutil.resolve_name(work)(config, records)
        return 0
    except UserError:
        return EXIT_USER
    except Exception as error:
        if not getattr(error, "explained", False):
            traceback.print_exc()
        return EXIT_FAILED


class NoRecords:
    """Stands where rank 0 has its `Tracking`."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.tokenizer: Any = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return _nothing


def _nothing(*_: Any, **__: Any) -> Callable[..., Any]:
    """Records nothing; the callback that `progress` gives is one more of it."""
    return _nothing


if __name__ == "__main__":
    sys.exit(main())
