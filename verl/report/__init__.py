"""The run's page: `write_report(run_dir)` makes `report.html`, one file that needs no network."""

from __future__ import annotations

from verl.report.build import build_page, write_report
from verl.report.read import read_run

__all__ = ["build_page", "read_run", "write_report"]
