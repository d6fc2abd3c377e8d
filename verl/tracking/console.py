"""What a person sees: one line per step on stdout, a table on a terminal, the progress bar and notices on stderr.

A stream that is lost (a pipe whose reader has gone, a full disk) ends no run: see `spare`.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TextIO, cast

from verl.tracking.metrics_table import NOT_ON_CONSOLE, in_order
from verl.tracking.names import Number

SPARSE_SECONDS = 10.0
_TABLE = (
    ("score", "critic/score/mean"),
    ("val", "val/accuracy"),
    ("entropy", "actor/entropy"),
    ("pg loss", "actor/pg_loss"),
    ("kl", "actor/ppo_kl"),
    ("clip", "actor/pg_clipfrac"),
    ("grad", "actor/grad_norm"),
    ("length", "response_length/mean"),
    ("cut", "response_length/clip_ratio"),
    ("|Δlogp|", "training/rollout_logprob_abs_diff/max"),
    ("s/step", "timing_s/step"),
    ("gen s", "timing_s/gen"),
    ("update s", "timing_s/update_actor"),
    ("tok/s", "perf/throughput"),
)


def step_line(step: int, metrics: Mapping[str, Number]) -> str:
    """`step:12 - name:value - …`: fields by " - ", value after the last ":", values as repr of int or float."""
    shown = in_order({name: value for name, value in metrics.items() if name not in NOT_ON_CONSOLE})
    return " - ".join([f"step:{step}", *(f"{name}:{value!r}" for name, value in shown.items())])


def one_line(text: Any) -> str:
    """Text on one line: line breaks and control characters spelt out."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))


def say(text: str) -> None:
    """One line on stdout; characters that its encoding lacks (a lone surrogate) are spelt out."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def notice(text: str) -> None:
    """One notice on stderr."""
    print(f"verl: {text}", file=sys.stderr, flush=True)


def show_step(step: int, metrics: Mapping[str, Number]) -> None:
    """The step's line; a terminal also gets a short table."""
    say(step_line(step, metrics))
    if sys.stdout.isatty():
        _show_table(step, metrics)


def _show_table(step: int, metrics: Mapping[str, Number]) -> None:
    from rich.console import Console
    from rich.table import Table

    cells = [(title, metrics[name]) for title, name in _TABLE if name in metrics]
    if not cells:
        return
    table = Table(title=f"step {step}", title_justify="left", show_edge=False, pad_edge=False)
    for title, _ in cells:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_row(*(f"{value:.4g}" for _, value in cells))
    Console(file=sys.stdout).print(table)


class Progress:
    """`Training Progress` on stderr: a live bar on a terminal, a sparse plain line with the remaining time else.

    `advance_to(done)` counts whole steps; `part(name, total)` gives a callback for what happens inside one.
    """

    def __init__(self, total: int, done: int = 0, title: str = "Training Progress"):
        self.total = total
        self._title = title
        self._start_done = self._done = done
        self._started = self._last_shown = time.monotonic()
        self._live: Any = None
        if sys.stderr.isatty():
            self._live = _live_bar()
            self._live.start()
            self._task = self._live.add_task(title, total=total, completed=done, detail="")
        elif done < total:
            notice(f"{title}: {done}/{total}")

    def advance_to(self, done: int) -> None:
        """Whole steps done so far."""
        self._done = done
        if self._live is not None:
            self._live.update(self._task, completed=done, detail="")
            return
        now = time.monotonic()
        first = done == self._start_done + 1
        if first or done >= self.total or now - self._last_shown >= SPARSE_SECONDS:
            self._last_shown = now
            notice(self._text(now))

    def detail(self, text: str) -> None:
        """What happens inside the step right now ("gen 37/128"); a pipe hears of it only when nothing else came."""
        if self._live is not None:
            self._live.update(self._task, detail=text)
            return
        now = time.monotonic()
        if now - self._last_shown >= 3 * SPARSE_SECONDS:
            self._last_shown = now
            notice(f"{self._title}: {self._done}/{self.total}, {text}")

    def _text(self, now: float) -> str:
        steps = max(1, self._done - self._start_done)
        pace = (now - self._started) / steps
        elapsed = timedelta(seconds=round(now - self._started))
        remaining = timedelta(seconds=round(pace * (self.total - self._done)))
        share = 100 * self._done / max(1, self.total)
        times = f"{pace:.1f} s/step, {elapsed} so far, {remaining} to go"
        return f"{self._title}: {self._done}/{self.total} ({share:.0f}%), {times}"

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def _live_bar() -> Any:
    from rich import progress
    from rich.console import Console

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("left"),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[detail]}"),
        console=Console(stderr=True),
        # Redirecting stdout sends it through stderr's console: only right when both are the same terminal.
        redirect_stdout=sys.stdout.isatty(),
    )


class LossyStream:
    """A text stream that drops failed writes: there is nowhere to report them, and records are kept elsewhere."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        """Write what can be written."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Hand on what can be handed on."""
        with contextlib.suppress(OSError):  # the stream keeps it for the next time
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def spare() -> None:
    """Replace both streams of this process, for as long as it lives: its end flushes them, too."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, LossyStream):
            setattr(sys, name, cast(TextIO, LossyStream(stream)))
