#!/usr/bin/env bash
# Eight responses to each test question of GSM8K, on one device. Prepare the data first:
#   python3 examples/data_preprocess/gsm8k.py
# A checkpoint of training is a model, too; a later value wins:
#   bash examples/evaluation/generate_gsm8k.sh model.path=checkpoints/gsm8k/qwen3_grpo/global_step_20/actor
# Then: bash examples/evaluation/evaluate_gsm8k.sh
set -euo pipefail

python3 -m verl.trainer.main_generation \
  data.path=~/data/gsm8k/test.parquet \
  data.output_path=~/data/gsm8k/responses.parquet \
  data.n_samples=8 \
  data.apply_chat_template_kwargs.enable_thinking=False \
  model.path=Qwen/Qwen3-0.6B \
  rollout.name=native \
  rollout.temperature=0.7 \
  rollout.prompt_length=512 \
  rollout.response_length=1024 "$@"
