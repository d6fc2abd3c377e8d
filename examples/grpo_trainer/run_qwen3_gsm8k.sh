#!/usr/bin/env bash
# GRPO on GSM8K with Qwen3-0.6B on one device. Prepare the data first:
#   python3 examples/data_preprocess/gsm8k.py
# Every argument is passed on, and a later value wins:
#   bash examples/grpo_trainer/run_qwen3_gsm8k.sh actor_rollout_ref.model.path=/models/Qwen3-1.7B --check
set -euo pipefail

python3 -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files=~/data/gsm8k/train.parquet \
  data.val_files=~/data/gsm8k/test.parquet \
  data.train_batch_size=128 \
  data.max_prompt_length=512 \
  data.max_response_length=1024 \
  data.filter_overlong_prompts=True \
  data.apply_chat_template_kwargs.enable_thinking=False \
  actor_rollout_ref.model.path=Qwen/Qwen3-0.6B \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 \
  actor_rollout_ref.actor.use_kl_loss=True \
  actor_rollout_ref.actor.kl_loss_coef=0.001 \
  actor_rollout_ref.actor.kl_loss_type=low_var_kl \
  actor_rollout_ref.rollout.name=native \
  actor_rollout_ref.rollout.n=8 \
  trainer.project_name=gsm8k \
  trainer.experiment_name=qwen3_grpo \
  trainer.save_freq=20 \
  trainer.max_ckpt_to_keep=3 \
  trainer.test_freq=5 \
  trainer.total_epochs=3 "$@"
