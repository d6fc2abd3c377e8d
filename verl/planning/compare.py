"""A finished run held against its plan: seconds of each phase, and the most memory."""

from __future__ import annotations

import json
import resource
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.config.devices import ranks
from verl.config.model_facts import look
from verl.errors import UserError
from verl.planning.devices import GIB
from verl.planning.memory import total
from verl.planning.plan import plan
from verl.planning.report import device_of

if TYPE_CHECKING:
    from verl.config import Config


MEMORY = "perf/max_memory_allocated_gb"


def compared(config: Config, run_dir: Path) -> dict[str, tuple[float, float]]:
    """(planned, measured) by phase in seconds, and "memory" in GiB; {} where the run cannot be predicted.

    Planned for the mean lengths that the run had; measured: medians of its steps, the first left out if there are more.
    """
    steps = _records(run_dir / "metrics.jsonl")
    model = config.actor_rollout_ref.model
    if not steps or model.path is None:
        return {}
    prompt, response = (_median(steps, f"{side}_length/mean") for side in ("prompt", "response"))
    try:
        facts = look(model.path, model.override_config, model.hf_config_path)
        planned = plan(config, facts.config, device_of(config), prompt=prompt, response=response)
    except UserError:  # no device of the table, or a config.json that leaves sizes to the library
        return {}
    pairs = {phase: (value, _median(steps, f"timing_s/{phase}")) for phase, value in planned.seconds.items()}
    pairs |= {"step": (planned.step, _median(steps, "timing_s/step"))}
    peak = max((float(step[MEMORY]) for step in steps if step.get(MEMORY)), default=0.0)
    if not peak and ranks(config) == 1 and planned.work.sampler.shares:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    training = [parts for phase, parts in planned.memory.items() if phase != "gen" or planned.work.sampler.colocated]
    pairs["memory"] = (max(map(total, training)) / GIB, peak or None)
    return {name: (value, seen) for name, (value, seen) in pairs.items() if seen and value == value and value > 0}


def lines(pairs: Mapping[str, tuple[float, float]]) -> str:
    """One line for each phase."""
    rows = [
        f"  {name:<15}{planned:>9.2f}{measured:>10.2f} "
        f"{'GiB' if name == 'memory' else 's':<4}{planned / measured - 1:+.0%}"
        for name, (planned, measured) in pairs.items()
    ]
    return "\n".join(["plan of the run    planned  measured (docs/planning.md)", *rows])


def _records(file: Path) -> list[dict[str, Any]]:
    """Records of trained steps, without the first if there are more."""
    try:
        records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return []
    steps = [record for record in records if record.get("timing_s/step")]
    return steps[1:] or steps


def _median(steps: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [float(step[name]) for step in steps if step.get(name) is not None]
    return statistics.median(values) if values else None
