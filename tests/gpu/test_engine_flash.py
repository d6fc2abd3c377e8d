"""The flash path on a CUDA device against the blocks."""

from __future__ import annotations

import pytest
import torch

from tests.unit.engine.training.test_attention import layout, tensors
from verl.models import flash_attention
from verl.models.attention import AttentionOptions
from verl.models.packed_attention import PackedPlan, _TiledAttention
from verl.platform import detect

pytestmark = pytest.mark.needs_cuda


def test_flash_equals_blocks():
    device = detect("cuda").device()
    segments, positions = layout([(70, [100, 31, 1]), (5, [9, 0]), (40, [])])
    plan = PackedPlan(segments, positions.to(device), 4)
    q, k, v, _ = (
        None if x is None else x.detach().to(device, torch.bfloat16).requires_grad_()
        for x in tensors(len(positions), width=64, value_width=64)
    )
    assert flash_attention.fits(q, v, AttentionOptions(0.125))
    flash = flash_attention.attend(q, k, v, plan.flash_parts, 0.125, plan.flash_kernel)
    blocks = _TiledAttention.apply(q, k, v, None, plan, plan.tiles, AttentionOptions(0.125))
    torch.testing.assert_close(flash, blocks, rtol=2e-2, atol=2e-2)
    weight = torch.randn_like(flash)
    for a, b in zip(
        torch.autograd.grad((flash * weight).sum(), (q, k, v)),
        torch.autograd.grad((blocks * weight).sum(), (q, k, v)),
        strict=True,
    ):
        assert float((a - b).norm() / b.norm()) < 0.02


def test_flash_equals_sdpa(record_property):
    """Sequences that share no prompt, against torch's own attention of each alone."""
    device = detect("cuda").device()
    lengths = [100, 1, 257, 64]
    segments, positions = layout([(n, []) for n in lengths])
    plan = PackedPlan(segments, positions.to(device), 4)
    q, k, v, _ = (
        None if x is None else x.detach().to(device, torch.bfloat16).requires_grad_()
        for x in tensors(len(positions), width=64, value_width=64)
    )
    flash = flash_attention.attend(q, k, v, plan.flash_parts, 0.125, plan.flash_kernel)
    weight = torch.randn_like(flash)
    ours = torch.autograd.grad((flash * weight).sum(), (q, k, v))
    parts, start = [], 0
    for length in lengths:
        one = [x[..., start : start + length, :].float() for x in (q, k, v)]
        parts.append(
            torch.nn.functional.scaled_dot_product_attention(*one, is_causal=True, scale=0.125, enable_gqa=True)
        )
        start += length
    plain = torch.cat(parts, 2).transpose(1, 2)
    difference = float((flash.float() - plain).abs().max())
    record_property("output", difference)
    assert difference < 3e-2
    theirs = torch.autograd.grad((plain * weight.float()).sum(), (q, k, v))
    for name, a, b in zip("qkv", ours, theirs, strict=True):
        found = float((a.float() - b.float()).norm() / b.float().norm())
        record_property(f"gradient_{name}", found)
        assert found < 0.02
