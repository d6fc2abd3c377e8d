"""Packed attention against one dense masked softmax, forward and backward; tiles of every kind; the flash merge."""

from __future__ import annotations

import sys
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import torch_npu_reference
from verl.models import flash_attention, packed_attention
from verl.models.attention import AttentionOptions, TokenSpan
from verl.models.packed_attention import PackedPlan
from verl.platform import npu


def layout(groups):
    """(prompt length, response lengths) → segments and positions, prompts first; a prompt alone where no answers."""
    segments, positions, at = [], [], 0
    for length, responses in groups:
        prompt = (at, at + length)
        segments.append(TokenSpan(*prompt))
        positions += range(length)
        at += length
        for size in responses:
            response = at
            segments.append(TokenSpan(at, at + size, (prompt,)))
            positions += range(length, length + size)
            at += size
            for branch in (3, 2) if size > 8 else ():  # spans that go on from the response, too
                segments.append(TokenSpan(at, at + branch, (prompt, (response, response + size))))
                positions += range(length + size, length + size + branch)
                at += branch
    return segments, torch.tensor(positions, dtype=torch.long)


def dense(q, k, v, segments, positions, scale, window=None, softcap=None, sinks=None):
    """The definition: all scores, one mask, one softmax."""
    size = q.shape[2]
    seen = torch.zeros(size, size, dtype=torch.bool)
    for s in segments:
        for t in range(s.start, s.end):
            seen[t, s.start : t + 1] = True
            for start, end in s.prefix:
                seen[t, start:end] = True
    if window is not None:
        seen &= positions[:, None] - positions[None] < window
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(1, -1, size, 1)), -1)
    p = torch.softmax(scores, -1)[..., :size]
    return (p @ v).transpose(1, 2)


def tensors(size, heads=4, kv_heads=2, width=8, value_width=8, seed=0, sinks=False):
    g = torch.Generator().manual_seed(seed)
    shapes = [(1, heads, size, width), (1, kv_heads, size, width), (1, kv_heads, size, value_width)]
    out = [torch.randn(s, generator=g).requires_grad_() for s in shapes]
    return [*out, torch.randn(heads, generator=g).requires_grad_() if sinks else None]


def compare(groups, window=None, softcap=None, sinks=False, **shape):
    segments, positions = layout(groups)
    q, k, v, sink = tensors(len(positions), sinks=sinks, **shape)
    leaves = [x for x in (q, k, v, sink) if x is not None]
    expected = dense(q, k, v, segments, positions, 0.3, window, softcap, sink)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    theirs = torch.autograd.grad((expected * weight).sum(), leaves)
    plan = PackedPlan(segments, positions, q.shape[1])
    got = plan.attend(None, q, k, v, AttentionOptions(0.3, window, softcap, sink))
    ours = torch.autograd.grad((got * weight).sum(), leaves)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    return plan


shapes = st.lists(st.tuples(st.integers(1, 30), st.lists(st.integers(0, 30), max_size=4)), min_size=1, max_size=4)


@given(
    groups=shapes,
    window=st.one_of(st.none(), st.integers(1, 40)),
    softcap=st.sampled_from([None, 1.5]),
    sinks=st.booleans(),
    limits=st.sampled_from([(512 * 1024, 24 * 1024), (2048, 0), (2048, 3000), (1 << 30, 1 << 30)]),
)
@settings(max_examples=60, deadline=None)
def test_any_layout(groups, window, softcap, sinks, limits):
    before = packed_attention.TILE_SCORES, packed_attention.TILE_OVERHEAD
    packed_attention.TILE_SCORES, packed_attention.TILE_OVERHEAD = limits
    try:
        compare(groups, window, softcap, sinks)
    finally:
        packed_attention.TILE_SCORES, packed_attention.TILE_OVERHEAD = before


def test_long_segments_are_cut_and_short_ones_merged():
    plan = compare([(300, [700, 2, 3, 4])])
    rows = [t.rows for t in plan.tiles]
    assert len(rows) > 3 and max(t.rows * t.keys * 4 for t in plan.tiles) <= packed_attention.TILE_SCORES * 1.6
    many = compare([(5, [3] * 20), (4, [2] * 10)])
    assert len(many.tiles) < 8


