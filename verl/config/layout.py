"""How ranks and samplers share devices, and which parallel sizes fit ranks and model.

Both `--check` and the start of a run use it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from verl.config.reward_weights import scores_by_model
from verl.config.rollout_engines import CAPABILITIES
from verl.config.schema.base import select

_HEADS = "num_attention_heads"
_COUNTS = (_HEADS, "num_key_value_heads", "intermediate_size")
MODEL_KEYS = (*_COUNTS, "layer_types")
"""What a model's configuration has to say for `model_problems`."""
ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
"""Kinds of layers that carry no state along a row."""
_WORDS = {_HEADS: "attention heads", "num_key_value_heads": "key-value heads"}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How the ranks of a role share its work. `role`, `engine`: what its keys begin with.

    sequence  ranks that share a sequence
    tensor    ranks that share products
    shard     ranks that share one copy of the weights; ≤ 0: all
    """

    sequence: int = 1
    tensor: int = 1
    shard: int = -1
    role: str = ""
    engine: str = "fsdp_config."

    @classmethod
    def of(cls, group: Any, role: str = "", engine: str = "fsdp_config.") -> Sizes:
        """Those of a role's group, or of what holds its `engine` ("" where the group itself does)."""
        placed = select(group, engine[:-1]) if engine else group
        tensor, shard = placed.tensor_parallel_size, placed.fsdp_size
        return cls(group.ulysses_sequence_parallel_size, tensor, shard, role, engine)

    @property
    def ranks_per_row(self) -> int:
        """Ranks that hold the same rows."""
        return self.sequence * self.tensor

    @property
    def sequence_text(self) -> str:
        return f"{self.role}ulysses_sequence_parallel_size={self.sequence}"

    @property
    def tensor_text(self) -> str:
        return f"{self.role}{self.engine}tensor_parallel_size={self.tensor}"


def reference_is_base(config: Any) -> bool:
    """True where the reference is the actor without its adapter, and no model of its own."""
    arr = config.actor_rollout_ref
    return bool(arr.model.lora_rank > 0 or arr.model.lora_adapter_path) and not arr.ref.model.path


def rank_problems(sizes: Sizes, ranks: int) -> Iterator[tuple[str, str]]:
    """(key=value, what is wrong and what would be right) for sizes that do not divide the ranks."""
    wrong = f"does not divide the {ranks} ranks; use one of {divisors(ranks)}"
    alone = [(sizes.sequence_text, sizes.sequence), (sizes.tensor_text, sizes.tensor)]
    problems = [(text, wrong) for text, size in alone if ranks % size]
    if not problems and ranks % sizes.ranks_per_row:
        text = f"{sizes.sequence_text} × {sizes.tensor_text}"
        problems = [(text, f"= {sizes.ranks_per_row} does not divide the {ranks} ranks; lower one of them")]
    yield from problems
    if sizes.shard <= 0:
        return
    shard_text = f"{sizes.role}{sizes.engine}fsdp_size={sizes.shard}"
    parts = max(1, ranks // sizes.tensor)
    if ranks % sizes.shard:
        yield shard_text, wrong
    elif sizes.shard < parts and parts % sizes.shard:
        ranks_left = f"the {parts} ranks that remain beside {sizes.tensor_text}"
        yield shard_text, f"does not divide {ranks_left}; use one of {divisors(parts)}"


def model_problems(sizes: Sizes, model: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The same for sizes that do not divide the model's, or that its layers rule out.

    `model`: `MODEL_KEYS` as far as they are known, and "experts", how many a layer has.
    """
    counts = {key: model[key] for key in _COUNTS if isinstance(model.get(key), int) and model[key]}
    for key, count in counts.items():
        if count % sizes.tensor:
            quantity = f"the model's {count} {_WORDS.get(key, key)}"
            yield sizes.tensor_text, f"does not divide {quantity}; use one of {divisors(count)}"
    if sizes.tensor > 1 and (model.get("experts") or 0) > 1:
        yield sizes.tensor_text, "the model has experts, which are not cut so; set 1"
    if sizes.sequence == 1:
        return
    heads = counts.get(_HEADS, 0)
    local_heads, remainder = divmod(heads, sizes.tensor)
    if heads % sizes.sequence:
        message = f"does not divide the model's {heads} attention heads; use one of {divisors(heads)}"
        yield sizes.sequence_text, message
    elif remainder == 0 and local_heads % sizes.sequence:
        message = f"does not divide the {local_heads} attention heads that {sizes.tensor_text} leaves a rank"
        yield sizes.sequence_text, f"{message}; use one of {divisors(local_heads)}"
    states = sorted(set(model.get("layer_types") or ()) - ATTENTION_LAYERS)
    if states:
        text = f"the model has layers ({', '.join(states)}) that carry a state along the row, which cannot be split"
        yield sizes.sequence_text, f"{text}; set 1"


def sampler_devices(rollout: Any) -> int:
    """Devices of one sampler."""
    return (rollout.tensor_model_parallel_size or 1) if CAPABILITIES[rollout.name].tensor_parallel else 1


def samplers_per_node(config: Any) -> int:
    """How many samplers of a run are on one machine."""
    rollout = config.actor_rollout_ref.rollout
    devices = rollout.n_gpus_per_node if rollout.nnodes else config.trainer.n_gpus_per_node
    return max(1, (devices or 1) // sampler_devices(rollout))


@dataclass(frozen=True, slots=True)
class OwnPool:
    """Devices that a kind of role has to itself: `nodes` with `per_node` each. `keys`: the group that sets it."""

    keys: str
    nodes: int
    per_node: int

    @property
    def devices(self) -> int:
        """All of them."""
        return self.nodes * self.per_node

    def __str__(self) -> str:
        return f"{self.keys}.nnodes={self.nodes}, {self.keys}.n_gpus_per_node={self.per_node}"


def own_pools(config: Any) -> dict[str, OwnPool]:
    """The device pools apart from the policy's: "critic", "teacher", "reward_model" or "judge".

    The samplers' pool is `rollout.nnodes`.
    """
    critic, taught, scoring_model = config.critic, config.distillation, config.reward_model
    scored_by = "reward_model" if scores_by_model(config) else "judge"
    roles = {
        "critic": (critic, "critic", critic.enable),
        "teacher": (taught, "distillation", taught.enabled),
        scored_by: (
            scoring_model,
            "reward_model",
            scoring_model.enable and scoring_model.enable_resource_pool,
        ),
    }
    return {
        name: OwnPool(keys, group.nnodes, group.n_gpus_per_node)
        for name, (group, keys, on) in roles.items()
        if on and group.nnodes
    }


def divisors(number: int) -> str:
    """The divisors of a number, as text."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return ", ".join(map(str, sorted({*small, *(number // d for d in small)})))
