"""Step metrics against plain loops over lists."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from verl.tracking.step_metrics import (
    Counters,
    StepFacts,
    agent_metrics,
    length_metrics,
    perf_metrics,
    reward_metrics,
    score_metrics,
    staleness_metrics,
    step_metrics,
    time_metrics,
)
from verl.trajectory import Batch, Prompt, Trajectory


def response(uid: str, index: int, length: int, rng: np.random.Generator, **kwargs) -> Trajectory:
    prompt = Prompt(uid, np.arange(int(uid[1:]) + 3), [{"role": "user", "content": uid}], "src")
    mask = rng.random(length) < 0.8 if length else np.zeros(0, bool)
    t = Trajectory(prompt, index, np.arange(length), mask, rng.normal(size=length).astype(np.float32) - 1)
    t.score = float(index)
    t.loss_mask = mask.copy()
    t.advantages, t.returns, t.entropy, t.old_log_probs = (
        rng.normal(size=length).astype(np.float32) - 1 for _ in range(4)
    )
    t.token_rewards = np.zeros(length, np.float32)
    if length:
        t.token_rewards[-1] = t.score - 0.25
    t.timing = {
        "generate_sequences": 1.0 + index,
        "compute_score": 0.1 * index,
        "num_preempted": float(index % 2),
    }
    for name, value in kwargs.items():
        setattr(t, name, value)
    return t


def batch_of(seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    rows = [response(f"u{g}", i, int(rng.integers(1, 9)), rng) for g in range(3) for i in range(4)]
    rows[1].score, rows[1].score_error = None, "it raised"
    rows[1].extra["score_failure"] = {"kind": "exception", "reason": "x"}
    rows[2].score, rows[2].score_error = None, "more than 30 s"
    rows[2].extra["score_failure"] = {"kind": "timeout", "reason": "x"}
    for t in (rows[1], rows[2]):
        t.loss_mask = np.zeros(t.length, bool)
    rows[5] = response("u1", 1, 0, rng, score=7.0)
    rows[7] = response(
        "u1", 3, 0, rng, score=None, score_error="lost by the sampler", finish_reason="lost", timing={}
    )
    rows[8].segments[0].versions = (1, 2)
    rows[0].score_parts = {"acc": True, "note": "text", "speed": 2.5}
    rows[3].score_parts = {"acc": False, "speed": float("nan")}
    return Batch(rows)


FACTS = StepFacts(
    step=4,
    epoch=1,
    timings={
        "step": 10.0,
        "gen": 4.0,
        "reward": 0.5,
        "adv": 0.1,
        "update_actor": 3.0,
        "update_weights": 0.2,
        "ref": 1.0,
    },
    weight_version=4,
    max_prompt_length=5,
    max_response_length=8,
    sampler={"busy_s": 3.5},
    sync_bytes=400_000_000,
    devices=2,
)


def close(found: dict, name: str, expected: float) -> None:
    assert found[name] == pytest.approx(expected, rel=1e-6), name


def three(found: dict, name: str, values: list[float]) -> None:
    close(found, f"{name}/mean", sum(values) / len(values))
    close(found, f"{name}/max", max(values))
    close(found, f"{name}/min", min(values))


@pytest.mark.parametrize("seed", range(3))
def test_scores_rewards_advantages(seed):
    batch = batch_of(seed)
    found = score_metrics(batch)
    scored = [t for t in batch.trajectories if t.score is not None and any(t.response_mask)]
    assert len(scored) >= 7
    three(found, "critic/score", [t.score for t in scored])
    three(found, "critic/rewards", [sum(t.token_rewards.tolist()) for t in scored])
    for column in ("advantages", "returns"):
        values = []
        for t in batch.trajectories:
            for i in range(t.length):
                if t.loss_mask[i]:
                    values.append(float(getattr(t, column)[i]))
        three(found, f"critic/{column}", values)
    three(found, "reward_extra/acc", [1.0, 0.0])
    three(found, "reward_extra/speed", [2.5])
    assert "reward_extra/note/mean" not in found and not any("values" in n for n in found)


def test_rewards_equal_scores_without_token_rewards():
    batch = batch_of()
    for t in batch:
        t.token_rewards = None
    found = score_metrics(batch)
    for kind in ("mean", "max", "min"):
        assert found[f"critic/rewards/{kind}"] == found[f"critic/score/{kind}"]


def test_failed_scores_are_counted_and_lost_answers_apart():
    found = reward_metrics(batch_of())
    assert (found["reward/errors"], found["reward/timeouts"]) == (2, 1)
    close(found, "reward/error_ratio", 2 / 11)
    assert found["training/rollout_failure/evicted_samples"] == 1
    close(found, "reward/latency_s/max", 0.3)
    assert "reward/latency_s/min" not in found


@pytest.mark.parametrize("seed", range(3))
def test_a_lost_answer_is_in_no_number_but_its_own_counter(seed):
    batch = batch_of(seed)
    without = Batch([t for t in batch if t.finish_reason != "lost"])
    assert len(without) == len(batch) - 1
    found, expected = (step_metrics(b, FACTS, Counters()) for b in (batch, without))
    assert found.pop("training/rollout_failure/evicted_samples") == 1
    for name in set(found) | set(expected):
        if name != "perf/cpu_memory_used_gb":
            assert found[name] == pytest.approx(expected[name], nan_ok=True), name


def test_lengths():
    batch = batch_of()
    found = length_metrics(batch, 5, 6)
    lengths = [len(t.response_ids) for t in batch.trajectories]
    prompts = [len(t.prompt.ids) for t in batch.trajectories]
    three(found, "response_length", lengths)
    three(found, "prompt_length", prompts)
    batch[4].response_mask[:] = False
    written = [n for t, n in zip(batch, lengths, strict=True) if t.response_mask.sum() > 0]
    found = length_metrics(batch, 5, 6)
    three(found, "response_length_non_aborted", written)
    close(found, "response_length/clip_ratio", sum(n >= 6 for n in lengths) / 12)
    close(found, "response_length_non_aborted/clip_ratio", sum(n >= 6 for n in written) / len(written))
    close(found, "prompt_length/clip_ratio", sum(n >= 5 for n in prompts) / 12)
    close(found, "response/aborted_ratio", 1 - len(written) / 12)
    assert len(written) < 10, "a response of tool output alone is empty too"
    three(found, "num_turns", [2])
    three(found, "training/num_turns", [2])


def test_times():
    batch = batch_of()
    found = time_metrics(batch, FACTS)
    responses = sum(len(t.response_ids) for t in batch)
    total = responses + sum(len(t.prompt.ids) for t in batch)
    close(found, "timing_s/step", 10.0)
    close(found, "timing_s/reshard", 0.2)
    assert found["timing_s/generate_sequences"] == found["timing_s/generate_sequence"] == 3.5
    close(found, "timing_per_token_ms/gen", 4000 / responses)
    close(found, "timing_per_token_ms/update_actor", 3000 / total)
    close(found, "timing_per_token_ms/ref", 1000 / total)
    assert "timing_per_token_ms/values" not in found
    perf = perf_metrics(batch, FACTS)
    assert perf["perf/total_num_tokens"] == total
    close(perf, "perf/throughput", total / (10.0 * 2))
    close(perf, "perf/weight_sync_gb_per_s", 2.0)
    close(perf, "perf/device_busy_ratio", (3.5 + 1.0 + 3.0) / 10)
    assert perf["perf/cpu_memory_used_gb"] > 0.01


def test_generate_sequences_never_exceeds_gen():
    facts = StepFacts(1, 0, {"step": 5.0, "gen": 2.0}, 1, 5, 5, sampler={"busy_s": 99.0})
    assert time_metrics(batch_of(), facts)["timing_s/generate_sequences"] == 2.0


def test_slowest_response():
    batch = batch_of()
    batch[9].timing = {
        "generate_sequences": 2.0,
        "tool_calls": 50.0,
        "compute_score": 1.0,
        "num_preempted": 3.0,
    }
    found = agent_metrics(batch)
    base = "timing_s/agent_loop"
    assert found[f"{base}/slowest/tool_calls"] == 50.0
    assert found[f"{base}/slowest/num_preempted"] == 3.0
    assert found[f"{base}/slowest/response_length"] == batch[9].length
    assert found[f"{base}/slowest/prompt_length"] == 5
    assert found[f"{base}/num_preempted/min"] == -1.0, "unknown for the lost response"
    assert found[f"{base}/generate_sequences/max"] == 4.0


def test_staleness():
    batch = batch_of()
    for t in batch:
        t.segments[0].versions = (3,)
    batch[0].segments[0].versions = (1, 2)
    found = staleness_metrics(batch, 4)
    assert found["training/weight_version"] == 4
    base = "training/off_policy/trajectory"
    assert (found[f"{base}_spans/max"], found[f"{base}_spans/min"]) == (2, 1)
    assert (found[f"{base}_staleness/max"], found[f"{base}_staleness/min"]) == (1, 0)
    assert found[f"{base}_staleness_worst/max"] == 2
    close(found, f"{base}_spans/mean", 11 / 10)


def test_whole_step_is_plain_numbers_and_has_what_is_always_there():
    found = step_metrics(batch_of(), FACTS, Counters(skipped_updates=1, refused_steps=2))
    assert all(type(v) in (int, float) for v in found.values())
    assert (found["training/skipped_updates"], found["training/refused_steps"]) == (1, 2)
    assert (found["training/global_step"], found["training/epoch"]) == (4, 1)
    values = [float(v) for t in batch_of() for v, m in zip(t.entropy, t.response_mask, strict=True) if m]
    assert found["actor/entropy"] == pytest.approx(statistics.fmean(values), rel=1e-6)
    for name in (
        "training/rollout_probs_diff_mean",
        "training/rollout_logprob_abs_diff/max",
        "rollout_corr/kl",
        "timing_s/agent_loop/slowest/tool_calls",
    ):
        assert name in found
    assert found["training/rollout_probs_diff_valid"] == 1


def test_nothing_to_average_over_is_nan_and_stops_nothing():
    rng = np.random.default_rng(0)
    rows = [response("u0", i, 0, rng, score=None, score_error="x", entropy=None) for i in range(2)]
    found = step_metrics(Batch(rows), FACTS, Counters())
    for name in (
        "critic/score/mean",
        "critic/advantages/max",
        "actor/entropy",
        "response_length_non_aborted/mean",
    ):
        assert math.isnan(found[name])
    assert found["reward/errors"] == 2 and found["response/aborted_ratio"] == 1.0
    assert "training/rollout_probs_diff_mean" not in found
    empty = step_metrics(Batch([]), FACTS, Counters())
    assert math.isnan(empty["critic/score/mean"]) and empty["perf/total_num_tokens"] == 0


def test_counters_travel():
    counters = Counters(3, 4)
    other = Counters()
    other.load(counters.state())
    assert other == counters
    other.load({})
    assert other == counters
