"""Tensor parallelism after transformers' plans: the same numbers, the same checkpoints, clear refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import ranks
from tests.tiny import tiny_model
from tests.unit.engine.training.fsdp_cases import Cases, check_on_ranks, role
from tests.unit.engine.training.test_fsdp_checkpoint import check_four_ranks_one_device_and_back
from tests.unit.engine.training.test_fsdp_engine import complaint
from verl.engine.training.fsdp.engine import FSDPEngine


def cut(size: int, fsdp: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return role(fsdp={"tensor_parallel_size": size} | (fsdp or {}), **changes)


@pytest.mark.parametrize(("arch", "tied"), [("qwen3", True), ("qwen2", False)])
def test_two_ranks_share_the_products(tmp_path: Path, arch: str, tied: bool) -> None:
    path = str(tiny_model(tmp_path / "m", arch, scale=4.0, tied=tied))
    cases: Cases = {
        "cut": (cut(2), {}, "even"),
        "recomputed": (cut(2), {"enable_gradient_checkpointing": True}, "even"),
    }
    found = check_on_ranks(2, path, cases)
    assert found[0]["cut"]["rows"] == found[1]["cut"]["rows"]
    module = FSDPEngine(path, role_cfg=role(), device="cpu", trainable=False).module
    layers = sum(p.numel() for n, p in module.named_parameters() if n.endswith("proj.weight"))
    whole = sum(p.numel() for p in module.parameters())
    biases = sum(p.numel() for n, p in module.named_parameters() if n.endswith("proj.bias"))
    assert found[0]["cut"]["held"] == whole - layers // 2 - biases // 2


@pytest.mark.slow
@pytest.mark.long
def test_four_ranks(tmp_path: Path) -> None:
    path = str(tiny_model(tmp_path / "m", "qwen3", scale=4.0, tied=True))
    cases: Cases = {
        "and shards": (cut(2), {}, "uneven"),
        "one pair has none": (cut(2), {}, "none for the last"),
        "and replicas": (cut(2, {"fsdp_size": 1}), {}, "uneven"),
        "and a split sequence": (cut(2, ulysses_sequence_parallel_size=2), {}, "even"),
        "offloaded": (cut(2, {"offload_policy": True}), {}, "uneven"),
    }
    check_on_ranks(4, path, cases)


@pytest.mark.long
def test_checkpoints_go_to_one_device_and_back(tmp_path: Path) -> None:
    path = str(tiny_model(tmp_path / "m", "qwen2", tied=True))
    check_four_ranks_one_device_and_back(tmp_path, path, {"tensor_parallel_size": 2})


def test_what_cannot_be_cut_is_refused_on_every_rank(tmp_path: Path) -> None:
    experts = str(tiny_model(tmp_path / "experts", "qwen3_moe"))
    odd = str(tiny_model(tmp_path / "odd", num_attention_heads=3, num_key_value_heads=3))
    grouped = str(tiny_model(tmp_path / "grouped", num_attention_heads=4, num_key_value_heads=1))
    for path, size, role_cfg, word in (
        (grouped, 2, cut(2), "does not divide the model's 1 key-value heads; use one of 1"),
        (grouped, 2, cut(2, ulysses_sequence_parallel_size=2), "= 4 does not divide the 2 ranks"),
        (experts, 2, cut(2), "cannot be cut"),
        (odd, 2, cut(2), "tensor_parallel_size=2: does not divide the model's 3 attention heads"),
        (odd, 2, cut(3), "tensor_parallel_size=3: does not divide the 2 ranks"),
    ):
        messages = ranks.run(complaint, size, path, role_cfg)
        assert all(word in message for message in messages), messages


def test_the_configuration_checks_layouts() -> None:
    from verl.config import load
    from verl.preflight.check import check as check_config

    def problems(*argv: str) -> str:
        base = ("trainer.n_gpus_per_node=4", "trainer.device=cpu", "data.train_files=x.parquet")
        return str(check_config(load([*base, *argv])).problem_text())

    actor, ref = "actor_rollout_ref.actor.", "actor_rollout_ref.ref."
    assert "tensor_parallel_size=3: does not divide the 4 ranks" in problems(
        f"{actor}fsdp_config.tensor_parallel_size=3"
    )
    assert "must divide 1" in problems(f"{ref}ulysses_sequence_parallel_size=2")
    assert "must divide" not in problems(f"{actor}ulysses_sequence_parallel_size=2")
    assert "must divide" not in problems(f"{actor}fsdp_config.tensor_parallel_size=2")
