#!/usr/bin/env bash
# Everything that a first session on a device should find out, in one go; a part that fails does not stop the next.
#
#   OUT=results bash tests/gpu/run.sh               # a CUDA device
#   VERL_TEST_DEVICE=cpu SHAPES=tiny bash tests/gpu/run.sh    # this script's own parts, on a processor
#
#   OUT      folder for doctor.txt, limits.json, gpu_tests.xml, gpu_tests.json, gpu_loop.json, log.txt (gpu_results)
#   SHAPES   of benchmarks/gpu_loop.py (0.6b,1.7b); empty: none
#   PYTHON   the interpreter (python3)
#   WHEELS   folder of wheels to install first, without an index, for a machine that reaches none. Beside torch,
#            transformers, pyarrow and pytest the loop needs hydra-core, omegaconf, antlr4-python3-runtime 4.9.3,
#            math-verify and latex2sympy2-extended; the engines' tests need none of them.
set -uo pipefail
cd "$(dirname "$0")/../.."
export OUT=${OUT:-gpu_results} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
PYTHON=${PYTHON:-python3} SHAPES=${SHAPES-0.6b,1.7b}
DEVICE=${VERL_TEST_DEVICE:-cuda}
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
failed=()

if [ -n "${WHEELS:-}" ]; then
  site=$(mktemp -d)
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl || exit 2
  export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

part() {
  local name=$1
  shift
  echo "== $name ($(date +%T))"
  "$@" || failed+=("$name")
}
{
  part doctor bash -c "'$PYTHON' -m verl.cli.main doctor --bench | tee '$OUT/doctor.txt'"
  part limits bash -c "'$PYTHON' benchmarks/limits.py --device $DEVICE | tee '$OUT/limits.json'"
  part tests "$PYTHON" -m pytest tests/gpu -q --junitxml="$OUT/gpu_tests.xml" -o junit_family=xunit1 -p no:cacheprovider \
    --timeout 300
  [ -z "$SHAPES" ] || part loop "$PYTHON" benchmarks/gpu_loop.py --shape "$SHAPES" --device "$DEVICE" \
    --steps 2 --json "$OUT/gpu_loop.json"
  echo "== failed: ${failed[*]:-nothing}"
} > >(tee "$OUT/log.txt") 2>&1
[ ${#failed[@]} -eq 0 ]
