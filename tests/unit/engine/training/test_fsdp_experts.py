"""Experts spread over ranks: the same numbers, the same checkpoints, clear refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import ranks
from tests.tiny import tiny_model
from tests.unit.engine.training.fsdp_cases import assert_same, locally, on_ranks, role
from tests.unit.engine.training.test_fsdp_checkpoint import ROLE, same, save, sharded, state
from tests.unit.engine.training.test_fsdp_engine import complaint
from verl.engine.training.fsdp.engine import FSDPEngine

Cases = dict[str, tuple[dict[str, Any], dict[str, Any], str]]
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 3},
}


def spread(size: int, fsdp: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return role(fsdp={"expert_parallel_size": size} | (fsdp or {}), **changes)


def model(folder: Path, arch: str = "qwen3_moe") -> str:
    return str(tiny_model(folder / "m", arch, scale=4.0, **EXPERTS[arch]))


def check(size: int, path: str, cases: Cases) -> list[dict[str, Any]]:
    local = locally(path, role())
    found = ranks.run(on_ranks, size, path, cases)
    for name in cases:
        assert_same([one[name] for one in found], local, 2e-6)
    return found


def gathered(path: str) -> int:
    """Experts whose weights a rank has while it computes."""
    experts = FSDPEngine(path, role_cfg=spread(2), device="cpu").module.model.layers[0].mlp.experts
    experts.unshard()
    return len(experts.down_proj.to_local())


@pytest.mark.parametrize("arch", list(EXPERTS))
def test_two_ranks_have_half_of_the_experts_each(tmp_path: Path, arch: str) -> None:
    cases: Cases = {
        "recomputed": (spread(2), {}, "uneven"),
        "kept": (spread(2), {"enable_gradient_checkpointing": False}, "none for the last"),
        "whole": (spread(2, {"reshard_after_forward": False}), {}, "even"),
        "a split sequence": (spread(2, ulysses_sequence_parallel_size=2), {}, "even"),
        "offloaded": (spread(2, {"offload_policy": True}), {}, "uneven"),
    }
    found = check(2, path := model(tmp_path, arch), cases)
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
    check(4, model(tmp_path), cases)


def test_checkpoints_go_to_one_device_and_back(tmp_path: Path) -> None:
    path, (here, there, local) = model(tmp_path), (str(tmp_path / name) for name in ("here", "there", "local"))
    two = {"expert_parallel_size": 2}
    saved, ended = ranks.run(sharded, 4, path, None, 2, here, 1, two)[0]
    engine = FSDPEngine(path, role_cfg=ROLE, device="cpu")
    engine.schedule(8)
    engine.load_weights(Path(here) / "w")
    engine.load_optimizer(Path(here) / "o")
    same(state(engine), saved)
    save(engine, local)
    again = ranks.run(sharded, 4, path, local, 0, there, 1, two)
    same(again[3][0], saved)
    same(again[3][1], ended)
    same(ranks.run(sharded, 2, path, there, 0, None)[1][0], saved)


def test_what_cannot_be_spread_is_refused_on_every_rank(tmp_path: Path) -> None:
    path, dense = model(tmp_path), str(tiny_model(tmp_path / "dense"))
    for where, role_cfg, word in (
        (dense, spread(2), "does not divide the model's 0 experts"),
        (path, spread(3), "does not divide the 2 ranks of a copy of the model; use one of 1, 2"),
        (path, spread(2, {"fsdp_size": 1}), "does not divide the 1 ranks of a copy"),
    ):
        messages = ranks.run(complaint, 2, where, role_cfg)
        assert all(word in message for message in messages), messages
