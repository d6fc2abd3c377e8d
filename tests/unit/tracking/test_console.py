"""Console: the step line and its inverse, order, names left out, progress in a pipe."""

from __future__ import annotations

import contextlib
import math
import os
import pty
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from verl.tracking import console, names
from verl.tracking.metrics_table import NOT_ON_CONSOLE, in_order, with_aliases

ROOT = Path(__file__).parents[3]
NAMES = st.text(st.characters(codec="ascii", categories=["L", "N"], include_characters="_/@:"), min_size=1, max_size=20)


def test_line_is_exactly_as_specified():
    metrics = {
        "perf/throughput": 812.4,
        "timing_s/step": 41.7,
        "actor/entropy": 0.4312,
        "critic/score/mean": 0.53125,
        "training/epoch": 0,
        "training/global_step": 12,
        "actor/reward_mean": 1.0,
        "val/accuracy": 0.5,
    }
    assert console.step_line(12, metrics) == (
        "step:12 - training/global_step:12 - training/epoch:0 - actor/entropy:0.4312 - critic/score/mean:0.53125 - "
        "timing_s/step:41.7 - perf/throughput:812.4"
    )


def parse_step_line(text):
    """Fields by " - ", value after the last ":"."""
    pairs = [field.rpartition(":") for field in text.split(" - ")]
    return {name: int(v) if v.lstrip("-").isdigit() else float(v) for name, _, v in pairs}


@given(st.integers(0, 10**6), st.dictionaries(NAMES, st.integers() | st.floats()))
def test_line_parses_back(step, metrics):
    metrics = {n: v for n, v in metrics.items() if n not in NOT_ON_CONSOLE and n != "step"}
    found = parse_step_line(console.step_line(step, metrics))
    assert found.pop("step") == step
    assert found.keys() == metrics.keys()
    for name, value in metrics.items():
        assert type(found[name]) is type(value)
        assert found[name] == value or (math.isnan(value) and math.isnan(found[name]))


IN_ORDER = """
training/global_step actor/pg_loss actor/lr training/skipped_updates critic/score/mean critic/returns/max
reward_extra/acc/mean response_length/clip_ratio num_turns/mean timing_s/gen timing_s/save_checkpoint
timing_s/agent_loop/slowest/tool_calls perf/throughput training/off_policy/trajectory_spans/mean
val-core/gsm8k/acc/mean@1 val-aux/gsm8k/reward/std@2 timing_s/reshard custom/metric
"""


def test_order_of_sections():
    expected = IN_ORDER.split()
    assert list(in_order(dict.fromkeys(sorted(expected), 0))) == expected


def test_plain_numbers_only():
    import numpy as np
    import torch

    given = {"a": np.float32(0.5), "b": np.int64(3), "c": torch.tensor(2.0), "d": True, "e": np.array([1.5])}
    given |= {"f": math.nan, "g": "text", "h": None, "i": torch.ones(2), "j": np.float64(1e-5)}
    numbers, bad = names.plain_metrics(given)
    assert {n for n, v in numbers.items() if type(v) is int} == {"b", "d"}
    assert {n for n, v in numbers.items() if type(v) is float} == {"a", "c", "e", "f", "j"}
    assert bad == ["g", "h", "i"]


def test_aliases():
    base = {"critic/rewards/mean": 0.5, "actor/ppo_kl": 0.1}
    assert with_aliases(base) == {**base, "actor/reward_mean": 0.5, "actor/kl_divergence": 0.1}
    more = {**base, "actor/reward_kl_penalty": 0.2}
    assert with_aliases(more)["actor/kl_divergence"] == 0.2
    assert with_aliases({**more, "actor/kl_loss": 0.3})["actor/kl_divergence"] == 0.3
    assert with_aliases({"critic/vf_loss": 2.0})["critic/value_loss"] == 2.0


def test_one_line():
    assert console.one_line("a\nb\tc é 汉") == "a\\nb\\tc é 汉"


def test_progress_in_a_pipe_is_sparse(capsys, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    bar = console.Progress(100, 10)
    for step in range(11, 101):
        now[0] += 2.0
        bar.advance_to(step)
    bar.close()
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert lines[0] == "verl: Training Progress: 10/100"
    assert lines[1] == "verl: Training Progress: 11/100 (11%), 2.0 s/step, 0:00:02 so far, 0:02:58 to go"
    assert lines[-1].startswith("verl: Training Progress: 100/100 (100%), 2.0 s/step, 0:03:00 so far")
    assert 15 < len(lines) < 25


def test_progress_and_table_on_a_terminal(capsys, monkeypatch):
    """Run in a pseudo terminal: the bar is live, the step's line is still there, a table is added."""
    code = (
        "from verl.tracking import console\nbar = console.Progress(3)\nfor s in (1, 2, 3):\n"
        "    bar.detail('gen 5/8')\n    console.show_step(s, {'critic/score/mean': 0.25 * s})\n"
        "    bar.advance_to(s)\nbar.close()\n"
    )
    ours, theirs = pty.openpty()
    env = dict(os.environ, TERM="xterm", COLUMNS="120")
    child = subprocess.Popen([sys.executable, "-c", code], stdout=theirs, stderr=theirs, env=env, cwd=ROOT)
    os.close(theirs)
    data = b""
    with contextlib.suppress(OSError):  # its end is an error of reading
        while chunk := os.read(ours, 65536):
            data += chunk
    assert child.wait() == 0
    text = data.decode()
    assert "step:2 - critic/score/mean:0.5" in text
    assert "Training Progress" in text and "3/3" in text
    assert "score" in text.replace("critic/score", "")
