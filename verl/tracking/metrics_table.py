"""The metrics that verl logs: name, unit, condition and meaning, in the order in which they are shown.

docs/metrics.md, the console, metrics.jsonl and the trackers use this table; the charts of the report
(`verl.report.charts`) name its metrics.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple


class Row(NamedTuple):
    """A metric, or several of one kind. In `pattern`, `{a,b}` stands for either and `{word}` for any text."""

    section: str
    pattern: str
    unit: str
    when: str
    meaning: str


OWN_LOSS = "actor/{name}"
"""The row of what a registered policy loss reports by itself."""
ALIASES = {
    "actor/reward_mean": ("critic/rewards/mean",),
    "actor/kl_divergence": ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl"),
    "critic/value_loss": ("critic/vf_loss",),
}
"""Second spelling → the metrics it repeats: the first of them that the step has."""
NOT_ON_CONSOLE = frozenset((*ALIASES, "val/accuracy", "val/multimodal_score"))
"""Names that only metrics.jsonl and the trackers get."""

_TABLE = """
# Training

training/global_step | | always | number of the step, from 1
training/epoch | | always | passes over the data that are complete
actor/pg_loss | | actor updated | policy term of the loss
actor/kl_loss | nats | use_kl_loss | KL divergence from the reference, aggregated like the loss
actor/kl_coef | | use_kl_loss | coefficient of actor/kl_loss
actor/entropy | nats | always | mean entropy of the policy per token at the start of the step
actor/entropy_loss | nats | entropy term | entropy, aggregated like the loss
actor/loss | | actor updated | sum of all terms, which the optimizer minimises
actor/pg_clipfrac | 0–1 | actor updated | share of tokens that the clip of the ratio cuts off
actor/pg_clipfrac_lower | 0–1 | actor updated | share of tokens that the lower (dual) clip cuts off
actor/ppo_kl | nats | actor updated | mean of old − current log-prob
actor/grad_norm | | actor updated | global norm of the gradient before clipping
actor/lr | | actor updated | learning rate
actor/kl_clipped_ratio | 0–1 | use_kl_loss | share of tokens whose KL estimate was clipped
actor/reward_kl_penalty | nats | use_kl_in_reward | mean KL divergence of a response from the reference
actor/reward_kl_penalty_coeff | | use_kl_in_reward | coefficient of the penalty
actor/router_replay/changed_frac | 0–1 | router_replay | share of response tokens that today's routers send elsewhere
actor/{name} | | such a loss | what a policy loss reports by itself (`LossInputs.metrics`)
training/skipped_updates | mini-batches | always | mini-batches without a token in the loss, since the start
training/skipped_rows | rows | if any | rows that failed when they were drawn since the last step
training/refused_steps | steps | always | updates refused because they were not finite, since the start
training/dropped_groups | groups | always | groups with too few scored responses to compare
training/rollout_failure/evicted_samples | responses | if any | responses that the sampler lost
training/filter_groups/evicted_samples | groups | filter_groups | groups left out because all scores are equal
training/filter_groups/discarded_surplus_samples | groups | filter_groups | finished groups that were not used
training/filter_groups/gen_prompts | prompts | filter_groups | prompts that were drawn
training/filter_groups/all_max_ratio | 0–1 | filter_groups | share of drawn groups that all got the highest score
training/filter_groups/all_min_ratio | 0–1 | filter_groups | share of drawn groups that all got the lowest score
training/pf_ppo/unique_ratio | 0–1 | use_pf_ppo | share of distinct responses after resampling
training/sync_proof/{max_abs_diff,tensors} | | first push | largest difference and number of the weights compared
training/images_dropped | images | images | images of prompts that no segment of the trajectory has

# Distillation

distillation/loss | | distillation | distillation term, aggregated like the loss
distillation/{loss_min,loss_max,abs_loss} | nats | distillation | least, greatest and mean absolute term of a token
distillation/pg_loss | | use_policy_gradient | policy-gradient term whose advantages are the negative terms
distillation/{pg_clipfrac,pg_clipfrac_lower,ppo_kl} | | use_policy_gradient | as those of actor/, of that term
distillation/loss_clamped_ratio | 0–1 | loss_max_clamp | share of tokens whose term was limited
distillation/log_prob_clamped_ratio | 0–1 | log_prob_min_clamp | share of tokens with a log-prob that was limited
distillation/{student,teacher}_mass | 0–1 | forward_kl_topk | probability of the teacher's k most likely tokens
distillation/{student,teacher}_mass_{min,max} | 0–1 | forward_kl_topk | its least and greatest value
distillation/overlap_ratio | 0–1 | forward_kl_topk | share of the k most likely tokens that both have
distillation/overlap_token_advantage | | forward_kl_topk | mean of −ν·(log ν − log p) over tokens that both have

