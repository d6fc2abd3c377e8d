"""Bytes of one device, by what holds them: a role's state, what its passes add, and the sampler's share.

State           float32 weights, gradients and two moments of AdamW, cut over the ranks that share a copy
Gathered        FSDP: a few layers, embedding and head whole in the compute type, and gradients before they are cut
Activations     inputs of all layers and one layer's own (recomputed), or all layers' own
Logits          one block of them, or all (`use_fused_kernels=False`)
"""

from __future__ import annotations

from verl.planning.calibration import CALIBRATED, Calibration
from verl.planning.workload import Role, Sampler

LOGIT_BLOCK, HOST_LOGIT_BLOCK = 2**27, 2**23
"""Bytes of a block of logits on a device, on a processor (`verl.engine.training.log_prob`)."""

Parts = dict[str, float]


def state(role: Role) -> Parts:
    """Weights, gradients and optimizer state of a role on each device."""
    if role.streams and role.gathers:
        return {"weights": 0.0}
    trained, cut = role.trainable, role.cut
    if role.megatron:
        dense, experts = _megatron_weights(role)
        held: Parts = {"weights": role.width * (dense + experts)}
        if not role.trained:
            return held
        p, stages = role.placement, role.ranks / role.placement.pipeline
        moments = 12 * (dense / max(1.0, stages / p.tensor) + experts / max(1.0, stages / p.tensor / p.expert))
        return held | {"gradients": 4 * (dense + experts), "optimizer": moments}
    weights = 4.0 * (role.parameters + (role.adapter_weights if role.adapter and role.trained else 0)) / cut
    if not role.trained:
        return {"weights": weights}
    return {"weights": weights, "gradients": 4.0 * trained / cut, "optimizer": 8.0 * trained / cut}


def _megatron_weights(role: Role) -> tuple[float, float]:
    """Parameters on the first stage of a pipeline, which has the embedding too; of them those of experts apart."""
    m, p = role.model, role.placement
    ends = m.embedding + (m.head if p.pipeline == 1 and not role.value else 0)
    dense = (m.trunk - m.experts) / p.tensor / p.pipeline + ends / p.tensor
    return dense, m.experts / p.tensor / p.expert / p.pipeline


def layer_bytes(role: Role, c: Calibration = CALIBRATED) -> float:
    """What one layer keeps of one token for its backward pass, on one device."""
    m, p = role.model, role.placement
    units = 16 * m.used + 24 * (m.query + m.unpacked)
    if role.megatron or role.gathers:
        hidden = 40 * m.hidden / (p.tensor if role.megatron else 1)
        kept = c.layer * (hidden + units / p.tensor) * role.width / 2
    elif role.kernels:  # measured on an H100 as 44.8 KB of Qwen3-0.6B, which this says to 1 %
        kept = 12 * m.hidden + 4 * m.used + 6 * m.query + 4 * m.unpacked
    else:  # one process under autocast: the residual stream is float32
        kept = 40 * m.hidden + units
    return kept + c.routed * m.chosen * m.hidden * role.width


def passing(role: Role, tokens: float, update: bool, c: Calibration = CALIBRATED) -> Parts:
    """What a pass over a micro-batch of so many tokens adds to the state on each device."""
    m, p = role.model, role.placement
    parts: Parts = {"gathered": _gathered(role, update, c)}
    local = tokens / p.sequence
    layers = m.layers / p.pipeline
    layer = local * layer_bytes(role, c)
    block = HOST_LOGIT_BLOCK if role.on_host else LOGIT_BLOCK
    head = 0.0 if role.value else 3.0 * block
    if role.full_logits and not role.value:
        head = c.logit * (1.0 if update else 0.4) * m.vocabulary * local / p.tensor
    if not update:
        return parts | {"activations": layer / 2, "logits": head}
    if role.recompute:
        width = role.width if role.gathers or role.megatron else 4
        inputs = 0.0 if role.offload_activations else local * layers * m.hidden * width
        inputs /= p.tensor if role.megatron else 1
        return parts | {"activations": inputs * p.pipeline + layer, "logits": max(0.0, head - layer)}
    return parts | {"activations": layer * layers * p.pipeline, "logits": head}


def _gathered(role: Role, update: bool, c: Calibration) -> float:
    m, tensor = role.model, role.placement.tensor
    ends = m.embedding + (0 if role.value else m.head)
    if role.gathers:
        whole = role.width * (c.gathered * m.layer + c.root * ends)
        reduced = 4.0 * (m.layer + ends) if update and role.trained and not role.adapter else 0.0
        return (whole + reduced) / tensor
    # In one process autocast, and what our operators keep, is a copy of each weight in the compute type until the pass
    # ends.
    passes_on = role.kernels and (role.recompute or not update)
    return 2.0 * role.parameters if role.width == 2 and not role.megatron and not passes_on else 0.0


def total(parts: Parts) -> float:
    """Sum of the parts."""
    return sum(parts.values())


def cache(sampler: Sampler, memory: float, taken: float) -> float:
    """Bytes of the key/value cache on each device. taken: bytes of what else is there while it samples."""
    needed = sampler.tables * sampler.sequences * (sampler.longest * sampler.token_bytes + sampler.state_bytes)
    room = sampler.share * memory - sampler.weights if sampler.preallocates else sampler.share * (memory - taken)
    return max(0.0, room if sampler.preallocates else min(room, needed))


def sampling(sampler: Sampler, memory: float, taken: float) -> Parts:
    """Weights and cache of the sampler on each device while it samples."""
    weights = 0.0 if sampler.shares else sampler.weights
    copies = sampler.weights if sampler.shares and sampler.width == 2 else 0.0
    return {"sampler weights": weights + copies, "cache": cache(sampler, memory, taken + weights + copies)}


def pushing(role: Role, sampler: Sampler) -> Parts:
    """What a push of weights adds on a training device: two buckets and one whole tensor, the sampler's weights."""
    if sampler.shares:
        return {}
    largest = 4.0 * max(role.model.output, role.model.layer / max(1, role.model.expert_count))
    parts: Parts = {"sync buckets": 2 * sampler.bucket + largest}
    if sampler.colocated:
        parts["sampler weights"] = sampler.weights
    return parts
