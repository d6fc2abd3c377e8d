"""What a step asks of the devices: one record of a training role, one of the sampler."""

from __future__ import annotations

from dataclasses import dataclass, field

from verl.engine.registry import Placement
from verl.planning.model import ModelSize


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A model on the training devices.

    ranks          devices that it is on; gathers: weights are cut (FSDP) and gathered layer by layer
    megatron       weights in the compute type, optimizer state cut over the data-parallel ranks
    trained        it has gradients and an optimizer; adapter: rank of its LoRA adapter, 0 for all weights
    micro_tokens   tokens of a micro-batch in the update, and in passes without gradients (`infer_tokens`), on the ranks
                   that share it
    recompute      None: where activations would not fit; offload_activations: kept activations go to the host
    full_logits    logits are written out
    value          one number a token in place of logits
    streams        the state is in host memory throughout (`offload_policy`)
    width          bytes of the compute type; on_host: the devices are processors
    """

    model: ModelSize
    ranks: int = 1
    placement: Placement = field(default_factory=Placement)
    gathers: bool = False
    megatron: bool = False
    trained: bool = True
    adapter: int = 0
    micro_tokens: int = 16384
    infer_tokens: int = 16384
    recompute: bool | None = True
    offload_activations: bool = False
    full_logits: bool = False
    value: bool = False
    streams: bool = False
    width: int = 2
    on_host: bool = False

    @property
    def kernels(self) -> bool:
        """Whether fused operators of the device compute the layers: in one process, in half precision, without
        experts."""
        alone = not (self.on_host or self.gathers or self.megatron)
        return alone and self.width == 2 and not self.model.expert_count

    @property
    def rows(self) -> int:
        """Groups of ranks that have rows of their own."""
        return max(1, self.ranks // self.placement.ranks_per_row)

    @property
    def cut(self) -> int:
        """Devices that one copy of the weights is cut over."""
        p = self.placement
        if self.megatron:
            return p.tensor * p.pipeline
        ranks = max(1, self.ranks // p.tensor)
        return p.tensor * (p.shard if 0 < p.shard < ranks else ranks)

    @property
    def output(self) -> int:
        """Weights of the last product."""
        return self.model.hidden if self.value else self.model.output

    @property
    def parameters(self) -> int:
        """All of the model's."""
        return self.model.total - (self.model.head if self.value else 0)

    @property
    def adapter_weights(self) -> int:
        """Of an adapter on all matrices."""
        m, r = self.model, self.adapter
        expert = m.experts // max(1, 3 * m.hidden)  # widths of all experts together
        dense = m.mlp // (3 * m.hidden)
        matrices = m.layers * (4 * m.hidden + 2 * m.query + m.unpacked)
        experts = 3 * (expert + m.hidden * m.expert_count * m.layers if m.expert_count else 0)
        return r * (matrices + 3 * (dense + m.hidden * m.layers) + experts)

    @property
    def trainable(self) -> int:
        """Weights with gradients."""
        if not self.trained:
            return 0
        return self.adapter_weights if self.adapter else self.parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """The rollout engines.

    engines     how many; tensor, expert: devices of one that share products, experts
    shares      it samples from the trainer's own tensors; colocated: on the training devices
    width       bytes of its data type; sequences: responses in flight of one engine
    longest     tokens of prompt and response at most; share: of the device's memory (`gpu_memory_utilization`)
    sleeps      weights and cache are released while the trainer computes
    preallocates  the cache takes its whole share from the start
    tables      as many tokens as all sequences can have are in the cache so many times at most (prompts and responses
                apart)
    bucket      bytes of one transfer of weights
    """

    model: ModelSize
    engines: int = 1
    tensor: int = 1
    expert: int = 1
    shares: bool = False
    colocated: bool = True
    width: int = 2
    sequences: int = 256
    longest: int = 2048
    share: float = 0.5
    sleeps: bool = True
    preallocates: bool = True
    tables: int = 1
    cache_width: int | None = None
    bucket: float = 2.0**31

    @property
    def token_bytes(self) -> float:
        """Cache of one token on one device."""
        keys = self.model.cached * self.model.attending
        return float(keys * (self.cache_width or self.width)) / min(self.tensor, max(1, self.model.heads))

    @property
    def state_bytes(self) -> float:
        """State of one sequence in layers of linear attention, on one device."""
        return 4.0 * self.model.state / self.tensor

    @property
    def weights(self) -> float:
        """Bytes of its weights on one device."""
        experts = self.model.experts
        return self.width * ((self.model.total - experts) / self.tensor + experts / max(self.tensor, self.expert))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The sequences of one step.

    prompts × responses   sequences; prompt, response: mean tokens of one
    minis        optimizer steps on the batch; epochs: how often it is gone through
    passes       phases with a forward pass: name of the phase → role ("actor", "ref", "critic")
    shared       a group's prompt is computed once by the sampler, and grouped: by the trainer
    """

    prompts: int
    responses: int
    prompt: float
    response: float
    minis: int = 1
    epochs: int = 1
    passes: tuple[tuple[str, str], ...] = ()
    shared: bool = True
    grouped: bool = True

    @property
    def sequences(self) -> int:
        """Of the step."""
        return self.prompts * self.responses

    @property
    def length(self) -> float:
        """Tokens of a sequence, as a mean."""
        return self.prompt + self.response

    @property
    def tokens(self) -> float:
        """Of the step."""
        return self.sequences * self.length
