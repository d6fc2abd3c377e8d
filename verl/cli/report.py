"""`verl report RUN`: build a run's page and print where it is."""

from __future__ import annotations

import argparse
from pathlib import Path

from verl.errors import UserError

FILES = ("metrics.jsonl", "events.jsonl", "config.yaml", "trajectories")


def find_run(path: Path) -> Path:
    """The run folder that a path means: itself, or the parent of a file or checkpoint inside one.

    UserError where neither holds a run's files, with the run folders that are below, if any.
    """
    path = path.expanduser()
    for place in (path, path.parent):
        if place.is_dir() and any((place / name).exists() for name in FILES):
            return place
    if not path.exists():
        raise UserError(f"{path} does not exist")
    below = sorted({p.parent for depth in ("*", "*/*") for p in path.glob(f"{depth}/metrics.jsonl")})
    hint = f"; run folders below it: {', '.join(map(str, below[:5]))}" if below else ""
    raise UserError(f"{path} is not a run folder: none of {', '.join(FILES)} is in it{hint}")


def main(argv: list[str]) -> int:
    """Build the page; 0, or 2 with one line on what is wrong."""
    about = "Build report.html of a run: curves, sampled responses, events, config; one file, no network."
    parser = argparse.ArgumentParser(prog="verl report", description=about)
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder (trainer.default_local_dir)")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    args = parser.parse_args(argv)
    from verl.report import write_report

    try:
        page = write_report(find_run(args.run))
    except OSError as error:
        raise UserError(f"the page cannot be written: {error}") from error
    print(page)
    if args.open:
        import webbrowser

        if not webbrowser.open(page.resolve().as_uri()):
            raise UserError(f"no browser could be started here; open {page} yourself")
    return 0
