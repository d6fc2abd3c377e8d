#!/usr/bin/env bash
# Dr. GRPO (arXiv 2503.20783): the GRPO command with three keys changed. No division by the group's standard
# deviation, no division by a response's own length, no KL term.
set -euo pipefail

bash "$(dirname "$0")/run_qwen3_gsm8k.sh" \
  algorithm.norm_adv_by_std_in_grpo=False \
  actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm \
  actor_rollout_ref.actor.use_kl_loss=False \
  trainer.experiment_name=qwen3_drgrpo "$@"
