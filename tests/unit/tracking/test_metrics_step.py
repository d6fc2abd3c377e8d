"""Step metrics against plain loops over lists; merging values of several mini-batches."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.tracking import step_metrics as of_step
from verl.tracking.names import merge_metrics, rule
from verl.tracking.step_metrics import Counters, StepFacts, score_metrics, step_metrics
from verl.trajectory import Batch, Prompt, Trajectory


def response(uid: str, index: int, length: int, rng: np.random.Generator, **kwargs) -> Trajectory:
    prompt = Prompt(uid, np.arange(int(uid[1:]) + 3), [{"role": "user", "content": uid}], "src")
    mask = rng.random(length) < 0.8 if length else np.zeros(0, bool)
    t = Trajectory(
        prompt,
        index,
        np.arange(length),
        mask,
        rollout_log_probs=rng.normal(size=length).astype(np.float32) - 1,
    )
    t.score = float(index)
    t.loss_mask = mask.copy()
    t.advantages, t.returns, t.entropy, t.old_log_probs = (
        rng.normal(size=length).astype(np.float32) - 1 for _ in range(4)
    )
    t.token_rewards = np.zeros(length, np.float32)
    if length:
        t.token_rewards[-1] = t.score - 0.25
    t.timing = {"generate_sequences": 1.0 + index, "compute_score": 0.1 * index}
    t.timing["num_preempted"] = float(index % 2)
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
    lost = {"score": None, "score_error": "lost by the sampler", "finish_reason": "lost", "timing": {}}
    rows[7] = response("u1", 3, 0, rng, **lost)
    rows[8].segments[0].versions = (1, 2)
    rows[0].score_parts = {"acc": True, "note": "text", "speed": 2.5}
    rows[3].score_parts = {"acc": False, "speed": float("nan")}
    return Batch(rows)


FACTS = StepFacts(
    step=4,
    epoch=1,
    timings={"step": 10.0, "gen": 4.0, "reward": 0.5, "update_actor": 3.0, "update_weights": 0.2, "ref": 1.0},
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
    for t in batch:
        t.token_rewards = None
    three(score_metrics(batch), "critic/rewards", [t.score for t in scored])


def test_failed_scores_are_counted_and_lost_responses_apart():
    found = of_step.reward_metrics(batch_of())
    assert (found["reward/errors"], found["reward/timeouts"]) == (2, 1)
    close(found, "reward/error_ratio", 2 / 11)
    assert found["training/rollout_failure/evicted_samples"] == 1
    close(found, "reward/latency_s/max", 0.3)
    assert "reward/latency_s/min" not in found


@pytest.mark.parametrize("seed", range(3))
def test_a_lost_response_is_in_no_number_but_its_own_counter(seed):
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
    found = of_step.length_metrics(batch, 5, 6)
    lengths = [len(t.response_ids) for t in batch.trajectories]
    prompts = [len(t.prompt.ids) for t in batch.trajectories]
    three(found, "response_length", lengths)
    three(found, "prompt_length", prompts)
    batch[4].response_mask[:] = False
    written = [n for t, n in zip(batch, lengths, strict=True) if t.response_mask.sum() > 0]
    found = of_step.length_metrics(batch, 5, 6)
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
    found = of_step.time_metrics(batch, FACTS)
    responses = sum(len(t.response_ids) for t in batch)
    total = responses + sum(len(t.prompt.ids) for t in batch)
    close(found, "timing_s/step", 10.0)
    close(found, "timing_s/reshard", 0.2)
    assert found["timing_s/generate_sequences"] == found["timing_s/generate_sequence"] == 3.5
    close(found, "timing_per_token_ms/gen", 4000 / responses)
    close(found, "timing_per_token_ms/update_actor", 3000 / total)
    close(found, "timing_per_token_ms/ref", 1000 / total)
    assert "timing_per_token_ms/values" not in found
    perf = of_step.perf_metrics(batch, FACTS)
    assert perf["perf/total_num_tokens"] == total
    close(perf, "perf/throughput", total / (10.0 * 2))
    close(perf, "perf/weight_sync_gb_per_s", 2.0)
    close(perf, "perf/weight_sync_gb", FACTS.sync_bytes / 1e9)
    close(perf, "perf/device_busy_ratio", (3.5 + 1.0 + 3.0) / 10)
    assert perf["perf/cpu_memory_used_gb"] > 0.01
    longer = StepFacts(1, 0, {"step": 5.0, "gen": 2.0}, 1, 5, 5, sampler={"busy_s": 99.0})
    assert of_step.time_metrics(batch, longer)["timing_s/generate_sequences"] == 2.0, "it never exceeds gen"


def test_slowest_response():
    batch = batch_of()
    batch[9].timing = {"generate_sequences": 2.0, "tool_calls": 50.0, "num_preempted": 3.0}
    found = of_step.agent_metrics(batch)
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
    found = of_step.staleness_metrics(batch, 4)
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
    there = {"training/rollout_probs_diff_mean", "training/rollout_logprob_abs_diff/max", "rollout_corr/kl"}
    assert there | {"timing_s/agent_loop/slowest/tool_calls"} <= set(found)
    assert found["training/rollout_probs_diff_valid"] == 1


def test_nothing_to_average_over_is_nan_and_stops_nothing():
    rng = np.random.default_rng(0)
    rows = [response("u0", i, 0, rng, score=None, score_error="x", entropy=None) for i in range(2)]
    found = step_metrics(Batch(rows), FACTS, Counters())
    for name in ("critic/score/mean", "critic/advantages/max", "actor/entropy"):
        assert math.isnan(found[name])
    assert found["reward/errors"] == 2 and found["response/aborted_ratio"] == 1.0
    assert "training/rollout_probs_diff_mean" not in found
    empty = step_metrics(Batch([]), FACTS, Counters())
    assert math.isnan(empty["critic/score/mean"]) and empty["perf/total_num_tokens"] == 0


# ---- values of several mini-batches ----

NUMBERS = st.floats(-1e6, 1e6)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("actor/loss", "mean"),
        ("critic/score/max", "max"),
        ("critic/score/min", "min"),
        ("rollout_corr/rollout_is_max", "max"),
        ("rollout_corr/rollout_is_seq_max_deviation", "max"),
        ("rollout_corr/rollout_rs_seq_max_k3_masked_fraction", "mean"),
        ("rollout_corr/rollout_rs_seq_max_k3_max", "max"),
        ("timing_s/gen", "mean"),
        ("actor/determination", "mean"),
        ("actor/grad_norm", "mean"),
        ("perf/max_memory_allocated_gb", "max"),
    ],
)
def test_rule_by_name(name, how):
    assert rule(name) == how


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS, st.floats(0.001, 1e3)), min_size=1, max_size=8))
def test_merge_against_plain_loops(rows):
    merged = merge_metrics([({"a": a, "b/max": b, "b/min": c}, w) for a, b, c, w in rows])
    above = below = 0.0
    high, low = -math.inf, math.inf
    for a, b, c, w in rows:
        above += a * w
        below += w
        high = b if b > high else high
        low = c if c < low else low
    assert merged["a"] == pytest.approx(above / below, rel=1e-9, abs=1e-6)
    assert (merged["b/max"], merged["b/min"]) == (high, low)


def test_nan_has_nothing_to_say():
    nan = math.nan
    rows = [({"a": nan, "m/max": nan, "z": nan}, 1), ({"a": 2.0, "m/max": -3.0}, 5), ({"q": 1.0}, 0)]
    merged = merge_metrics(rows)
    assert merged["a"] == 2.0 and merged["m/max"] == -3.0
    assert math.isnan(merged["z"]) and math.isnan(merged["q"])
    assert merge_metrics([]) == {}


def test_infinite_is_kept_and_negative_weights_are_refused():
    both = [({"actor/grad_norm": value}, 1.0) for value in (math.inf, 1.0)]
    assert merge_metrics(both) == {"actor/grad_norm": math.inf}
    with pytest.raises(ValueError, match="negative"):
        merge_metrics([({"a": 1.0}, -1.0)])


def test_trajectories_of_loops() -> None:
    rng = np.random.default_rng(0)
    rows = [
        response("u1", index, 3, rng, status=status)
        for index, status in enumerate(["completed", "timeout", "completed", "length"])
    ]
    for number, t in enumerate(rows):
        t.extra |= {"agent_loop": "environment_agent", "sampler_calls": number, "resamples": number % 2}
        t.extra["session_counts"] = {"repeated_requests": number, "required_tool_choices": 1}
        t.extra |= {
            "turns": [{"reward": float(number)}, {}],
            "tool_counts": {"calls": 2, "invalid": 1, "errors": 0},
        }
        t.timing["tool_calls"] = float(number)
    found = of_step.dialogue_metrics(of_step.AgentRecord.of([*rows, response("u1", 4, 3, rng)]))
    shares = {name.rpartition("/")[2]: value for name, value in found.items() if "agent/status/" in name}
    assert {name: share for name, share in shares.items() if share} == {
        "completed": 0.5,
        "timeout": 0.25,
        "length": 0.25,
    }
    assert (found["agent/calls/mean"], found["agent/calls/max"], found["agent/resampled"]) == (1.5, 3, 2)
    assert (found["agent/repeated_requests"], found["agent/required_tool_choices"]) == (6, 4)
    three(found, "agent/step_reward", [0, 1, 2, 3])
    assert (found["timing_s/agent_loop/environment/max"], found["agent/invalid_calls"]) == (3, 4)
