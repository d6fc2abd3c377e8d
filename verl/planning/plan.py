"""The plan of a run: memory and seconds of each phase, what fits, and what to change where it does not."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from verl.config.schema.base import put
from verl.planning import memory, timing
from verl.planning.configured import Workload, workload
from verl.planning.devices import GIB, Device
from verl.planning.memory import Parts, total
from verl.planning.workload import Role

if TYPE_CHECKING:
    from verl.config import Config


ROOM = 0.94
"""Share of a device's memory that a run can fill: the driver, libraries and fragments take the rest."""
PROCESS = 0.5 * GIB
"""What the libraries take of the host's memory where the device is the processor."""
HOST_LINK = 25e9
"""Bytes a second between a device and the host."""
KEEPABLE, HOST_KEEPABLE = 0.7, 0.4
"""Share of the free memory that activations may take before layers are recomputed: the engine's own rule, for measured
bytes on a device, for estimated ones on a processor."""
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is predicted.

    memory    phase → what holds memory → bytes on each training device; "gen" of a sampler with devices of its own
              counts those
    seconds   phase → seconds, in the order of a step; empty where the device's rates are not known
    largest   most tokens of a micro-batch of the update that fit on one device; 0: not even the state does
    """

    work: Workload
    memory: dict[str, Parts]
    seconds: dict[str, float]
    largest: int

    @property
    def fits(self) -> bool:
        """Every phase has room."""
        return self.worst <= 1.0

    @property
    def worst(self) -> float:
        """The fullest phase relative to the room of a device."""
        return max(map(total, self.memory.values())) / (ROOM * self.work.device.memory)

    @property
    def excess(self) -> float:
        """Sum over the phases of what does not fit, relative to the room of a device."""
        room = ROOM * self.work.device.memory
        return sum(max(0.0, total(parts) / room - 1) for parts in self.memory.values())

    @property
    def step(self) -> float:
        """Seconds of a step; phases follow each other."""
        return sum(self.seconds.values()) if self.seconds else math.nan

    @property
    def throughput(self) -> float:
        """Tokens of prompts and responses, a second and training device, as perf/throughput counts."""
        return self.work.step.tokens / self.step / self.work.roles["actor"].ranks


def plan(
    config: Config,
    model_config: Mapping[str, Any],
    device: Device,
    *,
    prompt: float | None = None,
    response: float | None = None,
) -> Plan:
    """The plan of a configuration of reinforcement learning; arguments as of `workload`."""
    work = workload(config, model_config, device, prompt=prompt, response=response)
    actor = work.roles["actor"]
    if actor.recompute is None:
        tokens = min(actor.micro_tokens, _most_tokens(work, actor))
        kept = memory.passing(replace(actor, recompute=False), tokens, True)
        share = HOST_KEEPABLE if actor.on_host else KEEPABLE
        free = max(0.0, device.memory - total(memory.state(actor)))
        recompute = kept["activations"] + (0.0 if actor.on_host else kept["gathered"]) > share * free
        work = replace(work, roles=work.roles | {"actor": replace(actor, recompute=recompute)})
    if (critic := work.roles.get("critic")) is not None and critic.recompute is None:
        recompute = bool(work.roles["actor"].recompute)
        work = replace(work, roles=work.roles | {"critic": replace(critic, recompute=recompute)})
    phases = _memory(work)
    seconds = _seconds(work, phases) if device.flops == device.flops else {}
    return Plan(work, phases, seconds, _largest(work, phases))


def _idle(work: Workload, but: str = "") -> Parts:
    """State on the devices while another role computes, or the sampler."""
    parts: Parts = {}
    for name, role in work.roles.items():
        for part, size in memory.state(role).items():
            if name != but and part not in work.offload[name] and not (part == "gradients" and _drops(name, role)):
                parts[f"{name} {part}"] = size
    if work.device.on_host:
        parts["process"] = PROCESS
    return parts


def _drops(name: str, role: Role) -> bool:
    """Whether its gradients are freed when weights are pushed, and made again by the next update."""
    return name == "actor" and not role.on_host and not role.megatron


def _computing(work: Workload, name: str, update: bool) -> Parts:
    """Memory of a pass of a role, the idle state of the others included."""
    role = work.roles.get(name, work.roles["actor"])
    name = name if name in work.roles else "actor"
    held = memory.state(role)
    if not update:
        gone = work.offload[name] | ({"gradients"} if _drops(name, role) else set())
        held = {part: size for part, size in held.items() if part == "weights" or part not in gone}
    tokens = min(role.micro_tokens if update else role.infer_tokens, _most_tokens(work, role))
    parts = _idle(work, but=name) | {f"{name} {part}": size for part, size in held.items()}
    return parts | memory.passing(role, tokens, update) | _awake(work)


def _most_tokens(work: Workload, role: Role) -> float:
    """Tokens of the sequences of an update on one group of ranks: a micro-batch has no more."""
    step = work.step
    rows = math.ceil(step.sequences / step.minis / role.rows)
    return rows * max(step.length, work.longest)


def _awake(work: Workload) -> Parts:
    """Of a sampler that does not sleep on the training devices."""
    sampler = work.sampler
    if not sampler.colocated or sampler.sleeps or sampler.shares:
        return {}
    return memory.sampling(sampler, work.device.memory, total(_idle(work)))


def _memory(work: Workload) -> dict[str, Parts]:
    sampler, idle = work.sampler, _idle(work)
    if not sampler.colocated:
        phases = {"gen": memory.sampling(sampler, work.device.memory, 0.0)}
    else:
        if sampler.shares:
            idle = idle | {"actor weights": memory.state(work.roles["actor"])["weights"]}
        phases = {"gen": idle | memory.sampling(sampler, work.device.memory, total(idle))}
    for phase, role in work.step.passes:
        phases[phase] = _computing(work, role, update=False)
    if "critic" in work.roles:
        phases["update_critic"] = _computing(work, "critic", update=True)
    phases["update_actor"] = _computing(work, "actor", update=True)
    pushed = memory.pushing(work.roles["actor"], sampler)
    if pushed:
        weights = memory.state(work.roles["actor"])["weights"]
        phases["update_weights"] = _idle(work) | {"actor weights": weights} | pushed | _awake(work)
    return phases


def _seconds(work: Workload, phases: Mapping[str, Parts]) -> dict[str, float]:
    step, device, sampler = work.step, work.device, work.sampler
    seconds = {"gen": timing.sampling_seconds(sampler, step, device, max(1.0, phases["gen"]["cache"]))}
    for phase, name in step.passes:
        role = work.roles.get(name, work.roles["actor"])
        once = replace(role, micro_tokens=role.infer_tokens, adapter=0)
        seconds[phase] = timing.training_seconds(once, timing.INFERENCE, _trained(work, role), step.length, device)
    for name in ("critic", "actor"):
        if name not in work.roles:
            continue
        role = work.roles[name]
        passes = timing.training_seconds(role, timing.update_work(role), _trained(work, role), step.length, device)
        steps = step.minis * step.epochs * timing.optimizer_seconds(role, device)
        seconds[f"update_{name}"] = passes * step.epochs + steps
    seconds["update_weights"] = timing.push_seconds(work.roles["actor"], sampler, device, work.nodes)
    if moved := _offload_bytes(work):
        seconds["offload"] = moved / HOST_LINK
    return seconds


def _trained(work: Workload, role: Role) -> float:
    """Tokens that go through a model in training: the prompt of a group once (FSDP)."""
    step = work.step
    repeats = step.responses if role.megatron or not step.grouped else 1
    return step.prompts * (step.prompt * repeats + step.response * step.responses)


def _offload_bytes(work: Workload) -> float:
    """Bytes of a step to the host and back on one device."""
    if work.device.on_host:
        return 0.0
    moved = 0.0
    for name, role in work.roles.items():
        held, uses = memory.state(role), 1 + sum(owner == name for _, owner in work.step.passes)
        moved += 2 * held["weights"] * uses if "weights" in work.offload[name] else 0.0
        moved += 2 * held.get("optimizer", 0.0) if "optimizer" in work.offload[name] else 0.0
    return moved


def _largest(work: Workload, phases: Mapping[str, Parts]) -> int:
    """Most tokens of a micro-batch of the update on one device, in powers of two and halves of them."""
    actor = work.roles["actor"]
    names = ("gathered", "activations", "logits")
    held = sum(size for part, size in phases["update_actor"].items() if part not in names)
    room = ROOM * work.device.memory - held
    sizes = sorted({base * factor for base in (2**n for n in range(8, 22)) for factor in (2, 3)})
    fitting = [size for size in sizes if total(memory.passing(actor, size * actor.placement.sequence, True)) <= room]
    return max(fitting, default=0)


# ---- what to change ----


def changes(config: Config, current: Plan) -> Iterator[tuple[str, Any]]:
    """Keys that may make a run fit, the cheapest in time first."""
    arr, longest = config.actor_rollout_ref, current.work.longest
    actor = current.work.roles["actor"]
    if arr.model.use_fused_kernels is False:
        yield "actor_rollout_ref.model.use_fused_kernels", None
    if not arr.rollout.free_cache_engine and current.work.sampler.colocated:
        yield f"{ROLLOUT}.free_cache_engine", True
    if not actor.recompute:
        yield "actor_rollout_ref.model.enable_gradient_checkpointing", True
    tokens = max(longest, current.largest)
    if actor.micro_tokens > tokens and arr.actor.ppo_micro_batch_size_per_gpu is None:
        yield f"{ACTOR}.ppo_max_token_len_per_gpu", tokens // actor.placement.sequence
    elif (arr.actor.ppo_micro_batch_size_per_gpu or 1) > 1:
        yield f"{ACTOR}.ppo_micro_batch_size_per_gpu", 1
    for share in (0.4, 0.3, 0.2):
        if current.work.sampler.colocated and arr.rollout.gpu_memory_utilization > share:
            yield f"{ROLLOUT}.gpu_memory_utilization", share
    if not current.work.device.on_host:
        offloads = [(actor, "optimizer_offload"), (actor, "param_offload")]
        if "ref" in current.work.roles:
            offloads.append((current.work.roles["ref"], "param_offload"))
        # an engine of a user's may have no such keys
        yield from ((role.placement.keys[name], True) for role, name in offloads if name in role.placement.keys)
        if not actor.megatron:
            for size in (2, 4, 8):
                if actor.ranks % size == 0 and actor.model.heads % size == 0:
                    yield f"{ACTOR}.ulysses_sequence_parallel_size", size
    if not actor.adapter and not actor.megatron:
        yield "actor_rollout_ref.model.lora_rank", 32


def advice(config: Config, model_config: Mapping[str, Any], current: Plan) -> tuple[list[str], Plan]:
    """key=value that make a run fit, tried one after the other and kept where less is too much; and the plan with all
    of them. It does not fit even so: more devices are needed."""
    changed, kept = copy.deepcopy(config), {}
    lengths = {"prompt": current.work.step.prompt, "response": current.work.step.response}
    for key, value in changes(config, current):
        if current.fits:
            break
        before = changed.select(key)
        put(changed, key, value)
        new = plan(changed, model_config, current.work.device, **lengths)
        if new.excess < current.excess - 1e-3:
            current, kept[key] = new, value
        else:
            put(changed, key, before)
    return [assignment(key, value) for key, value in kept.items()], current


def assignment(key: str, value: Any) -> str:
    """key=value as a command line takes it."""
    return f"{key}={'null' if value is None else value}"
