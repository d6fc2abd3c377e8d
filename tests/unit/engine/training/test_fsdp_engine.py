"""The sharded engine: weights as a normal load gives them, refusals on all ranks, precision, sizes that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import ranks
from tests.tiny import tiny_model
from tests.unit.engine.training.engine_cases import rows_of, simple_loss
from tests.unit.engine.training.fsdp_cases import assert_same, locally, on_ranks, role
from verl.engine.training.fsdp.engine import FSDPEngine

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {},
    "llama": {},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 16},
    "gpt_oss": {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
}
ROWS = [(7, [5, 9, 1, 0, 3]), (12, [6, 6])]
TRAINED = role(optim={"lr": 1e-2})


def engine(path: str, role_cfg: dict[str, Any] = TRAINED, **options: Any) -> Any:
    from verl.engine.training.fsdp.engine import FSDPEngine

    return FSDPEngine(path, role_cfg=role_cfg, device="cpu", **options)


# -- loading ----------------------------------------------------------------------------------------------


def loaded(paths: list[str]) -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], np.ndarray]]:
    out = []
    for path in paths:
        one = engine(path)
        assert not any(t.is_meta for t in (*one.module.parameters(), *one.module.buffers()))
        out.append(
            (
                {n: t.clone() for n, t in one.named_weights()},
                {n: b.clone() for n, b in one.module.named_buffers()},
                one.forward(rows_of(ROWS), temperature=1.0)["log_probs"],
            )
        )
    return out


@pytest.mark.slow
def test_meta_initialisation_is_a_normal_load(tmp_path: Path) -> None:
    paths = [
        str(tiny_model(tmp_path / f"{arch}{tied}", arch, tied=tied, scale=4.0, **more))
        for arch, more in ARCHITECTURES.items()
        for tied in (False, True)
    ]
    # What only transformers can read: another kind of file; the body alone under its own names.
    paths += [as_pickle(tmp_path), without_prefix(tmp_path)]
    found = ranks.run(loaded, 2, paths)
    for number, path in enumerate(paths):
        local = FSDPEngine(path, role_cfg=TRAINED, device="cpu")
        expected = local.forward(rows_of(ROWS), temperature=1.0)["log_probs"]
        for weights, buffers, log_probs in (one[number] for one in found):
            assert weights.keys() == dict(local.named_weights()).keys(), path
            for name, tensor in local.named_weights():
                assert torch.equal(weights[name], tensor), (path, name)
            for name, tensor in local.module.named_buffers():
                assert torch.equal(buffers[name], tensor), (path, name)
            np.testing.assert_allclose(log_probs, expected, rtol=1e-5, atol=2e-6)


def as_pickle(tmp_path: Path) -> str:
    from safetensors.torch import load_file

    path = tiny_model(tmp_path / "pickled", "qwen3", scale=4.0)
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    return str(path)


def without_prefix(tmp_path: Path) -> str:
    from safetensors.torch import load_file, save_file

    path = tiny_model(tmp_path / "body", "qwen3", scale=4.0, tied=True)
    tensors = {n.removeprefix("model."): t for n, t in load_file(path / "model.safetensors").items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return str(path)


@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss"])
def test_other_architectures_train_the_same(tmp_path: Path, arch: str) -> None:
    path = str(tiny_model(tmp_path / "m", arch, scale=4.0, **ARCHITECTURES[arch]))
    cases = {"plain": (role(), {}, "uneven"), "split": (role(ulysses_sequence_parallel_size=2), {}, "even")}
    local = locally(path, role())
    found = ranks.run(on_ranks, 2, path, cases)
    for name in cases:
        assert_same([one[name] for one in found], local, 5e-6)


# -- refusals ----------------------------------------------------------------------------------------------


def complaint(path: str, role_cfg: dict[str, Any]) -> str:
    from verl.errors import UserError

    try:
        engine(path, role_cfg)
    except UserError as error:
        return str(error)
    return ""


def test_sizes_that_do_not_fit_are_refused_on_every_rank(tmp_path: Path) -> None:
    path = str(tiny_model(tmp_path / "m", num_attention_heads=3, num_key_value_heads=3))
    for size, role_cfg, word in (
        (3, role(fsdp={"fsdp_size": 2}), "fsdp_size=2: does not divide the 3 ranks"),
        (2, role(ulysses_sequence_parallel_size=2), "3 attention heads"),
        (2, role(fsdp={"mixed_precision": {"reduce_dtype": "int8"}}), "reduce_dtype"),
    ):
        assert all(word in message for message in ranks.run(complaint, size, path, role_cfg))
    messages = ranks.run(complaint, 2, str(tmp_path / "absent"), role())
    assert all("no such directory" in message for message in messages)


# -- precision, sizes, settings ------------------------------------------------------------------------------


def mixed(path: str) -> dict[str, Any]:
    one = engine(path, role(fsdp={"dtype": "bfloat16", "mixed_precision": {"buffer_dtype": "bfloat16"}}))
    rows = rows_of(ROWS)
    mine = rows[:5] if one.dp_rank == 0 else rows[5:]
    log_probs = one.forward(rows, temperature=1.0)["log_probs"]
    result = one.step(mine, simple_loss(30), temperature=1.0)
    return {
        "log_probs": log_probs,
        "norm": result.grad_norm,
        "masters": {p.dtype for p in one.module.parameters()},
        "gradients": {p.grad.dtype for p in one.module.parameters()},
        "buffers": {b.dtype for b in one.module.buffers()},
        "head": one._model.head.layer is not None,
        "weights": {t.dtype for _, t in one.named_weights()},
    }


def test_mixed_precision_keeps_float32_masters(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "m", scale=4.0)
    exact = FSDPEngine(path, role_cfg=role(), device="cpu")
    expected = exact.forward(rows_of(ROWS), temperature=1.0)["log_probs"]
    norm = exact.step(rows_of(ROWS), simple_loss(30), temperature=1.0).grad_norm
    for one in ranks.run(mixed, 2, str(path)):
        assert one["masters"] == one["gradients"] == one["weights"] == {torch.float32}
        assert one["buffers"] == {torch.bfloat16} and one["head"]
        assert 0 < np.abs(one["log_probs"] - expected).mean() < 0.05
        assert one["norm"] == pytest.approx(norm, rel=0.1)


def trained(path: str, role_cfg: dict[str, Any], steps: int) -> dict[str, torch.Tensor]:
    one = engine(path, role_cfg)
    rows = rows_of(ROWS)
    mine = [rows[:5], rows[5:], []][one.dp_rank] if one.dp_size > 1 else rows
    for _ in range(steps):
        one.onload(optimizer=True)
        one.step(mine, simple_loss(30), temperature=1.0)
        one.offload()
    return {n: t.clone() for n, t in one.named_weights()}


def test_three_uneven_shards_and_offloading_train_the_same(tmp_path: Path) -> None:
    """31 rows of vocabulary and 20 hidden units are not divisible by three; moving the state away changes nothing."""
    path = str(tiny_model(tmp_path / "m", vocab_size=259, hidden_size=20, intermediate_size=31))
    base = role(optim={"lr": 1e-3, "weight_decay": 0.1}, grad_clip=0.5)
    away = base | {"fsdp_config": base["fsdp_config"] | {"param_offload": True, "optimizer_offload": True}}
    local = FSDPEngine(path, role_cfg=base, device="cpu")
    for _ in range(3):
        local.step(rows_of(ROWS), simple_loss(30), temperature=1.0)
    three = ranks.run(trained, 3, path, base, 3)
    moved = ranks.run(trained, 3, path, away, 3)
    for name, tensor in local.named_weights():
        torch.testing.assert_close(three[0][name], tensor, rtol=0, atol=5e-5)
        assert torch.equal(moved[0][name], three[0][name]), name
