"""Replaced forwards: only where they agree, only while active, same values and gradients."""

from __future__ import annotations

import shutil
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from tests import torch_npu_reference
from tests.tiny import tiny_config
from verl.engine.training.fsdp.fuse import FusedForwards
from verl.platform.compiled import compiled_operators
from verl.platform.cpu import CpuPlatform
from verl.platform.npu import NpuPlatform


@pytest.mark.parametrize("kind", [Qwen3RMSNorm, Gemma2RMSNorm])
@pytest.mark.parametrize("shape", [(1, 7, 12), (2, 3, 4, 12), (1, 0, 12)])
def test_norms(kind, shape):
    module = kind(12)
    with torch.no_grad():
        module.weight.copy_(torch.randn(12))
    check(module, torch.randn(shape) * 3)


def test_gated_mlp():
    model = AutoModelForCausalLM.from_config(tiny_config("qwen3"), dtype=torch.float32)
    check(model.model.layers[0].mlp, torch.randn(1, 9, 32))


def check(module, x):
    fused = FusedForwards(module)
    assert len(fused.forwards) == 1
    results = []
    for on in (False, True):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        if on:
            with fused.active():
                out = module(leaf)
        else:
            out = module(leaf)
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        results.append([out.detach(), leaf.grad, *(p.grad.clone() for p in module.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest new tensor that an operator returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if isinstance(out, torch.Tensor) and not func.overloadpacket.__name__.endswith("_"):
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize("padding", [None, 3])
def test_an_embedding_adds_rows_to_the_gradient_bit_for_bit_as_torch(padding):
    module = nn.Embedding(1000, 8, padding_idx=padding)
    ids = torch.randint(0, 9, (2, 30))
    weights, earlier = torch.randn(2, 30, 8), torch.randn(1000, 8)
    gradients, largest = [], []
    fused = FusedForwards(module)
    assert list(fused.forwards) == [module]
    for context in (nullcontext(), fused.active()):
        module.weight.grad = earlier.clone()
        with context:
            product = (module(ids) * weights).sum()
        with LargestTensor() as mode:
            product.backward()
        largest.append(mode.elements)
        gradients.append(module.weight.grad)
    assert torch.equal(*gradients) and not torch.equal(gradients[0], earlier)
    assert largest[0] == 8000 and largest[1] <= 480


def test_an_embeddings_first_gradient_is_torchs():
    module, ids = nn.Embedding(50, 8, padding_idx=0), torch.tensor([[4, 0, 4, 7]])
    with FusedForwards(module).active():
        module(ids).sum().backward()
    expected = torch.zeros(50, 8)
    expected[4], expected[7] = 2, 1
    assert torch.equal(module.weight.grad, expected)


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_other_embeddings_are_left_alone(options):
    assert not FusedForwards(nn.Embedding(5, 4, **options)).forwards


def test_gradients_add_to_what_is_there():
    model = AutoModelForCausalLM.from_config(tiny_config("qwen3"), dtype=torch.float32)
    mlp = model.model.layers[0].mlp
    x = torch.randn(1, 5, 32)
    mlp(x).sum().backward()
    once = [p.grad.clone() for p in mlp.parameters()]
    held = [p.grad for p in mlp.parameters()]
    with FusedForwards(mlp).active():
        mlp(x).sum().backward()
    for p, a, buffer in zip(mlp.parameters(), once, held, strict=True):
        assert p.grad is buffer
        torch.testing.assert_close(p.grad, 2 * a)


class OddRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * 1.01


class OddMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x):
        return self.down_proj(torch.relu(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("scale", [0.0, 1e-3])
def test_a_gated_mlp_that_says_nearly_nothing_yet_is_not_taken_for_another(scale):
    """With a last layer of zeros every gate gives the same output, and another gradient."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        mlp = AutoModelForCausalLM.from_config(tiny_config("gemma"), dtype=torch.float32).model.layers[0].mlp
    with torch.no_grad():
        mlp.down_proj.weight.mul_(scale)
    assert not FusedForwards(mlp).forwards


@pytest.mark.parametrize("kind", [OddRMSNorm, OddMLP])
def test_what_computes_something_else_is_left_alone(kind):
    assert not FusedForwards(kind()).forwards


def test_in_force_inside_the_block_only():
    model = AutoModelForCausalLM.from_config(tiny_config("llama"), dtype=torch.float32)
    fused = FusedForwards(model)
    with pytest.raises(ZeroDivisionError), fused.active():
        assert "forward" in model.model.norm.__dict__
        raise ZeroDivisionError
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_what_a_replacement_returns_may_be_changed_in_place():
    """Gemma 3n multiplies what a projection returned in place."""
    mlp = AutoModelForCausalLM.from_config(tiny_config("qwen3"), dtype=torch.float32).model.layers[0].mlp
    x = torch.randn(1, 5, 32, requires_grad=True)
    (expected,) = torch.autograd.grad((mlp(x) * 3).sum(), x)
    with FusedForwards(mlp).active():
        y = mlp(x)
        y *= 3
        (found,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(found, expected)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler")
def test_operators_of_torch_compile(monkeypatch):
    """Where a device has no others, and with use_torch_compile alone: values and gradients of a whole model."""
    model = AutoModelForCausalLM.from_config(tiny_config("qwen3"), dtype=torch.float32).eval()
    monkeypatch.setattr(CpuPlatform, "compiled_operators", lambda self: compiled_operators())
    plain, compiled = FusedForwards(model), FusedForwards(model, compiles=True)
    assert compiled.rotations and not plain.rotations
    results = []
    for forwards in (plain, compiled):
        model.zero_grad()
        with forwards.active():
            out = model(torch.arange(3, 12)[None], use_cache=False).logits
            out.square().mean().backward()
        results.append([out.detach(), *(p.grad.clone() for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("arch", ["qwen3", "llama", "gemma2"])
def test_a_devices_own_operators_are_put_in_by_what_modules_compute(arch, monkeypatch):
    """Ascend's, on a reference of torch_npu: values and gradients of a whole model, and which operators it used."""
    from transformers.models.llama import modeling_llama

    model = AutoModelForCausalLM.from_config(tiny_config(arch), dtype=torch.float32).eval()
    ids, own = torch.arange(3, 12)[None], modeling_llama.apply_rotary_pos_emb

    def run():
        model.zero_grad()
        out = model(ids, use_cache=False).logits
        out.square().mean().backward()
        return [out.detach(), *(p.grad.clone() for p in model.parameters())]

    expected = run()
    monkeypatch.setitem(sys.modules, "torch_npu", torch_npu_reference)
    monkeypatch.setattr(CpuPlatform, "fused_operators", NpuPlatform.fused_operators)
    torch_npu_reference.calls.clear()
    fused = FusedForwards(model)
    torch_npu_reference.calls.clear()
    with fused.active():
        found = run()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    layers, norms = 2, sum(type(m).__name__.endswith("RMSNorm") for m in model.modules())
    gated = {} if arch == "gemma2" else {"npu_swiglu": layers}  # its gate is a GELU
    assert torch_npu_reference.calls == {"npu_rms_norm": norms, "npu_rotary_mul": 2 * layers} | gated
    assert modeling_llama.apply_rotary_pos_emb is own
