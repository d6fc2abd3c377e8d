"""What tests of whole runs share: a small dataset, a reward that varies, the overrides of a tiny run, reading it
back."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.tiny import tiny_model
from verl.report import write_report
from verl.tracking.metrics_table import OWN_LOSS, ROWS, rank
from verl.tracking.run_folder import LiveReport

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    text = solution_str or ""
    return {"score": sum(c in "aeiou0123" for c in text) / (1 + len(text)), "length": len(text)}
"""
# What may differ between two runs that are the same: clocks and memory.
UNSTABLE = ("timing_s/", "timing_per_token_ms/", "perf/", "reward/latency_s/", "training/sync_proof/")


def write_rows(path: Path, count: int) -> Path:
    """A parquet file of the chat format with `count` short questions."""
    rows = [
        {
            "data_source": "test/letters",
            "prompt": [{"role": "user", "content": f"Say {i} letters" + "!" * (i % 7)}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "extra_info": {"split": "train", "index": i},
        }
        for i in range(count)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


class TinyRun:
    """Model, data and reward below `root`; `overrides` are those of a run of a few seconds."""

    def __init__(self, root: Path, arch: str = "qwen3", rows: int = 24):
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        self.model = root / "model"
        tiny_model(self.model, arch=arch)
        self.train = write_rows(root / "train.parquet", rows)
        self.val = write_rows(root / "val.parquet", 4)
        self.reward = root / "reward.py"
        self.reward.write_text(REWARD)

    def overrides(self, out: Path, *more: str) -> list[str]:
        """Command-line words of a run that writes to `out`; later ones win."""
        return [
            "algorithm.adv_estimator=grpo",
            f"data.train_files={self.train}",
            f"data.val_files={self.val}",
            "data.train_batch_size=4",
            "data.max_prompt_length=64",
            "data.max_response_length=12",
            f"actor_rollout_ref.model.path={self.model}",
            "actor_rollout_ref.rollout.name=native",
            "actor_rollout_ref.rollout.n=3",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.actor.optim.lr=1e-2",
            "actor_rollout_ref.actor.fsdp_config.dtype=float32",
            f"custom_reward_function.path={self.reward}",
            "reward_model.num_workers=1",
            f"trainer.default_local_dir={out}",
            "trainer.device=cpu",
            "trainer.total_training_steps=4",
            "trainer.save_freq=1",
            "trainer.test_freq=2",
            "trainer.logger=console",
            *more,
        ]


report_by_a_process = LiveReport._report


def write_pages_here() -> None:
    """Runs of this process write their pages themselves, without a process that imports all of verl for it: 0.3 s of a
    core for each run. Those of test_commands_train.py and of `main_ppo` start that process."""

    def report(self: LiveReport) -> str:
        try:
            write_report(self._run_dir)
        except OSError as error:
            return str(error)
        return ""

    LiveReport._report = report  # type: ignore[method-assign]


def environment(**more: str) -> dict[str, str]:
    """The environment of a child: one thread, offline."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **more,
    }


def main_ppo(words: list[str], timeout: float = 240, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does."""
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=environment(**more), check=False
    )


def check_listed(record: dict, own: Collection[str] = ()) -> dict:
    """The record, all of whose metrics must have a row of verl/tracking/metrics_table.txt, or be a plug-in's `own`."""
    patterns = [*(row.pattern for row in ROWS), OWN_LOSS]
    unlisted = {n for n in record if n not in ("step", "time", *own) and patterns[rank(n)] == OWN_LOSS}
    assert not unlisted, f"metrics without a row in metrics_table.txt: {unlisted}"
    return record


def records(run: Path, own: Collection[str] = ()) -> dict[int, dict]:
    """metrics.jsonl as step → record, the last of each step; the part that must not vary between equal runs."""
    found: dict[int, dict] = {}
    assert '"event": "check_' not in (run / "events.jsonl").read_text(), "a check of each step found an error"
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "step" in record and "event" not in record:
            check_listed(record, own)
            kept = {k: v for k, v in record.items() if k != "time" and not k.startswith(UNSTABLE)}
            found[record["step"]] = kept
    return found


def weights(run: Path, step: int) -> dict[str, bytes]:
    """Name → bytes of every tensor of a checkpoint's actor."""
    from safetensors.numpy import load_file

    out: dict[str, bytes] = {}
    for file in sorted((run / f"global_step_{step}" / "actor").glob("*.safetensors")):
        out |= {name: tensor.tobytes() for name, tensor in load_file(file).items()}
    return out


def from_step(run: Path, step: int, to: Path) -> Path:
    """A copy of a run as it was when that step was saved."""
    to.mkdir()
    shutil.copytree(run / f"global_step_{step}", to / f"global_step_{step}")
    (to / "latest_checkpointed_iteration.txt").write_text(str(step))
    return to
