"""What every platform offers, whatever the device: one suite for all. Devices that are not here answer as stand-ins."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.ranks import DEVICE
from verl.errors import UserError
from verl.platform import KINDS, Platform, cuda, detect, npu, platform_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=KINDS)
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Platform:
    """Each platform, on a stand-in for torch's module of the device where the machine has none."""
    found = platform_of(request.param)
    if not found.count():
        device = SimpleNamespace(
            is_available=lambda: True,
            device_count=lambda: 2,
            mem_get_info=lambda index=0: (10 << 30, 80 << 30),
            memory_reserved=lambda index=0: 6 << 30,
            memory_allocated=lambda index=0: 2 << 30,
            max_memory_allocated=lambda index=0: 5 << 30,
            get_device_name=lambda index=0: {"cuda": "NVIDIA H100", "npu": "Ascend910B"}[request.param],
            is_bf16_supported=lambda including_emulation: True,
            get_device_properties=lambda index: SimpleNamespace(uuid=f"GPU-{index}"),
            current_device=lambda: 1,
            get_device_capability=lambda device: (9, 0),
            set_device=lambda index: None,
            synchronize=lambda *_: None,
            empty_cache=lambda: None,
            ipc_collect=lambda: None,
        )
        monkeypatch.setattr(cuda, "torch", SimpleNamespace(**vars(torch) | {"cuda": device}))
        monkeypatch.setattr(npu.NpuPlatform, "module", device)
        # torch knows "npu" only with torch_npu
        place = SimpleNamespace(type="npu", index=0)
        monkeypatch.setattr(npu.NpuPlatform, "device", lambda self, index=0: place)
        cuda._has_flash.cache_clear()
    return found


@pytest.fixture
def best_device() -> torch.device:
    """The device of this machine."""
    platform = detect("auto")
    platform.prepare()
    return platform.device()


def test_it_says_what_it_is(platform: Platform) -> None:
    assert platform.name in KINDS and platform_of(platform.device()) is platform
    assert platform.count() >= 1 and platform.describe()
    assert platform.device(0).type == platform.name
    assert platform.on_host == (platform.name == "cpu")


def test_memory_is_counted_in_bytes(platform: Platform) -> None:
    held = torch.ones(1 << 19, device=platform.device()) if platform.name == DEVICE else None
    free, total = platform.memory()
    assert 0 < free <= total and platform.peak_memory() > 1 << 20
    cached = 4 << 30 if not platform.on_host and free == 10 << 30 else 0
    assert platform.room() >= free * (0.5 if platform.on_host else 1) and (
        not cached or platform.room() == free + cached
    ), "what the process has freed and kept counts as free"
    del held


def test_data_types(platform: Platform) -> None:
    assert platform.supports(torch.float32) and not platform.supports(torch.int64)
    assert platform.supports(platform.default_dtype)
    for compute in (torch.float32, torch.bfloat16):
        assert platform.key_dtype(compute).itemsize >= compute.itemsize
    peak = platform.peak_flops(torch.bfloat16)
    assert peak is None if platform.on_host else peak and peak > 1e13
    assert platform.peak_flops(torch.float32) is None


def test_preparing_again_is_harmless(platform: Platform) -> None:
    for _ in range(2):
        platform.prepare()
        platform.select(0)
        platform.synchronize()
        platform.empty_cache()


def test_a_seed_decides_all_draws(platform: Platform) -> None:
    import random

    import numpy as np

    drawn = []
    for _ in range(2):
        platform.seed(2**40 + 3)
        drawn.append((random.random(), np.random.rand(), float(torch.rand(1))))
    assert drawn[0] == drawn[1]


def test_what_other_parts_are_told(platform: Platform) -> None:
    """A Ray resource comes with the variable that shows a process its devices; a host has neither."""
    assert bool(platform.ray_resource) == bool(platform.visible_devices) == (not platform.on_host)
    assert platform.collectives in {"gloo", "nccl", "hccl"}
    assert platform.preferred_tokens is None or platform.preferred_tokens[0] < platform.preferred_tokens[1]


