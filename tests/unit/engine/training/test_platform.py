"""Devices: detection, refusals, data types, seeds, allocator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from verl.engine.training.fsdp import ENGINE
from verl.engine.training.settings import compute_dtype, micro_batching, preferred_tokens
from verl.errors import UserError
from verl.platform import cpu, detect

ROOT = Path(__file__).parents[4]


def dtype_of(role, platform):
    return compute_dtype(ENGINE.placement(role), platform)


def test_bfloat16_only_where_the_processor_has_it(monkeypatch):
    platform = detect("cpu")
    monkeypatch.setattr(cpu, "processor", lambda: ("", frozenset({"avx512f", "avx512_bf16"})))
    monkeypatch.setattr(cpu, "has_packed_products", lambda dtype: False)
    assert platform.default_dtype == torch.float32
    monkeypatch.setattr(cpu, "has_packed_products", lambda dtype: True)
    assert platform.default_dtype == torch.bfloat16
    assert dtype_of({}, platform) == torch.bfloat16
    assert dtype_of({"fsdp_config": {"dtype": "float32"}}, platform) == torch.float32
    monkeypatch.setattr(cpu, "processor", lambda: ("", frozenset({"avx2"})))
    assert platform.default_dtype == torch.float32
    assert dtype_of({"fsdp_config": {"mixed_precision": {"param_dtype": "bf16"}}}, platform) == torch.bfloat16
    with pytest.raises(UserError, match=r"fsdp_config\.dtype='int8'"):
        dtype_of({"fsdp_config": {"dtype": "int8"}}, platform)


_AS_WITHOUT_AVX512 = """
import sys, torch
from verl.engine.rollout.native.runner import FastLinears
from verl.platform.cpu import CpuPlatform, has_packed_products
assert not has_packed_products(torch.bfloat16) and CpuPlatform().default_dtype == torch.float32
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(96, 64), torch.nn.Linear(64, 33, bias=False))
x = torch.randn(20, 96)
fast = FastLinears(model, torch.bfloat16)
with torch.no_grad(), fast.active():
    found = model(x)
fast.check()
with torch.no_grad():
    wanted = model.to(torch.bfloat16)(x.to(torch.bfloat16))
assert found.dtype == torch.bfloat16
torch.testing.assert_close(found, wanted, rtol=1.6e-2, atol=1e-3)
"""


def test_a_processor_without_packed_bfloat16_products_samples_in_it_all_the_same():
    """oneDNN behaves as on AVX2 when asked to; the variable counts only from the start of a process."""
    if not cpu.has_packed_products(torch.float32):
        pytest.skip("torch without oneDNN")
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    command = [sys.executable, "-c", _AS_WITHOUT_AVX512]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr


def test_micro_batches_suit_the_device_within_the_budget():
    platform = detect("cpu")
    assert [preferred_tokens(platform, n) for n in (1, 1 << 18, 1 << 30)] == [4096, 2048, 1024]

    class Other(cpu.CpuPlatform):
        preferred_tokens = None

    assert preferred_tokens(Other(), 1) is None
    asked = {"ppo_max_token_len_per_gpu": 3000}
    assert micro_batching(asked, "ppo", share_prompt=None, preferred=2048).tokens == 2048
    assert micro_batching(asked, "ppo", share_prompt=None, preferred=4096).tokens == 3000
    assert micro_batching(asked, "ppo", share_prompt=None).tokens == 3000


def test_float32_products_stay_float32():
    detect("cpu").prepare()
    assert cpu._float32_error() < 1e-5


def test_a_processor_that_would_round_is_left_alone(monkeypatch):
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    cpu.onednn_float32.cache_clear()
    try:
        matmul.fp32_precision = "ieee"
        monkeypatch.setattr(cpu, "processor", lambda: ("", frozenset({"avx512_bf16", "amx_tile"})))
        assert not cpu.onednn_float32() and matmul.fp32_precision == "ieee"
        cpu.onednn_float32.cache_clear()
        monkeypatch.setattr(cpu, "processor", lambda: ("", frozenset({"avx512_bf16"})))
        monkeypatch.setattr(cpu, "has_packed_products", lambda dtype: True)
        monkeypatch.setattr(cpu, "_float32_error", lambda: 1e-2)
        assert not cpu.onednn_float32() and matmul.fp32_precision == "ieee"
    finally:
        matmul.fp32_precision = before
        cpu.onednn_float32.cache_clear()


_FAULTS = """
import resource, sys, torch
from verl.platform.cpu import PLATFORM
from verl.platform.host_resources import tune_allocator
torch.set_num_threads(1)
took = tune_allocator() if sys.argv[1] == "tuned" else False
def touch():
    for _ in range(6):
        a = torch.empty(12 << 20); a.fill_(1.0); del a
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
touch()
print(int(took), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
PLATFORM.empty_cache()
"""


def test_freed_memory_is_kept():
    counts = {}
    for mode in ("tuned", "plain"):
        command = [sys.executable, "-c", _FAULTS, mode]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        counts[mode] = [int(x) for x in run.stdout.split()]
    if not counts["tuned"][0]:
        pytest.skip("not glibc: the allocator cannot be told")
    assert counts["tuned"][1] * 1.5 < counts["plain"][1], "the system may take some back on its own"


@pytest.fixture
def usual_kernels():
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


def test_full_determinism_is_asked_for_and_a_step_goes_through(tmp_path, usual_kernels):
    from tests.tiny import tiny_model
    from tests.unit.engine.training.engine_cases import rows_of, simple_loss
    from verl.engine.training.fsdp.engine import FSDPEngine

    rows = rows_of([(7, [5, 9, 1]), (3, [4])])
    kept = []
    for config in ({"dtype": "float32"}, {"dtype": "float32", "full_determinism": True}):
        path = tiny_model(tmp_path / "m", "qwen3_moe")
        engine = FSDPEngine(path, role_cfg={"fsdp_config": config, "optim": {"lr": 1e-3}}, device="cpu")
        assert torch.are_deterministic_algorithms_enabled() == ("full_determinism" in config)
        result = engine.step(rows, simple_loss(19), temperature=1.0)
        assert result.refused == ""
        kept.append(engine.forward(rows, temperature=1.0)["log_probs"])
    np.testing.assert_allclose(kept[0], kept[1], rtol=1e-5, atol=1e-6)


def test_a_reserved_port_is_nobody_elses_until_it_is_listened_on():
    import socket

    from verl.platform.network import listen, reserve

    port = reserve("127.0.0.1")
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
    early = socket.create_connection(("127.0.0.1", port), timeout=5)
    with socket.socket(fileno=listen("127.0.0.1", port)) as server:
        server.settimeout(5)
        accepted, address = server.accept()
        assert address == early.getsockname(), "who comes before the owner listens is not lost"
    for one in (accepted, early):
        one.close()
    with socket.socket(fileno=listen("127.0.0.1", port)):
        pass  # free again, and no longer reserved
