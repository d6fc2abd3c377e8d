"""Experts spread over ranks: the same numbers, the same checkpoints, clear refusals."""

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

EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 3},
}


def spread(size: int, fsdp: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return role(fsdp={"expert_parallel_size": size} | (fsdp or {}), **changes)


def model(folder: Path, arch: str = "qwen3_moe") -> str:
    return str(tiny_model(folder / "m", arch, scale=4.0, **EXPERTS[arch]))


def gathered(path: str) -> int:
    """Experts whose weights a rank has while it computes."""
    experts = FSDPEngine(path, role_cfg=spread(2), device="cpu").module.model.layers[0].mlp.experts
    experts.unshard()
    return len(experts.down_proj.to_local())


@pytest.mark.parametrize("arch", [pytest.param(a, marks=() if a == "qwen3_moe" else pytest.mark.long) for a in EXPERTS])
def test_two_ranks_have_half_of_the_experts_each(tmp_path: Path, arch: str) -> None:
    cases: Cases = {
        "recomputed": (spread(2), {}, "uneven"),
        "kept": (spread(2), {"enable_gradient_checkpointing": False}, "none for the last"),
        "whole": (spread(2, {"reshard_after_forward": False}), {}, "even"),
        "a split sequence": (spread(2, ulysses_sequence_parallel_size=2), {}, "even"),
        "offloaded": (spread(2, {"offload_policy": True}), {}, "uneven"),
    }
    found = check_on_ranks(2, path := model(tmp_path, arch), cases)
    module = FSDPEngine(path, role_cfg=role(), device="cpu", trainable=False).module
    assert found[0]["recomputed"]["held"] == sum(p.numel() for p in module.parameters()) // 2
    assert ranks.run(gathered, 2, path) == [4, 4]


@pytest.mark.slow
@pytest.mark.long
def test_four_ranks(tmp_path: Path) -> None:
    cases: Cases = {
        "cut, too": (spread(2), {}, "uneven"),
        "in each replica": (spread(2, {"fsdp_size": 2}), {}, "none for the last"),
        "one group": (spread(4), {}, "uneven"),
    }
    check_on_ranks(4, model(tmp_path), cases)


def test_checkpoints_go_to_one_device_and_back(tmp_path: Path) -> None:
    check_four_ranks_one_device_and_back(tmp_path, model(tmp_path), {"expert_parallel_size": 2})


def test_what_cannot_be_spread_is_refused_on_every_rank(tmp_path: Path) -> None:
    path, dense = model(tmp_path), str(tiny_model(tmp_path / "dense"))
    for where, role_cfg, word in (
        (dense, spread(2), "does not divide the model's 0 experts"),
        (path, spread(3), "does not divide the 2 ranks of a copy of the model; use one of 1, 2"),
        (path, spread(2, {"fsdp_size": 1}), "does not divide the 1 ranks of a copy"),
    ):
        messages = ranks.run(complaint, 2, where, role_cfg)
        assert all(word in message for message in messages), messages
