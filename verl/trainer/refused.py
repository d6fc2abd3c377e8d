"""What happens when an update is refused: the batch is dumped, the step counted, and too many in a row end the run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from verl.trajectory import COLUMNS

if TYPE_CHECKING:
    from verl.tracking.step_metrics import Counters
    from verl.tracking.tracker import Tracking
    from verl.trajectory import Trajectory
    from verl.workers.plan import Refusal, UpdateResult


class TooManyRefused(RuntimeError):
    """`trainer.max_refused_steps` updates in a row were refused."""

    explained = True


def dump_rows(directory: Path, rows: list[Trajectory], reason: str) -> None:
    """Write the rows of a refused update: `batch.safetensors` (columns, concatenated) and `batch.json`.

    OSError where they cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    arrays = {"lengths": np.array([row.length for row in rows], np.int64)}
    for column in COLUMNS:
        values = [getattr(row, column) for row in rows]
        if all(value is not None for value in values):
            arrays[column] = np.concatenate(values)
    try:
        save_file(arrays, directory / "batch.safetensors")
    except SafetensorError as error:  # what the library makes of a full disk
        raise OSError(str(error)) from error
    listing = [
        {name: getattr(row, name) for name in ("uid", "index", "text", "score")}
        | {"prompt_ids": row.prompt.ids.tolist()}
        for row in rows
    ]
    (directory / "batch.json").write_text(json.dumps({"reason": reason, "rows": listing}, ensure_ascii=False))


class RefusedSteps:
    """Counts steps in a row with a refused update; `counters` keeps the count, for it outlives a resume."""

    def __init__(self, limit: int, tracking: Tracking, counters: Counters):
        self._limit = limit
        self._tracking = tracking
        self._counters = counters
        self._last = ""

    def note(self, step: int, update: UpdateResult) -> None:
        """Record a step's outcome; `check` then says whether the run may go on."""
        if not update.refused:
            if update.updates:
                self._counters.refused_in_a_row = 0
            return
        self._counters.refused_steps += len(update.refused)
        self._counters.refused_in_a_row += 1
        self._last = update.refused[-1].reason
        self._keep(step, update.refused)

    def _keep(self, step: int, refused: Sequence[Refusal]) -> None:
        """Dump the batches, and say where."""
        for number, refusal in enumerate(refused):
            directory = Path(self._tracking.run_dir) / "refused" / f"step_{step}" / str(number)
            try:
                dump_rows(directory, refusal.rows, refusal.reason)
            except OSError as error:
                self._tracking.event("dump_failed", path=str(directory), error=str(error))
            self._tracking.event("refused_update", step=step, reason=refusal.reason, dump=str(directory))
            self._tracking.notice(
                f"step {step}: update refused, {refusal.reason}; the batch is in {directory}"
            )

    def check(self) -> None:
        """Raise TooManyRefused at the limit. Called when the step is logged, so that its record is there."""
        if self._last and self._counters.refused_in_a_row >= self._limit:
            raise TooManyRefused(
                f"{self._counters.refused_in_a_row} steps in a row had a non-finite update (trainer.max_refused_steps={self._limit}); "
                f"the last: {self._last}. The batches are in {self._tracking.run_dir}/refused. "
                "Lower the learning rate (optim.lr), check the reward's range, or start from an earlier checkpoint"
            )
