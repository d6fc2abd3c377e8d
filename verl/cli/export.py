"""`verl export RUN OUT`: copy the model of a sealed checkpoint out of a run, whole or not at all."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from verl.checkpoint import Checkpoint, open_checkpoint
from verl.checkpoint.manifest import NAME, step_directories, step_of
from verl.checkpoint.read import foreign, newest_of
from verl.errors import UserError


def find_checkpoint(run: Path, step: int | None) -> Checkpoint:
    """The checkpoint to export: `step`'s, else the newest complete one; verified against its manifest.

    `run` may be a run folder or a `global_step_N` itself. Raises UserError (CheckpointError among them) that
    says what is there instead.
    """
    if not run.is_dir():
        raise UserError(f"{run} does not exist or is not a directory")
    if (run / NAME).is_file():
        return open_checkpoint(run)
    if why := foreign(run):
        raise UserError(why)
    if step is not None:
        steps = sorted(n for n in map(step_of, step_directories(run)) if n is not None)
        if step not in steps:
            raise UserError(f"{run} has no global_step_{step}; it has {steps or 'no checkpoint'}")
        return open_checkpoint(run / f"global_step_{step}")

    def told(kind: str, **fields: Any) -> None:
        print(f"verl export: {fields.get('message', kind)}", file=sys.stderr)

    return newest_of(run, str(run), told)


def copy_model(checkpoint: Checkpoint, out: Path, role: str = "actor") -> Path:
    """Copy the role's Hugging Face directory to `out`, which must not exist or be empty. Returns `out`."""
    source = checkpoint.part(role)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not empty; name a new directory")
    beside = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, beside)
        if out.exists():
            out.rmdir()
        os.replace(beside, out)
    except OSError as error:
        raise UserError(f"{out} could not be written: {error}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return out


def main(argv: list[str]) -> int:
    """Copy the model; 0, or 2 with one line on what is wrong."""
    about = "Copy the trained model (a Hugging Face directory) of a checkpoint to a directory of its own."
    parser = argparse.ArgumentParser(prog="verl export", description=about)
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder, or a global_step_N in it")
    parser.add_argument("out", type=Path, metavar="OUT", help="new directory for the model")
    parser.add_argument("--step", type=int, help="which checkpoint (default: the newest complete one)")
    args = parser.parse_args(argv)
    checkpoint = find_checkpoint(args.run.expanduser(), args.step)
    out = copy_model(checkpoint, args.out.expanduser())
    print(f"{out}  (step {checkpoint.step})")
    if not (out / "config.json").is_file():
        print(
            "verl export: the checkpoint holds an adapter without the model (save_lora_only): "
            f"load {out}/lora_adapter with peft over the model it was trained on",
            file=sys.stderr,
        )
    return 0
