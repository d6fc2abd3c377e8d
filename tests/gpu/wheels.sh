#!/usr/bin/env bash
# Wheels that run.sh's loop needs on a machine that reaches no index, for its WHEELS; made where pip works:
#
#   bash tests/gpu/wheels.sh FOLDER
#
# Beside them a machine needs torch, transformers, pyarrow, psutil, rich, fsspec, tensorboard and, for the tests, pytest,
# pytest-timeout and hypothesis. All of these wheels are for any platform.
set -euo pipefail
folder=${1:?a folder for the wheels}
python=${PYTHON:-python3}
mkdir -p "$folder"
# hydra-core 1.3 takes omegaconf below 2.4, and both a grammar runtime that is published as source alone.
"$python" -m pip download -q --no-deps --only-binary=:all: -d "$folder" \
  "hydra-core>=1.3.2,<1.4" "omegaconf>=2.3,<2.4" "math-verify==0.9.0" "latex2sympy2-extended==1.11.0"
"$python" -m pip wheel -q --no-deps -w "$folder" "antlr4-python3-runtime==4.9.3"
ls "$folder"
