"""`skip.rollout`: the trajectories of a step on disk, and again instead of sampling.

    dump_dir/PROJECT/EXPERIMENT/{step}.parquet      as `verl.tracking.journal` writes it

Scores are not kept: they are computed anew. A file appears whole or not at all. For the development of what comes after
sampling: log-probs are those of the weights that sampled.
"""

from __future__ import annotations

from pathlib import Path

from verl.config.schema.entries import Config
from verl.tracking import journal
from verl.trajectory import Batch


class Recorded:
    """The files of a run. Only those of `steps` are read and written ([]: all). With action `cache` a step has its own
    file, with `repeat` the latest one up to it."""

    def __init__(self, folder: Path, steps: list[int], action: str):
        self.folder, self.steps, self.action = folder, steps, action

    @classmethod
    def of(cls, config: Config) -> Recorded | None:
        """From the checked configuration; None where `skip.rollout` is off."""
        skip, trainer = config.skip.rollout, config.trainer
        if not skip.enable:
            return None
        folder = Path(str(skip.dump_dir)) / trainer.project_name / trainer.experiment_name
        return cls(folder, list(skip.steps), skip.action)

    def load(self, step: int) -> Batch | None:
        """The trajectories to use in a step; None where it has to be sampled. UserError for a file that is damaged."""
        if self.steps and step not in self.steps:
            return None
        there = journal.steps(self.folder)
        chosen = max((n for n in there if n <= step), default=None) if self.action == "repeat" else step
        if chosen not in there:
            return None
        batch, _ = journal.read(there[chosen])
        for trajectory in [*batch, *(t.baseline for t in batch if t.baseline is not None)]:
            trajectory.score, trajectory.score_parts, trajectory.score_error = None, {}, None
        return batch

    def save(self, step: int, batch: Batch) -> None:
        """Write what was sampled in a step."""
        if self.steps and step not in self.steps:
            return
        journal.write(self.folder / f"{step}.parquet", batch, {"step": step})