# Scores, rewards and advantages

critic/score/{mean,max,min} | | always | score that the reward function gives to a response
critic/rewards/{mean,max,min} | | always | sum of a response's token rewards: the score, less a KL penalty in the reward
critic/reward_baseline/mean | | remax | score of the greedy response
critic/advantages/{mean,max,min} | | always | advantages of the tokens in the loss
critic/returns/{mean,max,min} | | always | returns of the tokens in the loss
critic/values/{mean,max,min} | | critic | values of the policy's tokens
critic/vf_loss | | critic | loss of the values
critic/vf_clipfrac | 0–1 | critic | share of tokens whose value was clipped
critic/vpred_mean | | critic | mean of the predicted values
critic/vf_explained_var | ≤ 1 | critic | share of the returns' variance that the values explain
critic/grad_norm | | critic | global norm of the critic's gradient before clipping
critic/lr | | critic | learning rate of the critic
reward/errors | responses | always | responses whose scoring failed
reward/timeouts | responses | always | those of them whose scoring took too long
reward/undecided | comparisons | always | comparisons that a verifier could not make because of the response
reward/error_ratio | 0–1 | always | share of responses whose scoring failed
reward/latency_s/{mean,max} | s | always | time to score a response
reward/{name}/mean | | several rewards | mean of each reward before its weight
reward_extra/{key}/{mean,max,min} | | if any | numeric key that the reward function returns beside the score

# Lengths and turns

response_length/{mean,max,min} | tokens | always | tokens after the prompt, output of tools included
response_length/clip_ratio | 0–1 | always | share of responses that reached data.max_response_length
response_length_non_aborted/{mean,max,min,clip_ratio} | tokens, 0–1 | always | the same without empty responses
response/aborted_ratio | 0–1 | always | share of empty responses
prompt_length/{mean,max,min} | tokens | always | templated prompt, image tokens included
prompt_length/clip_ratio | 0–1 | always | share of prompts at data.max_prompt_length
prompt_length/image_tokens/{mean,max} | tokens | images | image tokens of a prompt
num_turns/{mean,max,min} | messages | always | messages of the dialogue; 2 for one turn
training/num_turns/{mean,max,min} | messages | always | the same
tool_call_counts/{mean,max,min} | calls | tools | tool calls of a trajectory
agent/status/{status} | 0–1 | agent loops | share of trajectories that ended so: completed, length, max_turns, …
agent/segments_per_trajectory/{mean,max,min} | segments | agent loops | token sequences of a trajectory
agent/calls/{mean,max} | calls | agent loops | sampler calls of a trajectory
agent/unrecorded_tokens | tokens | agent loops | tokens that a loop returned and no sampler call recorded
agent/{repeated_requests,required_tool_choices} | requests | agent loops | repeated requests; those that require a tool
agent/resampled | trajectories | agent loops | trajectories that were started again
agent/step_reward/{mean,max,min} | | turn rewards | reward of a turn
agent/prefix_reuse_ratio | | agent loops | tokens prefilled ÷ new tokens
agent/valid_call_ratio | 0–1 | tools | share of trajectories with a valid tool call
agent/{invalid_calls,tool_errors,tool_timeouts} | calls | tools | calls that are not valid, that failed, that took too long
global_seqlen/{mean,max,min,minmax_diff} | tokens | several ranks | tokens of a rank, the batch split in its order
global_seqlen/{balanced_min,balanced_max} | tokens | several ranks | tokens of a rank, the batch as it is split

# Time, throughput and memory

