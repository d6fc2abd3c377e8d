#!/usr/bin/env bash
# Accuracy, pass@k and maj@k of what generate_gsm8k.sh wrote, with a page beside the file.
set -euo pipefail

python3 -m verl.trainer.main_eval data.path=~/data/gsm8k/responses.parquet "$@"