def test_kernels_are_there_or_said_not_to_be(platform: Platform) -> None:
    device = platform.device()
    for answer in (
        platform.has_packed_products(torch.float32),
        platform.has_grouped_attention(torch.bfloat16, True),
        platform.has_widening_product(),
        platform.has_triton(),
    ):
        assert isinstance(answer, bool)
    kernel = platform.flash_kernel(device)
    assert kernel is None or (len(kernel) == 2 and all(map(callable, kernel)))
    recorder: Any = platform.graph_recorder()
    assert recorder is None or (callable(recorder) and callable(recorder.forget))
    assert (recorder is not None) == (platform.name == "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_of_groups_have_gradients(dtype: torch.dtype, best_device: torch.device) -> None:
    """What layers of experts call."""
    x, weight = torch.randn(10, 16, dtype=dtype), torch.randn(3, 8, 16, dtype=dtype)
    ends = torch.tensor([2, 2, 10], dtype=torch.int32)
    results = []
    for device in (torch.device("cpu"), best_device):
        a, b = (t.to(device).detach().requires_grad_() for t in (x, weight))
        product = torch.nn.functional.grouped_mm(a, b.transpose(-2, -1), offs=ends.to(device))
        product.square().sum().backward()
        results.append([t.detach().cpu() for t in (product, a.grad, b.grad)])
    torch.testing.assert_close(results[1], results[0])
    if best_device.type == "npu" and dtype == torch.bfloat16:
        assert importlib.import_module("torch_npu").calls["npu_grouped_matmul"] >= 3


def test_memory_of_other_processes(platform: Platform) -> None:
    """Where devices have no names that the whole machine knows, their memory has no handles."""
    if not platform.memory_id(platform.device()):
        with pytest.raises(ValueError, match="no handles"):
            platform.share_memory(torch.zeros(3, dtype=torch.uint8))
        with pytest.raises(ValueError, match="no handles"):
            platform.open_memory({})
        return
    with pytest.raises(ValueError, match="only uint8 CUDA tensors"):
        platform.share_memory(torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="device GPU-elsewhere, which this process cannot see"):
        platform.open_memory({"uuid": "GPU-elsewhere", "size": 3, "offset": 0, "storage": []})


def test_profilers_work_or_are_refused(platform: Platform) -> None:
    if platform.name != "cuda":
        with pytest.raises(UserError, match=f"works on {platform.name}"):
            platform.require_nsys()
    if platform.name != "npu":
        with pytest.raises(UserError, match=f"works on {platform.name}"):
            platform.own_tracer({})
    if platform.on_host:
        assert not platform.has_memory_history
        with platform.range("nothing"):
            platform.capture(True)
            platform.capture(False)


@pytest.mark.parametrize(
    ("dtype", "causal", "expected"),
    [(torch.bfloat16, True, True), (torch.bfloat16, False, False), (torch.float32, True, False)],
)
def test_grouped_heads_on_cuda(dtype: torch.dtype, causal: bool, expected: bool) -> None:
    assert platform_of("cuda").has_grouped_attention(dtype, causal) == expected
    assert platform_of("cpu").has_grouped_attention(dtype, causal)


def test_auto_takes_the_best_present() -> None:
    present = [kind for kind in KINDS if platform_of(kind).count() > 0]
    assert detect("auto").name == present[0] and detect("cpu", devices=8).name == "cpu"


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_a_device_that_is_not_there_is_refused(kind: str) -> None:
    if platform_of(kind).count():
        pytest.skip(f"this machine has {kind}")
    with pytest.raises(UserError, match=rf"trainer.device={kind}.*Present: .*cpu"):
        detect(kind)


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(UserError, match="auto, cuda, npu, cpu"):
        detect("tpu")


def test_too_many_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.CudaPlatform, "count", lambda self: 1)
    with pytest.raises(UserError, match=r"trainer.n_gpus_per_node=8.*1 cuda device\."):
        detect("cuda", devices=8)


DEVICE_QUESTIONS = (".is_cuda", ".device.type ==", ".device.type !=", "platform.name ==", "platform.name !=")


def test_nothing_else_asks_what_device_it_is_on() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sorted((ROOT / "verl").rglob("*.py"))
        if "platform" not in path.parts
        for line in path.read_text().splitlines()
        if any(question in line for question in DEVICE_QUESTIONS) or "torch.cuda" in line
    ]
    # An offloaded tensor is compared with its own mesh, whatever that is.
    assert [line for line in found if "mesh.device_type" not in line] == []