timing_s/step | s | always | the whole step
timing_s/gen | s | always | from the first request to the last response; the time waited where sampling runs ahead
timing_s/reward | s | always | waiting for scores after the last response
timing_s/{old_log_prob,ref,teacher,values} | s | if it ran | forward pass of that name
timing_s/adv | s | always | from rewards to advantages, rollout correction included
timing_s/{update_critic,update_actor} | s | if it ran | optimizer steps of the role
timing_s/update_weights | s | always | weights from trainer to sampler, its waking and sleeping included
timing_s/testing | s | if it ran | validation
timing_s/save_checkpoint | s | if it ran | time the loop waits for a checkpoint
timing_s/{start_profile,stop_profile} | s | profiled steps | starting a profile, writing its files
timing_s/agent_loop/{generate_sequences,tool_calls,compute_score}/{min,max,mean} | s | always | per response
timing_s/agent_loop/environment/{mean,max} | s | environments | time in the environment per trajectory
timing_s/agent_loop/num_preempted/{min,max,mean} | | always | preemptions of a response by the engine; −1: not known
timing_s/agent_loop/slowest/{what} | s, tokens | always | the same, and both lengths, of the response that took longest
timing_per_token_ms/gen | ms | always | timing_s/gen ÷ tokens of responses
timing_per_token_ms/{ref,values,adv,update_critic,update_actor} | ms | if it ran | time ÷ all tokens
perf/total_num_tokens | tokens | always | prompt and response tokens, each response with its prompt
perf/time_per_step | s | always | timing_s/step
perf/throughput | tokens/s | always | perf/total_num_tokens ÷ (step time × devices)
perf/cpu_memory_used_gb | GiB | always | host memory in use on the driver's node
perf/device_busy_ratio | 0–1 | always | share of the step in which devices computed
perf/weight_sync_gb_per_s | GB/s | always | bytes moved to the sampler ÷ timing_s/update_weights
perf/max_memory_{allocated,reserved}_gb | GiB | accelerators | device memory since the start, maximum over ranks
perf/sampler_idle_ratio | 0–1 | always | share of the step in which the sampler had no request
perf/trainer_idle_ratio | 0–1 | always | share of the step in which the trainer waited for responses or scores
perf/prompt_sharing_saved_ratio | 0–1 | always | share of tokens not computed thanks to shared prompts
perf/mfu/{actor,critic,actor_infer} | 0–1 | known peak | model FLOPs ÷ (time × peak of the devices)
perf/images/count | images | images | images of the step's prompts
perf/images/sent_per_node | | images | how often an image was sent to a node
perf/images/{name}_per_image | | images | how often an image was decoded, processed, …
perf/images/encoded_per_image/{sampler,trainer} | | images | how often an image went through the vision encoder

# Sampler against trainer

training/rollout_probs_diff_valid | 0, 1 | log-probs | 1 if there were tokens to compare
training/rollout_probs_diff_{max,mean,std} | | log-probs | absolute difference of probabilities of sampled tokens
training/rollout_actor_probs_pearson_corr | −1–1 | log-probs | correlation of these probabilities
training/rollout_logprob_abs_diff/{mean,max,p99} | nats | log-probs | absolute difference of log-probs of sampled tokens
training/weight_version | | always | version of the weights that the trainer holds
training/off_policy/trajectory_spans/{mean,max,min} | versions | always | weight versions that wrote a response
training/off_policy/trajectory_staleness/{mean,max,min} | versions | always | age of the newest token's version
training/off_policy/trajectory_staleness_worst/{mean,max,min} | versions | always | age of the oldest token's version
training/off_policy/evicted_samples | responses | max_staleness | responses too stale to use
training/off_policy/continued_samples | responses | max_staleness | responses that went on after new weights
rollout_corr/{kl,k3_kl} | nats | log-probs | mean of −e, and of exp(e) − e − 1, where e = old − sampled log-prob
rollout_corr/{training,rollout}_ppl | | log-probs | mean over responses of exp(−mean log-prob)
rollout_corr/{training,rollout}_log_ppl | nats | log-probs | mean over responses of −mean log-prob
rollout_corr/log_ppl_{diff,abs_diff,diff_max,diff_min} | nats | log-probs | difference of the two per response
rollout_corr/ppl_ratio | | log-probs | mean of the exponential of that difference
rollout_corr/chi2_{token,seq} | | log-probs | χ² divergence: mean of exp(2e) − 1, per token and per response
rollout_corr/rollout_is_eff_sample_size | 0–1 | rollout_is | 1 ÷ mean((w ÷ mean w)²)
rollout_corr/rollout_is_batch_norm_factor | | batch normalised | divisor of the weights
rollout_corr/rollout_is_{name} | | rollout_is | importance weights as applied; `ratio_fraction_*`, `oob_ratio`: raw ones
rollout_corr/rollout_rs_rejected_fraction | 0–1 | rollout_rs | share of responses without a token left
rollout_corr/rollout_rs_{masked_fraction,seq_masked_fraction} | 0–1 | rollout_rs | share of tokens, of responses, affected
rollout_corr/rollout_rs_{option}_{name} | | rollout_rs | values of each option, and shares beyond its bounds
variance_proxy/proxy1_signal_strength | | Σπ² known | squared norm of the gradient
variance_proxy/proxy2_total_power | | Σπ² known | mean of A²W
variance_proxy/proxy3_pure_noise | | Σπ² known | (proxy2 − proxy1) ÷ (N − 1), at least 0
variance_proxy/{expected_a_squared,expected_w} | | Σπ² known | mean of A²; mean of W

