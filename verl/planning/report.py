"""A plan in words and as JSON, and the device that a command means."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from verl.config.devices import ranks
from verl.errors import UserError
from verl.planning.devices import GIB, Device, measured, named
from verl.planning.memory import total
from verl.planning.plan import ROOM, Plan, assignment
from verl.platform import probe

if TYPE_CHECKING:
    from verl.config import Config


Proposal = tuple[dict[str, Any], Plan]
_GENERAL = "lengths are the limits unless --prompt and --response say their means"


def device_of(config: Config, name: str | None = None) -> Device:
    """The device named, or that of this machine. UserError for one that is not in the table."""
    kind = config.trainer.device
    if name in (None, "cpu") and (name or kind == "cpu" or not (probe.nvidia_gpus() or probe.npus())):
        if kind not in ("auto", "cpu") and not name:
            raise UserError(f"trainer.device={kind}: there is none here; name one with --device")
        host = measured()
        return replace(host, memory=host.memory / max(1, ranks(config)))  # ranks share the machine's
    gpus = probe.nvidia_gpus()
    return named(name or (gpus[0] if gpus and kind != "npu" else "910B"))


def text(plan: Plan, keys: Sequence[str], changed: Plan) -> str:
    """The table. keys, changed: what to change where the plan does not fit, and the plan with it."""
    work, model = plan.work, plan.work.roles["actor"].model
    device = work.device
    lines = [
        f"{model.name}, {_count(model.total)} parameters"
        + (f" ({_count(model.active)} of a token)" if model.expert_count else "")
        + f", on {work.roles['actor'].ranks} × {device.name} of {device.memory / GIB:.0f} GiB"
        + (": a forecast, nothing was measured on this device" if device.forecast else ""),
        f"a step: {work.step.prompts} × {work.step.responses} sequences of "
        f"{work.step.prompt:g} + {work.step.response:g} tokens",
        "",
        f"{'phase':<15}{'GiB':>8}{'seconds':>10}  what holds the memory",
    ]
    for phase in dict.fromkeys([*plan.memory, *plan.seconds]):
        parts = plan.memory.get(phase, {})
        size = f"{total(parts) / GIB:.1f}" if parts else ""
        taken = f"{plan.seconds[phase]:.2f}" if phase in plan.seconds else ""
        lines.append(f"{phase:<15}{size:>8}{taken:>10}  {_parts(parts)}".rstrip())
    if plan.seconds:
        lines += [f"{'step':<15}{'':>8}{plan.step:>10.2f}  {plan.throughput:.0f} tokens/s and device"]
    else:
        lines += ["no seconds: this processor has not been measured; run `verl doctor --bench` once"]
    actor = work.roles["actor"]
    lines += ["", f"micro-batch of the update: {actor.micro_tokens} tokens, the largest that fits has {_largest(plan)}"]
    return "\n".join([*lines, *_verdict(plan, keys, changed), f"note: {_GENERAL}"])


def _largest(plan: Plan) -> str:
    size = plan.largest * plan.work.roles["actor"].placement.sequence
    return f"{size}" if size else "none: the state alone is too much"


def _verdict(plan: Plan, keys: Sequence[str], changed: Plan) -> list[str]:
    room = ROOM * plan.work.device.memory / GIB
    phase, parts = max(plan.memory.items(), key=lambda pair: total(pair[1]))
    full = f"{phase} takes {total(parts) / GIB:.1f} of {room:.1f} GiB that a run can fill"
    if plan.fits:
        return [f"fits: {full}"]
    if changed.fits:
        return [f"does not fit: {full}. Change:", *(f"  {key}" for key in keys), f"  → {_short(changed)}"]
    more = "more devices (trainer.nnodes, trainer.n_gpus_per_node) or a smaller model are needed"
    return [f"does not fit: {full}; {more}", *(f"  {key}" for key in keys), f"  → {_short(changed)}, still too much"]


def _short(plan: Plan) -> str:
    worst = max(map(total, plan.memory.values())) / GIB
    return f"{worst:.1f} GiB at most" + (f", {plan.step:.1f} s a step" if plan.seconds else "")


def _parts(parts: dict[str, float]) -> str:
    shown = sorted(((size, name) for name, size in parts.items() if size >= 0.005 * total(parts)), reverse=True)
    return ", ".join(f"{name} {size / GIB:.1f}" if size > GIB / 20 else f"{name} <0.1" for size, name in shown)


def _count(number: float) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.0f} M"


def record(plan: Plan, keys: Sequence[str]) -> dict[str, Any]:
    """The plan as JSON's types: bytes by phase and part, seconds by phase."""
    return {
        "device": plan.work.device.name,
        "forecast": plan.work.device.forecast,
        "devices": plan.work.roles["actor"].ranks,
        "parameters": plan.work.roles["actor"].model.total,
        "memory_bytes": plan.memory,
        "seconds": plan.seconds | ({"step": plan.step} if plan.seconds else {}),
        "tokens_per_second_per_device": None if math.isnan(plan.step) else plan.throughput,
        "largest_micro_batch_tokens": plan.largest * plan.work.roles["actor"].placement.sequence,
        "fits": plan.fits,
        "change": list(keys),
    }


def proposals(found: Sequence[Proposal], device: Device) -> str:
    """The layouts of a search, the best first."""
    if not found:
        return f"no layout fits these devices ({device.name}): use more of them, or an adapter (model.lora_rank)"
    lines = []
    for number, (keys, plan) in enumerate(found, 1):
        lines += [f"{number}. {_short(plan)}, {plan.throughput:.0f} tokens/s and device"]
        lines += [f"     {assignment(key, value)}" for key, value in keys.items()]
    return "\n".join([*lines, "forecasts: layouts beside FSDP on one node were not measured"])


def proposals_json(found: Sequence[Proposal]) -> str:
    """The same as JSON."""
    return json.dumps([{"keys": keys, "plan": record(plan, ())} for keys, plan in found], indent=1)


def summary(plan: Plan) -> list[str]:
    """Two lines for a check."""
    phase, parts = max(plan.memory.items(), key=lambda pair: total(pair[1]))
    room = ROOM * plan.work.device.memory / GIB
    state = "fits" if plan.fits else "does NOT fit (`verl plan` says what to change)"
    memory = f"memory of a device: at most {total(parts) / GIB:.1f} GiB of {room:.1f}, in {phase}: {state}"
    if not plan.seconds:
        return [memory, "time of a step: unknown; `verl doctor --bench` measures this processor"]
    slowest = sorted(plan.seconds.items(), key=lambda pair: -pair[1])[:3]
    shares = ", ".join(f"{name} {seconds:.3g}" for name, seconds in slowest)
    return [memory, f"time of a step at full lengths: {plan.step:.3g} s ({shares}); a forecast, see docs/planning.md"]
