"""vLLM's processes in tests are forked from one that has imported vLLM: as vLLM starts them, each would import it
again, which takes eight seconds of a core, and take it apart in the end, which takes two.

`use()` makes vLLM do so in this process. `variables()` is the environment of a run that does it, too: this module is
then one of its plug-ins. tests/integration/test_vllm_vision.py does without, as a user's run.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from multiprocessing import context, forkserver, popen_forkserver
from typing import Any
from unittest import mock

from tests import vllm_drafts, vllm_linear_attention
from verl.engine.rollout.vllm import launch
from verl.platform.processes import alive, process_start_time

ADDRESS = "VERL_TEST_VLLM_PROCESSES"
"""In the environment: the socket of the server that forks."""
PRELOAD = [
    "torch",
    "transformers",
    "verl.engine.rollout.vllm.worker",
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.attention.backends.cpu_attn",
]


def variables() -> dict[str, str]:
    """Environment of a run whose vLLM shares this process's server, which is started if it is not there."""
    return {"VERL_USE_EXTERNAL_MODULES": __name__, ADDRESS: _address()}


def use() -> None:
    """From now on vLLM gets its processes from the server."""
    launch.start = _start_forked


def _start_forked(arguments: dict[str, Any]) -> Any:
    _patch()
    return _start(arguments)


def _patch() -> None:
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    utils.get_mp_context = multiproc_executor.get_mp_context = _Context
    _spread_experts()
    vllm_drafts.mend()
    if vllm_drafts.RECORD in os.environ:
        vllm_drafts.record()
    vllm_linear_attention.add_float32()


@functools.cache
def _spread_experts() -> None:
    """What vLLM lacks on a CPU for experts that are spread over ranks: its kernel takes every expert for one of its
    own, and its groups do not gather parts of different lengths."""
    import torch
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    apply = CPUUnquantizedExperts.apply

    def local(self: Any, *, topk_ids: Any, topk_weights: Any, expert_map: Any, **rest: Any) -> None:
        if expert_map is not None:
            topk_ids = expert_map[topk_ids.long()]
            topk_weights = topk_weights.masked_fill(topk_ids < 0, 0.0)
            topk_ids = topk_ids.clamp(min=0).int()
        apply(self, topk_ids=topk_ids, topk_weights=topk_weights, expert_map=expert_map, **rest)

    def gather(self: Any, parts: Any, dim: int = 0, sizes: Any = None) -> Any:
        if not isinstance(parts, list):
            return gather(self, [parts], dim, sizes)[0]
        whole = []
        for part in parts:
            padded = part.new_zeros(max(sizes), *part.shape[1:])
            padded[: len(part)] = part
            pieces = self.all_gather(padded, 0).split(max(sizes))
            whole.append(torch.cat([piece[:size] for piece, size in zip(pieces, sizes, strict=True)]))
        return whole

    def scatter(self: Any, whole: Any, dim: int = 0, sizes: Any = None) -> Any:
        return self.all_reduce(whole.contiguous()).split(sizes)[self.rank_in_group].clone()

    CPUUnquantizedExperts.apply = local
    CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = gather, scatter


@functools.cache
def _address() -> str:
    """Of the server: another process's, or of this process's own, which ends with it."""
    if ADDRESS not in os.environ:
        _own.set_forkserver_preload(PRELOAD)
        with mock.patch.dict(os.environ, VLLM_LOGGING_LEVEL="WARNING", OMP_NUM_THREADS="1"):
            _own.ensure_running()
        return str(_own._forkserver_address)
    return os.environ[ADDRESS]


_own: Any = forkserver.ForkServer()
_start = launch.start


def _connect(handles: list[int]) -> tuple[int, int]:
    """As `multiprocessing.forkserver.connect_to_new_process`, to the server at the address."""
    client: Any = forkserver.ForkServer()
    client.ensure_running = lambda: None
    client._forkserver_address, client._forkserver_alive_fd = _address(), os.open(os.devnull, os.O_RDONLY)
    try:
        return client.connect_to_new_process(handles)
    finally:
        os.close(client._forkserver_alive_fd)


def _end_with(parent: int) -> None:
    started = process_start_time(parent)
    while started and alive(parent, started):
        time.sleep(0.5)
    time.sleep(4)  # a worker that has begun removes what it shares
    os._exit(1)


class _Process(context.ForkServerProcess):
    """Has the environment of the process that starts it, which it takes for its parent."""

    @staticmethod
    def _Popen(process: Any) -> Any:  # the name of multiprocessing
        with mock.patch.object(forkserver, "connect_to_new_process", _connect):
            return popen_forkserver.Popen(process)

    def start(self) -> None:
        self._variables = {**os.environ, ADDRESS: _address()}
        super().start()

    def run(self) -> None:
        import torch

        os.environ.clear()
        os.environ.update(self._variables)
        torch.set_num_threads(int(self._variables.get("OMP_NUM_THREADS", 1)))
        os.getppid = lambda: self._parent_pid
        # Those of a user's run are known by a variable that they were started with (`processes.started_by`).
        threading.Thread(target=_end_with, args=(self._parent_pid,), daemon=True).start()
        _patch()
        super().run()


class _Context(context.ForkServerContext):
    Process = _Process


if ADDRESS in os.environ:  # a plug-in of a run
    use()
