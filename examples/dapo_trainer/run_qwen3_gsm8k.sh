#!/usr/bin/env bash
# DAPO (arXiv 2503.14476) on GSM8K: the GRPO command with clip-higher, a mean over tokens, dynamic sampling, the penalty on
# responses near the length limit, and no KL term.
set -euo pipefail

bash "$(dirname "$0")/../grpo_trainer/run_qwen3_gsm8k.sh" \
  actor_rollout_ref.actor.clip_ratio_low=0.2 \
  actor_rollout_ref.actor.clip_ratio_high=0.28 \
  actor_rollout_ref.actor.loss_agg_mode=token-mean \
  actor_rollout_ref.actor.use_kl_loss=False \
  algorithm.filter_groups.enable=True \
  algorithm.filter_groups.metric=acc \
  algorithm.filter_groups.max_num_gen_batches=10 \
  reward_model.reward_manager=dapo \
  reward_model.reward_kwargs.overlong_buffer_cfg.enable=True \
  reward_model.reward_kwargs.overlong_buffer_cfg.len=256 \
  trainer.experiment_name=qwen3_dapo "$@"
