"""How ranks and samplers share devices, and which parallel sizes fit ranks and model.

Both `--check` and the start of a run use it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl.config.model_facts import ATTENTION_LAYERS, LINEAR_ATTENTION
from verl.config.reward_weights import scores_by_model
from verl.config.schema.base import Root, setting
from verl.engine.registry import TRAINING_ENGINES, Placement, capabilities, placement

if TYPE_CHECKING:
    from verl.config import Config


_HEADS = "num_attention_heads"
_COUNTS = (_HEADS, "num_key_value_heads", "intermediate_size")
MODEL_KEYS = (*_COUNTS, "layer_types")
"""What a model's configuration has to say for `model_problems`."""
_FULL = ("auto", "float", "bfloat16", "fp32", "fp16", "bf16", "half")
_WORDS = {_HEADS: "attention heads", "num_key_value_heads": "key-value heads"}


def policy_placement(config: Root) -> Placement:
    """Of the model that is trained; one rank where none is."""
    path = {"ppo": "actor_rollout_ref.actor", "sft": "engine"}.get(config.entry)
    return placement(config.select(path), path) if path else Placement()


def reference_is_base(config: Config) -> bool:
    """True where the reference is the actor without its adapter, and no model of its own."""
    arr = config.actor_rollout_ref
    return bool(arr.model.lora_rank > 0 or arr.model.lora_adapter_path) and not arr.ref.model.path


def rank_problems(placement: Placement, ranks: int) -> Iterator[tuple[str, str]]:
    """(key=value, what is wrong and what would be right) for parallel sizes that do not divide the ranks."""
    wrong = f"does not divide the {ranks} ranks; use one of {divisors(ranks)}"
    shared = [name for name in ("sequence", "tensor", "pipeline") if getattr(placement, name) > 1]
    problems = [(placement.at(name), wrong) for name in shared if ranks % getattr(placement, name)]
    if not problems and ranks % placement.ranks_per_row:
        text = " × ".join(map(placement.at, shared))
        problems = [(text, f"= {placement.ranks_per_row} does not divide the {ranks} ranks; lower one of them")]
    yield from problems
    whole = placement.shard if placement.shard > 0 else ranks
    if whole % placement.expert:
        yield (
            placement.at("expert"),
            f"does not divide the {whole} ranks of a copy of the model; use one of {divisors(whole)}",
        )
    if placement.shard <= 0:
        return
    parts = max(1, ranks // placement.tensor)
    if ranks % placement.shard:
        yield placement.at("shard"), wrong
    elif placement.shard < parts and parts % placement.shard:
        ranks_left = f"the {parts} ranks that remain beside {placement.at('tensor')}"
        yield placement.at("shard"), f"does not divide {ranks_left}; use one of {divisors(parts)}"


def model_problems(placement: Placement, model: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The same for sizes that do not divide the model's, or that its layers rule out.

    `model`: `MODEL_KEYS` as far as they are known, and "experts", how many a layer has.
    """
    sequence, tensor = placement.sequence, placement.tensor
    sequence_text, tensor_text = placement.at("sequence"), placement.at("tensor")
    counts = {key: model[key] for key in _COUNTS if isinstance(model.get(key), int) and model[key]}
    for key, count in counts.items():
        if count % tensor:
            quantity = f"the model's {count} {_WORDS.get(key, key)}"
            yield tensor_text, f"does not divide {quantity}; use one of {divisors(count)}"
    if tensor > 1 and (model.get("experts") or 0) > 1:
        yield tensor_text, "the model has experts, which are not cut so; set 1"
    if sequence == 1:
        return
    heads = counts.get(_HEADS, 0)
    local_heads, remainder = divmod(heads, tensor)
    if heads % sequence:
        message = f"does not divide the model's {heads} attention heads; use one of {divisors(heads)}"
        yield sequence_text, message
    elif remainder == 0 and local_heads % sequence:
        message = f"does not divide the {local_heads} attention heads that {tensor_text} leaves a rank"
        yield sequence_text, f"{message}; use one of {divisors(local_heads)}"
    states = sorted(set(model.get("layer_types") or ()) - ATTENTION_LAYERS - {LINEAR_ATTENTION})
    if states:
        text = f"the model has layers ({', '.join(states)}) that carry a state along the row, which cannot be split"
        yield sequence_text, f"{text}; set 1"


def sampler_devices(rollout: Any) -> int:
    """Devices of one sampler. Copies of a model that share no experts are samplers of their own."""
    if not capabilities(rollout.name).tensor_parallel:
        return 1
    copies = rollout.data_parallel_size if rollout.expert_parallel_size > 1 else 1
    return int((rollout.tensor_model_parallel_size or 1) * copies)


def samplers_per_node(config: Config) -> int:
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


def own_pools(config: Config) -> dict[str, OwnPool]:
    """The device pools apart from the policy's: "critic", "teacher", "reward_model" or "judge".

    The samplers' pool is `rollout.nnodes`.
    """
    critic, taught, scoring_model = config.critic, config.distillation, config.reward_model
    scored_by = "reward_model" if scores_by_model(config) else "judge"
    roles: dict[str, tuple[Any, str, bool]] = {
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


def quantized_sampling(rollout: Any) -> str:
    """The key below `rollout.`, with its value, by which a sampler computes in lower precision than the trainer; "" for
    none."""
    cache = f"engine_kwargs.{rollout.name}.kv_cache_dtype"
    values = {"quantization": rollout.quantization or "auto", cache: str(setting(rollout, cache, "auto"))}
    return next((f"{key}={value}" for key, value in values.items() if not value.startswith(_FULL)), "")


def sampling_mask_from(config: Config) -> str:
    """Who says which tokens a draw from a truncated distribution could have given (`rollout.replay_sampling_mask`):
    "sampler", "trainer", or "" where nobody does."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    whole = rollout.logprobs_mode != "processed_logprobs" or setting(config, "distillation.enabled")
    if whole or not rollout.replay_sampling_mask:
        return ""
    if capabilities(rollout.name).sampling_mask:
        return "sampler"
    truncated = rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0
    finds = actor.strategy in TRAINING_ENGINES and TRAINING_ENGINES[actor.strategy].finds_sampling_mask
    return "trainer" if truncated and finds and placement(actor).sequence == 1 else ""
