"""Starting SGLang's engine and its processes."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import os
import signal
from typing import Any

from verl.engine.registry import EnginePackageError
from verl.engine.rollout.hosted import Process
from verl.engine.rollout.sglang import ENGINE
from verl.errors import UserError
from verl.platform.host_resources import cpu_binding
from verl.platform.processes import process_start_time, started_by


async def start(arguments: dict[str, Any], cpu: bool) -> tuple[Any, set[Process]]:
    """SGLang's engine, tied to the running loop, or its part on a node that is not the first; and its processes.
    EnginePackageError where SGLang cannot be imported, UserError where it refuses its arguments."""
    if cpu:
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    for name, value in ENGINE.environment.items():
        os.environ.setdefault(name, value)
    policy = asyncio.get_event_loop_policy()
    try:
        from sglang.srt.entrypoints.engine import Engine
    except (ImportError, OSError) as error:
        raise EnginePackageError(f"SGLang {ENGINE.installed()} cannot be imported: {error}") from error
    finally:  # it sets uvloop's, with which no other loop of this process, the run's own for one, starts a program
        asyncio.set_event_loop_policy(policy)
    # A process of SGLang that fails sends this signal to its parent, which it would end. Python sets handlers only in
    # the main thread.
    ctypes.CDLL(None).signal(signal.SIGQUIT, ctypes.c_void_p(signal.SIG_IGN))
    variables = started_by(os.getpid()) | {
        "SGLANG_VLM_CACHE_SIZE_MB": "0",  # of images it would remember what the weights before have made
        "SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0",  # a part returns when it is ready, not at its end
    }
    ranks, bind = arguments["tp_size"], "SGLANG_CPU_OMP_THREADS_BIND"
    if cpu and ranks > 1 and bind not in os.environ:
        # By itself it takes one rank for each memory node, wherever the others of the engine are.
        variables[bind] = cpu_binding(ranks // arguments.get("nnodes", 1), sorted(os.sched_getaffinity(0)))
    os.environ |= variables
    try:
        engine = Engine(**arguments)
    except (ValueError, TypeError) as error:
        raise UserError(f"SGLang refuses its arguments: {str(error)[:1500]}") from error
    finally:
        for name in variables:
            os.environ.pop(name, None)
        with contextlib.suppress(NameError):
            atexit.unregister(engine.shutdown)
    return engine, {(pid, process_start_time(pid)) for pid in engine.get_all_child_pids()}
