"""The numbers of a training step that follow from its batch, its timings and counters.

Pure functions: a `Batch` and facts in, names and plain Python numbers out. What the losses report comes from the
training engine, the comparison of sampler and trainer from `verl.algorithms.agreement`.

Model FLOPs utilisation is what the model's own arithmetic takes, against what the devices could have done. Counted are
the matrix products of the model's definition, once: nothing for recomputed layers, nothing for padding (there is none),
and a prompt that its group shares as often as it was computed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.algorithms.agreement import sampler_metrics
from verl.tracking.names import Number, plain, spread
from verl.trajectory import STATUSES, Batch, Trajectory

if TYPE_CHECKING:
    from verl.models.layers import ModelCost

LOST = "lost"
BACKWARD = 2.0
"""A backward pass takes two products where the forward pass takes one."""
_AGENT_TIMES = {"generate_sequences": 0.0, "tool_calls": 0.0, "compute_score": 0.0, "num_preempted": -1.0}
PER_TOKEN = ("ref", "values", "adv", "update_critic", "update_actor")
_BUSY_PHASES = ("old_log_prob", "ref", "values", "update_critic", "update_actor", "teacher")


@dataclass(slots=True)
class Counters:
    """Counts since the start of the run; they travel with its checkpoints. `refused_in_a_row`: steps, up to now."""

    skipped_updates: int = 0
    refused_steps: int = 0
    refused_in_a_row: int = 0
    skipped_rows: int = 0

    def state(self) -> dict[str, int]:
        """For the checkpoint."""
        return asdict(self)

    def load(self, state: Mapping[str, int]) -> None:
        """Inverse of `state`; counts that a checkpoint does not have keep their value."""
        for name in asdict(self):
            setattr(self, name, int(state.get(name, getattr(self, name))))


@dataclass(slots=True)
class StepFacts:
    """What the loop knows about a step besides its batch.

    timings: seconds by phase, "step" and "gen" among them. sampler: the engine's `stats()` since the step began
    (`busy_s`). sync_bytes: bytes moved to the sampler. memory: further numbers of the platform and the ranks.
    """

    step: int
    epoch: int
    timings: Mapping[str, float]
    weight_version: int
    max_prompt_length: int
    max_response_length: int
    sampler: Mapping[str, float] = field(default_factory=dict)
    sync_bytes: int = 0
    devices: int = 1
    memory: Mapping[str, float] = field(default_factory=dict)


def step_metrics(batch: Batch, facts: StepFacts, counters: Counters) -> dict[str, Number]:
    """All metrics of a step that follow from the arguments.

    A response that the sampler lost is counted (training/rollout_failure/evicted_samples) and in nothing else.
    """
    out: dict[str, Number] = {"training/global_step": facts.step, "training/epoch": facts.epoch}
    out |= reward_metrics(batch) | dialogue_metrics(AgentRecord.of(batch))
    batch = Batch([t for t in batch if t.finish_reason != LOST], batch.meta)
    with_entropy = [t for t in batch if t.entropy is not None]
    out["actor/entropy"] = _over_tokens("", with_entropy, "entropy", "response_mask")["/mean"]
    out["training/skipped_updates"] = counters.skipped_updates
    out["training/refused_steps"] = counters.refused_steps
    out |= score_metrics(batch)
    out |= length_metrics(batch, facts.max_prompt_length, facts.max_response_length)
    out |= time_metrics(batch, facts) | agent_metrics(batch) | perf_metrics(batch, facts)
    if any(t.rollout_log_probs is not None and t.length > 0 for t in batch):
        out |= sampler_metrics(batch)
    out |= staleness_metrics(batch, facts.weight_version)
    return out


def score_metrics(batch: Batch) -> dict[str, Number]:
    """critic/{score,rewards,advantages,returns} and reward_extra/*, over non-empty responses with a valid score."""
    rows = [t for t in batch if t.policy_tokens > 0 and t.scored]
    scores = [float(t.score) for t in rows if t.score is not None]
    rewards_of_rows = [t.score if t.token_rewards is None else t.token_rewards for t in rows]
    rewards = [float(np.sum(np.asarray(reward), dtype=np.float64)) for reward in rewards_of_rows]
    out = spread("critic/score", scores) | spread("critic/rewards", rewards)
    out |= _over_tokens("critic/advantages", rows, "advantages", "loss_mask")
    if all(t.returns is t.advantages for t in rows):  # one column of a large step takes a tenth of a second
        out |= {f"critic/returns/{kind}": out[f"critic/advantages/{kind}"] for kind in ("mean", "max", "min")}
    else:
        out |= _over_tokens("critic/returns", rows, "returns", "loss_mask")
    if rows and all(t.values is not None for t in rows):
        out |= _over_tokens("critic/values", rows, "values", "response_mask")
    for key, values in numeric_parts(rows).items():
        out |= spread(f"reward_extra/{key}", values)
    return out


def reward_metrics(batch: Batch) -> dict[str, Number]:
    """reward/*: failed and timed-out scorings (a timeout is a failure too), their share, abstentions, comparisons that
    a verifier could not make because of the response, time per response, and the mean of each of several rewards before
    its weight.

    Responses the sampler lost were never scored: they are training/rollout_failure/evicted_samples.
    """
    lost = [t for t in batch if t.finish_reason == LOST]
    sampled = [t for t in batch if t.finish_reason != LOST]
    unscored = [t for t in sampled if not t.scored]
    failed = [t for t in unscored if t.extra.get("score_failure", {}).get("kind") != "abstained"]
    out: dict[str, Number] = {"training/rollout_failure/evicted_samples": len(lost)} if lost else {}
    kinds = [t.extra.get("score_failure", {}).get("kind") for t in failed]
    out |= {"reward/errors": len(failed), "reward/timeouts": kinds.count("timeout")}
    out["reward/abstained"] = len(unscored) - len(failed)
    out["reward/undecided"] = sum(t.extra.get("undecided", 0) for t in sampled)
    out["reward/error_ratio"] = _ratio(len(failed), len(sampled))
    latency = [t.timing["compute_score"] for t in sampled if "compute_score" in t.timing]
    several = [t.extra["rewards"] for t in sampled if "rewards" in t.extra]
    for name in several[0] if several else ():
        out[f"reward/{name}/mean"] = _mean(np.array([rewards[name] for rewards in several], np.float64))
    return out | spread("reward/latency_s", latency, ("mean", "max"))


def length_metrics(batch: Batch, max_prompt_length: int, max_response_length: int) -> dict[str, Number]:
    """Lengths of responses and prompts, shares at their limits, empty responses (no token of the policy), turns; image
    tokens of prompts with images."""
    lengths, prompts = batch.lengths, batch.prompt_lengths
    empty = np.array([t.policy_tokens == 0 for t in batch], bool)
    turns = [t.num_turns for t in batch]
    tokens = [t.prompt.media.tokens for t in batch if t.prompt.media is not None]
    images = spread("prompt_length/image_tokens", tokens, ("mean", "max")) if tokens else {}
    return images | {
        **lengths_at("response_length", lengths, max_response_length),
        **lengths_at("response_length_non_aborted", lengths[~empty], max_response_length),
        "response/aborted_ratio": _mean(empty),
        **lengths_at("prompt_length", prompts, max_prompt_length),
        **spread("num_turns", turns),
        **spread("training/num_turns", turns),
    }


def lengths_at(name: str, lengths: np.ndarray, limit: int) -> dict[str, Number]:
    """{name}/{mean,max,min}, and {name}/clip_ratio: the share at the limit; nan of no length."""
    return spread(name, lengths) | {f"{name}/clip_ratio": _mean(lengths >= limit)}


def time_metrics(batch: Batch, facts: StepFacts) -> dict[str, Number]:
    """timing_s/* of the phases and their second spellings, timing_per_token_ms/*."""
    timings = facts.timings
    out: dict[str, Number] = {f"timing_s/{name}": float(seconds) for name, seconds in timings.items()}
    if "update_weights" in timings:
        out["timing_s/reshard"] = float(timings["update_weights"])
    if "gen" in timings:
        running = min(_generating(facts), float(timings["gen"]))
        out["timing_s/generate_sequences"] = out["timing_s/generate_sequence"] = running
        out["timing_per_token_ms/gen"] = _ratio(1000 * timings["gen"], int(batch.lengths.sum()))
    total = total_tokens(batch)
    for name in PER_TOKEN:
        if name in timings:
            out[f"timing_per_token_ms/{name}"] = _ratio(1000 * timings[name], total)
    return out


def _generating(facts: StepFacts) -> float:
    """Seconds in which the engine had requests running; an engine that does not count them: all of gen."""
    return float(facts.sampler.get("busy_s", facts.timings.get("gen", 0.0)))


def agent_metrics(batch: Batch) -> dict[str, Number]:
    """timing_s/agent_loop/*: per response, and of the response that took longest from prompt to score."""
    if not len(batch):
        return {}
    out: dict[str, Number] = {}
    columns = {}
    for name, missing in _AGENT_TIMES.items():
        columns[name] = np.array([float(t.timing.get(name, missing)) for t in batch])
        out |= spread(f"timing_s/agent_loop/{name}", columns[name], ("min", "max", "mean"))
    whole = columns["generate_sequences"] + columns["tool_calls"] + columns["compute_score"]
    slowest = int(whole.argmax())
    prefix = "timing_s/agent_loop/slowest"
    out |= {f"{prefix}/{name}": float(values[slowest]) for name, values in columns.items()}
    out[f"{prefix}/prompt_length"] = int(batch.prompt_lengths[slowest])
    out[f"{prefix}/response_length"] = int(batch.lengths[slowest])
    return out


@dataclass(frozen=True, slots=True)
class AgentRecord:
    """What the metrics of dialogues need of an agent loop's trajectory, without its tokens and messages: `seconds` in
    tools or in the environment, None where nothing counts them; `extra` as the trajectory's."""

    status: str
    segments: int
    num_turns: int
    seconds: float | None
    extra: dict[str, Any]

    @classmethod
    def of(cls, batch: Iterable[Trajectory]) -> list[AgentRecord]:
        """Those of the trajectories that agent loops played."""
        rows = [t for t in batch if "agent_loop" in t.extra]
        return [cls(t.status, len(t.segments), t.num_turns, t.timing.get("tool_calls"), t.extra) for t in rows]


def dialogue_metrics(rows: Sequence[AgentRecord]) -> dict[str, Number]:
    """agent/*: how trajectories of agent loops ended (those left out too), segments, calls, rewards of turns, seconds
    in tools; {} without any."""
    if not rows:
        return {}
    ended = Counter(t.status for t in rows)
    out: dict[str, Number] = {f"agent/status/{s}": _ratio(ended[s], len(rows)) for s in STATUSES}
    out |= spread("agent/segments_per_trajectory", [t.segments for t in rows])
    out |= spread("agent/calls", [t.extra.get("sampler_calls", 0) for t in rows], ("mean", "max"))
    out["agent/unrecorded_tokens"] = sum(int(t.extra.get("unrecorded_tokens", 0)) for t in rows)
    of_sessions = [t.extra.get("session_counts", {}) for t in rows]
    for name in ("repeated_requests", "required_tool_choices"):
        out[f"agent/{name}"] = sum(counts.get(name, 0) for counts in of_sessions)
    out["agent/resampled"] = sum(int(t.extra.get("resamples", 0)) for t in rows)
    turns = [turn for t in rows for turn in t.extra.get("turns", ())]
    if earned := [turn["reward"] for turn in turns if "reward" in turn]:
        out |= spread("agent/step_reward", earned)
    played = [t.seconds or 0.0 for t in rows if t.extra["agent_loop"] == "environment_agent"]
    if played:
        out |= spread("timing_s/agent_loop/environment", played, ("mean", "max"))
    if seconds := [t.seconds for t in rows if t.seconds is not None]:
        out |= spread("timing_s/agent_loop/tool_calls", seconds, ("min", "max", "mean"))
    prefill = np.array([t.extra["prefill"] for t in rows if "prefill" in t.extra])
    if len(prefill):
        out["agent/prefix_reuse_ratio"] = _ratio(*prefill.sum(0).tolist())
    counts = [t.extra["tool_counts"] for t in rows if "tool_counts" in t.extra]
    if counts:
        out |= spread("tool_call_counts", [c.get("calls", 0) for c in counts])
        valid_calls = [c.get("calls", 0) > c.get("invalid", 0) for c in counts]
        out["agent/valid_call_ratio"] = _mean(np.array(valid_calls))
        names = {"invalid": "invalid_calls", "errors": "tool_errors", "timeouts": "tool_timeouts"}
        for kind, name in names.items():
            out[f"agent/{name}"] = sum(c.get(kind, 0) for c in counts)
    return out


def perf_metrics(batch: Batch, facts: StepFacts) -> dict[str, Number]:
    """perf/*: tokens, throughput, memory, how busy the devices were."""
    import psutil

    timings, total = facts.timings, total_tokens(batch)
    step = float(timings.get("step", math.nan))
    busy = min(_generating(facts), float(timings.get("gen", 0.0)))
    busy += sum(timings.get(name, 0.0) for name in _BUSY_PHASES)
    out: dict[str, Number] = {
        "perf/total_num_tokens": total,
        "perf/time_per_step": step,
        "perf/throughput": _ratio(total, step * facts.devices),
        "perf/cpu_memory_used_gb": psutil.virtual_memory().used / 2**30,
        "perf/device_busy_ratio": min(1.0, _ratio(busy, step)) if step > 0 else math.nan,
    }
    if "update_weights" in timings:
        out["perf/weight_sync_gb"] = facts.sync_bytes / 1e9
        out["perf/weight_sync_gb_per_s"] = _ratio(facts.sync_bytes / 1e9, timings["update_weights"])
    return out | {name: float(value) for name, value in facts.memory.items()}


def staleness_metrics(batch: Batch, version: int) -> dict[str, Number]:
    """training/weight_version and training/off_policy/*, over responses that were sampled.

    `version`: what the trainer holds after the step; responses of a synchronous step were written with the one
    before, and the versions behind are counted against `version − 1`, the one that was trained.
    """
    versions = [t.versions for t in batch if t.versions and t.length > 0]
    base = "training/off_policy/trajectory"
    trained = version - 1
    return {
        "training/weight_version": version,
        **spread(f"{base}_spans", [len(v) for v in versions]),
        **spread(f"{base}_staleness", [trained - v[-1] for v in versions]),
        **spread(f"{base}_staleness_worst", [trained - v[0] for v in versions]),
    }


def mfu(cost: ModelCost, lengths: Iterable[int], seconds: float, *, passes: float) -> float:
    """Share of the devices' peak: `passes` forward passes' worth of work over the sequences in so many seconds."""
    return cost.forward(lengths) * passes / (seconds * cost.peak) if seconds > 0 else math.nan


def step_mfu(
    role: str,
    cost: ModelCost | None,
    batch: Iterable[Trajectory],
    timings: Mapping[str, float],
    *,
    epochs: int = 1,
    computed: float = 1.0,
) -> dict[str, float]:
    """perf/mfu/{role} of `timings["update_{role}"]`, and perf/mfu/actor_infer of `old_log_prob` if that pass ran.

    `computed`: the share of the sequences' tokens that went through the model. {} without a known peak.
    """
    if cost is None:
        return {}
    sizes = [(len(t.prompt.ids) + t.length, t.loss_mask is not None and t.loss_mask.any()) for t in batch]
    trained, out = [size for size, learns in sizes if learns], {}
    if (phase := f"update_{role}") in timings:
        passes = (1 + BACKWARD) * epochs * computed
        out[f"perf/mfu/{role}"] = mfu(cost, trained, timings[phase], passes=passes)
    if role == "actor" and "old_log_prob" in timings:
        every = [size for size, _ in sizes]
        out["perf/mfu/actor_infer"] = mfu(cost, every, timings["old_log_prob"], passes=computed)
    return out


def numeric_parts(rows: Iterable[Trajectory]) -> dict[str, list[float]]:
    """Numeric keys the reward function returned besides the score: key → finite values of the responses."""
    parts: dict[str, list[float]] = {}
    for t in rows:
        for key, value in t.score_parts.items():
            number = plain(value)
            if number is not None and math.isfinite(number) and key != "score":
                parts.setdefault(str(key), []).append(float(number))
    return parts


def total_tokens(batch: Batch) -> int:
    """Tokens of all sequences that are trained on: of each segment its context and its response."""
    return int(batch.lengths.sum()) + sum(len(segment.context_ids) for t in batch for segment in t.segments)


def _over_tokens(name: str, rows: Iterable[Trajectory], column: str, mask: str) -> dict[str, Number]:
    """`{name}/{mean,max,min}` of a token-level column where the mask is True (`loss_mask` not set yet: the response
    mask).

    Response by response, in float64: a copy of all tokens of a step may be hundreds of megabytes.
    """
    count, total, top, bottom = 0, 0.0, -math.inf, math.inf
    for t in rows:
        values, chosen = getattr(t, column), getattr(t, mask)
        chosen = t.response_mask if chosen is None else chosen
        if values is None or not len(values):
            continue
        selected = values if chosen.all() else values[chosen]
        if len(selected):
            count += len(selected)
            total += float(np.sum(selected, dtype=np.float64))
            top, bottom = np.maximum(top, selected.max()), np.minimum(bottom, selected.min())
    if not count:
        return {f"{name}/{kind}": math.nan for kind in ("mean", "max", "min")}
    return {f"{name}/mean": total / count, f"{name}/max": float(top), f"{name}/min": float(bottom)}


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values, dtype=np.float64)) if len(values) else math.nan


def _ratio(above: float, below: float) -> float:
    return float(above / below) if below else math.nan
