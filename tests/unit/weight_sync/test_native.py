"""The embedded sampler's own weights: loaded in place, whole or refused, packed copies looked at by the checksums."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import tiny_model
from verl.engine.rollout.base import SamplingParams
from verl.engine.rollout.native.engine import NativeEngine
from verl.engine.training.fsdp.engine import FSDPEngine
from verl.models.adapters import exported
from verl.models.checkpoint_names import CheckpointViews
from verl.weight_sync.sender import InProcessSync
from verl.weight_sync.verify import WeightSyncError, checksums, compare, digesting

ARCHS: dict[str, dict[str, Any]] = {"qwen3": {}, "qwen2": {"tied": True}, "qwen3_moe": {}, "mixtral": {}}


def load(path: Path, arch: str, seed: int = 0) -> Any:
    from transformers import AutoModelForCausalLM

    extra = {"num_local_experts": 4} if arch == "mixtral" else ARCHS[arch]
    directory = tiny_model(path / f"{arch}{seed}", arch, seed=seed, scale=8.0, **extra)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def engine(model: Any, **options: Any) -> NativeEngine:
    return NativeEngine(model, eos_token_ids=[258], max_model_len=96, max_num_seqs=8, **options)


def response(sampler: NativeEngine) -> Any:
    params = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
    return asyncio.run(sampler.generate([5, 6, 7], params, request_id="a"))


@pytest.mark.parametrize("arch", list(ARCHS))
def test_views_are_the_checkpoint_in_the_models_own_memory(tmp_path: Path, arch: str) -> None:
    model = load(tmp_path, arch)
    views, copies = dict(CheckpointViews(model).named()), dict(exported(model))
    assert views.keys() == copies.keys()
    storages = {t.untyped_storage().data_ptr() for t in model.state_dict().values()}
    for name, view in views.items():
        assert torch.equal(view, copies[name]) and view.untyped_storage().data_ptr() in storages
        view.zero_()
    assert all(not t.any() for t in model.state_dict().values())


@pytest.mark.parametrize("arch", list(ARCHS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_in_place_is_as_if_built_from_the_new_weights(tmp_path: Path, arch: str, dtype: str) -> None:
    sampler = engine(load(tmp_path, arch, 0), dtype=dtype)
    before = response(sampler)
    places = {n: t.data_ptr() for n, t in sampler.named_weights()}
    new = load(tmp_path, arch, 1)
    sampler.load_weights(exported(new), 5)
    assert sampler.version == 5 and places == {n: t.data_ptr() for n, t in sampler.named_weights()}
    compare(checksums(exported(new)), sampler.checksums())
    expected, got = response(engine(new, dtype=dtype)), response(sampler)
    assert got.token_ids.tolist() == expected.token_ids.tolist() != before.token_ids.tolist()
    assert got.log_probs.tolist() == expected.log_probs.tolist() and got.versions == (5,)


def test_the_models_own_fused_names_are_taken_too(tmp_path: Path) -> None:
    sampler, new = engine(load(tmp_path, "qwen3_moe", 0)), load(tmp_path, "qwen3_moe", 1)
    sampler.load_weights(new.state_dict().items(), 1)
    compare(checksums(exported(new)), sampler.checksums())


def test_a_load_that_fails_leaves_a_sampler_that_refuses_until_one_succeeds(tmp_path: Path) -> None:
    sampler, new = engine(load(tmp_path, "qwen3", 0)), load(tmp_path, "qwen3", 1)
    whole = list(exported(new))
    for weights, words in (
        (whole[1:], "no value came for 1 weights, among them .'model.embed_tokens.weight'"),
        ([*whole, ("extra", torch.zeros(1))], "'extra' is no weight"),
        ([(whole[0][0], torch.zeros(2, 2))], r"of shape \(2, 2\)"),
    ):
        with pytest.raises(ValueError, match=words):
            sampler.load_weights(weights, 1)
        with pytest.raises(RuntimeError, match=r"not whole .loading version 1 failed"):
            response(sampler)
    sampler.load_weights(whole, 2)
    assert response(sampler).token_ids.tolist() == response(engine(new)).token_ids.tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_verification_sees_a_stale_packed_copy(tmp_path: Path, dtype: str) -> None:
    """The weights agree, but the sampler would compute with what it packed from older ones."""
    trainer = FSDPEngine(module=load(tmp_path, "qwen3"))
    sampler = engine(trainer.module, dtype=dtype)
    sync = InProcessSync(trainer, sampler)
    assert sync.push(1, verify=True).verified
    response(sampler)
    with torch.no_grad():
        trainer.module.model.layers[1].mlp.up_proj.weight.mul_(2)
    compare(checksums(trainer.named_weights()), checksums(sampler.named_weights()))
    with pytest.raises(WeightSyncError, match=r"copy of model\.layers\.1\.mlp\.up_proj"):
        sampler.checksums()
    assert sync.push(2, verify=True).verified


def test_verification_sees_a_push_that_forgets_the_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = FSDPEngine(module=load(tmp_path, "qwen3"))
    sampler = engine(trainer.module)
    response(sampler)
    monkeypatch.setattr(type(sampler._runner.linears), "invalidate", lambda self: None)
    with torch.no_grad():
        trainer.module.lm_head.weight.add_(1)
    with pytest.raises(WeightSyncError, match="copy of lm_head"):
        InProcessSync(trainer, sampler).push(1, verify=True)


def test_packed_copies_are_replaced_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never all old and all new copies at once: the sampler would hold the model a third time."""
    sampler = engine(load(tmp_path, "qwen3"))
    response(sampler)
    linears = sampler._runner.linears
    copies = {id(copy.weight): copy.weight for copy in linears._copies.values()}
    old = [weakref.ref(weight) for weight in copies.values()]
    del copies
    left = []
    pack = type(linears)._pack

    def watched(self: Any, modules: Any, dtype: torch.dtype) -> None:
        pack(self, modules, dtype)
        left.append(sum(ref() is not None for ref in old))

    monkeypatch.setattr(type(linears), "_pack", watched)
    sampler.weights_updated(1)
    response(sampler)
    assert left == list(range(len(old) - 1, -1, -1))


def test_digests_of_a_stream_that_is_read_once() -> None:
    weights = [("a", torch.randn(3, 4)), ("b", torch.zeros(0)), ("n", torch.arange(4))]
    seen: dict[str, str] = {}
    passed = list(digesting(iter(weights), seen, dtype=torch.bfloat16))
    assert all(a is b for (_, a), (_, b) in zip(passed, weights, strict=True))
    assert seen == checksums([(n, t.bfloat16() if t.is_floating_point() else t) for n, t in weights])
    with pytest.raises(WeightSyncError, match="differ in a"):
        compare(checksums(weights), seen)


def test_a_load_that_fails_lets_the_sender_know_at_once(tmp_path: Path) -> None:
    """The stream is closed although the caller still holds it."""
    closed = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        try:
            yield "nonsense", torch.zeros(1)
            yield "never", torch.zeros(1)
        finally:
            closed.append(True)

    sampler, held = engine(load(tmp_path, "qwen3")), stream()
    with pytest.raises(ValueError, match="nonsense"):
        sampler.load_weights(digesting(held, {}), 1)
    assert closed == [True] and next(held, None) is None
