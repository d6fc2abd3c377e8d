"""Build a run's report: one HTML file that needs no network, from the files of the run folder.

Model output is hostile by assumption. It reaches the page only as JSON inside a data block whose
`<`, `>` and `&` are escaped, the page's script writes it as text nodes only, and a content security
policy with hashes lets no script or style run but the ones built in here.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
import statistics
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from verl.data.files import written_whole
from verl.report import summary
from verl.report.charts import chart_list
from verl.report.compare import differences, joined
from verl.report.read import Metrics, Record, Run, kind_of, number, read_run, text_of
from verl.report.responses import Packed, PageLimits, pack_responses
from verl.tracking.jsonl import jsonable
from verl.tracking.names import rule

SCRIPTS = (
    *("vendor/uPlot-LICENSE.js", "vendor/uPlot.iife.min.js", "core.js", "charts.js"),
    *("scores.js", "work.js", "responses.js", "tokens.js", "lists.js", "app.js"),
)
SERIES_BYTES = 2_000_000
POINTS = 1_500
LANES = 12
"""Steps whose work is drawn over time."""

_LOSSES = ("sampler_died", "sampler_silent", "cluster_lost")
_UNSAFE = re.compile("[<>&\u2028\u2029\ud800-\udfff]")
_SLOT = re.compile(r"\{\{(\w+)\}\}")


def write_report(run_dir: Path, limits: PageLimits | None = None, beside: Path | None = None) -> Path:
    """Write `run_dir/report.html`, whole or not at all, and return its path. beside: the folder of another run, whose
    curves the charts show too.

    Raises FileNotFoundError if the folder is absent, OSError if it cannot be written. Files that are
    missing or torn only make the page shorter; it says what could not be read.
    """
    others = [read_run(beside)] if beside is not None else []
    page = build_page(joined(read_run(Path(run_dir)), *others), limits)
    target = Path(run_dir) / "report.html"
    with written_whole(target) as draft:
        draft.write_bytes(page.encode("utf-8"))
    return target


def build_page(run: Run, limits: PageLimits | None = None, data: Record | None = None) -> str:
    """The page's text for a run that was read. data: its `page_data`, where that is there already."""
    if data is None:
        data = page_data(run, pack_responses(run.response_files, run.unreadable, limits))
    style = _part("vendor/uPlot.min.css") + _part("style.css")
    script = "\n".join(_part(name) for name in SCRIPTS)
    sources = f"script-src '{_hash(script)}'; style-src '{_hash(style)}'"
    connect = " connect-src 'self';" if data.get("live") else ""
    policy = f"default-src 'none'; {sources};{connect} img-src data:; base-uri 'none'; form-action 'none'"
    title = html.escape(" · ".join(reversed(names(run))))
    slots = {"title": title, "policy": html.escape(policy), "style": style, "script": script, "data": escape_json(data)}
    # One pass over the template: text that was put in is never searched for slots again.
    return _SLOT.sub(lambda m: slots[m.group(1)], _part("page.html"))


def table_page(title: str, intro: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A page in the report's style that holds one table, of plain text; no script."""
    style = _part("style.css")
    policy = f"default-src 'none'; style-src '{_hash(style)}'; base-uri 'none'; form-action 'none'"
    head, *body = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in (header, *rows))
    table = "".join(f"<tr>{cells}</tr>" for cells in body)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark">\n<title>{html.escape(title)}</title>'
        f'<style>{style}</style></head>\n<body><main><section class="masthead"><h1>{html.escape(title)}</h1>'
        f'<p>{html.escape(intro)}</p></section>\n<section><div class="table-box"><table class="scores"><thead><tr>'
        f"{head.replace('td>', 'th>')}</tr></thead><tbody>{table}</tbody></table></div></section></main></body></html>"
        "\n"
    )


def page_data(run: Run, responses: Packed) -> Record:
    """The object the page's script reads; plain JSON types only."""
    project, experiment = names(run)
    steps, curves = run.metrics.steps, run.curves or run.metrics
    times = [t for t in run.metrics.times if t is not None]
    return {
        "built": time.time(),
        "project": project,
        "experiment": experiment,
        "folder": str(run.path),
        "status": summary.status(run),
        "lastStep": steps[-1] if steps else None,
        "totalSteps": summary.total_steps(run),
        "elapsed": summary.elapsed(run.metrics),
        "times": {"first": times[0] if times else None, "last": times[-1] if times else None},
        "model": summary.model_name(run),
        "device": summary.device_name(run),
        "facts": summary.facts(run),
        "headline": summary.headline(run.metrics),
        "charts": chart_list(curves, _other_name(run)),
        "lanes": lanes(run.timeline),
        "planned": planned(run),
        "differences": differences(run, run.other) if run.other else None,
        "series": thin(curves),
        "marks": _marks(run),
        "events": [_event(e) for e in run.events.shown],
        "eventCounts": dict(run.events.counts.most_common(60)),
        "eventTotal": run.events.counts.total(),
        "config": summary.flatten(run.config),
        "versions": summary.flatten(run.versions),
        "unreadable": dict(run.unreadable),
        "responses": {name: getattr(responses, name) for name in ("rows", "prompts", "tokens", "images", "steps")}
        | {"stepsOnDisk": responses.steps_on_disk},
    }


