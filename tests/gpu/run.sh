#!/usr/bin/env bash
# What a first session on a device should find out, in calls of at most ten minutes; a part that fails does not stop the next.
#
# Calls in the order of what they tell; each takes ten minutes at most, and leaves its figures where the last one reads them:
#
#   export OUT=results
#   bash tests/gpu/run.sh                                # 1 does it run at all, and how fast: doctor, limits, tests of parts,
#                                                        #   0.6b: kernels, waits, memory around captures; tests of runs
#   PARTS=loop bash tests/gpu/run.sh                     # 2 0.6b: whole steps
#   PARTS=trl bash tests/gpu/run.sh                      # 3 0.6b: TRL beside us on the same work
#   PARTS=loop SHAPES=1.7b bash tests/gpu/run.sh         # 4 the ladder of shapes
#   PARTS=loop SHAPES=4b MORE="--optimizer lora" bash tests/gpu/run.sh
#   PARTS=profile SHAPES=8b MORE="--only decode" bash tests/gpu/run.sh   # sampling alone
#   PARTS=section bash tests/gpu/run.sh                  # 5 the figures into docs/performance.md
#
# A call costs 60 to 540 s by its parts' limits below (the first took 200 s on an H100, with WORKERS=6 for the tests). On a processor:
# VERL_TEST_DEVICE=cpu SHAPES=tiny PARTS="doctor limits tests profile runs loop" bash tests/gpu/run.sh
#
#   OUT      folder for doctor.txt, limits.json, gpu_tests.xml, gpu_tests.json (of runs: in runs/), gpu_loop_SHAPE.json, profile_SHAPE.json,
#            traces, log.txt (gpu_results); figures are there as soon as they are known
#   LIMIT    seconds for all parts together (540); what is not done by then is given up
#   PARTS    some of doctor limits tests profile runs loop trl section ("doctor limits tests profile runs")
#   SHAPES   of benchmarks/gpu_loop.py, one (0.6b)
#   MORE     words for the profile or the loop
#   WORKERS  processes for the tests, which then share the device (1; more want pytest-xdist)
#   PYTHON   the interpreter (python3); TRL_PYTHON: that of an environment with TRL
#   WHEELS   folder of wheels to install first, without an index, for a machine that reaches none: see wheels.sh. The
#            engines' tests and the profile need none of them.
set -uo pipefail
cd "$(dirname "$0")/../.."
export OUT=${OUT:-gpu_results} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
PYTHON=${PYTHON:-python3} SHAPES=${SHAPES:-0.6b} PARTS=${PARTS:-doctor limits tests profile runs}
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
  tests=("$PYTHON" -m pytest -q -o junit_family=xunit1 -p no:cacheprovider --timeout 120)
  [ "${WORKERS:-1}" -gt 1 ] && tests+=(-n "$WORKERS")
  part tests 300 "${tests[@]}" --junitxml="$OUT/gpu_tests.xml" tests/gpu/test_{kernels,engine_flash,sampler,training,weights}.py
  # shellcheck disable=SC2086 # words
  part profile 240 "$PYTHON" benchmarks/gpu_profile.py --shape "$SHAPES" --device "$DEVICE" --out "$OUT" ${MORE:-}
  OUT=$OUT/runs part runs 240 "${tests[@]}" --junitxml="$OUT/runs/gpu_tests.xml" tests/gpu/test_loop.py
  part loop 540 "$PYTHON" benchmarks/gpu_loop.py --shape "$SHAPES" --device "$DEVICE" \
    --steps 2 --limit 200 --json "$OUT/gpu_loop_$SHAPES.json" ${MORE:-}
  part trl 540 "$PYTHON" benchmarks/gpu_loop.py --shape "$SHAPES" --device "$DEVICE" --trl ${TRL_PYTHON:+--trl-python "$TRL_PYTHON"} \
    --steps 2 --limit 250 --json "$OUT/gpu_loop_$SHAPES.json" ${MORE:-}
  part section 20 "$PYTHON" benchmarks/gpu_section.py "$OUT"
  echo "== not done: ${failed[*]:-nothing}"
  [ ${#failed[@]} -eq 0 ]
} 2>&1 | tee "$OUT/log.txt"
exit "${PIPESTATUS[0]}"
