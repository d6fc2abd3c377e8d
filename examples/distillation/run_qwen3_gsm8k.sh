#!/usr/bin/env bash
# On-policy distillation on GSM8K: the GRPO command, and a larger model of the same family that scores every token the policy
# samples. TEACHER names it. Of the teacher's distribution the 32 most likely tokens are compared.
set -euo pipefail

bash "$(dirname "$0")/../grpo_trainer/run_qwen3_gsm8k.sh" \
  distillation.enabled=True \
  distillation.teacher_models.teacher_model.model_path="${TEACHER:-Qwen/Qwen3-4B}" \
  distillation.distillation_loss.loss_mode=forward_kl_topk \
  distillation.distillation_loss.topk=32 \
  actor_rollout_ref.actor.use_kl_loss=False \
  trainer.experiment_name=qwen3_distillation "$@"
