"""`verl report RUN --serve`: the run's page over HTTP on this machine; it grows while the run goes.

GET /TOKEN/       the page
GET /TOKEN/data   what it shows, as JSON; 204 where nothing is new. `tag`, `responses`: the tags of what the page has
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from verl.report.build import build_page, escape_json, page_data
from verl.report.compare import joined
from verl.report.read import Events, GrowingLines, Record, Run, add_rows, columns_of, read_run
from verl.report.responses import Packed, pack_responses

POLL_S = 2.0
"""A page asks for news so often; less often where an answer takes longer than a tenth of that to make."""


class FollowedRun:
    """A run folder that is read again as it grows: metrics and events from where the last reading ended."""

    def __init__(self, path: Path):
        self.path = path
        self._unreadable: Counter[str] = Counter()
        self._metrics = GrowingLines(path / "metrics.jsonl", self._unreadable)
        self._event_lines = GrowingLines(path / "events.jsonl", self._unreadable)
        self._rows: dict[int, Record] = {}
        self._events = Events()

    def state(self) -> str:
        """Changes with any of the files that a page is made of."""
        names = (
            "metrics.jsonl",
            "events.jsonl",
            "timeline.jsonl",
            "config.yaml",
            "trajectories",
            "trajectories/now.jsonl",
        )
        parts = []
        for name in names:
            try:
                status = (self.path / name).stat()
                parts.append(f"{status.st_ino} {status.st_size} {status.st_mtime_ns}")
            except OSError:
                parts.append("-")
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]

    def read(self) -> Run:
        """The run as it is now."""
        run = read_run(self.path, growing=True)
        records = self._metrics.new()
        if self._metrics.started_anew:
            self._rows.clear()
        add_rows(self._rows, records, "metrics.jsonl", self._unreadable)
        events = self._event_lines.new()
        if self._event_lines.started_anew:
            self._events = Events()
        self._events.add(events)
        run.metrics, run.events = columns_of(self._rows), self._events
        run.unreadable.update(self._unreadable)
        return run


class LivePage:
    """The page of one run, or of one beside another, and its data. Safe to ask from several threads."""

    def __init__(self, paths: Sequence[Path]):
        self._runs = [FollowedRun(path) for path in paths]
        self._lock = threading.Lock()
        self._tag, self._data = "", dict[str, Any]()
        self._responses = "", Packed()
        self._poll = POLL_S

    def page(self) -> str:
        """The whole page."""
        with self._lock:
            self._refresh()
            return build_page(self._run, data=self._data | {"live": True})

    def news(self, tag: str, responses: str) -> str | None:
        """JSON of the data, without responses that the page has; None where the page has all there is."""
        with self._lock:
            self._refresh()
            if tag == self._tag:
                return None
            known = responses == self._data["responsesTag"]
            return escape_json({k: v for k, v in self._data.items() if not (known and k == "responses")})

    def _refresh(self) -> None:
        tag = "-".join(run.state() for run in self._runs)
        if tag == self._tag:
            return
        since = time.monotonic()
        self._run, *others = [run.read() for run in self._runs]
        self._run = joined(self._run, *others)
        files = self._run.response_files
        newest = next(reversed(files.values()), None)
        key = f"{len(files)}-{newest.stem}-{newest.stat().st_size}" if newest is not None else "0"
        if key != self._responses[0]:
            self._responses = key, pack_responses(files, self._run.unreadable)
        self._data = page_data(self._run, self._responses[1])
        self._data |= {"tag": tag, "responsesTag": key, "poll": max(POLL_S, 10 * (time.monotonic() - since))}
        self._tag = tag


def open_server(paths: Sequence[Path], host: str = "127.0.0.1", port: int = 0) -> tuple[ThreadingHTTPServer, str]:
    """(a server, not yet running; the address of its page, whose token nobody can guess). OSError: the port is
    taken."""
    token = secrets.token_urlsafe(16)
    live = LivePage(paths)
    server = ThreadingHTTPServer((host, port), _handler(live, token))
    server.daemon_threads = True
    return server, f"http://{host}:{server.server_address[1]}/{token}/"


def _handler(live: LivePage, token: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            address = urlsplit(self.path)
            _, _, rest = address.path.partition("/")
            key, _, name = rest.partition("/")
            if not secrets.compare_digest(key.encode(), token.encode()) or name not in ("", "data"):
                self.send_error(404)
            elif name == "":
                self._answer(live.page, "text/html; charset=utf-8")
            else:
                asked = parse_qs(address.query)
                tag, responses = (asked.get(field, [""])[0] for field in ("tag", "responses"))
                self._answer(lambda: live.news(tag, responses), "application/json")

        def _answer(self, make: Callable[[], str | None], kind: str) -> None:
            try:
                text = make()
            except OSError as error:  # the folder went away
                self.send_error(503, explain=str(error))
                return
            body = (text or "").encode()
            self.send_response(200 if body else 204)
            for header, value in (
                ("Content-Type", kind),
                ("Content-Length", str(len(body))),
                ("Cache-Control", "no-store"),
                ("Referrer-Policy", "no-referrer"),
                ("X-Content-Type-Options", "nosniff"),
            ):
                self.send_header(header, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Requests are not shown."""

    return Handler
