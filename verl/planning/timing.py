"""Seconds of the phases of a step.

Training    products by parts at shares of the peak, attention by pairs of tokens, activations through memory, a
            constant for each layer and micro-batch
Sampling    prefill as a forward pass; a step of decoding reads the weights and the cache of all responses in flight
Push        the weights through the slowest link between trainer and sampler
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from verl.planning.calibration import Calibration, fitted_to
from verl.planning.devices import Device
from verl.planning.workload import Role, Sampler, Step

DEVICES_OF_A_NODE = 8


@dataclass(frozen=True, slots=True)
class Work:
    """Passes over the layers' products (backward counts as two), over attention, over the last product; visits:
    how often each layer is run."""

    products: float
    attention: float
    output: float
    visits: float


def update_work(role: Role) -> Work:
    """Of a training step: attention's backward pass is 2.5 forward ones; frozen weights get no gradient."""
    again = 1.0 if role.recompute else 0.0
    backward = 1.0 if role.adapter else 2.0
    blocks = 0.0 if role.full_logits or role.value else 1.0  # logits of a block are computed again
    return Work(1 + again + backward, 1 + again + 2.5, 1 + blocks + backward, 2 + again)


INFERENCE = Work(1, 1, 1, 1)


def training_seconds(
    role: Role, work: Work, tokens: float, length: float, device: Device, c: Calibration | None = None
) -> float:
    """Seconds of passes over `tokens` tokens of all ranks, in sequences of `length`."""
    c, m, p = c or fitted_to(device.on_host), role.model, role.placement
    peak = (device.flops if role.width == 2 else device.full) * device.share
    local = tokens / role.ranks  # ranks that share a row share its work
    dense = 2.0 * (m.trunk - m.experts) * work.products + 2.0 * role.output * work.output
    seconds = local * dense / (peak * c.dense)
    if m.experts:
        seconds += local * 2.0 * m.active_experts * work.products / (peak * c.expert * device.sparse)
    seconds += local * m.pairs(length) * work.attention / (peak * c.attention)
    units = 40 * m.hidden + 16 * m.used + 24 * (m.query + m.unpacked) + 2 * role.width * m.chosen * m.hidden
    passes = c.traffic + (c.adapters if role.adapter else 0.0)
    seconds += local * m.layers * units * passes * work.visits / device.bandwidth
    micros = max(1.0, math.ceil(tokens / role.rows / role.micro_tokens))
    launches = c.launch * micros * m.layers / p.pipeline * work.visits
    bubble = (p.pipeline - 1) / micros
    computing = max(seconds, _moving(role, work, micros, device)) + _exchanging(role, work, tokens, device)
    return (computing + launches) * (1 + bubble)


def _moving(role: Role, work: Work, micros: float, device: Device) -> float:
    """Seconds of the links for gathered weights and summed gradients; the devices compute at the same time."""
    moved = 0.0
    if role.gathers and role.cut > 1:
        gathers = 1.0 if work.visits == 1 else 2.0
        moved = gathers * role.width * role.parameters * micros / role.placement.tensor
    if work.visits > 1 and role.ranks > 1:
        moved += 4.0 * role.trainable / (role.cut if role.megatron else 1) * (micros if role.gathers else 1)
    return moved / _link(role, device)


def _link(role: Role, device: Device) -> float:
    """Bytes a second between ranks, one way."""
    return 0.7 * (device.link if role.ranks <= DEVICES_OF_A_NODE else device.network)


def _exchanging(role: Role, work: Work, tokens: float, device: Device) -> float:
    """Seconds of the links for activations, for which the products wait: two sums a layer over ranks that share
    products, four exchanges over ranks that share a sequence, two over ranks that share experts."""
    m, p = role.model, role.placement
    local, layers = tokens / role.rows, m.layers / p.pipeline
    moved = 4.0 * (1 - 1 / p.tensor) * local / p.sequence * m.hidden
    moved += 2.0 * (1 - 1 / p.sequence) * local / p.sequence * (m.query + m.unpacked / 2) / p.tensor
    moved += 2.0 * (1 - 1 / p.expert) * local / p.sequence * m.hidden * m.chosen / p.tensor
    return moved * role.width * layers * work.visits / (0.7 * device.link)


def sampling_seconds(sampler: Sampler, step: Step, device: Device, cache: float, c: Calibration | None = None) -> float:
    """Seconds until all responses of a step are there. cache: bytes for keys and values on each device."""
    c, m = c or fitted_to(device.on_host), sampler.model
    each = step.sequences / sampler.engines
    context = step.prompt + step.response / 2
    room = cache / (sampler.token_bytes * max(1.0, context) + sampler.state_bytes)
    live = max(1.0, min(each, sampler.sequences, room))
    waves = each / live
    peak = (device.flops if sampler.width == 2 else device.full) * device.share * sampler.tensor
    prompts = each / (step.responses if step.shared else 1)
    flops = 2.0 * (m.active - m.embedding - m.head + m.output)
    prefill = prompts * step.prompt * (flops + m.pairs(step.prompt)) / (peak * c.dense)
    touched = 1 - (1 - m.chosen / m.expert_count) ** live if m.expert_count else 0.0
    read = sampler.width * (m.total - m.vision - m.embedding - m.head + m.output - m.experts * (1 - touched))
    read += live * (context * sampler.token_bytes + 2 * sampler.state_bytes) * sampler.tensor
    moved = read / sampler.tensor / (device.bandwidth * c.stream)
    computed = live * (flops + 2 * m.pairs(context)) / (peak * c.dense)
    overhead = c.decode * m.layers * (1 if sampler.tensor == 1 else 3)
    busy = moved + computed if device.on_host else max(moved, computed)  # a processor does one after the other
    return prefill + waves * step.response * (busy + overhead)


def optimizer_seconds(role: Role, device: Device) -> float:
    """Seconds of one step of the optimizer, which reads and writes weights, gradients and both moments once."""
    return 28.0 * role.trainable / role.cut / (0.7 * device.bandwidth)


def push_seconds(role: Role, sampler: Sampler, device: Device, nodes: int) -> float:
    """Seconds of a push of weights to all samplers."""
    if sampler.shares:
        return 0.0
    size = sampler.width * role.parameters
    gathered = size / (0.5 * (device.link if nodes == 1 else device.network)) if role.cut > 1 else 0.0
    way = device.bandwidth / 2 if sampler.colocated else (device.link if nodes == 1 else device.network)
    return gathered + size / (0.5 * way)
