"""What a machine or its container has: cores and memory, what the control group says of them, and who heeds it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from verl.engine.rollout.native.cache import KVCacheLayout, default_cache_tokens
from verl.engine.rollout.vllm import launch
from verl.engine.rollout.vllm.arguments import EngineSettings, cache_bytes
from verl.platform import host_resources
from verl.platform.cpu import CpuPlatform
from verl.reward.pool import FunctionSpec, ScoringPool

EIGHT = set(range(8))


@pytest.fixture
def quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A machine of eight cores whose control group has this cpu.max; nobody chose a number of threads."""
    monkeypatch.setattr(host_resources, "cgroups", lambda controller: [tmp_path / "inner", tmp_path])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: EIGHT, raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return lambda text: (tmp_path / "cpu.max").write_text(f"{text}\n") and None


@pytest.mark.parametrize(
    ("text", "allowed", "usable", "limit"),
    [
        ("max 100000", None, 8, None),
        ("250000 100000", 2.5, 2, 2),
        ("50000 100000", 0.5, 1, 1),
        ("800000 100000", 8.0, 8, None),
        ("1600000 100000", 16.0, 8, None),
    ],
)
def test_a_quota_is_heeded_where_it_is_less_than_the_cores(
    quota: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    allowed: float | None,
    usable: int,
    limit: int | None,
) -> None:
    quota(text)
    assert (
        host_resources.cores() == (8, allowed)
        and host_resources.usable() == usable
        and host_resources.thread_limit() == limit
    )
    assert ScoringPool(FunctionSpec(), workers=4)._cpus == usable
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert host_resources.thread_limit() is None and host_resources.usable() == usable, "who says a number gets it"


def test_the_tightest_quota_of_either_version_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = [tmp_path / name for name in ("a", "b", "c")]
    monkeypatch.setattr(host_resources, "cgroups", lambda controller: places)
    for place in places:
        place.mkdir()
    (places[0] / "cpu.max").write_text("max 100000\n")
    (places[1] / "cpu.max").write_text("300000 100000\n")
    (places[2] / "cpu.cfs_quota_us").write_text("-1\n")
    (places[2] / "cpu.cfs_period_us").write_text("100000\n")
    assert host_resources.cores()[1] == 3.0
    (places[2] / "cpu.cfs_quota_us").write_text("150000\n")
    assert host_resources.cores()[1] == 1.5


def test_a_processor_computes_with_no_more_threads_than_the_quota(
    quota: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [8]
    monkeypatch.setattr(torch, "get_num_threads", lambda: now[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: now.__setitem__(0, count))
    quota("max 100000")
    CpuPlatform().prepare()
    assert now == [8]
    quota("350000 100000")
    CpuPlatform().prepare()
    assert now == [3]
    now[0] = 1
    CpuPlatform().prepare()
    assert now == [1], "never raised"


def test_vllm_starts_as_many_threads_and_binds_none(
    quota: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)

    def inside(cpu: bool, ranks: int) -> tuple[str | None, str | None]:
        with launch.environment(cpu, ranks, "folder"):
            found = os.environ.get("OMP_NUM_THREADS"), os.environ.get("VLLM_CPU_OMP_THREADS_BIND")
        assert "OMP_NUM_THREADS" not in os.environ
        return found

    quota("350000 100000")
    assert inside(True, 1) == ("3", "nobind") and inside(True, 2) == ("1", "nobind")
    assert inside(True, 8) == ("1", "nobind") and inside(False, 2) == (None, None)
    quota("max 100000")
    assert inside(True, 1) == (None, None) and inside(True, 2) == (None, "0,1,2,3|4,5,6,7")
    quota("350000 100000")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-3")
    assert inside(True, 1) == (None, "0-3"), "who binds chose"


def test_it_costs_no_torch() -> None:
    code = "import sys, verl.preflight.doctor, verl.platform.host_resources; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# -- memory --------------------------------------------------------------------------------------------------


GIB = 1 << 30
TEXT = """Node {n} MemTotal:       {total} kB
Node {n} MemFree:        {free} kB
Node {n} Active(anon):   999 kB
Node {n} Active(file):   100 kB
Node {n} Inactive(file): 20 kB
Node {n} SReclaimable:   3 kB
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """64 GiB, 48 of them available, two memory nodes of four cores; no container."""
    state = SimpleNamespace(total=64 * GIB, available=48 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: state)
    monkeypatch.setattr(host_resources, "cgroups", lambda controller: [tmp_path])
    monkeypatch.setattr(host_resources, "_NODES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for number, free in ((0, 24 << 20), (1, 20 << 20)):
        node = tmp_path / f"node{number}"
        node.mkdir()
        (node / "meminfo").write_text(TEXT.format(n=number, total=32 << 20, free=free))
        (node / "cpulist").write_text(f"{4 * number}-{4 * number + 2},{4 * number + 3}\n")
    return tmp_path


def test_the_fullest_node_that_we_may_run_on_counts(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM allocates on the node of its cores, and refuses a cache for which that one has no room."""
    assert host_resources.available_memory() == (20 << 30) + 123 * 1024
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3}, raising=False)
    assert host_resources.available_memory() == (24 << 30) + 123 * 1024
    for node in machine.glob("node*"):
        (node / "meminfo").unlink()
    assert host_resources.available_memory() == 48 * GIB and host_resources.total_memory() == 64 * GIB


def test_a_container_has_what_its_limit_leaves(machine: Path) -> None:
    (machine / "memory.max").write_text(f"{8 * GIB}\n")
    (machine / "memory.current").write_text(f"{2 * GIB}\n")
    assert host_resources.available_memory() == 6 * GIB and host_resources.total_memory() == 8 * GIB


def test_samplers_plan_with_it(machine: Path) -> None:
    """Models whose sequences would not fit: each of the machine's engines takes its part of the share."""
    (machine / "memory.max").write_text(f"{8 * GIB}\n")
    (machine / "memory.current").write_text(f"{2 * GIB}\n")
    shape = {"num_hidden_layers": 64, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128}
    for engines, expected in ((1, 3 * GIB), (2, 3 * GIB // 2)):
        settings = EngineSettings("m", max_model_len=32768, gpu_memory_utilization=0.5, engines=engines)
        assert cache_bytes(SimpleNamespace(**shape), settings, host_resources.available_memory()) == expected

    per_token = 64 * 32 * 2 * 128 * 4
    for engines in (1, 2):
        tokens = default_cache_tokens(per_token, torch.device("cpu"), 256, 256, engines)
        assert tokens == 2 * GIB // engines // per_token
    for length in (512, 2048, 8192, 40_000):
        tokens = default_cache_tokens(per_token * 1000, torch.device("cpu"), 256, length)
        assert KVCacheLayout.fit(tokens, length, 256).rows == 1, "one sequence has its room"
