"""An advantage estimator and a policy loss of your own, under names of your own.

    PYTHONPATH=examples/plugin python3 -m verl.trainer.main_ppo … \
      actor_rollout_ref.model.external_lib=my_algorithms \
      algorithm.adv_estimator=median_baseline \
      actor_rollout_ref.actor.policy_loss.loss_mode=soft_clip
"""

import torch
from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss


@register_adv_est("median_baseline")
def median_baseline(token_level_rewards, response_mask, index, config=None):
    """Score minus the median score of the group: one lucky response does not make all others bad.

    token_level_rewards, response_mask [N, L]; index [N]: equal for the responses to one prompt.
    """
    scores = token_level_rewards.sum(-1)
    advantage = torch.empty_like(scores)
    for group in set(index):
        members = torch.tensor([key == group for key in index])
        advantage[members] = scores[members] - scores[members].quantile(0.5)
    advantages = advantage.unsqueeze(-1) * response_mask
    return advantages, advantages


@register_policy_loss("soft_clip")
def soft_clip(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    loss_agg_mode="token-mean",
    config=None,
    rollout_is_weights=None,
):
    """−A·tanh(d/ε)·ε with d = log_prob − old_log_prob: the gradient fades out where PPO's clip cuts it off.

    `agg_loss` needs the counts of the whole mini-batch: pass `config.global_batch_info` on.
    """
    epsilon = config.clip_ratio
    difference = log_prob - old_log_prob
    terms = -advantages * torch.tanh(difference / epsilon) * epsilon
    loss = agg_loss(terms, response_mask, loss_agg_mode, **config.global_batch_info)
    faded = (difference.abs() > epsilon) * response_mask
    share = faded.sum() / response_mask.sum().clamp(min=1)
    return loss, {"actor/faded": share.detach()}
