"""Take a picture of a run's report for the README: `python -m tests.report_picture RUN OUT.png [--dark] [--tokens]`."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.integration.chromium import Page
from verl.report import write_report


def main() -> None:
    """Build the report and save what a window of the given size shows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--width", type=int, default=1400)
    parser.add_argument("--height", type=int, default=1180)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--whole", action="store_true", help="the whole page instead of the window")
    parser.add_argument("--tokens", action="store_true", help="with the newest step's first response open")
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as profile,
        Page(Path(profile), args.width, args.height, dark=args.dark) as page,
    ):
        page.open(write_report(args.run))
        if args.tokens:
            page.eval("R.openResponse(R.visibleResponses[0])")
        page.screenshot(args.out, whole=args.whole)
    print(args.out)


if __name__ == "__main__":
    main()
