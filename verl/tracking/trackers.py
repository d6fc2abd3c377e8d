"""Trackers: where `trainer.logger` sends the metrics of a run besides its folder and the console.

A tracker is one class and one line of `TRACKERS`. An exception from it ends its use, never the run.
"""

from __future__ import annotations

import netrc
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlparse

from verl.tracking.jsonl import JsonLines

T = TypeVar("T")
ALIASES = {"tracking": "wandb"}
LATER = ("vemlp_wandb",)
_UNNAMEABLE = re.compile(r"[^\w\-./ :]", re.ASCII)
"""Characters that MLflow refuses in names."""
START_SECONDS = 60.0
CLOSE_SECONDS = 120.0


class Unavailable(Exception):
    """A tracker that cannot be used here; the message says why and what to do."""


@dataclass(slots=True)
class TrackerSession:
    """What a tracker is told about the run. `config` is plain containers with secrets masked."""

    project: str
    experiment: str
    run_dir: Path
    config: dict[str, Any] = field(default_factory=dict)
    proxy: str | None = None
    resume_step: int | None = None


class Tracker:
    """One tracker. `say` shows the user a line. ImportError where it is not installed, Unavailable where it is not set
    up or not logged in."""

    def __init__(self, session: TrackerSession, say: Callable[[str], None]):
        pass

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Finite plain numbers of one step."""

    def table(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """Validation responses: rows of (step, input, output, score). A tracker without tables ignores it."""

    def close(self) -> None:
        """Write everything out."""


class FileTracker(Tracker):
    """A second JSON-lines file at VERL_FILE_LOGGER_PATH, else VERL_FILE_LOGGER_ROOT/{project}/{experiment}.jsonl, whose
    root is the working folder unless set."""

    def __init__(self, session: TrackerSession, say: Callable[[str], None]):
        path, root = os.environ.get("VERL_FILE_LOGGER_PATH"), os.environ.get("VERL_FILE_LOGGER_ROOT") or "."
        place = Path(path or f"{root}/{session.project}/{session.experiment}.jsonl").expanduser()
        place.parent.mkdir(parents=True, exist_ok=True)
        self._lines = JsonLines(place, say)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line, `{"step": n, "data": {…}}`."""
        self._lines.append({"step": step, "data": dict(metrics)})

    def close(self) -> None:
        """Sync and close."""
        self._lines.close()


class TensorBoardTracker(Tracker):
    """Scalars under TENSORBOARD_DIR, else tensorboard_log/{project}/{experiment}, written with the tensorboard package
    alone (no torch, no TensorFlow). A resumed run tells TensorBoard to forget what was logged after the saved step."""

    def __init__(self, session: TrackerSession, say: Callable[[str], None]):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        default = Path("tensorboard_log", session.project, session.experiment)
        directory = Path(os.environ.get("TENSORBOARD_DIR") or default).expanduser()
        directory.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(directory), flush_secs=10)
        if session.resume_step is not None:
            self._add(session.resume_step + 1, session_log=SessionLog(status=SessionLog.START))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One event with all scalars of the step."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(step, summary=self._summary(value=values))
        self._writer.flush()

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), step=step, **content))

    def close(self) -> None:
        """Write everything out."""
        self._writer.close()


