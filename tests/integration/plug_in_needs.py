"""A user's module: an estimator and a loss with needs of their own, and an agent loop that drops its history."""

import numpy as np
import torch
from verl.rollout.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss

SEEN: dict[str, object] = {}


@register_adv_est("near_the_reference", needs={"ref_log_probs"})
def near_the_reference(token_level_rewards, response_mask, index, old_log_probs, ref_log_prob, **kwargs):
    """Rewards of the whole response, less how far its tokens are from the reference."""
    away = (old_log_probs - ref_log_prob).abs() * response_mask
    SEEN["estimator"] = tuple(away.shape)
    advantages = (token_level_rewards.sum(-1, keepdim=True) - away) * response_mask
    return advantages, advantages


@register_adv_est("beyond_the_critic", needs={"values"})
def beyond_the_critic(token_level_rewards, response_mask, values, **kwargs):
    """Rewards of the whole response, less what the critic expected at each token."""
    returns = token_level_rewards.sum(-1, keepdim=True) * response_mask
    return returns - values * response_mask, returns


@register_policy_loss("against_the_sampler", needs={"rollout_log_probs", "entropy"})
def against_the_sampler(inputs):
    """A policy gradient weighted by the ratio to the sampler, more where the policy was unsure."""
    ratio = (inputs.log_probs - inputs.columns["rollout_log_probs"]).detach().clamp(-1, 1).exp()
    SEEN["loss"] = sorted(inputs.columns)
    weight = ratio * (1 + inputs.columns["entropy"])
    loss = inputs.aggregate(-inputs.advantages * weight * inputs.log_probs)
    return loss, {"actor/mine": float(torch.as_tensor(ratio).mean())}


@register("forgetful")
class Forgetful(AgentLoopBase):
    """Two turns; the second sees only the end of the first."""

    async def run(self, sampling_params, **row):
        first = await self.generate(row["prompt_ids"], sampling_params)
        context = np.concatenate([row["prompt_ids"][:2], np.asarray(first.token_ids[-3:], np.int64)])
        second = await self.generate(context, sampling_params)
        return [
            AgentLoopOutput(
                prompt_ids=ids,
                response_ids=done.token_ids,
                response_mask=np.ones(len(done.token_ids), bool),
                response_logprobs=done.log_probs,
                num_turns=4,
                metrics={"asked": np.int64(2), "tool_calls": 0.5},
                extra_fields={"turns": 2},
            )
            for ids, done in ((row["prompt_ids"], first), (context, second))
        ]
