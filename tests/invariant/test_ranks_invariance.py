"""Who holds which rows, how weights are cut and sequences split changes no number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import ranks
from tests.tiny import LINEAR_ATTENTION, tiny_model
from tests.unit.engine.training.fsdp_cases import assert_same, locally, on_ranks, role

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "plain": (role(), {}, "even"),
    "uneven": (role(), {}, "uneven"),
    "one rank has none": (role(), {}, "none for the last"),
    "by tokens": (role(ppo_micro_batch_size_per_gpu=None, ppo_max_token_len_per_gpu=30), {}, "uneven"),
    "prompts repeated": (role(use_prefix_grouper=False), {}, "even"),
    "recomputed": (role(), {"enable_gradient_checkpointing": True}, "uneven"),
    "kept": (role(fsdp={"reshard_after_forward": False}), {"enable_gradient_checkpointing": False}, "uneven"),
    "prefetch": (role(fsdp={"forward_prefetch": True}), {}, "even"),
    "one unit": (role(fsdp={"wrap_policy": {"min_num_params": 10**9}}), {}, "even"),
    "offloaded": (
        role(fsdp={"offload_policy": True, "param_offload": True, "optimizer_offload": True}),
        {},
        "even",
    ),
    "full logits": (role(), {"use_fused_kernels": False}, "uneven"),
}


def split(size: int, **changes: Any) -> dict[str, Any]:
    return role(ulysses_sequence_parallel_size=size, **changes)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("ranks") / "m", "qwen3", scale=4.0, tied=True)


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, Any]:
    return locally(str(model), role())


def check(size: int, model: Path, cases: Any, alone: dict[str, Any]) -> list[dict[str, Any]]:
    found = ranks.run(on_ranks, size, str(model), cases)
    for name in cases:
        try:
            assert_same([one[name] for one in found], alone)
        except AssertionError as error:
            raise AssertionError(f"{name} on {size} ranks: {error}") from error
    return found


def test_one_rank(model: Path, alone: dict[str, Any]) -> None:
    check(1, model, {"plain": CASES["plain"], "recomputed": CASES["recomputed"]}, alone)


def test_two_ranks(model: Path, alone: dict[str, Any]) -> None:
    hybrid = {"hybrid 2x1": (role(fsdp={"fsdp_size": 1}), {}, "uneven")}
    found = check(2, model, CASES | hybrid, alone)
    whole = sum(t.numel() for n, t in alone["weights"].items() if n != "lm_head.weight")
    assert [one["plain"]["held"] for one in found] == [whole // 2, whole // 2]
    assert [one["hybrid 2x1"]["held"] for one in found] == [whole, whole]
    assert found[0]["plain"]["head"] and not found[0]["full logits"]["head"]
    assert found[0]["plain"]["fused"] > 0


def test_a_sequence_over_two_ranks(model: Path, alone: dict[str, Any]) -> None:
    cases = {
        "split": (split(2), {}, "even"),
        "split, by tokens": (
            split(2, ppo_micro_batch_size_per_gpu=None, ppo_max_token_len_per_gpu=30),
            {},
            "even",
        ),
        "split, repeated": (split(2, use_prefix_grouper=False), {}, "even"),
        "split, recomputed": (split(2), {"enable_gradient_checkpointing": True}, "even"),
        "split, full logits": (split(2), {"use_fused_kernels": False}, "even"),
    }
    found = check(2, model, cases, alone)
    assert found[0]["split"]["rows"] == found[1]["split"]["rows"]


def test_linear_attention_on_two_ranks(tmp_path: Path) -> None:
    """A sequence's states are on one rank, also where another gets no sequence of a pack."""
    model = tiny_model(tmp_path / "m", "qwen3_5_text", scale=4.0, **LINEAR_ATTENTION["qwen3_5_text"])
    cases = {
        "split": (split(2), {}, "even"),
        "split, rows alone": (
            split(2, ppo_micro_batch_size_per_gpu=1),
            {"enable_gradient_checkpointing": True},
            "even",
        ),
    }
    check(2, model, cases, locally(str(model), role()))


@pytest.mark.slow
@pytest.mark.long
def test_four_ranks(model: Path, alone: dict[str, Any]) -> None:
    """Two replicas of two shards; two sequences over two ranks each; more ranks than key heads."""
    cases = {
        "hybrid 2x2": (role(fsdp={"fsdp_size": 2}), {}, "uneven"),
        "split 2": (split(2), {}, "uneven"),
        "split 2, one pair has none": (split(2), {}, "none for the last"),
        "split 2, hybrid": (split(2, fsdp={"fsdp_size": 2}), {}, "even"),
        "split 4": (split(4), {"enable_gradient_checkpointing": True}, "even"),
    }
    check(4, model, cases, alone)
