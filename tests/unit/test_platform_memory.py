"""How much memory a sampler may plan with: of the machine, of its container, of its memory node."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from verl.engine.rollout.native.cache import default_cache_tokens
from verl.engine.rollout.vllm.arguments import EngineSettings, cache_bytes
from verl.platform import host

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
    monkeypatch.setattr(host, "cgroups", lambda controller: [tmp_path])
    monkeypatch.setattr(host, "_NODES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for number, free in ((0, 24 << 20), (1, 20 << 20)):
        node = tmp_path / f"node{number}"
        node.mkdir()
        (node / "meminfo").write_text(TEXT.format(n=number, total=32 << 20, free=free))
        (node / "cpulist").write_text(f"{4 * number}-{4 * number + 2},{4 * number + 3}\n")
    return tmp_path


def test_the_fullest_node_that_we_may_run_on_counts(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM allocates on the node of its cores, and refuses a cache for which that one has no room."""
    assert host.available_memory() == (20 << 30) + 123 * 1024
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3}, raising=False)
    assert host.available_memory() == (24 << 30) + 123 * 1024
    for node in machine.glob("node*"):
        (node / "meminfo").unlink()
    assert host.available_memory() == 48 * GIB and host.total_memory() == 64 * GIB


def test_a_container_has_what_its_limit_leaves(machine: Path) -> None:
    (machine / "memory.max").write_text(f"{8 * GIB}\n")
    (machine / "memory.current").write_text(f"{2 * GIB}\n")
    assert host.available_memory() == 6 * GIB and host.total_memory() == 8 * GIB


def test_samplers_plan_with_it(machine: Path) -> None:
    """Models whose sequences would not fit: each of the machine's engines takes its part of the share."""
    (machine / "memory.max").write_text(f"{8 * GIB}\n")
    (machine / "memory.current").write_text(f"{2 * GIB}\n")
    shape = {"num_hidden_layers": 64, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128}
    for engines, expected in ((1, 3 * GIB), (2, 3 * GIB // 2)):
        settings = EngineSettings("m", max_model_len=32768, gpu_memory_utilization=0.5, engines=engines)
        assert cache_bytes(SimpleNamespace(**shape), settings, host.available_memory()) == expected

    per_token = 64 * 32 * 2 * 128 * 4
    for engines in (1, 2):
        tokens = default_cache_tokens(per_token, torch.device("cpu"), 256, 512, engines)
        assert tokens == 2 * GIB // engines // per_token