class WandbTracker(Tracker):
    """One W&B run: online when logged in, offline when asked; it never asks and never blocks.

    The run's id is kept in the run folder, so that a resumed run goes on in it.
    """

    def __init__(self, session: TrackerSession, say: Callable[[str], None]):
        import wandb

        self._wandb = wandb
        mode = os.environ.get("WANDB_MODE", "online").lower()
        if mode in ("online", "shared", "run", "") and not logged_in(wandb):
            offline = "set WANDB_MODE=offline to log to disk and `wandb sync` later"
            raise Unavailable(f"not logged in; run `wandb login` or set WANDB_API_KEY, or {offline}")
        patience: dict[str, Any] = {"init_timeout": START_SECONDS, "login_timeout": 5}
        start = partial(
            wandb.init,
            project=session.project,
            name=session.experiment,
            config=session.config,
            dir=str(session.run_dir),
            id=_run_id(session, "wandb"),
            resume="allow" if session.resume_step is not None else None,
            entity=os.environ.get("WANDB_ENTITY"),
            settings=wandb.Settings(**patience, console="off", https_proxy=session.proxy),
        )
        self._run: Any = _within(START_SECONDS + 10, "starting", start)
        self._rows: list[list[Any]] = []
        if mode == "offline":
            say(f"wandb: offline; `wandb sync {Path(self._run.dir).parent}` uploads the run later")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """All metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def table(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """Grow the table val/generations."""
        self._rows += [list(row) for row in rows]
        table = self._wandb.Table(columns=["step", "input", "output", "score"], data=list(self._rows))
        self._run.log({"val/generations": table}, step=step)

    def close(self) -> None:
        """Finish the run; gives up after a while when the server cannot be reached."""
        _within(CLOSE_SECONDS, "uploading the rest", self._run.finish)


class SwanLabTracker(Tracker):
    """One SwanLab run; SWANLAB_MODE=offline or local writes below the run folder. A resumed run goes on in it."""

    def __init__(self, session: TrackerSession, say: Callable[[str], None]):
        import swanlab

        mode = os.environ.get("SWANLAB_MODE", "online")
        if mode in ("online", "cloud"):
            if "SWANLAB_API_KEY" not in os.environ and not Path("~/.swanlab/.netrc").expanduser().exists():
                raise Unavailable("not logged in; run `swanlab login`, or set SWANLAB_API_KEY or SWANLAB_MODE=offline")
            mode = "online"
        self._swanlab = swanlab
        start: Callable[[], Any] = partial(
            swanlab.init,
            project=session.project,
            name=session.experiment,
            config=session.config,
            log_dir=os.environ.get("SWANLAB_LOG_DIR") or str(session.run_dir / "swanlab"),
            mode=mode,
            id=_run_id(session, "swanlab"),
            resume="allow" if session.resume_step is not None else None,
        )
        _within(START_SECONDS, "starting", start)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """All metrics of a step."""
        self._swanlab.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run."""
        _within(CLOSE_SECONDS, "uploading the rest", self._swanlab.finish)


