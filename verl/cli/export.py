"""`verl export RUN OUT`: copy the model of a sealed checkpoint out of a run, whole or not at all; with `--atif` write
the trajectories of its journal."""

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
from verl.cli.report import find_run
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


def write_trajectories(run: Path, out: Path, step: int | None) -> int:
    """Write the trajectories of a journal, of one step or of all, in ATIF below `out`; returns how many documents.
    UserError where the journal has none."""
    from verl import __version__
    from verl.cli.replay import run_config
    from verl.data import atif
    from verl.data.tokenizer import tokenizer_of
    from verl.tracking import journal
    from verl.tracking.run_folder import JOURNAL

    steps = journal.steps(run / JOURNAL)
    if not steps or (step is not None and step not in steps):
        has = f"steps {min(steps)} to {max(steps)}" if steps else "none (trainer.journal=0?)"
        raise UserError(f"{run} has no trajectories{f' of step {step}' if steps else ''}: its journal has {has}")
    config = run_config(run, [])
    model = config.actor_rollout_ref.model
    decode = tokenizer_of(model, config.select("data.tokenizer")).decode
    count = 0
    for number in steps if step is None else [step]:
        batch, _ = journal.read(steps[number])
        about = {"run": run.resolve().name, "model": str(model.path), "version": __version__}
        count += sum(atif.write(out, t, number, decode, **about) for t in batch)
    return count


def main(argv: list[str]) -> int:
    """Copy the model, or write trajectories; 0, or 2 with one line on what is wrong."""
    about = "Copy the trained model (a Hugging Face directory) of a checkpoint to a directory of its own."
    parser = argparse.ArgumentParser(prog="verl export", description=about)
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder, or a global_step_N in it")
    parser.add_argument("out", type=Path, metavar="OUT", help="new directory for the model, or for the trajectories")
    about = "which checkpoint (default: the newest complete one); with --atif which step (default: all of the journal)"
    parser.add_argument("--step", type=int, help=about)
    parser.add_argument(
        "--atif", action="store_true", help="write trajectories, one JSON file each, in place of the model"
    )
    args = parser.parse_args(argv)
    if args.atif:
        run, out = find_run(args.run), args.out.expanduser()
        print(f"{out}: {write_trajectories(run, out, args.step)} documents")
        return 0
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
