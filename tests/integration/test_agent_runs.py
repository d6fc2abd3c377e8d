"""Tool agents from the command line: GRPO with a calculator, agreement on every turn, exact resume, loop processes, refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runs import TinyRun, records, weights
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer
from tests.unit.test_session import _QWEN
from verl.rollout.tools.parsers import PARSERS
from verl.trainer.main_ppo import main

USER = Path(__file__).parents[1] / "unit" / "agents_of_a_user.py"
ROLLOUT = "actor_rollout_ref.rollout."
# A model that knows nothing ends a turn at any letter; the parser of the plug-in reads every turn as a call.
WORDS = [
    "actor_rollout_ref.model.external_lib=tests.integration.plug_in_parser",
    f"{ROLLOUT}multi_turn.enable=True",
    f"{ROLLOUT}multi_turn.function_tool_path={USER}",
    f"{ROLLOUT}multi_turn.format=minimax",
    f"{ROLLOUT}multi_turn.max_assistant_turns=3",
    f"{ROLLOUT}stop_token_ids={list(range(64, 128))}",
    "data.max_prompt_length=400",
    "data.max_response_length=300",
    "trainer.total_training_steps=2",
    "trainer.test_freq=0",
    "trainer.val_before_train=False",
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyRun]:
    tiny = TinyRun(tmp_path_factory.mktemp("agents"))
    tiny_tokenizer(template=_QWEN.replace("%THINK%", "")).save_pretrained(tiny.model)
    from tests.integration import plug_in_parser

    # Imported once a process, whichever test came first: a run that imports it again changes nothing.
    PARSERS["minimax"] = plug_in_parser.every_turn_calls
    yield tiny
    PARSERS["minimax"] = plug_in_parser.ORIGINAL


def run(tiny: TinyRun, out: Path, workers: int, *more: str) -> list[dict[str, Any]]:
    words = [
        *WORDS,
        f"{ROLLOUT}agent.num_workers={workers}",
        f"trainer.rollout_data_dir={out / 'dump'}",
        *more,
    ]
    assert main(tiny.overrides(out, *words)) == 0
    files = sorted((out / "dump").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.slow
def test_a_calculator_trains_resumes_exactly_and_is_the_same_in_processes(
    tiny: TinyRun, tmp_path: Path
) -> None:
    whole = run(tiny, tmp_path / "whole", 0)
    found = [r for r in records(tmp_path / "whole").values() if "actor/grad_norm" in r]
    assert len(found) == 2
    for record in found:
        assert record["num_turns/max"] == 6 and record["agent/status/max_turns"] > 0
        assert record["tool_call_counts/mean"] > 1 and record["agent/valid_call_ratio"] == 1
        assert record["training/rollout_logprob_abs_diff/max"] < 1e-4, (
            "sampler and trainer agree on every turn"
        )
        assert record["agent/segments_per_trajectory/max"] == 1 and record["actor/grad_norm"] > 0
        assert record["agent/unrecorded_tokens"] == 0
        assert record["agent/prefill_ratio"] == 1.0, "later turns prefill only what is new"

    parts = tmp_path / "parts"
    run(tiny, parts, 0, "trainer.total_training_steps=1")
    run(tiny, parts, 0)
    assert weights(parts, 2) == weights(tmp_path / "whole", 2)

    for workers in (1, 4):
        there = run(tiny, tmp_path / str(workers), workers)
        assert [(r["uid"], r["output"]) for r in there] == [(r["uid"], r["output"]) for r in whole]


BAD = {
    "NoSuch": ("tool_config_path", "tools:\n  - class_name: {user}:NoSuch"),
    "is no JSON schema": (
        "tool_config_path",
        "tools:\n  - class_name: verl.tools.base_tool.BaseTool\n    tool_schema: {{function: {{name: x, parameters: {{type: thing}}}}}}",
    ),
    "two tools are called 'calculate'": (
        "tool_config_path",
        "tools:\n  - class_name: verl.tools.base_tool.BaseTool\n    tool_schema: {{function: {{name: calculate}}}}",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        *BAD,
        "kimi cannot read a call.*hermes or minimax or qwen can",
        "no support for tools",
        "max_response_length=40 cannot hold a turn after a call",
    ],
)
def test_what_cannot_work_is_refused_before_the_run(
    tiny: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str], words: str
) -> None:
    more = [f"{ROLLOUT}multi_turn.format=hermes"]
    if words in BAD:
        key, text = BAD[words]
        (tmp_path / "tools.yaml").write_text(text.format(user=USER))
        more.append(f"{ROLLOUT}multi_turn.{key}={tmp_path / 'tools.yaml'}")
    if words == "no support for tools":
        (tmp_path / "plain.jinja").write_text(CHAT_TEMPLATE)
        more.append(f"actor_rollout_ref.model.custom_chat_template={tmp_path / 'plain.jinja'}")
    if "cannot hold" in words:
        more.append("data.max_response_length=40")
    if words == "kimi cannot read a call.*hermes or minimax or qwen can":
        more.append(f"{ROLLOUT}multi_turn.format=kimi")
    assert main([*tiny.overrides(tmp_path, *WORDS, *more), "--check"]) == 2
    assert re.search(words, capfd.readouterr().err, re.S)
