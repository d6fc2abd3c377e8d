"""Run a function in several processes that have joined a gloo group, for tests of what ranks do on_all_ranks.

    results = ranks.run(function, 2, argument, …)      # function(argument, …) on ranks 0 and 1

`function` must be importable by name (top level of a test module). Its results come back in rank order. A rank that
raises makes `run` raise with that rank's traceback; ranks that do not end in time are killed, and the stacks that
they were in are part of the message.
"""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import pickle
import random
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEVICE = os.environ.get("VERL_TEST_DEVICE", "cpu")
"""What engines of the contract suites work on: "npu" under `python -m tests.pretend_npu pytest …`."""

# One server per test process imports this once (tests of an engine add to it); every rank is a copy of it and starts
# in milliseconds.
PRELOAD = ["torch.distributed.fsdp", "verl.engine.training.fsdp.engine", "tests.warm"]


def run(function: Callable[..., Any], size: int, *args: Any, timeout: float = 90.0, join: bool = True) -> list[Any]:
    """function(*args) on `size` ranks → their results. RuntimeError with the first failed rank's traceback.

    join=False: the ranks have not met, but the environment says how to, as torchrun would.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            child = context.Process(
                target=_child,
                args=(theirs, rank, size, port if join else -port, timeout, folder, function, args),
                daemon=True,
            )
            child.start()
            theirs.close()
            pipes.append(ours)
            processes.append(child)
        try:
            return _collect(pipes, processes, timeout + 5, Path(folder))
        finally:
            for child in processes:
                if child.is_alive():
                    child.kill()
                child.join()


def free_port() -> int:
    """A port that was free a moment ago. Not one of those that the system, or Ray to its workers, deals out: somebody
    else would have it before it is used."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue


def listens(port: int) -> bool:
    """Whether somebody answers at a port of this machine."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _collect(pipes: list[Any], processes: list[Any], timeout: float, folder: Path) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = mp.connection.wait(waiting, max(0.0, deadline - time.monotonic()))  # type: ignore[attr-defined]
        if not ready:
            stacks = "\n".join(f"rank {f.stem}:\n{f.read_text()}" for f in sorted(folder.glob("*.stack")))
            raise RuntimeError(f"ranks {sorted(set(range(len(pipes))) - set(results))} do not end\n{stacks}")
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                kind, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join()
                kind, value = "failed", f"the process died with exit code {processes[rank].exitcode}"
            if kind == "failed":
                raise RuntimeError(f"rank {rank} failed\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _child(pipe: Any, rank: int, size: int, port: int, timeout: float, folder: str, function: Any, args: Any) -> None:
    import torch
    import torch.distributed as dist

    from tests import pretend_npu
    from verl.engine.training.process_group import init_process_group
    from verl.platform import detect

    stacks = open(Path(folder) / f"{rank}.stack", "w")  # noqa: SIM115
    faulthandler.dump_traceback_later(timeout, file=stacks)
    torch.set_num_threads(1)
    try:
        if DEVICE == "npu":
            pretend_npu.install()
        if port > 0:
            init_process_group(rank, size, "127.0.0.1", port, detect(DEVICE), timeout)
        else:
            _as_torchrun(rank, size, -port)
        result = function(*args)
        # Not pipe.send: torch would share the memory of tensors with a process that is about to end.
        pipe.send_bytes(pickle.dumps(("done", result)))
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        pipe.send_bytes(pickle.dumps(("failed", traceback.format_exc())))
        os._exit(1)


def _as_torchrun(rank: int, size: int, port: int) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
