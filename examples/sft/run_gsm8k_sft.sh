#!/usr/bin/env bash
# Supervised fine-tuning on the worked answers of GSM8K, on one device. Prepare the data first:
#   python3 examples/data_preprocess/gsm8k.py
# The answers are inside the column extra_info; files with a column `messages` need no keys at all.
set -euo pipefail

python3 -m verl.trainer.sft_trainer \
  data.train_files=~/data/gsm8k/train.parquet \
  data.val_files=~/data/gsm8k/test.parquet \
  data.prompt_key=extra_info \
  data.prompt_dict_keys=[question] \
  data.response_key=extra_info \
  data.response_dict_keys=[answer] \
  data.train_batch_size=64 \
  data.max_length=1024 \
  model.path=Qwen/Qwen3-0.6B \
  optim.lr=1e-5 \
  optim.lr_warmup_steps_ratio=0.05 \
  optim.lr_scheduler_type=cosine \
  trainer.project_name=gsm8k \
  trainer.experiment_name=qwen3_sft \
  trainer.save_freq=100 \
  trainer.max_ckpt_to_keep=2 \
  trainer.test_freq=50 \
  trainer.total_epochs=2 "$@"
