"""Names of floating types in the configuration, with what torch calls them."""

from __future__ import annotations

from verl.config.rollout_engines import CAPABILITIES
from verl.errors import UserError

FLOATS = {
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
}


def float_name(name: object) -> str | None:
    """torch's name of a type under any of its names ("bf16", "torch.bfloat16"); None for a name that is none."""
    return FLOATS.get(str(name).removeprefix("torch."))


def sampler_dtype(engine: str, wanted: str | None, trainer: str) -> str:
    """rollout.dtype under torch's name, or the trainer's. UserError for one in which the engine does not compute."""
    name = float_name(wanted or trainer)
    if name is None or name not in CAPABILITIES[engine].dtypes:
        raise UserError(f"actor_rollout_ref.rollout.dtype={wanted}: {not_sampled(engine)}")
    return name


def not_sampled(engine: str) -> str:
    """What to say of a type that an engine does not have."""
    known = " or ".join(CAPABILITIES[engine].dtypes)
    return f"the {engine} engine computes in {known}; set one, or leave it null for the trainer's"
