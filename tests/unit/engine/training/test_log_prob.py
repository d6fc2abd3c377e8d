"""The chunked log-prob kernel against full logits: values, gradients, memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.engine.training import log_prob
from verl.engine.training.log_prob import LogitLayer, token_outputs
from verl.models.sampling_mask import SamplingMask, encode_sets

ALL = ("log_probs", "entropy", "sum_pi_squared")


def make(rows=13, width=8, vocab=37, bias=False, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=g, dtype=dtype) * 2
    weight = torch.randn(vocab, width, generator=g, dtype=dtype)
    offset = torch.randn(vocab, generator=g, dtype=dtype) if bias else None
    targets = torch.randint(0, vocab, (rows,), generator=g)
    return hidden, weight, offset, targets


def oracle(hidden, weight, bias, targets, scale, softcap, temperature, allowed):
    """Written out in double precision."""
    z = hidden @ weight.t() + (0 if bias is None else bias)
    z = z * scale
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    z = (z / temperature).masked_fill(~allowed, -300.0)
    p = z.exp() / z.exp().sum(-1, keepdim=True)
    logp = torch.log(p[torch.arange(len(targets)), targets])
    return logp, -(p * p.log()).sum(-1), (p * p).sum(-1)


@given(
    rows=st.integers(0, 9),
    vocab=st.integers(1, 40),
    block=st.sampled_from([(1, 1), (7, 3), (64, 16), (1 << 20, 1 << 14)]),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    softcap=st.sampled_from([None, 3.0]),
    bias=st.booleans(),
    entropy=st.booleans(),
    squares=st.booleans(),
    share=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
    seed=st.integers(0, 10),
)
@settings(max_examples=80, deadline=None)
def test_values_and_gradients(rows, vocab, block, temperature, softcap, bias, entropy, squares, share, seed):
    """share: of the vocabulary in the sets that the softmax is over, beside the target; 1: no mask."""
    hidden, weight, offset, targets = make(rows, 8, vocab, bias, seed=seed)
    allowed = torch.rand(rows, vocab, generator=torch.Generator().manual_seed(seed)) < share
    allowed[::3], allowed[torch.arange(rows), targets] = True, True
    mask = SamplingMask(encode_sets(allowed), "cpu") if share < 1 else None
    leaves64 = [x.requires_grad_() for x in (hidden, weight, offset) if x is not None]
    expected = oracle(hidden, weight, offset, targets, 0.7, softcap, temperature, allowed)
    mix = [torch.randn(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    wanted = [True, entropy, squares]
    sum((m * e).sum() for m, e, w in zip(mix, expected, wanted, strict=True) if w).backward() if rows else None

    leaves = [x.detach().float().requires_grad_() for x in leaves64]
    head = LogitLayer(leaves[1], leaves[2] if bias else None, 0.7, softcap)
    saved = log_prob.BLOCK_SCORES, log_prob.BLOCK_COLUMNS
    log_prob.BLOCK_SCORES, log_prob.BLOCK_COLUMNS = block
    try:
        asked = [name for name, w in zip(ALL, wanted, strict=True) if w]
        out = token_outputs(leaves[0], targets, head, asked, temperature=temperature, mask=mask)
        got = [out.get(name) for name in ALL]
        if rows:
            sum((m.float() * o).sum() for m, o in zip(mix, got, strict=True) if o is not None).backward()
    finally:
        log_prob.BLOCK_SCORES, log_prob.BLOCK_COLUMNS = saved
    for o, e, w in zip(got, expected, wanted, strict=True):
        assert (o is not None) == w
        if w:
            torch.testing.assert_close(o.double(), e, rtol=2e-5, atol=2e-5)
    for ours, theirs in zip(leaves, leaves64, strict=True):
        if rows:
            torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("block", [(1, 1), (7, 3), (64, 16), (1 << 20, 1 << 14)])
@pytest.mark.parametrize("topk", [1, 5, 37])
def test_candidates_and_the_most_likely_tokens(monkeypatch, block, topk):
    monkeypatch.setattr(log_prob, "BLOCK_SCORES", block[0])
    monkeypatch.setattr(log_prob, "BLOCK_COLUMNS", block[1])
    hidden, weight, offset, targets = (x.requires_grad_(x.is_floating_point()) for x in make(bias=True))
    candidates = torch.stack([torch.randperm(37)[:topk] for _ in targets])
    logp = torch.log_softmax((hidden @ weight.t() + offset) / 0.8, -1)
    mix = torch.randn(len(targets), topk + 1, dtype=torch.float64)
    together = torch.cat((targets[:, None], candidates), 1)
    (mix * logp.gather(1, together)).sum().backward()
    leaves = [x.detach().float().requires_grad_() for x in (hidden, weight, offset)]
    out = token_outputs(
        leaves[0],
        targets,
        LogitLayer(*leaves[1:]),
        log_prob.OUTPUTS,
        temperature=0.8,
        candidates=candidates,
    )
    found = torch.cat((out["log_probs"][:, None], out["candidate_log_probs"]), 1)
    (mix.float() * found).sum().backward()
    values, ids = logp.topk(topk, 1)
    torch.testing.assert_close(found.double(), logp.gather(1, together), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(out["topk_log_probs"].double(), values.detach(), rtol=2e-5, atol=2e-5)
    assert torch.equal(out["topk_ids"].long(), ids)
    inside = (candidates[:, :, None] == ids[:, None]).any(-1)
    assert torch.equal(out["candidates_in_topk"].bool(), inside)
    for ours, theirs in zip(leaves, (hidden, weight, offset), strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=2e-4, atol=2e-5)


def test_a_candidate_that_the_vocabulary_has_not_is_minus_infinity():
    hidden, weight, _, targets = make(dtype=torch.float32)
    candidates = torch.tensor([[36, 37]]).expand(13, 2)
    asked = (*log_prob.CANDIDATE_OUTPUTS, "log_probs")
    chunked = token_outputs(hidden, targets, LogitLayer(weight), asked, temperature=1.0, candidates=candidates)
    plain = log_prob.outputs_of_logits(hidden @ weight.t(), targets, asked, candidates)
    for name in asked:
        torch.testing.assert_close(chunked[name], plain[name], rtol=1e-5, atol=2e-5)
    found = chunked["candidate_log_probs"]
    assert found[:, 0].isfinite().all() and (found[:, 1] == float("-inf")).all()


def test_extreme_logits_stay_finite():
    hidden, weight, _, targets = make(dtype=torch.float32)
    hidden = (hidden * 1e4).requires_grad_()
    out = token_outputs(hidden, targets, LogitLayer(weight), ALL, temperature=1.0)
    (out["log_probs"].sum() + out["entropy"].sum() + out["sum_pi_squared"].sum()).backward()
    assert torch.isfinite(out["log_probs"]).all() and torch.isfinite(hidden.grad).all()
    torch.testing.assert_close(out["entropy"], torch.zeros_like(out["entropy"]), atol=1e-3, rtol=0)


def test_head_gradient_goes_into_an_existing_buffer():
    hidden, weight, _, targets = make(dtype=torch.float32)
    fresh, held = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    held.grad = torch.ones_like(held)
    buffer = held.grad
    for w in (fresh, held):
        token_outputs(hidden, targets, LogitLayer(w), ALL[:1], temperature=1.0)["log_probs"].sum().backward()
    assert held.grad is buffer
    torch.testing.assert_close(held.grad, fresh.grad + 1)


def test_without_grad_for_the_head():
    hidden, weight, _, targets = make(dtype=torch.float32)
    hidden.requires_grad_()
    token_outputs(hidden, targets, LogitLayer(weight), ALL[:1], temperature=1.0)["log_probs"].sum().backward()
    assert weight.grad is None and hidden.grad is not None


def test_bfloat16_products_upcast_before_the_softmax():
    hidden, weight, _, targets = make(rows=64, width=64, vocab=500, dtype=torch.float32)
    weight = weight / 8
    exact = token_outputs(hidden, targets, LogitLayer(weight), ALL[:2], temperature=1.0)
    with torch.autocast("cpu", torch.bfloat16):
        rough = token_outputs(hidden, targets, LogitLayer(weight), ALL[:2], temperature=1.0)
    assert rough["log_probs"].dtype == torch.float32
    assert 0 < float((rough["log_probs"] - exact["log_probs"]).abs().max()) < 0.05


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_temperature_must_be_positive(temperature):
    hidden, weight, _, targets = make(dtype=torch.float32)
    with pytest.raises(ValueError, match="temperature"):
        token_outputs(hidden, targets, LogitLayer(weight), ALL[:1], temperature=temperature)


_MEMORY = """
import resource, sys, torch
from verl.engine.training.log_prob import LogitLayer, token_outputs
ALL = ("log_probs", "entropy")
torch.set_num_threads(1)
vocab, width, rows = int(sys.argv[1]), 16, 512
weight = torch.zeros(vocab, width).normal_().requires_grad_()
weight.grad = torch.zeros(vocab, width)
hidden = torch.randn(rows, width, requires_grad=True)
targets = torch.randint(0, 2000, (rows,))
token_outputs(hidden[:8], targets[:8], LogitLayer(weight[:64]), ALL[:2], temperature=1.0)["entropy"].sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
out = token_outputs(hidden, targets, LogitLayer(weight), (*ALL, "candidate_log_probs", "candidates_in_topk"),
                    temperature=1.0, candidates=torch.randint(0, 2000, (rows, 32)))
(out["log_probs"].sum() + out["entropy"].sum() + out["candidate_log_probs"].sum()).backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_is_flat_in_the_vocabulary():
    root = Path(__file__).parents[4]
    grown = {}
    for vocab in (2_000, 152_000):
        run = subprocess.run(
            [sys.executable, "-c", _MEMORY, str(vocab)], cwd=root, capture_output=True, text=True, check=True
        )
        grown[vocab] = int(run.stdout) / 1024
    # All logits in float32 would be 297 MB at 152 000; their gradient as much again; a block is 8 MB.
    assert grown[152_000] < 120, grown