class MlflowTracker(Tracker):
    """One MLflow run at MLFLOW_TRACKING_URI, by default a folder below the run's own. A resumed run goes on in it."""

    def __init__(self, session: TrackerSession, say: Callable[[str], None]):
        import mlflow

        folder = f"sqlite:///{session.run_dir.absolute()}/mlflow.db"
        self._client = mlflow.MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or folder)
        self._run: str = _within(START_SECONDS, "starting", partial(self._start, session))

    def _start(self, session: TrackerSession) -> str:
        kept = session.run_dir / "mlflow_run_id.txt"
        if session.resume_step is not None and kept.is_file():
            return kept.read_text("utf-8").strip()
        experiment = self._client.get_experiment_by_name(session.project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(session.project)
        run = str(self._client.create_run(number, run_name=session.experiment).info.run_id)
        for name, value in flat(session.config):
            self._client.log_param(run, _UNNAMEABLE.sub("_", name), str(value)[:500])
        kept.write_text(run, "utf-8")
        return run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """All metrics of a step; characters that MLflow refuses in names are `_`."""
        for name, value in metrics.items():
            self._client.log_metric(self._run, _UNNAMEABLE.sub("_", name), value, step=step)

    def close(self) -> None:
        """Mark the run as ended."""
        self._client.set_terminated(self._run)


class ClearMLTracker(Tracker):
    """One ClearML task. A resumed run goes on in it."""

    def __init__(self, session: TrackerSession, say: Callable[[str], None]):
        from clearml import Task

        kept = session.run_dir / "clearml_run_id.txt"
        earlier = kept.read_text("utf-8").strip() if session.resume_step is not None and kept.is_file() else False
        options: dict[str, Any] = dict.fromkeys(
            ("auto_connect_frameworks", "auto_connect_arg_parser", "output_uri"), False
        )
        # 0: steps of a task that goes on are the run's; True would add those that it has.
        options |= {"reuse_last_task_id": earlier, "continue_last_task": 0 if earlier else False}
        start = partial(Task.init, project_name=session.project, task_name=session.experiment, **options)
        self._task: Any = _within(START_SECONDS, "starting", start)
        self._task.connect_configuration(session.config, name="Hyperparameters")
        kept.write_text(self._task.id, "utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """A scalar for each metric: its first part is the plot, the rest the curve in it."""
        logger = self._task.get_logger()
        for name, value in metrics.items():
            title, _, series = name.partition("/")
            logger.report_scalar(title, series or title, value, iteration=step)

    def close(self) -> None:
        """Send the rest."""
        _within(CLOSE_SECONDS, "uploading the rest", self._task.close)


class TrackioTracker(Tracker):
    """One trackio run, in its local database (TRACKIO_DIR). A resumed run goes on in the one of its name."""

    def __init__(self, session: TrackerSession, say: Callable[[str], None]):
        import trackio

        resume = "allow" if session.resume_step is not None else "never"
        names = {"project": session.project, "name": session.experiment}
        start = partial(trackio.init, **names, config=session.config, resume=resume, embed=False)
        self._run: Any = _within(START_SECONDS, "starting", start)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """All metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Write everything out."""
        _within(CLOSE_SECONDS, "writing the rest", self._run.finish)


TRACKERS = {
    "file": FileTracker,
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "swanlab": SwanLabTracker,
    "mlflow": MlflowTracker,
    "clearml": ClearMLTracker,
    "trackio": TrackioTracker,
}


def open_tracker(name: str, session: TrackerSession, say: Callable[[str], None]) -> Tracker:
    """The tracker of a name. Unavailable if there is none, or it cannot be used here."""
    if name in TRACKERS:
        try:
            return TRACKERS[name](session, say)
        except ImportError as error:
            why = f"the {name} package is not installed ({error}); pip install {name}"
            raise Unavailable(why) from error
    names = ", ".join(("console", *TRACKERS, *ALIASES, *LATER))
    later = "not in this release; metrics.jsonl in the run folder has everything"
    raise Unavailable(later if name in LATER else f"there is no such tracker; known: {names}")


def logged_in(wandb: Any) -> bool:
    """True if an API key is at hand: environment, settings, or the netrc file of the server's host."""
    settings = wandb.Settings()
    credentials = os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE")
    if credentials or getattr(settings, "api_key", None):
        return True
    host = urlparse(str(os.environ.get("WANDB_BASE_URL") or settings.base_url)).hostname
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return host is not None and netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every leaf of nested mappings."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _run_id(session: TrackerSession, tracker: str) -> str:
    """The id of this folder's run in a tracker: kept over a resume, new for a fresh start."""
    path = session.run_dir / f"{tracker}_run_id.txt"
    if session.resume_step is not None and path.is_file():
        return path.read_text("utf-8").strip()
    new = os.urandom(4).hex()
    path.write_text(new, "utf-8")
    return new


def _within(seconds: float, what: str, call: Callable[[], T]) -> T:
    """Result or error of a call made in a thread, or Unavailable when it takes too long."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # a library that calls sys.exit does not end the run
            safe = isinstance(error, Exception)
            future.set_exception(error if safe else Unavailable(f"{what}: {type(error).__name__}: {error}"))

    threading.Thread(target=work, daemon=True, name="tracker").start()
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.done():  # the call's own
            raise
        raise Unavailable(f"{what} took more than {seconds:.0f} s") from None
