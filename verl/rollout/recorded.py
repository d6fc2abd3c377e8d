"""`skip.rollout`: the trajectories of a step on disk, and again instead of sampling.

    dump_dir/PROJECT/EXPERIMENT/{step}.jsonl      a line for each trajectory: its prompt, its segments, how it ended

Scores are not kept: they are computed anew. A file appears whole or not at all. For the development of what comes after
sampling: log-probs are those of the weights that sampled.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from verl.config.schema.entries import Config
from verl.data.files import written_whole
from verl.errors import UserError
from verl.trajectory import COLUMNS, Batch, Prompt, Segment, Trajectory

_PROMPT = (
    "uid",
    "messages",
    "data_source",
    "ground_truth",
    "extra_info",
    "file",
    "row",
    "epoch",
    "agent_name",
    "columns",
)
_TRAJECTORY = ("index", "finish_reason", "status", "text", "num_turns", "fields", "extra")


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
        there = {int(path.stem): path for path in self.folder.glob("*.jsonl") if path.stem.isdigit()}
        chosen = max((n for n in there if n <= step), default=None) if self.action == "repeat" else step
        if chosen not in there:
            return None
        path = there[chosen]
        try:
            lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
            prompts = {line["prompt"]["uid"]: line["prompt"] for line in lines}
            made = {
                uid: Prompt(**prompt | {"ids": np.array(prompt["ids"], np.int64)}) for uid, prompt in prompts.items()
            }
            return Batch([_trajectory(line, made[line["prompt"]["uid"]]) for line in lines])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: no recorded step ({type(error).__name__}: {error}); remove it") from error

    def save(self, step: int, batch: Batch) -> None:
        """Write what was sampled in a step. UserError for rows with images."""
        if self.steps and step not in self.steps:
            return
        with written_whole(self.folder / f"{step}.jsonl") as beside:
            beside.write_text("".join(json.dumps(_line(t), default=_plain) + "\n" for t in batch), "utf-8")


def _line(t: Trajectory) -> dict[str, Any]:
    if any(segment.media is not None for segment in t.segments):
        raise UserError("skip.rollout.enable=True: responses to images are not recorded; set it to False")
    prompt = {name: getattr(t.prompt, name) for name in _PROMPT} | {"ids": t.prompt.ids}
    return {
        "prompt": prompt,
        **{name: getattr(t, name) for name in _TRAJECTORY},
        "segments": [
            {
                "context_ids": segment.context_ids,
                "columns": segment.columns,
                "context_columns": segment.context_columns,
                "versions": segment.versions,
                "parent": segment.parent,
                "shared": segment.shared,
            }
            for segment in t.segments
        ],
    }


def _trajectory(line: dict[str, Any], prompt: Prompt) -> Trajectory:
    segments = []
    for kept in line["segments"]:
        context = np.array(kept["context_ids"], np.int64)
        columns: Any = {n: np.array(values, COLUMNS[n].dtype) for n, values in kept["columns"].items()}
        segment = Segment(
            prompt.ids if np.array_equal(context, prompt.ids) else context,
            **columns,
            versions=tuple(kept["versions"]),
            parent=kept["parent"],
            shared=kept["shared"],
        )
        for name, values in kept["context_columns"].items():
            segment.context_columns[name] = np.array(values, COLUMNS[name].dtype)
        segments.append(segment)
    return Trajectory(prompt, segments=segments, **{name: line[name] for name in _TRAJECTORY})


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)
