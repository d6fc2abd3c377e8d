"""From a checked configuration to a finished run: drives the work of an entry point, explains how it ended."""

from __future__ import annotations

import gc
import os
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from verl import interrupt
from verl.errors import UserError
from verl.platform.host_resources import prepare_process
from verl.plugins import import_modules
from verl.tracking.console import notice, spare

if TYPE_CHECKING:
    from verl.config import Config, EvalConfig, GenerationConfig, SFTConfig
    from verl.tracking.tracker import Tracking
    from verl.trainer.parts import Parts

    RunConfig = Config | EvalConfig | GenerationConfig | SFTConfig

EXIT_USER = 2
EXIT_FAILED = 1
EXIT_UNSAVED = 4
EXIT_INTERRUPTED = 130


def run_guarded(config: RunConfig, work: str) -> int:
    """Call the function of (config, tracking) that "module:name" gives in an opened run folder and explain how it
    ended.

    The module is imported once the process is prepared: numerical libraries read their variables when they are loaded.

    Returns the exit status: 0 done, 1 the run failed, 2 something the user can mend, 4 done but the last checkpoint
    could not be written (said last), 130 interrupted.
    """
    os.environ.update({name: str(value) for name, value in (config.select("trainer.worker_env") or {}).items()})
    if config.select("trainer.compiled_kernels") == "off":
        os.environ["VERL_COMPILED_KERNELS"] = "off"  # every process of the run gets it
    prepare_process()
    spare()
    try:
        import_plugins(config)
        tracking = open_tracking(config)
    except UserError as error:
        notice(str(error))
        return EXIT_USER
    status = _run(config, tracking, work)
    if tracking.unsaved:
        notice(tracking.unsaved)
    return status or (EXIT_UNSAVED if tracking.unsaved else 0)


def _run(config: RunConfig, tracking: Tracking, work: str) -> int:
    """The exit status of `work`; says how it ended in the records and, if not well, on stderr."""
    earlier = None
    with interrupt.handled():
        try:
            earlier = _newest(tracking.run_dir)
            pkgutil.resolve_name(work)(config, tracking)
            return 0
        except UserError as error:
            if records := getattr(error, "records", ()):
                tracking.bad_rows(records)
            return _stopped(tracking, "refused", str(error), EXIT_USER)
        except Exception as error:
            import traceback

            name = type(error).__name__
            tracking.event("failed", error=f"{name}: {error}", traceback=traceback.format_exc())
            if not getattr(error, "explained", False):
                traceback.print_exc()
            words = [f"{name}: {str(error).rstrip('.')}", _further(config, tracking.run_dir, earlier)]
            return _stopped(tracking, "failed", ". ".join(filter(None, words)), EXIT_FAILED)
        except BaseException:
            # Not only KeyboardInterrupt: libraries wrap one that comes in the middle of their work.
            if not interrupt.noted():
                raise
            how = _interrupted(config, _further(config, tracking.run_dir, earlier))
            return _stopped(tracking, "interrupted", how, EXIT_INTERRUPTED)
        finally:
            tracking.close()


def _interrupted(config: RunConfig, further: str | None) -> str:
    """How to go on after an interruption."""
    if config.entry in ("eval", "generation"):
        return "interrupted: the same command starts from the beginning"
    if further is None:
        return (
            "interrupted before this run saved a checkpoint (trainer.save_freq): the same command starts from the "
            "beginning"
        )
    return f"interrupted. {further}"


def _newest(run_dir: Path) -> tuple[int, int, Path] | None:
    """(serial, step, path) of the checkpoint of a run folder that was sealed last."""
    from verl.checkpoint.write import sealed

    checkpoints = sealed(run_dir)
    return checkpoints[-1] if checkpoints else None


def _further(config: RunConfig, run_dir: Path, earlier: tuple[int, int, Path] | None) -> str | None:
    """How to go on from the newest checkpoint that this run saved or, as `trainer.resume_mode` says, starts from; None
    without one. earlier: the newest one when it began."""
    mode, newest = config.select("trainer.resume_mode"), _newest(run_dir)
    if newest is not None and (mode == "auto" or earlier is None or newest > earlier):
        option = " with trainer.resume_mode=auto" if mode != "auto" else ""
        return f"Run the same command again{option} to go on from {newest[2]}"
    if mode == "resume_path":
        return f"Run the same command again to go on from {config.select('trainer.resume_from_path')}"
    return None


def import_plugins(config: RunConfig) -> None:
    """Import `model.external_lib` and VERL_USE_EXTERNAL_MODULES, which register estimators, losses and the like."""
    model = config.select("actor_rollout_ref.model") or config.select("model")
    import_modules(model.external_lib if model is not None else None)


def open_tracking(config: RunConfig) -> Tracking:
    """The run folder's records and the trackers. UserError if the folder cannot be made or written."""
    from verl.tracking.tracker import Tracking

    folder = Path(config.trainer.default_local_dir).expanduser()
    try:
        return Tracking(config, folder)
    except OSError as error:
        raise UserError(
            f"trainer.default_local_dir={folder}: the run folder cannot be made or written "
            f"({error.strerror or error}); name another one"
        ) from error


def _stopped(tracking: Tracking, status: str, message: str, code: int) -> int:
    tracking.finish(status, message)
    notice(message)
    return code


def train_ppo(config: Config, tracking: Tracking) -> None:
    """Build the parts and train by reinforcement."""
    from verl.planning import compare
    from verl.tracking.profiler import announce
    from verl.trainer.ppo_trainer import PPOTrainer

    with running(config, tracking) as (parts, total_steps):
        announce(config, total_steps, tracking.notice)
        tracking.event("plan", total_steps=total_steps, device=parts.workers.describe)
        PPOTrainer(config, parts, total_steps).fit()
        if pairs := compare.compared(config, tracking.run_dir):
            tracking.event("planned", pairs, message=compare.lines(pairs))


@contextmanager
def running(config: Config, tracking: Tracking) -> Iterator[tuple[Parts, int]]:
    """The parts of a run and its number of steps; all processes and models are given back at the end."""
    import asyncio

    from verl.rollout.event_loop import BackgroundLoop
    from verl.tracking.timer import Phases, Watchdog
    from verl.trainer.parts import build_parts

    phases = Phases()
    watchdog = Watchdog(phases, config.trainer.watchdog_timeout, tracking.event)
    ahead = config.trainer.max_staleness or config.trainer.weight_sync_every > 1
    with BackgroundLoop() if ahead else asyncio.Runner() as loop, watchdog:
        with phases("start-up", waits_for="data, models and workers"):
            parts, total_steps = build_parts(config, tracking, loop, phases, watchdog.hooks(tracking))
        try:
            gc.collect()
            gc.freeze()  # a full collection would look at torch's hundreds of thousands of objects again each time
            with interrupt.patient():
                yield parts, total_steps
        finally:
            loop.run(parts.rollouts.stop())
            parts.checkpoints.finish()
            parts.rewards.close()
            parts.workers.close()
            gc.unfreeze()
