#!/usr/bin/env bash
# What a first session on a device should find out, in calls of at most ten minutes; a part that fails does not stop the next.
#
#   OUT=results bash tests/gpu/run.sh               # a CUDA device: doctor, limits, tests
#   OUT=results PARTS=loop SHAPES=0.6b bash tests/gpu/run.sh   # then the loop, one shape at a time
#   VERL_TEST_DEVICE=cpu SHAPES=tiny bash tests/gpu/run.sh    # this script's own parts, on a processor
#
#   OUT      folder for doctor.txt, limits.json, gpu_tests.xml, gpu_tests.json, gpu_loop.json, log.txt (gpu_results);
#            figures are there as soon as they are known
#   LIMIT    seconds for all parts together (540); what is not done by then is given up
#   PARTS    some of doctor limits tests loop ("doctor limits tests")
#   SHAPES   of benchmarks/gpu_loop.py, for the loop (0.6b)
#   PYTHON   the interpreter (python3)
#   WHEELS   folder of wheels to install first, without an index, for a machine that reaches none: see wheels.sh. The
#            engines' tests need none of them.
set -uo pipefail
cd "$(dirname "$0")/../.."
export OUT=${OUT:-gpu_results} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
PYTHON=${PYTHON:-python3} SHAPES=${SHAPES:-0.6b} PARTS=${PARTS:-doctor limits tests}
DEVICE=${VERL_TEST_DEVICE:-cuda}
END=$((SECONDS + ${LIMIT:-540}))
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
failed=()

if [ -n "${WHEELS:-}" ]; then
  site=$(mktemp -d)
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl || exit 2
  export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

# part NAME MOST-SECONDS COMMAND...
part() {
  local name=$1 most=$2 left=$((END - SECONDS - 5))
  shift 2
  [[ " $PARTS " == *" $name "* ]] || return 0
  [ "$left" -lt "$most" ] && most=$left
  if [ "$most" -lt 5 ]; then
    failed+=("$name (no time left)")
    return
  fi
  echo "== $name ($(date +%T), at most $most s)"
  timeout -k 5 "$most" "$@"
  case $? in
    0) ;;
    124 | 137) failed+=("$name (stopped after $most s)") ;;
    *) failed+=("$name") ;;
  esac
}
keeping() { # FILE COMMAND...: what it prints, also in a file
  printf '%q ' "${@:2}"
  printf '| tee %q' "$1"
}
{
  part doctor 90 bash -o pipefail -c "$(keeping "$OUT/doctor.txt" "$PYTHON" -m verl.cli.main doctor --bench)"
  part limits 90 bash -o pipefail -c "$(keeping "$OUT/limits.json" "$PYTHON" benchmarks/limits.py --device "$DEVICE")"
  part tests 450 "$PYTHON" -m pytest tests/gpu -q --junitxml="$OUT/gpu_tests.xml" -o junit_family=xunit1 \
    -p no:cacheprovider --timeout 120
  part loop 540 "$PYTHON" benchmarks/gpu_loop.py --shape "$SHAPES" --device "$DEVICE" \
    --steps 2 --limit 200 --json "$OUT/gpu_loop.json"
  echo "== not done: ${failed[*]:-nothing}"
  [ ${#failed[@]} -eq 0 ]
} 2>&1 | tee "$OUT/log.txt"
exit "${PIPESTATUS[0]}"
