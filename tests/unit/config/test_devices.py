"""Devices found without torch: on machines of several kinds, as files of a folder; how many samplers share them."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from verl.config import devices
from verl.config.layout import samplers_per_node


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without any device."""
    monkeypatch.setattr(devices, "_nodes", lambda name: [])
    monkeypatch.setattr(devices, "_proc_gpus", list)
    monkeypatch.setattr(devices, "_DXG", tmp_path / "dxg")
    monkeypatch.setattr(devices, "_KFD", tmp_path / "kfd")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    return tmp_path


def test_none() -> None:
    assert devices.find().cuda == 0


def test_one_that_windows_lends(bare: Path) -> None:
    (bare / "dxg").touch()
    assert devices.find().cuda == 1


def test_those_of_amd(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors are nodes of that driver, too, with the number 0."""
    for number, text in enumerate(("0\n", "51234\n", "40001\n", "not a number\n")):
        (bare / "kfd" / str(number)).mkdir(parents=True)
        (bare / "kfd" / str(number) / "gpu_id").write_text(text)
    assert devices.find().cuda == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert devices.find().cuda == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", False),
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", True),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '7.1'\n", True),
    ],
)
def test_builds_of_torch(bare: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: bool) -> None:
    (bare / "version.py").write_text(text)
    spec = importlib.machinery.ModuleSpec("torch", None, is_package=True)
    spec.submodule_search_locations = [str(bare)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert devices.find().cuda_build == expected


@pytest.mark.parametrize(
    ("name", "ranks", "own", "expected"),
    [("vllm", None, 0, 8), ("vllm", 2, 0, 4), ("native", 2, 0, 8), ("vllm", 2, 1, 2), ("vllm", 16, 0, 1)],
)
@pytest.mark.parametrize(("copies", "expert", "share"), [(1, 1, 1), (2, 1, 1), (2, 4, 2)])
def test_samplers_that_share_a_machine_are_counted(name, ranks, own, expected, copies, expert, share) -> None:
    """Copies are samplers of their own, unless they share experts."""
    rollout = SimpleNamespace(name=name, tensor_model_parallel_size=ranks, nnodes=own, n_gpus_per_node=4)
    rollout.data_parallel_size, rollout.expert_parallel_size = copies, expert
    config = SimpleNamespace(
        actor_rollout_ref=SimpleNamespace(rollout=rollout), trainer=SimpleNamespace(n_gpus_per_node=8)
    )
    assert samplers_per_node(config) == (expected if name == "native" else max(1, expected // share))
