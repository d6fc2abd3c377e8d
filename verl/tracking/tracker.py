"""One place to tell things to: `Tracking` passes metrics on to the run folder, the console and the trackers.

The run folder is opened at once (events, config, versions); metrics.jsonl and the trackers at the first record or
at `resumed`, because only then it is known at which step this life of the run starts.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.tracking import answers, console
from verl.tracking.backend import ALIASES, Backend, Session, Unavailable, open_backend
from verl.tracking.dumps import Dumper
from verl.tracking.names import NOT_ON_CONSOLE, Number, finite, in_order, plain_metrics, with_aliases
from verl.tracking.run_folder import TRAJECTORIES, RunFolder, mask_secrets

_SHUFFLE_SEED = 42


class Tracking:
    """Opens the run folder at `run_dir` and sends every record where `trainer.logger` says.

    `config`: the run's configuration (`trainer.` group and `to_dict()` are used). `resume_step`: the saved step
    this run goes on from, if known already; else `event("resume", step=…)` or `resumed(step)` says it before the
    first record. `tokenizer` may be set later; with it answers are dumped with the text of every token.
    Nothing here raises for a tracker or a full disk: what fails is told once and the run goes on.
    """

    def __init__(
        self, config: Any, run_dir: Path | str, *, resume_step: int | None = None, tokenizer: Any = None
    ) -> None:
        self.run_dir = Path(run_dir).expanduser()
        self._trainer = config.trainer
        logger = _setting(self._trainer, "logger", ["console"])
        self._names = [logger] if isinstance(logger, str) else list(logger or [])
        self._config = mask_secrets(config.to_dict())
        self._folder = RunFolder(self.run_dir, console.notice)
        self._folder.write_static(self._config)
        self._events_lock = threading.Lock()
        self._backends: dict[str, Backend] = {}
        self._dumper = Dumper(self.event)
        self._progress: console.Progress | None = None
        self._step = 0
        self._bad_names: set[str] = set()
        self._validations: list[tuple[int, dict[str, Number]]] = []
        self._status: str | None = None
        self._closed = False
        self.tokenizer = tokenizer
        self._texts = answers.TokenTexts(tokenizer)
        self.event("run_start", run_dir=str(self.run_dir))
        if resume_step is not None:
            self.resumed(resume_step)

    # ------------------------------------------------------------------------------ events and notices

    def event(self, kind: str, record: Mapping[str, Any] | None = None, /, **fields: Any) -> None:
        """One line of events.jsonl: {"time", "event": kind, …}, fields from `record` and keywords. Any thread.

        A field `message` is also shown on stderr. `event("resume", step=k)` calls `resumed(k)`.
        """
        fields = {**(record or {}), **fields}
        self._write_event(kind, fields)
        if fields.get("message"):
            console.notice(str(fields["message"]))
        if kind == "resume" and not self._folder.begun:
            self.resumed(int(fields["step"]))

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
        numbers = None if record is None else in_order(with_aliases(plain_metrics(record)[0]))
        self._begin(step, numbers)

    def _begin(self, resume_step: int | None, record: Mapping[str, Number] | None = None) -> None:
        """Open metrics.jsonl and the trackers; once."""
        self._step = resume_step or 0
        moved = self._folder.begin(resume_step, record)
        if moved:
            after = "" if resume_step is None else f" after step {resume_step}"
            self.notice(f"{moved} records{after} of an earlier run of this folder are kept in superseded/")
        self._open_backends(resume_step)

    def _open_backends(self, resume_step: int | None) -> None:
        session = Session(
            project=str(_setting(self._trainer, "project_name", "verl")),
            experiment=str(_setting(self._trainer, "experiment_name", "run")),
            run_dir=self.run_dir,
            config=self._config,
            proxy=_setting(self._trainer, "wandb_proxy", None),
            resume_step=resume_step,
        )
        for name in dict.fromkeys(ALIASES.get(name, name) for name in self._names):
            if name == "console":
                continue
            try:
                self._backends[name] = open_backend(name, session, self.notice)
            except Unavailable as error:
                self.notice(f"tracker {name}: {error}")
            except Exception as error:
                self.notice(
                    f"tracker {name} does not start ({type(error).__name__}: {error}); the run goes on without"
                )

    # ------------------------------------------------------------------------------------ the records

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """The record of a step: metrics.jsonl and trackers (with second spellings), and the console line.

        Values are turned into plain ints and floats; a value that is no number is left out and told once. NaN is
        `nan` on the console, null in JSON, absent for trackers.
        """
        if not self._folder.begun:
            self._begin(None)
        numbers, bad = plain_metrics(metrics)
        for name in set(bad) - self._bad_names:
            self._bad_names.add(name)
            self.notice(f"metric {name} is no number ({type(metrics[name]).__name__}) and is left out")
        full = in_order(with_aliases(numbers))
        self._folder.metrics(step, full)
        self._step = step
        if "console" in self._names:
            console.show_step(step, full)
        sent = finite(full)
        for name in list(self._backends):
            self._guard(name, lambda backend: backend.log(step, sent))
        if self._progress is not None and step > 0:
            self._progress.advance_to(step)

    def _guard(self, name: str, call: Callable[[Backend], None]) -> None:
        """Use a tracker; one that fails is told once and dropped."""
        try:
            call(self._backends[name])
        except Exception as error:
            del self._backends[name]
            self.notice(
                f"tracker {name} failed ({type(error).__name__}: {error}); the run goes on without it"
            )

    def data_report(self, *datasets: Any) -> None:
        """Bad rows of the datasets into data_report.jsonl, their counts as events, their summary on stderr.

        A dataset offers `bad_rows` (records), `report` (counts) and `describe()` (lines); None is passed over.
        """
        found = [dataset for dataset in datasets if dataset is not None]
        self._folder.data_report(row for dataset in found for row in dataset.bad_rows)
        for dataset in found:
            self.event("data", **dataset.report)
            for text in dataset.describe():
                console.notice(text)

    def rows_refused(self, records: Sequence[Mapping[str, Any]]) -> None:
        """The rows that made a data set unusable, into data_report.jsonl."""
        if records:
            self._folder.data_report(records)

    def dump_trajectories(self, step: int, batch: Sequence[Any] | Any, tokenizer: Any = None) -> None:
        """Up to 64 answers in whole groups to trajectories/{step}.jsonl; all to `trainer.rollout_data_dir`.

        Rows are taken here and now; files are written by a thread.
        """
        if not self._folder.begun:
            self._begin(None)
        tokenizer = self._use(tokenizer)
        every = list(batch)
        rows = answers.report_rows(step, answers.sampled(every), self._texts, tokenizer)
        self._dumper.submit(self.run_dir / TRAJECTORIES / f"{step}.jsonl", lambda: rows)
        self._dump(_setting(self._trainer, "rollout_data_dir", None), step, every, tokenizer)

    def validation(self, step: int, batch: Any, metrics: Mapping[str, Any], tokenizer: Any = None) -> None:
        """Answers and metrics of one validation; the record itself is `log`'s business.

        Writes `trainer.validation_data_dir`, sends `trainer.log_val_generations` answers to trackers with
        tables, and prints `Initial validation metrics: …` the first time before training.
        """
        if not self._folder.begun:
            self._begin(None)
        tokenizer = self._use(tokenizer)
        every = list(batch)
        numbers, _ = plain_metrics(metrics)
        if not self._validations and step == 0:
            console.say(f"Initial validation metrics: {_shown(numbers)}")
        self._validations.append((step, numbers))
        self._dump(_setting(self._trainer, "validation_data_dir", None), step, every, tokenizer)
        count = int(_setting(self._trainer, "log_val_generations", 0) or 0)
        if count > 0 and self._backends:
            rows = _table_rows(step, every, count, tokenizer)
            for name in list(self._backends):
                self._guard(name, lambda backend: backend.table(step, rows))

    def _use(self, tokenizer: Any) -> Any:
        if tokenizer is None:
            tokenizer = self.tokenizer
        if tokenizer is not self._texts.tokenizer:
            self._texts = answers.TokenTexts(tokenizer)
        return tokenizer

    def _dump(self, directory: str | None, step: int, every: list[Any], tokenizer: Any) -> None:
        if directory:
            rows = answers.dump_rows(step, every, tokenizer)
            self._dumper.submit(Path(directory).expanduser() / f"{step}.jsonl", lambda: rows)

    # -------------------------------------------------------------------------------------- progress

    def start_progress(self, total_steps: int, done: int = 0) -> None:
        """Show the bar `Training Progress`; `log` moves it."""
        self._step, self._progress = done, console.Progress(total_steps, done)

    def progress(
        self, what: str, total: int | None = None, beat: Callable[[], None] = lambda: None
    ) -> Callable[[int], None]:
        """A callback for things that finish inside a step (responses): shown beside the bar. `beat` is called each time."""
        done = 0

        def advance(count: int = 1) -> None:
            nonlocal done
            done += count
            beat()
            if self._progress is not None:
                self._progress.detail(f"{what} {done}" + (f"/{total}" if total else ""))

        return advance

    # ------------------------------------------------------------------------------------------- end

    def finish(self, status: str, message: str = "") -> None:
        """How the run ended: "finished", "failed", "interrupted", …; kept in events.jsonl. The first call counts."""
        if self._status is not None:
            return
        self._status = status
        if status == "finished" and self._validations and self._validations[-1][0] >= self._step:
            console.say(f"Final validation metrics: {_shown(self._validations[-1][1])}")
        with self._events_lock:
            self._folder.events.append(
                {
                    "time": time.time(),
                    "event": "run_end",
                    "status": status,
                    "step": self._step,
                    "text": message,
                }
            )

    def flush(self) -> None:
        """Wait until the dumps submitted so far are on disk."""
        self._dumper.flush()

    def close(self) -> None:
        """Write everything out and let the trackers go. May be called twice."""
        if self._closed:
            return
        self._closed = True
        if self._progress is not None:
            self._progress.close()
        self._dumper.close()
        for name in list(self._backends):
            self._guard(name, lambda backend: backend.close())
        self._backends.clear()
        self._folder.close()


def _setting(group: Any, name: str, default: Any) -> Any:
    """A key of a config group that not every entry point has."""
    return getattr(group, name, default)


def _shown(metrics: Mapping[str, Number]) -> dict[str, Number]:
    return in_order({name: value for name, value in metrics.items() if name not in NOT_ON_CONSOLE})


def _table_rows(step: int, every: list[Any], count: int, tokenizer: Any) -> list[list[Any]]:
    """Rows (step, input, output, score) of `count` answers, always the same ones: fixed shuffle, seed 42."""
    order = sorted(
        range(len(every)), key=lambda i: (answers.prompt_text(every[i], tokenizer), every[i].index)
    )
    random.Random(_SHUFFLE_SEED).shuffle(order)
    return [
        [step, answers.prompt_text(t, tokenizer), answers.answer_text(t, tokenizer), t.score]
        for t in (every[i] for i in order[:count])
    ]