def lanes(timeline: list[Record]) -> list[Record]:
    """The newest steps of `timeline.jsonl`: when the sampler had requests and what the trainer did."""
    shown = [record for record in timeline if number(record.get("begin")) and number(record.get("end"))]
    return [
        {key: record.get(key) for key in ("step", "begin", "end", "sampler", "trainer")} for record in shown[-LANES:]
    ]


def planned(run: Run) -> list[tuple[str, float, float]]:
    """(phase, planned, measured) of the newest comparison of the run with its plan."""
    events = [event for event in run.events.marks if kind_of(event) == "planned"]
    pairs = events[-1].items() if events else ()
    return [(str(name), *pair) for name, pair in pairs if isinstance(pair, list) and all(map(number, pair))]


def names(run: Run) -> tuple[str, str]:
    """(project, experiment) from the config, else from the folders' names."""
    folder = run.path.resolve()
    project = summary.lookup(run.config, "trainer.project_name") or folder.parent.name
    experiment = summary.lookup(run.config, "trainer.experiment_name") or folder.name
    return str(project), str(experiment)


def _other_name(run: Run) -> str:
    """The other run's experiment, or its folder where both have one name."""
    if run.other is None:
        return ""
    name = names(run.other)[1]
    return name if name != names(run)[1] else run.other.path.resolve().name


def escape_json(value: Any) -> str:
    """JSON that can stand in a script element: no markup characters, no lone surrogates, no NaN."""
    style: Record = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
    try:
        text = json.dumps(value, **style)
    except (ValueError, TypeError):
        # Something from a user's file that JSON lacks; rare, and the slow walk finds it.
        text = json.dumps(jsonable(value), **style)
    return _UNSAFE.sub(lambda m: f"\\u{ord(m.group()):04x}", text)


def thin(metrics: Metrics) -> Record:
    """Columns for the page, at most `POINTS` points each and about `SERIES_BYTES` bytes in all.

    `every` consecutive steps become one point: maximum, minimum or mean of what is there, by `names.rule`. The point's
    step is the last.
    """
    count = len(metrics.steps)
    room = max(50, SERIES_BYTES // (8 * max(1, len(metrics.columns))))
    every = max(1, math.ceil(count / min(POINTS, room)))
    columns = {}
    for name, column in metrics.columns.items():
        columns[name] = [_digits(v) for v in (column if every == 1 else _buckets(column, every, name))]
    ends = range(every - 1, count + every - 1, every)
    return {"steps": [metrics.steps[min(e, count - 1)] for e in ends], "columns": columns, "every": every}


def _buckets(column: list[float | None], every: int, name: str) -> list[float | None]:
    pick = {"max": max, "min": min, "mean": statistics.fmean}[rule(name)]
    parts = ([v for v in column[at : at + every] if v is not None] for at in range(0, len(column), every))
    return [pick(values) if values else None for values in parts]


def _digits(value: float | None) -> float | int | None:
    if value is None:
        return None
    if value == int(value) and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.5g}")


def _marks(run: Run) -> list[Record]:
    """What the curves show as a line: resumes, and workers that were lost."""
    losses = [e for e in run.events.shown if kind_of(e) in _LOSSES and isinstance(e.get("step"), int)]
    resumes = [e for e in run.events.marks if kind_of(e) == "resumed"]
    return [{"kind": kind_of(m), "step": m.get("step")} for m in [*resumes, *losses]][-50:]


def _event(event: Record) -> Record:
    shown = {"time", "step", "level", "message", "text", "event"}
    fields = [(k, v) for k, v in event.items() if k not in shown]
    message = event.get("message", event.get("text"))
    return {
        "time": number(event.get("time")),
        "step": event.get("step") if isinstance(event.get("step"), int) else None,
        "level": str(event.get("level") or ""),
        "kind": kind_of(event),
        "message": text_of(message, 2000),
        "rest": {str(k): text_of(v, 2000) for k, v in fields[:20]},
    }


def _part(name: str) -> str:
    return (resources.files("verl.report") / "page" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
