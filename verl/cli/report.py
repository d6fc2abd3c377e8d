"""`verl report RUN [OTHER]`: build a run's page and print where it is, or serve it (`--serve`)."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from verl.errors import UserError

FILES = ("metrics.jsonl", "events.jsonl", "config.yaml", "trajectories")


def find_run(path: Path) -> Path:
    """The run folder that a path means: itself, or the parent of a file or checkpoint inside one.

    UserError where neither holds a run's files, with the run folders that are below, if any.
    """
    path = path.expanduser()
    if not path.exists():
        raise UserError(f"{path} does not exist")
    for place in (path, path.parent):
        if place.is_dir() and any((place / name).exists() for name in FILES):
            return place
    below = sorted({p.parent for depth in ("*", "*/*") for p in path.glob(f"{depth}/metrics.jsonl")})
    hint = f"; run folders below it: {', '.join(map(str, below[:5]))}" if below else ""
    raise UserError(f"{path} is not a run folder: none of {', '.join(FILES)} is in it{hint}")


def main(argv: list[str]) -> int:
    """Build or serve the page; 0, or 2 with one line on what is wrong."""
    about = "Build report.html of a run: curves, sampled responses, events, config; one file, no network."
    parser = argparse.ArgumentParser(prog="verl report", description=about)
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder (trainer.default_local_dir)")
    parser.add_argument("other", type=Path, metavar="OTHER", nargs="?", help="another run, drawn beside it")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    parser.add_argument("--serve", action="store_true", help="serve a page that grows while the run goes, until Ctrl-C")
    parser.add_argument("--host", default="127.0.0.1", help="with --serve: the address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=0, help="with --serve: the port (default: a free one)")
    args = parser.parse_intermixed_args(argv)
    folders = [find_run(path) for path in (args.run, args.other) if path is not None]
    if args.serve:
        return _serve(folders, args)
    from verl.report import write_report

    try:
        page = write_report(folders[0], beside=folders[1] if args.other else None)
    except OSError as error:
        raise UserError(f"the page cannot be written: {error}") from error
    print(page)
    if args.open:
        _browse(page.resolve().as_uri())
    return 0


def _serve(folders: list[Path], args: argparse.Namespace) -> int:
    from verl.report.serve import open_server

    try:
        server, address = open_server(folders, args.host, args.port)
    except (OSError, OverflowError) as error:
        raise UserError(f"--host={args.host} --port={args.port}: {error}") from error
    print(address, flush=True)
    if args.open:
        _browse(address)
    with server, contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
    return 0


def _browse(address: str) -> None:
    import webbrowser

    if not webbrowser.open(address):
        raise UserError(f"no browser could be started here; open {address} yourself")
