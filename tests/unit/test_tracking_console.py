"""Console: the step line and its inverse, order, names left out, progress in a pipe."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from verl.tracking import console, names

NAMES = st.text(
    st.characters(codec="ascii", categories=["L", "N"], include_characters="_/@:"), min_size=1, max_size=20
)


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
    """As metrics.md says: fields by " - ", value after the last ":"."""
    pairs = [field.rpartition(":") for field in text.split(" - ")]
    return {name: int(v) if v.lstrip("-").isdigit() else float(v) for name, _, v in pairs}


@given(st.integers(0, 10**6), st.dictionaries(NAMES, st.integers() | st.floats()))
def test_line_parses_back(step, metrics):
    metrics = {n: v for n, v in metrics.items() if n not in names.NOT_ON_CONSOLE and n != "step"}
    found = parse_step_line(console.step_line(step, metrics))
    assert found.pop("step") == step
    assert found.keys() == metrics.keys()
    for name, value in metrics.items():
        assert type(found[name]) is type(value)
        assert found[name] == value or (math.isnan(value) and math.isnan(found[name]))


def test_order_of_sections():
    given_names = [
        "timing_s/reshard",
        "val-aux/gsm8k/reward/std@2",
        "val-core/gsm8k/acc/mean@1",
        "training/off_policy/trajectory_spans/mean",
        "custom/metric",
        "perf/throughput",
        "timing_s/agent_loop/slowest/tool_calls",
        "timing_s/save_checkpoint",
        "timing_s/gen",
        "num_turns/mean",
        "response_length/clip_ratio",
        "reward_extra/acc/mean",
        "critic/returns/max",
        "critic/score/mean",
        "training/skipped_updates",
        "actor/lr",
        "actor/pg_loss",
        "training/global_step",
    ]
    shown = list(names.in_order(dict.fromkeys(given_names, 0)))
    expected = given_names[::-1]
    expected.remove("custom/metric")
    assert shown == [*expected, "custom/metric"]


def test_plain_numbers_only():
    import numpy as np
    import torch

    numbers, bad = names.plain_metrics(
        {
            "a": np.float32(0.5),
            "b": np.int64(3),
            "c": torch.tensor(2.0),
            "d": True,
            "e": np.array([1.5]),
            "f": float("nan"),
            "g": "text",
            "h": None,
            "i": torch.ones(2),
            "j": np.float64(1e-5),
        }
    )
    assert {n: type(v) for n, v in numbers.items()} == {
        "a": float,
        "b": int,
        "c": float,
        "d": int,
        "e": float,
        "f": float,
        "j": float,
    }
    assert bad == ["g", "h", "i"]


def test_aliases():
    base = {"critic/rewards/mean": 0.5, "actor/ppo_kl": 0.1}
    assert names.with_aliases(base) == {**base, "actor/reward_mean": 0.5, "actor/kl_divergence": 0.1}
    more = {**base, "actor/reward_kl_penalty": 0.2}
    assert names.with_aliases(more)["actor/kl_divergence"] == 0.2
    assert names.with_aliases({**more, "actor/kl_loss": 0.3})["actor/kl_divergence"] == 0.3
    assert names.with_aliases({"critic/vf_loss": 2.0})["critic/value_loss"] == 2.0


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
    assert lines[-1].startswith(
        "verl: Training Progress: 100/100 (100%), 2.0 s/step, 0:03:00 so far, 0:00:00"
    )
    assert 15 < len(lines) < 25


def test_progress_and_table_on_a_terminal(capsys, monkeypatch):
    """Run in a pseudo terminal: the bar is live, the step's line is still there, a table is added."""
    import os
    import pty
    import subprocess
    import sys
    from pathlib import Path

    code = (
        "from verl.tracking import console\n"
        "bar = console.Progress(3)\n"
        "for s in (1, 2, 3):\n"
        "    bar.detail('gen 5/8')\n"
        "    console.show_step(s, {'critic/score/mean': 0.25 * s})\n"
        "    bar.advance_to(s)\n"
        "bar.close()\n"
    )
    ours, theirs = pty.openpty()
    env = dict(os.environ, TERM="xterm", COLUMNS="120")
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=theirs, stderr=theirs, env=env, cwd=Path(__file__).parents[2]
    )
    os.close(theirs)
    data = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:
            break
        if not chunk:
            break
        data += chunk
    assert child.wait() == 0
    text = data.decode()
    assert "step:2 - critic/score/mean:0.5" in text
    assert "Training Progress" in text and "3/3" in text
    assert "score" in text.replace("critic/score", "")
