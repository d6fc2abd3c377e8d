"""The processor's compiled kernels against the plain references of our operators, and against the sampler's torch
code."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import operator_references as references
from tests.tiny import tiny_model
from verl.engine.rollout.base import SamplingParams
from verl.engine.rollout.native.cache import KVBlockPool, KVCacheLayout, KVSlotTable
from verl.engine.rollout.native.decode_plan import DecodePlan
from verl.engine.rollout.native.engine import NativeEngine
from verl.engine.rollout.native.sampling import Rows, sample
from verl.models.attention import AttentionOptions, TokenSpan
from verl.models.packed_attention import PackedPlan
from verl.platform import cpu_kernels, detect
from verl.platform.host_resources import processor

KINDS = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setenv(cpu_kernels.SWITCH, "auto")
    if cpu_kernels.state().library is None:
        pytest.skip(cpu_kernels.state().text)
    torch.manual_seed(0)
    yield monkeypatch


def close(ours: Any, theirs: Any, kind: torch.dtype = torch.float32) -> None:
    tolerance = 1e-5 if kind == torch.float32 else 2e-2
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a.float(), b.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("x_kind", KINDS)
@pytest.mark.parametrize("y_kind", KINDS)
@pytest.mark.parametrize("width", [50, 64])
def test_norms(x_kind: torch.dtype, y_kind: torch.dtype, width: int) -> None:
    x = torch.randn(1, 7, 5, width).to(x_kind).transpose(1, 2)
    weight, grad = torch.randn(width), torch.randn(1, 5, 7, width).to(y_kind)
    y, inverse = cpu_kernels.rms_norm(x, weight, 1e-6, 1.0, y_kind)
    close((y, inverse), references.rms_norm(x, weight, 1e-6, 1.0, y_kind), y_kind)
    expected = references.rms_norm_backward(grad, x, weight, 1.0, inverse)
    close(cpu_kernels.rms_norm_backward(grad, x, weight, 1.0, inverse), expected, x_kind)


@pytest.mark.parametrize("kind", [*KINDS, torch.float16])
def test_gates_and_rotations(kind: torch.dtype) -> None:
    grad, both = torch.randn(33, 130).to(kind), torch.randn(33, 260).mul(4).to(kind)
    gate, up = both.split(130, -1)
    close([cpu_kernels.swiglu(gate, up)], [references.swiglu(gate, up)], kind)
    close(cpu_kernels.swiglu_backward(grad, gate, up), references.swiglu_backward(grad, gate, up), kind)
    q, k = (torch.randn(1, 9, heads, 24).to(kind).transpose(1, 2) for heads in (4, 2))
    cos, sin = torch.randn(2, 1, 9, 24)
    for back in (False, True):
        close(*(kernels.rotate(q, k, cos, sin, kind, back) for kernels in (cpu_kernels, references)), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [1, 2])
def test_packed_products(kind: torch.dtype, threads: int) -> None:
    """Close to exact, and a row's result is the same beside any number of others."""
    weight, x, bias = (torch.randn(*shape).to(kind) for shape in ((48, 70), (40, 70), (48,)))
    if not cpu_kernels.packs(weight):
        pytest.skip("oneDNN's are faster on this processor")
    packed = cpu_kernels.pack_weight(weight)
    assert torch.equal(cpu_kernels.unpack_weight(packed), weight)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for some in (None, bias):
            whole = cpu_kernels.packed_product(x, packed, some)
            exact = x.double() @ weight.double().T + (0 if some is None else some.double())
            precision = 2**-8 if kind == torch.bfloat16 else 1e-5
            torch.testing.assert_close(whole.double(), exact, atol=1e-4, rtol=precision)
            for rows in range(1, 40):
                assert torch.equal(cpu_kernels.packed_product(x[None, :rows], packed, some)[0], whole[:rows])
    finally:
        torch.set_num_threads(before)
    assert not cpu_kernels.packs(weight[:42]) and not cpu_kernels.packs(weight.half())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outputs", [(False, False), (True, True)])
