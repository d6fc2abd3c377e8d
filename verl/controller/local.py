"""Roles in this process: one device, no server, no Ray. The same roles that a Ray controller would place.

The actor's engine owns the weights; the sampler works on the same tensors; the reference is a frozen engine of
its own, built only when a KL term asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl.engine.rollout.native.engine import NativeEngine
from verl.engine.training.local_engine import LocalEngine
from verl.engine.training.settings import DTYPES
from verl.errors import UserError
from verl.weight_sync.in_process import InProcessSync
from verl.worker.actor import Actor
from verl.worker.reference import Reference

if TYPE_CHECKING:
    from verl.config import Config
    from verl.engine.rollout.base import RolloutEngine
    from verl.weight_sync.base import WeightSync


@dataclass(slots=True)
class Roles:
    """What the loop talks to."""

    actor: Actor
    reference: Reference | None
    sampler: RolloutEngine
    weight_sync: WeightSync


def end_token_ids(model_config: Any, generation_config: Any, tokenizer: Any) -> list[int]:
    """Every id that ends an answer: the generation config's, the model's and the tokenizer's."""
    found: list[int] = []
    for source in (generation_config, model_config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found += ids if isinstance(ids, list) else [ids] if ids is not None else []
    return sorted(set(found))


def sampler_dtype(wanted: str | None, trainer: str) -> str:
    """rollout.dtype under torch's name, or the trainer's. UserError for one the embedded sampler does not have."""
    name = str(wanted or trainer).removeprefix("torch.")
    known = {key: value for key, value in DTYPES.items() if value != "float16"}
    if name not in known:
        raise UserError(
            f"actor_rollout_ref.rollout.dtype={wanted}: the native engine computes in float32 or bfloat16; set it to one "
            "of them, or leave it null for the trainer's"
        )
    return known[name]


def build_roles(config: Config, tokenizer: Any, total_steps: int) -> Roles:
    """Load the model and place every role on this process's device. UserError for a model that cannot be used."""
    arr = config.actor_rollout_ref
    rollout, seed, device = arr.rollout, config.trainer.seed, config.trainer.device
    common = {"model_cfg": arr.model, "device": device, "seed": seed}
    engine = LocalEngine(arr.model.path, role_cfg=arr.actor, log_prob_cfg=rollout, **common)
    engine.schedule(total_steps)
    actor = Actor(
        engine,
        arr.actor,
        temperature=rollout.temperature,
        horizon=float(arr.actor.loss_scale_factor or config.data.max_response_length),
        batch_prompts=config.data.train_batch_size,
    )
    reference = None
    if arr.actor.use_kl_loss or config.algorithm.use_kl_in_reward:
        path = arr.ref.model.path or arr.model.path
        frozen = LocalEngine(path, role_cfg=arr.ref, trainable=False, role="ref", **common)
        reference = Reference(frozen, temperature=rollout.temperature)
    sampler = NativeEngine(
        engine.module,
        eos_token_ids=end_token_ids(engine.module.config, engine.module.generation_config, tokenizer),
        max_model_len=rollout.max_model_len
        or config.data.max_prompt_length + config.data.max_response_length,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        dtype=sampler_dtype(rollout.dtype, str(engine.compute_dtype)),
        enforce_eager=rollout.enforce_eager,
        tokenizer=tokenizer,
    )
    return Roles(actor, reference, sampler, InProcessSync(engine, sampler))
