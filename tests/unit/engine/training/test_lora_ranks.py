"""Adapters cut over ranks: the same loss, gradients, files and samples as on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import ranks
from tests.tiny import tiny_model
from tests.unit.engine.training.fsdp_cases import assert_same, columns, role
from tests.unit.engine.training.lora_cases import disturb, engine, locally, lora, on_ranks, trained
from verl.errors import UserError

pytest.importorskip("peft")

CASES = {
    "even": (trained(), lora(), "even"),
    "one idle": (trained(), lora(enable_gradient_checkpointing=True), "none for the last"),
    "sequence": (trained(ulysses_sequence_parallel_size=2), lora(), "even"),
    "kept whole": (trained(fsdp={"reshard_after_forward": False}), lora(), "uneven"),
}


@pytest.mark.parametrize("arch", [pytest.param("qwen3", marks=pytest.mark.long), "qwen3_moe"])
def test_two_ranks_train_as_one(tmp_path: Path, arch: str) -> None:
    path = str(tiny_model(tmp_path / "model", arch, scale=4.0))
    local = locally(path, trained(), lora(), 2)
    assert len(local["gradients"]) == 29, "of adapters, and of the last normalisation, which stays as it is"
    found = ranks.run(on_ranks, 2, path, CASES, 2)
    for name in CASES:
        mine = [one[name] for one in found]
        assert_same(mine, local, 5e-6)
        np.testing.assert_allclose(columns(mine, "base"), local["base"], rtol=1e-6, atol=4e-6)
        for key, tensor in local["weights"].items():
            assert torch.equal(mine[0]["weights"][key], mine[1]["weights"][key])
            assert float((mine[0]["weights"][key] - tensor).abs().max()) <= 1e-4, key


def descending(**changes: Any) -> dict[str, Any]:
    """Plain gradient descent, which shows the scale of clipped gradients."""
    return role(optim={"optimizer": "SGD", "lr": 5.0, "weight_decay": 0.0}, grad_clip=0.01, **changes)


def test_adapters_are_clipped_by_the_norm_of_all_ranks(tmp_path: Path) -> None:
    path = str(tiny_model(tmp_path / "model", scale=4.0))
    cases = {
        "uneven": (descending(), lora(), "uneven"),
        "sequence": (descending(ulysses_sequence_parallel_size=2), lora(), "even"),
        "replicas": (descending(fsdp={"fsdp_size": 1}), lora(), "uneven"),
    }
    start = locally(path, descending(), lora(), 0)["weights"]
    local = locally(path, descending(), lora(), 2)
    gone = distance(local["weights"], start)
    assert min(local["norm"]) > 0.05 and gone > 0.01
    for one in ranks.run(on_ranks, 2, path, cases, 2):
        for name in cases:
            assert one[name]["norm"] == pytest.approx(local["norm"], rel=1e-5), name
            assert distance(one[name]["weights"], local["weights"]) <= 2e-4 * gone, name


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return float(sum((a[name] - b[name]).double().square().sum() for name in a)) ** 0.5


def write(path: str, folder: str) -> dict[str, torch.Tensor]:
    one = sharded(path)
    disturb(one)
    one.save_weights(Path(folder))
    one.save_optimizer(Path(folder).parent / "optim")
    held = sum(p.to_local().numel() for p in one.module.parameters())
    total = sum(p.numel() for p in one.module.parameters())
    assert held <= 0.6 * total, "adapters are cut with their layers"
    return {n: t.clone() for n, t in one.adapter_weights()}


def read(path: str, folder: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], str]:
    one = sharded(path)
    one.load_weights(Path(folder))
    one.load_optimizer(Path(folder).parent / "optim")
    adapter, merged = ({n: t.clone() for n, t in f()} for f in (one.adapter_weights, one.named_weights))
    try:
        sharded(path, lora_rank=0).load_weights(Path(folder))
    except UserError as error:
        return adapter, merged, str(error)
    return adapter, merged, ""


def sharded(path: str, **more: Any) -> Any:
    from verl.engine.training.fsdp.engine import FSDPEngine

    return FSDPEngine(path, role_cfg=trained(), model_cfg=lora(**more), device="cpu")


@pytest.mark.parametrize("arch", [pytest.param("qwen3", marks=pytest.mark.long), "qwen3_moe"])
def test_checkpoints_move_between_numbers_of_ranks(tmp_path: Path, arch: str) -> None:
    path = str(tiny_model(tmp_path / "model", arch, scale=4.0, tied=True))
    (tmp_path / "two").mkdir()
    written = ranks.run(write, 2, path, str(tmp_path / "two/actor"))
    alone = engine(path)
    alone.load_weights(tmp_path / "two/actor")
    alone.load_optimizer(tmp_path / "two/optim")
    assert all(torch.equal(written[0][n], t) for n, t in alone.adapter_weights())
    alone.save_weights(tmp_path / "one/actor")
    alone.save_optimizer(tmp_path / "one/optim")
    for adapter, merged, refused in ranks.run(read, 2, path, str(tmp_path / "one/actor")):
        assert "set actor_rollout_ref.model.lora_rank=4 (sft: model.lora_rank) to go on" in refused
        assert adapter.keys() == written[0].keys()
        assert all(torch.equal(adapter[n], t) for n, t in written[0].items())
        for name, tensor in alone.named_weights():
            torch.testing.assert_close(merged[name], tensor, rtol=1e-6, atol=1e-6)