def test_head(kind: torch.dtype, outputs: tuple[bool, bool]) -> None:
    """Two blocks of logits; a target twice in a row, and targets in neither block."""
    blocks, targets = torch.randn(2, 10, 301).mul(4).to(kind), torch.randint(0, 800, (10, 3))
    targets[:, 2] = targets[:, 0]
    start = torch.stack((torch.full((10,), -torch.inf), *torch.zeros(3, 10)))
    results = []
    for kernels in (cpu_kernels, references):
        state, picked = start.clone(), torch.zeros(10, 3)
        for number, z in enumerate(blocks):
            kernels.head_forward(z, targets, state, picked, 301 * number, *outputs)
        results.append((state, picked))
    close(*results)
    state = results[0][0]
    stats, grad = torch.stack((state[0] + state[1].log(), torch.rand(10), torch.rand(10))), torch.randn(10, 3)
    others = [torch.rand(10) if wanted else None for wanted in outputs]
    gradients = [blocks[1].clone(), blocks[1].clone()]
    for kernels, z in zip((cpu_kernels, references), gradients, strict=True):
        kernels.head_backward(z, stats, targets, grad, *others, 301)
    close(gradients[:1], gradients[1:], kind)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.0}, {"top_k": 5}, {"temperature": 0.7, "top_p": 0.8}])
def test_draws(compiled: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    params = [SamplingParams(max_tokens=9, seed=i, **settings) for i in range(200)]
    rows, logits = Rows.of(params, [0] * 200), torch.randn(200, 2050) * 3
    logits[:, ::7] = -torch.inf
    ours = sample(logits.clone(), rows)
    compiled.setenv(cpu_kernels.SWITCH, "off")
    tokens, log_probs, _ = sample(logits.clone(), rows)
    assert (ours[0] != tokens).sum() <= 1  # a draw may lie on the border of two tokens, to rounding
    same = ours[0] == tokens
    torch.testing.assert_close(ours[1][same], log_probs[same], atol=1e-5, rtol=1e-5)


def test_logits_that_are_not_finite() -> None:
    logits = torch.zeros(3, 70)
    logits[0, 69], logits[1, 3], logits[2] = torch.nan, torch.inf, -torch.inf
    tokens, log_probs = cpu_kernels.draw(logits, torch.full((3,), 0.5, dtype=torch.float64))
    assert log_probs.isnan().all() and ((tokens >= 0) & (tokens < 70)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("heads", "widths", "options"),
    [
        ((4, 2), (64, 64), {}),
        ((3, 1), (128, 128), {"sliding_window": 20}),
        ((4, 2), (24, 16), {"softcap": 5.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}),
        ((5, 5), (72, 40), {"sliding_window": 37, "sinks": torch.linspace(-1, 1, 5)}),
    ],
)
def test_attention_of_a_decode_step(
    compiled: pytest.MonkeyPatch, kind: torch.dtype, heads: Any, widths: Any, options: Any
) -> None:
    """Groups of 9, 1 and 2 responses: more than a tile holds, and alone; beside blocks that nobody has written."""
    lengths = np.array([1, 40, 17, 16, 3, 9, 33, 2, 20, 48, 1, 30])
    q, k, v = (torch.randn(1, h, 12, d).to(kind) for h, d in ((heads[0], widths[0]), *((heads[1], w) for w in widths)))
    results: list[tuple[Tensor, ...]] = []
    for choice in ("auto", "off"):
        compiled.setenv(cpu_kernels.SWITCH, choice)
        generator = torch.Generator().manual_seed(1)
        pool = KVBlockPool(KVCacheLayout(4, 16, 40), torch.device("cpu"), detect("cpu").key_dtype(kind), kind)
        stores = pool.layer(0, heads[1], *widths)
        for store in stores:
            store.copy_(torch.randn(store.shape, generator=generator).to(kind))
        prompts, responses = KVSlotTable(pool, 4, from_end=True), KVSlotTable(pool, 16)
        kept = [store.clone() for store in stores]
        sizes = (37, 5, 64)
        groups = [prompts.acquire(n) for n in sizes]
        slots = np.array([responses.acquire(n) for n in lengths])
        for store, before in zip(stores, kept, strict=True):  # a block that is taken is emptied
            store.copy_(before)
        of_row = [0] * 9 + [1] + [2] * 2
        plan = DecodePlan(prompts, responses)
        plan.prepare(slots, lengths, *(np.array([each[i] for i in of_row]) for each in (groups, sizes)))
        pool.calls.start()
        out = plan.attend(torch.nn.Identity(), q, k, v, AttentionOptions(0.3, **options))
        results.append((out, *(store.to(kind) for store in stores)))
    close(*results, kind)
    assert torch.equal(results[0][1], results[1][1]) and torch.equal(results[0][2], results[1][2])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "width"), [((4, 2), 64), ((3, 1), 24), ((2, 2), 8), ((2, 1), 5)])
