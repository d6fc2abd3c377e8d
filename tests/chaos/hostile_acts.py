"""What code of a user's may do to the process that runs it, to the run's files and to shared memory. Rewards, tools and
environments of the tests do the same."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

MANY = "x" * 20_000_000
ENDS = {
    "exec": "SIGKILL|took more than|exit code|answered nothing",
    "SIGTERM": "SIGTERM",
    "SIGALRM": "SIGALRM",
    "close": "SIGKILL|took more than|exit code|answered nothing",
    "end": "exit code 7",
}
"""Ends its process → what is said of that."""
STOPS = ("stop", "block")
"""Has its process do nothing any more."""
RAISES = {"exit": "SystemExit", "cancel": "CancelledError", "streams": "OSError"}
"""Raises what hardly any `except` is meant for → its name."""
GOES_ON = ("fork", "flood", "deaf", "unlink")
"""Harms nothing that is not its own."""


def act(name: str, folder: Path) -> Any:
    """Do it; returns what the code then gives back. "unlink" deletes the files that the file "unlink" in `folder`
    lists."""
    match name:
        case "fork":
            os.fork()
        case "exec":
            os.execv("/bin/sleep", ["sleep", "600"])
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        case "SIGALRM":
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            time.sleep(600)
        case "deaf":
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        case "close":
            os.closerange(0, 256)
        case "streams":
            os.closerange(1, 3)
            sys.stderr.write("lost\n")
        case "block":
            time.sleep(600)
        case "end":
            os._exit(7)
        case "exit":
            sys.exit(7)
        case "cancel":
            raise asyncio.CancelledError
        case "flood":
            for _ in range(2000):
                print("x" * 10_000)
        case "huge":
            return MANY
        case "unlink":
            for path in (folder / "unlink").read_text().split():
                os.unlink(path)
    return "done"
