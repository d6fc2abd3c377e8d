"""The first push is verified without being asked, and the first batch's log-probs end a run that they contradict."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from verl.algorithms.agreement import first_step_bound, first_step_disagreement, where_apart
from verl.config import load
from verl.trajectory import Prompt, Trajectory
from verl.weight_sync.receiver import WeightReceiver
from verl.weight_sync.sender import StreamedSync
from verl.weight_sync.verify import FULL, SAMPLED, WeightSyncError, checksums, compare, digest


class Receiver(WeightReceiver):
    """Keeps what comes; `damage` spoils the tensor of that name."""

    def __init__(self, damage: str = ""):
        self.damage, self.asked = damage, list[str]()

    def load_weights(self, weights: Any, version: int, *, verify: str = "") -> dict[str, str]:
        self.asked.append(verify)
        held = [(name, tensor + (name == self.damage)) for name, tensor in weights]
        return checksums(held, verify) if verify else {}


def trainer() -> Any:
    weights = [(f"w{i}", torch.randn(300, 200)) for i in range(5)] + [("adapter.b", torch.randn(4, 8))]
    return SimpleNamespace(release_cached_memory=lambda: None, named_weights=lambda: iter(weights))


def test_the_first_push_is_verified_and_later_ones_when_asked() -> None:
    receiver = Receiver()
    sync = StreamedSync(trainer(), receiver)
    found = [sync.push(0), sync.push(1), sync.push(2, verify=True)]
    assert receiver.asked == [SAMPLED, "", FULL] and [r.verified > 0 for r in found] == [True, False, True]
    assert found[1].bytes == 5 * 300 * 200 * 4 + 4 * 8 * 4


@pytest.mark.parametrize("name", ["w3", "adapter.b"])
def test_a_first_push_that_went_wrong_names_the_weight(name: str) -> None:
    with pytest.raises(WeightSyncError, match=f"differ in {name}$"):
        StreamedSync(trainer(), Receiver(name)).push(0)


def test_many_wrong_weights_are_counted() -> None:
    ours = {f"w{i}": "a" for i in range(9)}
    with pytest.raises(WeightSyncError, match="differ in w0, w1, w2 and 6 more"):
        compare(ours, dict.fromkeys(ours, "b"))


def test_a_sample_finds_a_transposed_a_stale_shard_and_another_shape() -> None:
    weight = torch.randn(512, 512)
    stale = weight.clone()
    stale[256:] = 0
    reshaped = weight.reshape(256, 1024)
    found = [digest(t, SAMPLED) for t in (weight, weight.t().contiguous(), stale, reshaped)]
    assert len(set(found)) == 4 and digest(weight.clone(), SAMPLED) == found[0]
    assert digest(torch.randn(7, 40, 30, 9), SAMPLED) and digest(torch.zeros(()), SAMPLED)


ROLLOUT = "actor_rollout_ref.rollout"


def config(*changed: str) -> Any:
    return load(["algorithm.adv_estimator=grpo", *changed])


def metrics(mean: float, most: float, behind: int = 0) -> dict[str, float]:
    return {
        "training/rollout_logprob_abs_diff/mean": mean,
        "training/rollout_logprob_abs_diff/max": most,
        "training/off_policy/trajectory_staleness_worst/max": behind,
    }


@pytest.mark.parametrize(
    ("sampler", "trainer", "mean", "most", "stops"),
    [
        (None, "torch.float32", 1e-6, 9e-4, False),
        (None, "torch.float32", 1e-6, 2e-3, True),
        ("fp32", "torch.float32", 1e-6, 2e-3, True),
        ("bf16", "torch.float32", 0.05, 3.0, False),
        (None, "torch.bfloat16", 0.05, 3.0, False),
        (None, "torch.bfloat16", 0.2, 3.0, True),
        (None, "torch.float32", float("nan"), float("nan"), False),
    ],
)
def test_a_first_batch_far_beyond_the_precision_stops_the_run(
    sampler: str | None, trainer: str, mean: float, most: float, stops: bool
) -> None:
    bound = first_step_bound(config(*([f"{ROLLOUT}.dtype={sampler}"] if sampler else [])), trainer)
    said = first_step_disagreement(metrics(mean, most), bound)
    assert bool(said) is stops and (not stops or "do not compute the same model" in said)
    assert first_step_disagreement(metrics(9.0, 9.0, behind=1), bound) == "", "of earlier weights"


def test_a_quantized_sampler_is_held_to_its_own_bound() -> None:
    for word in ("quantization=fp8", "+engine_kwargs.vllm.kv_cache_dtype=fp8"):
        plus, key = ("+", word[1:]) if word.startswith("+") else ("", word)
        bound = first_step_bound(config(f"{ROLLOUT}.name=vllm", f"{plus}{ROLLOUT}.{key}"), "torch.float32")
        assert not first_step_disagreement(metrics(0.06, 3.0), bound)
        assert first_step_disagreement(metrics(0.5, 3.0), bound)


@pytest.mark.parametrize(
    "changed",
    [
        ["algorithm.rollout_correction.bypass_mode=True"],
        [f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.replay_sampling_mask=False"],
        [f"{ROLLOUT}.top_k=50", f"{ROLLOUT}.name=vllm"],
        ["trainer.logprob_diff_limit=5.0"],
    ],
)
def test_nothing_is_said_where_log_probs_may_differ_by_design(changed: list[str]) -> None:
    bound = first_step_bound(config(*changed), "torch.float32")
    assert first_step_disagreement(metrics(9.0, 9.0), bound) == ""


@pytest.mark.parametrize(
    ("apart", "named"),
    [
        ([0, 1, 2, 7], "the beginning of a response: another prompt"),
        ([6, 7], "the beginning of a later turn"),
        ([3, 4, 8], "the middle of a response"),
        ([], ""),
    ],
)
def test_where_both_sides_part_is_said(apart: list[int], named: str) -> None:
    """Of responses with two turns: tokens 0 to 3 and 6 to 9."""
    mask = np.array([1, 1, 1, 1, 0, 0, 1, 1, 1, 1], bool)
    rows = []
    for number in range(3):
        ours, theirs = np.full(10, -1.0, np.float32), np.full(10, -1.0, np.float32)
        theirs[apart] -= 0.5
        theirs[~mask] = 0
        prompt = Prompt(f"0:{number}@0", np.arange(4), None)
        rows.append(Trajectory(prompt, 0, np.arange(10), mask, rollout_log_probs=theirs, old_log_probs=ours))
    said = where_apart(rows)
    assert bool(said) is bool(named) and (f"they part in 3 of 3 responses at {named}" in said or not named)