def test_attention_of_a_pack(
    compiled: pytest.MonkeyPatch, kind: torch.dtype, heads: tuple[int, int], width: int
) -> None:
    """A prompt with two responses, a branch of one of them, and a sequence alone; output and gradients."""
    spans = [TokenSpan(0, 37), TokenSpan(37, 102, ((0, 37),)), TokenSpan(102, 103, ((0, 37),))]
    spans += [TokenSpan(103, 120, ((0, 37), (37, 102))), TokenSpan(120, 161)]
    inputs = [torch.randn(1, h, 161, width).to(kind) for h in (heads[0], heads[1], heads[1])]
    grad, results = torch.randn(1, 161, heads[0], width).to(kind), []
    for choice in ("auto", "off"):
        compiled.setenv(cpu_kernels.SWITCH, choice)
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = PackedPlan(spans, torch.arange(161), heads[0]).attend(torch.nn.Identity(), *leaves, AttentionOptions(0.3))
        assert ("PackAttention" in type(out.grad_fn).__name__) == (choice == "auto")
        out.backward(grad)
        results.append((out, *(leaf.grad for leaf in leaves)))
    for ours, theirs in zip(*results, strict=True):
        size = float(theirs.detach().abs().max())
        close([ours / size], [theirs / size], kind)


def test_a_sampler_gives_what_it_gives_without(compiled: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tokens and log-probs of responses of several lengths and groups; again the same, bit for bit."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path, "qwen3"), dtype=torch.float32).eval()

    def sampled(choice: str) -> list[Any]:
        compiled.setenv(cpu_kernels.SWITCH, choice)
        engine = NativeEngine(model, eos_token_ids=[], max_model_len=64, max_num_seqs=8)

        async def go() -> Any:
            calls = []
            for i in range(12):
                params = SamplingParams(max_tokens=3 + 4 * i % 23, seed=i)
                calls.append(engine.generate([5 + i // 4] * (7 + i // 4), params, request_id=f"{i}", group=f"{i // 4}"))
            return await asyncio.gather(*calls)

        return [(c.token_ids, c.log_probs) for c in asyncio.run(go())]

    ours, again, plain = sampled("auto"), sampled("auto"), sampled("off")
    assert [(list(t), list(p)) for t, p in ours] == [(list(t), list(p)) for t, p in again]
    for (tokens, log_probs), (others, other_log_probs) in zip(ours, plain, strict=True):
        assert list(tokens) == list(others)
        np.testing.assert_allclose(log_probs, other_log_probs, atol=1e-4)


@pytest.mark.skipif("avx2" not in processor()[1], reason="no processor with AVX2")
@pytest.mark.parametrize("flags", ["-march=native -mno-avx512bf16", "-march=haswell"])
def test_kernels_built_for_other_processors(compiled: pytest.MonkeyPatch, flags: str) -> None:
    """Wide vectors without products of pairs, and narrow ones: what this processor's own build may leave out."""
    cpu_kernels._state.cache_clear()
    try:
        compiled.setattr(cpu_kernels, "_NATIVE", tuple(flags.split()))
        for kind in KINDS:
            test_attention_of_a_pack(compiled, kind, (3, 1), 24)
            test_attention_of_a_decode_step(compiled, kind, (4, 2), (64, 64), {})
            if cpu_kernels.packs(torch.zeros(16, 2, dtype=kind)):
                test_packed_products(kind, threads=1)
    finally:
        cpu_kernels._state.cache_clear()


def test_a_machine_without_a_compiler(compiled: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpu_kernels._state.cache_clear()
    try:
        compiled.setenv("PATH", str(tmp_path))
        compiled.delenv("CXX", raising=False)
        assert "no C++ compiler" in cpu_kernels.state().text and detect("cpu").fused_operators() is None
        broken = tmp_path / "g++"
        broken.write_text("#!/bin/sh\n[ $1 = --version ] || { echo cannot do that >&2; exit 1; }\n")
        broken.chmod(0o755)
        compiled.setattr(cpu_kernels, "FOLDER", tmp_path / "cache")
        cpu_kernels._state.cache_clear()
        assert "cannot do that" in cpu_kernels.state().text and not list((tmp_path / "cache").glob("*.so"))
        assert detect("cpu").describe().endswith("(cannot do that)")
    finally:
        cpu_kernels._state.cache_clear()


def test_what_was_built_is_used_again(compiled: pytest.MonkeyPatch) -> None:
    def refuse(command: list[str], **options: Any) -> Any:
        assert command[1:] == ["--version"], "compiled again"
        return SimpleNamespace(stdout=run(command, **options).stdout)

    run = subprocess.run
    compiled.setattr(subprocess, "run", refuse)
    cpu_kernels._state.cache_clear()
    assert cpu_kernels.state().library is not None
