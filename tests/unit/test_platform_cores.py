"""Cores and quotas: what the control group says, and who heeds it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from verl.engine.rollout.vllm import launch
from verl.platform import host
from verl.platform.cpu import CpuPlatform
from verl.reward.pool import FunctionSpec, Pool

EIGHT = set(range(8))


@pytest.fixture
def quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A machine of eight cores whose control group has this cpu.max; nobody chose a number of threads."""
    monkeypatch.setattr(host, "cgroups", lambda controller: [tmp_path / "inner", tmp_path])
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
    assert host.cores() == (8, allowed) and host.usable() == usable and host.thread_limit() == limit
    assert Pool(FunctionSpec(), workers=4)._cpus == usable
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert host.thread_limit() is None and host.usable() == usable, "who says a number gets it"


def test_the_tightest_quota_of_either_version_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = [tmp_path / name for name in ("a", "b", "c")]
    monkeypatch.setattr(host, "cgroups", lambda controller: places)
    for place in places:
        place.mkdir()
    (places[0] / "cpu.max").write_text("max 100000\n")
    (places[1] / "cpu.max").write_text("300000 100000\n")
    (places[2] / "cpu.cfs_quota_us").write_text("-1\n")
    (places[2] / "cpu.cfs_period_us").write_text("100000\n")
    assert host.cores()[1] == 3.0
    (places[2] / "cpu.cfs_quota_us").write_text("150000\n")
    assert host.cores()[1] == 1.5


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
        with launch.environment(cpu, ranks):
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
    code = "import sys, verl.cli.doctor, verl.platform.host; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
