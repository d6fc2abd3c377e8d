"""What a test cluster's nodes run instead of Ray's `setup_worker.py` and `default_worker.py`: the worker is forked from
the cluster's fork server, which has imported everything, rather than started. That takes milliseconds instead of
seconds of a core.

Only the standard library is imported here. This process lives as long as its worker does.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from typing import Any

SERVER, WORKER = "VERL_TEST_FORK_SERVER", "VERL_TEST_RAY_WORKER"
"""In a node's environment: the fork server's socket, and Ray's own `default_worker.py`."""


def main() -> int:
    """Ask for the worker and wait for its end; returns its exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    options, argv = parser.parse_known_args()
    if argv[0] == __file__:  # as the setup of a worker it is told what to start: itself, as the worker
        del argv[0]
    path = os.environ[WORKER]
    context = json.loads(options.serialized_runtime_env_context or "{}")
    environment = {**os.environ, **(context.get("env_vars") or {})}
    if context.get("command_prefix"):  # a profiler around it
        words = [*context["command_prefix"], sys.executable, path, *argv]
        os.execvpe("bash", ["bash", "-c", " ".join(["exec", *words])], environment)
    return forked(os.environ[SERVER], {"path": path, "argv": argv, "environment": environment})


def forked(address: str, order: dict[str, Any]) -> int:
    """Have the server at that socket fork a process with this one's folder and streams; returns its exit status."""
    streams = f"/proc/{os.getpid()}/fd"
    order |= {"id": 0, "cwd": os.getcwd(), "stdout": f"{streams}/1", "stderr": f"{streams}/2"}
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        server.sendall(json.dumps(order).encode() + b"\n")
        with server.makefile() as messages:
            for message in map(json.loads, messages):
                if "status" in message:
                    return abs(int(message["status"]))
    return 1


if __name__ == "__main__":
    sys.exit(main())
