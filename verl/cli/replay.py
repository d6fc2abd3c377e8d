"""`verl replay RUN --step N`, `verl diff RUN RUN`, `verl audit RUN`: what a run's journal says."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from verl.cli.report import find_run
from verl.errors import UserError
from verl.platform.host_resources import prepare_process

if TYPE_CHECKING:
    from verl.config import Config


def run_config(run: Path, overrides: list[str], *changed: str) -> Config:
    """The configuration of a run with changes."""
    from verl.compat.spellings import PUBLIC
    from verl.config import load
    from verl.workers.training_worker import prepare_process as prepare_worker

    words = ["--config-path", str(run.resolve()), "--config-name", "config", *overrides, *changed]
    config: Config = load(words, spellings=PUBLIC)
    prepare_worker(config)
    return config


def _recorded_run(path: Path) -> Path:
    """The run folder that a path means. UserError where it lacks the run's settings."""
    run = find_run(path)
    if not (run / "config.yaml").is_file():
        raise UserError(f"{run} has no config.yaml, the run's settings: copy it from where the run was made")
    return run


def _parser(name: str, about: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"verl {name}", description=about, allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder (trainer.default_local_dir)")
    return parser


def _add_step(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    which = "step of the journal" + (" (default: the newest)" if not required else "")
    parser.add_argument("--step", type=int, required=required, metavar="N", help=which)
    about = "settings of this machine where they are not the run's: trainer.device=cpu, actor_rollout_ref.model.path=…"
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=about)


def main(argv: list[str]) -> int:
    """Compute a step again and compare; 0, or 2 with one line on what is wrong."""
    parser = _parser("replay", "Compute a step of a run again, from its journal and the nearest checkpoint before it.")
    _add_step(parser)
    parser.add_argument("--set", action="append", default=[], metavar="key=value", help="what if the step had this")
    parser.add_argument("--reward", type=Path, metavar="FILE", help="what if this file had scored the responses")
    args = parser.parse_intermixed_args(argv)
    if args.reward and not args.reward.is_file():
        raise UserError(f"--reward {args.reward}: no such file")
    prepare_process()
    from verl.trainer.replay import replay

    run = _recorded_run(args.run)
    for line in replay(run, args.step, partial(run_config, run, args.overrides), args.set, args.reward):
        print(line)
    return 0


def diff(argv: list[str]) -> int:
    """Name the first step, phase and tensor at which two runs part; 0, or 2 with one line on what is wrong."""
    parser = _parser("diff", "Name the first step, phase and tensor at which two runs part.")
    parser.add_argument("other", type=Path, metavar="RUN", help="run folder")
    args = parser.parse_intermixed_args(argv)
    from verl.trainer.replay import diff

    for line in diff(_recorded_run(args.run), _recorded_run(args.other)):
        print(line)
    return 0


def audit(argv: list[str]) -> int:
    """Compare a step's log-probs with those of transformers; 0, or 2 with one line on what is wrong."""
    parser = _parser("audit", "Compute the log-probs of a step's tokens with transformers, and compare.")
    _add_step(parser, required=False)
    args = parser.parse_intermixed_args(argv)
    prepare_process()
    from verl.tracking import journal
    from verl.tracking.run_folder import JOURNAL
    from verl.trainer.replay import audit

    run = _recorded_run(args.run)
    step = args.step if args.step is not None else max(journal.steps(run / JOURNAL), default=0)
    for line in audit(run, step, run_config(run, args.overrides)):
        print(line)
    return 0
