"""One place to tell things to: `Tracking` passes metrics on to the run folder, the console and the trackers.

The run folder is opened at once (events, config, versions); metrics.jsonl and the trackers at the first record or
at `resumed`, because only then it is known at which step this life of the run starts.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from verl.config.schema.base import Root, setting
from verl.tracking import console, responses
from verl.tracking.journal import Journal
from verl.tracking.jsonl import line, write_lines
from verl.tracking.metrics_table import NOT_ON_CONSOLE, in_order, with_aliases
from verl.tracking.names import Number, plain_metrics
from verl.tracking.run_folder import JOURNAL, NOW, TRAJECTORIES, LiveReport, RunFolder, mask_secrets
from verl.tracking.trackers import ALIASES, Tracker, TrackerSession, Unavailable, open_tracker
from verl.trajectory import Batch, Trajectory

_SHUFFLE_SEED = 42


class Tracking:
    """Opens the run folder at `run_dir` and sends every record to the trackers of `trainer.logger`.

    `config`: the run's configuration (`trainer.` group and `to_dict()` are used). `resumed(step)` comes before the
    first record of a run that goes on. `tokenizer` may be set later; with it responses are dumped with the text of
    every token. Nothing here raises for a tracker or a full disk: what fails is told once and the run goes on.
    """

    def __init__(self, config: Root, run_dir: Path | str, *, tokenizer: Any = None) -> None:
        self.run_dir = Path(run_dir).expanduser()
        self._trainer = setting(config, "trainer")
        logger = setting(self._trainer, "logger", ["console"])
        self._names = [logger] if isinstance(logger, str) else list(logger or [])
        self._config = mask_secrets(config.to_dict())
        self._folder = RunFolder(self.run_dir, console.notice)
        self._folder.write_static(self._config)
        self._events_lock = threading.Lock()
        self._trackers: dict[str, Tracker] = {}
        self._dumper = responses.Dumper(self.event)
        gigabytes = float(setting(self._trainer, "journal", 0.0))
        self._journal = Journal(self.run_dir / JOURNAL, gigabytes * 2**30, self._dumper.submit)
        self._progress: console.Progress | None = None
        self._step = 0
        self._finished = 0
        self._now = self.run_dir / TRAJECTORIES / NOW
        self._bad_names: set[str] = set()
        self._validations: list[tuple[int, dict[str, Number]]] = []
        self._status: str | None = None
        self._closed = False
        self._page = LiveReport(self.run_dir, self.flush, self.event)
        self.unsaved = ""
        """What the run says last, before it ends with status 4: its last checkpoint could not be written."""
        self.tokenizer = tokenizer
        self._texts = responses.TokenTexts(tokenizer)
        self.event("run_start", run_dir=str(self.run_dir))

    # ------------------------------------------------------------------------------ events and notices

    def event(self, kind: str, record: Mapping[str, Any] | None = None, /, **fields: Any) -> None:
        """One line of events.jsonl: {"time", "event": kind, …}, fields from `record` and keywords. Any thread.

        A field `message` is also shown on stderr.
        """
        fields = {**(record or {}), **fields}
        self._write_event(kind, fields)
        if fields.get("message"):
            console.notice(str(fields["message"]))

    def event_of_step(self, kind: str, **fields: Any) -> None:
        """`event` of what befell the step under way: it says which one that is."""
        under_way = {} if self._progress is None else {"step": self._step + 1}
        self.event(kind, under_way, **fields)

    def _write_event(self, kind: str, fields: Mapping[str, Any]) -> None:
        head = {"time": time.time(), "event": kind}
        with self._events_lock:
            self._folder.events.append(head | {k: v for k, v in fields.items() if k not in head})

    def notice(self, text: str) -> None:
        """One line on stderr, kept as an event."""
        console.notice(text)
        self._write_event("notice", {"text": text})

    def resumed(self, step: int, record: Mapping[str, Any] | None = None) -> None:
        """This run goes on after the saved `step`: later records of an earlier life move to superseded/.

        `record`: the metrics of that step as kept in the checkpoint. They are logged now if the earlier life was
        killed after the checkpoint was sealed and before the step was logged.
        """
        self._begin(step, None if record is None else in_order(with_aliases(plain_metrics(record)[0])))

    def _begin(self, resume_step: int | None = None, record: Mapping[str, Number] | None = None) -> None:
        """Open metrics.jsonl and the trackers; once."""
        if self._folder.begun:
            return
        self._step = resume_step or 0
        moved = self._folder.begin(resume_step, record)
        if moved:
            after = "" if resume_step is None else f" after step {resume_step}"
            self.notice(f"{moved} records{after} of an earlier run of this folder are kept in superseded/")
        project, experiment, proxy = (
            setting(self._trainer, key) for key in ("project_name", "experiment_name", "wandb_proxy")
        )
        session = TrackerSession(
            str(project or "verl"), str(experiment or "run"), self.run_dir, self._config, proxy, resume_step
        )
        for name in dict.fromkeys(ALIASES.get(name, name) for name in self._names if name != "console"):
            try:
                self._trackers[name] = open_tracker(name, session, self.notice)
            except Unavailable as error:
                self.notice(f"tracker {name}: {error}")
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
                self.notice(f"tracker {name} does not start ({problem}); the run goes on without")

    def rely_on(self, what: str, path: Path) -> None:
        """Say so if this path is gone at a later record; it replaces the one before of the same `what`."""
        self._folder.relied_on[what] = path

    # ------------------------------------------------------------------------------------ the records

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """The record of a step: metrics.jsonl and trackers (with second spellings), and the console line.

        Values are turned into plain ints and floats; a value that is no number is left out and told once. NaN is
        `nan` on the console, null in JSON, absent for trackers.
        """
        self._begin()
        numbers, bad = plain_metrics(metrics)
        for name in set(bad) - self._bad_names:
            self.notice(f"metric {name} is no number ({type(metrics[name]).__name__}) and is left out")
        self._bad_names.update(bad)
        full = in_order(with_aliases(numbers))
        self._folder.metrics(step, full)
        self._step = step
        if "console" in self._names:
            console.show_step(step, full)
        sent = {name: value for name, value in full.items() if math.isfinite(value)}
        self._tell_trackers(lambda tracker: tracker.log(step, sent))
        if self._progress is not None and step > 0:
            self._progress.advance_to(step)

    def _tell_trackers(self, call: Callable[[Tracker], None]) -> None:
        """Use every tracker; one that fails is told once and dropped."""
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as error:
                del self._trackers[name]
                problem = f"{type(error).__name__}: {error}"
                self.notice(f"tracker {name} failed ({problem}); the run goes on without it")

    def data_report(self, *datasets: Any) -> None:
        """Bad rows of the datasets into data_report.jsonl, their counts as events, their summary on stderr.

        A dataset offers `bad_rows` (records), `report` (counts) and `describe()` (lines); None is passed over.
        """
        present = [dataset for dataset in datasets if dataset is not None]
        self.bad_rows(row for dataset in present for row in dataset.bad_rows)
        for dataset in present:
            self.event("data", **dataset.report)
            for text in dataset.describe():
                console.notice(text)

    def bad_rows(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Rows that cannot be used into data_report.jsonl, in place of what it says."""
        self._folder.data_report(records)

    def finished(self, trajectory: Trajectory) -> None:
        """Show a response of the step under way in trajectories/now.jsonl, which the page takes for the newest step;
        `dump_trajectories` removes the file."""
        if self._progress is None or self._finished >= responses.FINISHED:
            return
        self._finished += 1
        row = responses.finished_row(self._step + 1, trajectory, self.tokenizer)
        try:
            self._now.parent.mkdir(exist_ok=True)
            with self._now.open("ab") as file:
                file.write(line(row))
        except OSError as error:
            self._finished = responses.FINISHED
            self._write_event("dump_failed", {"path": str(self._now), "error": str(error)})

    def dump_trajectories(self, step: int, batch: Iterable[Trajectory]) -> None:
        """Up to 64 responses in whole groups to trajectories/{step}.jsonl; all to `trainer.rollout_data_dir`.

        Rows are taken here and now; files are written by a thread.
        """
        self._begin()
        if self._texts.tokenizer is not self.tokenizer:
            self._texts = responses.TokenTexts(self.tokenizer)
        every = list(batch)
        self._forget_finished()
        rows = responses.report_rows(step, responses.sampled(every), self._texts)
        self._dumper.submit(self.run_dir / TRAJECTORIES / f"{step}.jsonl", partial(write_lines, records=rows))
        self._dump_all("rollout_data_dir", step, every)

    def keep(self, step: int, batch: Batch, **about: Any) -> None:
        """Write what the step was made of to journal/, within `trainer.journal`, in the thread."""
        self._journal.add(step, batch, about)

    def validation(self, step: int, batch: Iterable[Trajectory], metrics: Mapping[str, Any]) -> None:
        """Responses and metrics of one validation; the record itself is `log`'s business.

        Writes `trainer.validation_data_dir`, sends `trainer.log_val_generations` responses to trackers with
        tables, and prints `Initial validation metrics: …` the first time before training.
        """
        self._begin()
        every = list(batch)
        numbers, _ = plain_metrics(metrics)
        if not self._validations and step == 0:
            console.say(f"Initial validation metrics: {_shown(numbers)}")
        self._validations.append((step, numbers))
        self._dump_all("validation_data_dir", step, every)
        if self._trackers and (count := int(setting(self._trainer, "log_val_generations", 0))) > 0:
            rows = _table_rows(step, every, count, self.tokenizer)
            self._tell_trackers(lambda tracker: tracker.table(step, rows))

    def _forget_finished(self) -> None:
        self._finished = 0
        with suppress(OSError):
            self._now.unlink(missing_ok=True)

    def _dump_all(self, key: str, step: int, every: list[Trajectory]) -> None:
        if directory := setting(self._trainer, key):
            rows = responses.dump_rows(step, every, self.tokenizer)
            self._dumper.submit(Path(directory).expanduser() / f"{step}.jsonl", partial(write_lines, records=rows))

    # -------------------------------------------------------------------------------------- progress

    def start_progress(self, total_steps: int, done: int = 0) -> None:
        """Show the bar `Training Progress`; `log` moves it."""
        self._step, self._progress = done, console.Progress(total_steps, done)

    def progress(
        self, what: str, total: int | None = None, beat: Callable[[], None] = lambda: None
    ) -> Callable[[int], None]:
        """A callback for items that finish in a step (responses): shown beside the bar. `beat` is called each time."""
        count_so_far = 0

        def advance(count: int = 1) -> None:
            nonlocal count_so_far
            count_so_far += count
            beat()
            if self._progress is not None:
                self._progress.detail(f"{what} {count_so_far}" + (f"/{total}" if total else ""))

        return advance

    # ------------------------------------------------------------------------------------------- end

    def finish(self, status: str, message: str = "") -> None:
        """How the run ended: "finished", "failed", "interrupted", …; the first call is kept in events.jsonl."""
        first, self._status = self._status is None, status
        if not first:
            return
        if status == "finished" and self._validations and self._validations[-1][0] >= self._step:
            console.say(f"Final validation metrics: {_shown(self._validations[-1][1])}")
        self._write_event("run_end", {"status": status, "step": self._step, "text": message})

    def write_page(self, *, last: bool = False) -> None:
        """Rewrite `report.html` if it is time; see `LiveReport.write`."""
        self._page.write(last=last)

    def flush(self) -> None:
        """Wait until the dumps submitted so far are on disk."""
        self._dumper.flush()

    def close(self) -> None:
        """Write everything out, close the trackers; list the folder of a run that finished. May be called twice."""
        if self._closed:
            return
        self._closed = True
        if self._progress is not None:
            self._progress.close()
        self._dumper.close()
        self._forget_finished()
        self._tell_trackers(lambda tracker: tracker.close())
        if self._status == "finished":
            self.notice(f"finished; {self.run_dir} {self._contents()}")
        self._folder.close()

    def _contents(self) -> str:
        """What the run folder has of this run, in words."""
        missing = self._folder.unwritten() + self._dumper.failed
        if self._page.failing or not (self.run_dir / "report.html").exists():
            missing.insert(0, "report.html")
        missing += ["its last checkpoint"] if self.unsaved else []
        if missing:
            further = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            return f"lacks {', '.join(missing[:3])}{further}, which could not be written"
        return "has all of this run, report.html to begin with"


def _shown(metrics: Mapping[str, Number]) -> dict[str, Number]:
    return in_order({name: value for name, value in metrics.items() if name not in NOT_ON_CONSOLE})


def _table_rows(step: int, every: list[Trajectory], count: int, tokenizer: Any) -> list[list[Any]]:
    """Rows (step, input, output, score) of `count` responses, always the same ones: fixed shuffle, seed 42."""
    rows = [(responses.prompt_text(t, tokenizer), t.index, t) for t in every]
    rows.sort(key=lambda row: row[:2])
    random.Random(_SHUFFLE_SEED).shuffle(rows)
    return [[step, text, responses.response_text(t, tokenizer), t.score] for text, _, t in rows[:count]]
