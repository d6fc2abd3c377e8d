#!/usr/bin/env bash
# PPO with a critic on GSM8K: the GRPO command with GAE, four responses a prompt, and no KL term. The critic starts from the policy's
# weights and is trained alone for ten steps.
set -euo pipefail

bash "$(dirname "$0")/../grpo_trainer/run_qwen3_gsm8k.sh" \
  algorithm.adv_estimator=gae \
  actor_rollout_ref.rollout.n=4 \
  actor_rollout_ref.actor.use_kl_loss=False \
  critic.optim.lr=1e-5 \
  trainer.critic_warmup=10 \
  trainer.experiment_name=qwen3_ppo "$@"
