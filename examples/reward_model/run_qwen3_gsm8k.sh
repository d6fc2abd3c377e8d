#!/usr/bin/env bash
# GRPO on GSM8K with two rewards: the built-in rule, and a tenth of what a reward model says. Prepare the data first:
#   python3 examples/data_preprocess/gsm8k.py
# Every argument is passed on, and a later value wins:
#   bash examples/reward_model/run_qwen3_gsm8k.sh reward_model.weights.model=0.5
set -euo pipefail

bash "$(dirname "$0")/../grpo_trainer/run_qwen3_gsm8k.sh" \
  reward_model.enable=True \
  reward_model.model.path=Skywork/Skywork-Reward-V2-Qwen3-0.6B \
  reward_model.weights='{function: 1, model: 0.1}' \
  trainer.experiment_name=qwen3_grpo_reward_model "$@"