# Validation

val-core/{source}/{variable}/{metric} | | validation | `reward` and `acc`: mean@N, best@N, maj@N (below)
val-aux/num_turns/{min,max,mean} | messages | validation | messages of the dialogue
val-aux/{source}/{variable}/{metric} | | validation | all other variables and metrics
val-aux/{source}/{errors,undecided} | responses | if any | scoring that failed; comparisons that could not be made
val-aux/{agent_metric} | | agent loops | the names of agent loops above, of the validation
val/accuracy | | validation | mean of `acc` (else `reward`) over prompts of all sources
val/multimodal_score | | images | the same over prompts with images or video

# Second spellings

timing_s/reshard | s | always | timing_s/update_weights
timing_s/{generate_sequences,generate_sequence} | s | always | time in which the engine had requests running
actor/reward_mean | | always | critic/rewards/mean
actor/kl_divergence | nats | always | actor/kl_loss, else actor/reward_kl_penalty, else actor/ppo_kl
critic/value_loss | | critic | critic/vf_loss

# Supervised training

train/loss | nats | always | mean over the trained tokens of the batch
train/grad_norm | | always | global norm of the gradient before clipping
train/lr | | always | learning rate
train/lr(1e-3) | | always | learning rate × 1000
train/global_tokens | tokens | always | tokens of the batch
train/total_tokens(B) | 10⁹ tokens | always | tokens since the start
train/time | s | always | the whole step
train/mfu | 0–1 | known peak | model FLOPs ÷ (time × peak of the devices)
val/loss | nats | validation | mean over the trained tokens of the validation data

# Generation and evaluation

generation/{num_prompts,num_tokens} | | main_generation | prompts; sampled tokens
generation/tokens_per_s | tokens/s | main_generation | sampled tokens ÷ time
generation/lost | responses | main_generation | responses that the sampler lost
eval/{source}/{metric} | | main_eval | accuracy and its interval, pass@k, maj@k, numbers of prompts and responses
test_score/{source} | | main_eval | mean of the mean score of each row
"""


def _rows() -> list[Row]:
    section, rows = "", []
    for line in filter(None, _TABLE.splitlines()):
        if line.startswith("# "):
            section = line[2:]
        else:
            pattern, unit, when, meaning = (cell.strip() for cell in line.split("|"))
            rows.append(Row(section, pattern, unit, when, meaning))
    return rows


def regex_of(pattern: str) -> re.Pattern[str]:
    """What a pattern matches as a whole."""
    parts = re.split(r"\{(.*?)\}", pattern)
    for at, part in enumerate(parts):
        choices = "|".join(map(re.escape, part.split(",")))
        parts[at] = re.escape(part) if at % 2 == 0 else f"(?:{choices})" if "," in part else ".+"
    return re.compile("".join(parts))


ROWS = _rows()
_PATTERNS = [regex_of(row.pattern) for row in ROWS]
_EXACT = {row.pattern: place for place, row in enumerate(ROWS)}


@lru_cache(maxsize=4096)
def rank(name: str) -> int:
    """Index in `ROWS` of the row that a name belongs to: the row of that name, else the first whose pattern matches;
    `len(ROWS)` if there is none."""
    if name in _EXACT:
        return _EXACT[name]
    return next((place for place, regex in enumerate(_PATTERNS) if regex.fullmatch(name)), len(ROWS))


def in_order(metrics: Mapping[str, float]) -> dict[str, float]:
    """The same metrics in the order of the table; those of one row keep their order, unlisted names come last."""
    return dict(sorted(metrics.items(), key=lambda item: rank(item[0])))


def with_aliases(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics and the second spellings that depend on other metrics."""
    out = dict(metrics)
    for alias, sources in ALIASES.items():
        values = [metrics[name] for name in sources if name in metrics]
        if values:
            out.setdefault(alias, values[0])
    return out
