"""What a turn of a dialogue costs beside the model and the tool: an engine that answers at once, a tool that returns at
once.

    python benchmarks/agent_overhead.py [--trajectories 1000] [--turns 4] [--processes 0 1 2] [--rounds 3] [--out
    benchmarks/results/agent_overhead.json]

All trajectories are open at once. Each turn is a call of a tool that the engine has ready, the last one a plain answer;
the prompts and the template are those of the quickstart's agent. Reported: milliseconds of wall time per turn over all,
median of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "examples/quickstart"), str(HERE.parent)]

from verl.config import load  # noqa: E402
from verl.engine.rollout.base import Completion, RolloutEngine, SamplingParams  # noqa: E402
from verl.rollout.attempt import RolloutSettings  # noqa: E402
from verl.rollout.groups import RolloutManager  # noqa: E402
from verl.rollout.loop_processes import LoopProcesses  # noqa: E402
from verl.trajectory import Prompt, Trajectory  # noqa: E402

TEMPLATE = (
    "{%- if tools %}<|start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|end|>\n{% endif %}"
    "{%- for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}<tool_call>\n"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n</tool_call>"
    "{%- endfor %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TOOL = '''from verl.tools.function_tool import function_tool


@function_tool
def add(a: int, b: int) -> int:
    """The sum of two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b
'''


class AtOnce(RolloutEngine):
    """Calls the tool in every turn but the last, without a wait."""

    version = 0

    def __init__(self, call: np.ndarray, answer: np.ndarray, turns: int):
        self._turns = turns
        self._ready = [Completion(ids, np.full(len(ids), -0.5, np.float32), "stop") for ids in (call, answer)]

    async def generate(self, prompt_ids: Any, sampling: SamplingParams, **about: Any) -> Completion:
        """The completion of this turn."""
        return self._ready[sampling.call + 1 >= self._turns]

    def abort(self, request_ids: Any = None) -> None:
        """Nothing is in flight."""

    def sleep(self) -> None:
        """Nothing to release."""

    def wake(self) -> None:
        """Nothing to fetch."""


async def unscored(trajectory: Trajectory) -> None:
    """No reward."""
    trajectory.score = 0.0


async def play(folder: Path, args: argparse.Namespace, processes: int) -> float:
    """Seconds of wall time per turn, median of the rounds; a first round starts processes."""
    from build_model import build_tokenizer
    from transformers import AutoTokenizer

    build_tokenizer(["go on", CALL, TEMPLATE], folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    ids = [np.array(tokenizer(text + "<|end|>")["input_ids"]) for text in (CALL, "3")]
    tokenizer.save_pretrained(folder)
    (folder / "tools.py").write_text(TOOL)
    rollout = "actor_rollout_ref.rollout."
    config = load([
        f"actor_rollout_ref.model.path={folder}", f"{rollout}prompt_length=1024", f"{rollout}response_length=8192",
        f"{rollout}multi_turn.enable=True", f"{rollout}multi_turn.function_tool_path={folder / 'tools.py'}",
    ])  # fmt: skip
    settings = RolloutSettings(SamplingParams(max_tokens=8192), n=8, seed=1, default_loop="tool_agent")
    manager = RolloutManager(
        AtOnce(*ids, args.turns), settings, decode=tokenizer.decode, on_finished=unscored, tokenizer=tokenizer,
        config=config,
        processes=(lambda: LoopProcesses(processes, config)) if processes else None,
    )  # fmt: skip
    seconds = []
    for round_ in range(args.rounds + 1):
        messages = [{"role": "user", "content": "1 + 2?"}]
        opening = np.array(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
        prompts = [Prompt(f"0:{i}@{round_}", opening, messages) for i in range(args.trajectories // 8)]
        began = time.perf_counter()
        batch = await manager.take(prompts)
        seconds.append((time.perf_counter() - began) / (len(batch) * args.turns))
        assert all(t.status == "completed" and t.extra["sampler_calls"] == args.turns for t in batch)
    await manager.stop()
    return statistics.median(seconds[1:])


def main() -> None:
    """Measure every number of processes and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--processes", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = {}
    for processes in args.processes:
        with tempfile.TemporaryDirectory() as folder:
            found[processes] = 1000 * asyncio.run(play(Path(folder), args, processes))
        print(f"{processes} loop processes: {found[processes]:.2f} ms a turn", flush=True)
    if args.out:
        about = {
            "processor": platform.processor() or platform.machine(),
            "trajectories": args.trajectories,
            "turns": args.turns,
        }
        args.out.write_text(json.dumps(about | {"ms_per_turn": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
