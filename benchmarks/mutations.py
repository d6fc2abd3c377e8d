"""Does a test fail for each of some central lines that is changed? In a worktree of its own, with the tests of that part.

    python benchmarks/mutations.py --json benchmarks/results/mutations.json

A line that is not there any more is named: write its change anew.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

# What is changed, where, the line, what it becomes, the tests that should see it.
MUTATIONS = [
    (
        "a sign in the PPO loss",
        "verl/algorithms/policy_loss.py",
        "    plain = -advantages * ratio\n    clipped",
        "    plain = advantages * ratio\n    clipped",
        "tests/unit/algorithms/test_losses.py tests/unit/algorithms/test_objective.py",
    ),
    (
        "the mask of a loss",
        "verl/algorithms/objective.py",
        "            loss_mask=columns.loss_mask,",
        "            loss_mask=columns['response_mask'],",
        "tests/unit/algorithms/test_objective.py tests/contract/test_worker_group_contract.py",
    ),
    (
        "a response's seed",
        "verl/rollout/manager.py",
        'digest = hashlib.blake2b(f"{seed}/{uid}/{index}"',
        'digest = hashlib.blake2b(f"{seed}/{uid}"',
        'tests/unit tests/invariant -k "seed or draws or rollout"',
    ),
    (
        "the k3 estimator",
        "verl/algorithms/kl.py",
        "return torch.expm1(-limited) + limited",
        "return torch.expm1(-limited) - limited",
        "tests/unit/algorithms/test_kl.py",
    ),
    (
        "GAE's discount",
        "verl/algorithms/advantage.py",
        "inputs.gamma * inputs.lam)",
        "inputs.gamma)",
        "tests/unit/algorithms/test_estimators.py",
    ),
    (
        "a manifest's sizes",
        "verl/checkpoint/manifest.py",
        'elif path.stat().st_size != entry["size"]:',
        "elif False:",
        "tests/unit/checkpoint/test_seal.py",
    ),
    (
        "the comparison of checksums",
        "verl/weight_sync/verify.py",
        "({n for n in trainer if trainer[n] != sampler.get(n)}",
        "({n for n in trainer if n not in sampler}",
        "tests/unit/weight_sync/test_proof.py",
    ),
    (
        "the sampler's temperature",
        "verl/engine/rollout/native/sampling.py",
        "divisor = np.where(greedy, 1.0, rows.temperature)",
        "divisor = np.where(greedy, 1.0, 1.0)",
        "tests/contract/test_rollout_engine_contract.py -k native",
    ),
    (
        "who gets which rows' columns back",
        "verl/workers/group.py",
        "        return [results[i] for i in self._speaker]",
        "        return [results[0] for i in self._speaker]",
        "tests/contract/test_worker_group_contract.py",
    ),
    (
        "tokens the policy did not write",
        "verl/compat/agent_loop.py",
        "            parts.append(ids[at : at + 1])",
        "            parts.append((0, 0, 1))",
        "tests/unit/rollout/test_agents.py tests/unit/rollout/test_rollout_session.py",
    ),
    (
        "staleness",
        "verl/rollout/schedule.py",
        "row.versions[0] < oldest",
        "row.versions[0] < oldest - 1",
        "tests/unit/rollout/test_rollout_async.py",
    ),
    (
        "the published layout of experts",
        "verl/models/checkpoint_names.py",
        "            parts[name] = tensor.transpose(1, 2)",
        "            pass",
        "tests/invariant/test_vision.py -k experts",
    ),
]


def fails(tree: Path, file: str, line: str, changed: str, tests: str) -> str:
    """The first test that fails with the change; "" for none."""
    path = tree / file
    before = path.read_text()
    if line not in before:
        sys.exit(f"{file} has no {line!r} any more")
    path.write_text(before.replace(line, changed, 1))
    command = [sys.executable, "-m", "pytest", "-x", *shlex.split(tests)]
    here = os.environ | {"PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=here, capture_output=True, text=True, check=False)
    path.write_text(before)
    if done.returncode > 1:
        sys.exit(f"{tests}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}")
    failed = [
        line.removeprefix("FAILED ").split(" - ")[0]
        for line in done.stdout.splitlines()
        if line.startswith("FAILED ")
    ]
    return failed[0] if failed else ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    root = Path(__file__).resolve().parents[1]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "-C", root, "worktree", "add", "-q", "--detach", tree, "HEAD"], check=True)
        try:
            for name, file, line, changed, tests in MUTATIONS:
                found[name] = fails(tree, file, line, changed, tests)
                print(f"{name}: {found[name] or 'NO TEST FAILS'}", flush=True)
        finally:
            subprocess.run(["git", "-C", root, "worktree", "remove", "--force", tree], check=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(0 if all(found.values()) else 1)


if __name__ == "__main__":
    main()