@pytest.mark.parametrize("heads, kv_heads, width, value_width", [(1, 1, 4, 4), (6, 2, 8, 5), (3, 3, 2, 7)])
def test_head_shapes(heads, kv_heads, width, value_width):
    compare([(9, [4, 7]), (3, [5])], heads=heads, kv_heads=kv_heads, width=width, value_width=value_width)


def test_nothing_quadratic_is_kept():
    """Between forward and backward only queries, keys, values and sinks are saved."""
    segments, positions = layout([(64, [100] * 6)])
    q, k, v, _ = tensors(len(positions))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        PackedPlan(segments, positions, 4).attend(None, q, k, v, AttentionOptions(1.0))
    assert sum(saved) <= q.numel() + k.numel() + v.numel()


def test_bfloat16_adds_up_shared_keys_in_float32():
    """300 responses to one prompt: sums in bfloat16 would lose most of them."""
    segments, positions = layout([(4, [3] * 300)])
    q, k, v, _ = tensors(len(positions))
    exact = torch.autograd.grad(dense(q, k, v, segments, positions, 0.3).sum() + (k * 0).sum(), (q, k, v))
    lower = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    plan = PackedPlan(segments, positions, 4)
    out = plan.attend(None, *lower, AttentionOptions(0.3))
    dv = torch.autograd.grad(out.sum(), lower)[2]
    assert float((dv.float() - exact[2]).norm() / exact[2].norm()) < 0.01


# -- the two-call merge, with a plain kernel in the flash kernel's place --------------------------------------


def plain_scores(q, k, part, scale):
    group = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    seen = torch.zeros(q.shape[0], k.shape[0], dtype=torch.bool)
    bounds = zip(part.queries[:-1], part.queries[1:], part.keys[:-1], part.keys[1:], strict=True)
    for q0, q1, k0, k1 in bounds:
        block = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool)
        seen[q0:q1, k0:k1] = block.tril() if part.causal else block
    return scores.masked_fill(~seen, float("-inf"))


def plain_forward(q, k, v, part, scale):
    assert part.queries.diff().min() > 0, "torch's kernel takes no empty sequence where the longest has one query"
    scores = plain_scores(q, k, part, scale)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1), (None, None)


def plain_backward(grad, q, k, v, out, lse, part, state, scale):
    group = q.shape[1] // k.shape[1]
    p = (plain_scores(q, k, part, scale) - lse[..., None]).exp()
    wide_k, wide_v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    delta = (grad * out).sum(-1).t()[..., None]
    ds = p * (torch.einsum("qhd,khd->hqk", grad, wide_v) - delta) * scale
    dq = torch.einsum("hqk,khd->qhd", ds, wide_k)
    dk = torch.einsum("hqk,qhd->khd", ds, q).view(k.shape[0], k.shape[1], group, -1).sum(2)
    dv = torch.einsum("hqk,qhd->khd", p, grad).view(v.shape[0], v.shape[1], group, -1).sum(2)
    return dq, dk, dv


@pytest.mark.parametrize("kernel", [(plain_forward, plain_backward), (npu._flash_forward, npu._flash_backward)])
@mock.patch.dict(sys.modules, {"torch_npu": torch_npu_reference})
@given(groups=shapes)
@settings(max_examples=30, deadline=None)
def test_two_calls_merge_into_one_softmax(kernel, groups):
    segments, positions = layout(groups)
    q, k, v, _ = tensors(len(positions))
    expected = dense(q, k, v, segments, positions, 0.3)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    theirs = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    plan = PackedPlan(segments, positions, 4)
    got = flash_attention.attend(q, k, v, plan.flash_parts, 0.3, kernel)
    ours = torch.autograd.grad((got * weight).sum(), (q, k, v))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_flash_kernel_is_for_cuda_only():
    q, _, v, _ = tensors(3)
    assert not flash_attention.fits(q, v, AttentionOptions(1.0)), "half precision only"
    assert PackedPlan(*layout([(2, [1])]), 4).flash_kernel is None
