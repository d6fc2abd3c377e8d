"""The engines by name. An engine is one folder, whose `ENGINE` is its record: all that the rest of the program knows of
it.

An engine outside of this package registers its record in a module that `model.external_lib` names. Imports no torch: a
record imports what it needs when it builds.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from verl.errors import UserError
from verl.versions import HOLES, satisfies, version

if TYPE_CHECKING:
    from verl.config.model_facts import ModelFacts
    from verl.config.schema.base import Root
    from verl.config.schema.entries import Config
    from verl.config.schema.rollout import RolloutConfig
    from verl.engine.training.base import TrainingEngine
    from verl.platform import Platform

_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
FLOATS = {name: name for name in _SHORT.values()} | _SHORT
"""Names of floating types in the configuration → torch's."""


def float_name(name: object) -> str | None:
    """torch's name of a type under any of its names ("bf16", "torch.bfloat16"); None for a name that is none."""
    return FLOATS.get(str(name).removeprefix("torch."))


class EnginePackageError(UserError):
    """The package of an engine is not installed, or in a version that is not supported; says what to install."""


class EngineCheck(Protocol):
    """A check of a configuration in progress, as an engine's own rules see it.

    rollout, rollout_key   the group of the sampling engine, and its path
    facts                  of the model's config.json, None if it is not on this disk
    """

    config: Root
    rollout: RolloutConfig
    rollout_key: str

    @property
    def facts(self) -> ModelFacts | None: ...

    def refuse(self, key: str, message: str) -> None:
        """The configuration is wrong."""

    def lacks(self, key: str, message: str) -> None:
        """This machine lacks something."""

    def notice(self, text: str) -> None:
        """Say something and go on."""


class EngineRecord(ABC):
    """What rollout and training engines have in common.

    name         value of the key that chooses the engine
    packages     distributions that the engine may come in, besides those of every run: any one of them is enough
    versions     supported versions of them
    holes        versions of them with known security holes
    install      what to do where none is installed
    builder      "module:function" that `build` calls with its arguments; imported only then
    environment  variables that the engine's processes start with unless the user sets them. Variables that begin with
                 the engine's name in capitals (VLLM_…) are passed on to all processes of a run
    """

    name: ClassVar[str]
    builder: ClassVar[str] = ""
    packages: ClassVar[tuple[str, ...]] = ()
    versions: ClassVar[str] = ""
    holes: ClassVar[str] = ""
    install: ClassVar[str] = ""
    environment: ClassVar[Mapping[str, str]] = {}

    def installed(self) -> str:
        """The version of the installed package, "" for an engine without one. EnginePackageError if it cannot be
        used."""
        if not self.packages:
            return ""
        found = next((text for package in self.packages if (text := version(package))), None)
        supported = f"supported are {self.versions or 'all versions'}: {self.install}"
        if found is None or importlib.util.find_spec(self.name) is None:
            raise EnginePackageError(f"{self.name} is not installed; {supported}")
        if self.versions and not satisfies(found, self.versions):
            raise EnginePackageError(f"{self.name} {found} is installed; {supported}")
        return found

    def check(self, check: EngineCheck) -> None:  # noqa: B027
        """Report the problems of a configuration that chooses this engine, and its notices."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a rollout engine can do.

    dtypes             data types that it computes in
    in_place_weights   in one process it samples from the trainer's own tensors (`RolloutEngineRecord.attach`): nothing
                       is transferred, and nothing can be sampled while they are trained
    tensor_parallel    one engine may span several devices, each with a part of every matrix
    several_nodes      these may be on several nodes (`RolloutEngineRecord.span`)
    lora               it adds LoRA adapters itself; otherwise it gets merged weights
    lora_ranks         ranks that it allocates memory for, ascending; empty: exactly the adapter's
    lora_experts, lora_head   it adds adapters of expert layers, of the output layer, itself; otherwise it gets merged
                       weights
    images, videos     types of models whose images, and videos, it takes besides token ids
    image_transformers versions of transformers whose models take images from it
    routes             it returns the experts that each token went to
    sampling_mask      it returns which tokens each draw of a truncated distribution could have given
    grammars           a response follows a grammar, where llguidance is installed
    quantization       values of rollout.quantization: kinds of weights that it makes of the trainer's, at each transfer
    """

    dtypes: tuple[str, ...] = tuple(_SHORT.values())[:3]
    in_place_weights: bool = False
    tensor_parallel: bool = True
    several_nodes: bool = False
    lora: bool = True
    lora_ranks: tuple[int, ...] = ()
    lora_experts: bool = True
    lora_head: bool = True
    images: tuple[str, ...] = ()
    videos: tuple[str, ...] = ()
    image_transformers: str = ""
    routes: bool = False
    sampling_mask: bool = False
    grammars: bool = False
    quantization: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodePart:
    """The part of an engine on the `number`th of its `count` nodes; `address` is that node's. The parts meet at
    first_address:port; there is the engine, the others hold what it calls."""

    number: int
    count: int
    address: str
    first_address: str
    port: int


class RolloutEngineRecord(EngineRecord):
    """A rollout engine. `unread`: keys of `rollout.` that it does not read → why; names are separated by spaces.

    Its own keys are `rollout.engine_kwargs.<name>.*`.
    """

    capabilities: ClassVar[Capabilities]
    unread: ClassVar[Mapping[str, str]] = {}

    def build(self, config: Config, tokenizer: Any, platform: Platform) -> Any:
        """A `RolloutEngine` that is a `WeightReceiver`, with weights of its own. UserError if it cannot be built."""
        return resolve_name(self.builder)(config, tokenizer, platform)

    def span(self, config: Config, part: NodePart) -> None:
        """Have `build` make one part of an engine on several nodes (`Capabilities.several_nodes`): on the first node
        the engine, on another an object with `readers`, `weights_dtype`, `dead` and `close` of one."""
        raise NotImplementedError(f"{self.name} runs on one node")

    def attach(self, config: Config, tokenizer: Any, trainer: TrainingEngine) -> Any:
        """A `RolloutEngine` on the tensors of a training engine of this process (`Capabilities.in_place_weights`)."""
        raise NotImplementedError(f"{self.name} has weights of its own")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the weights and the work of a role are, in terms that all training engines share.

    sequence  ranks that share a sequence
    tensor    ranks that share products
    pipeline  ranks that share the layers
    expert    ranks that share the experts
    chunks    of layers on each of the ranks that share them
    even      all chunks have as many layers
    shard     ranks that share one copy of the weights; ≤ 0: all
    dtype     data type of the matrix products, None for the platform's choice
    param_offload, grad_offload, optimizer_offload   what goes to host memory while the role is idle
    streams   weights, gradients and moments stay in host memory while the role works, too
    keys      field → its key in the configuration
    cuts_adapters   LoRA adapters too are cut over the ranks that share products
    """

    sequence: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    chunks: int = 1
    even: bool = True
    shard: int = -1
    dtype: str | None = None
    param_offload: bool = False
    grad_offload: bool = False
    optimizer_offload: bool = False
    streams: bool = False
    keys: Mapping[str, str] = field(default_factory=dict, compare=False)
    cuts_adapters: bool = False

    @property
    def ranks_per_row(self) -> int:
        """Ranks that hold the same rows."""
        return self.sequence * self.tensor * self.pipeline

    @property
    def sizes(self) -> tuple[int, ...]:
        """The parallel sizes."""
        return self.sequence, self.tensor, self.pipeline, self.expert, self.shard

    @property
    def leaves(self) -> bool:
        """True if something of the role is in host memory while the role is idle."""
        return self.param_offload or self.grad_offload or self.optimizer_offload

    def key(self, name: str) -> str:
        """The key of a field; its name where the engine has none."""
        return self.keys.get(name, name)

    def at(self, name: str) -> str:
        """key=value of a field."""
        return f"{self.key(name)}={getattr(self, name)}"


class TrainingEngineRecord(EngineRecord):
    """A training engine.

    shares_module  in one process a sampler may work on its tensors (`Capabilities.in_place_weights`)
    finds_sampling_mask  where a sampler does not say which tokens top-k, top-p and min-p left, it finds them
    unread         globs of keys that it does not read → why
    """

    shares_module: ClassVar[bool] = True
    finds_sampling_mask: ClassVar[bool] = False
    unread: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def placement(self, role: Mapping[str, Any], path: str = "") -> Placement:
        """The placement that a role's group asks for (actor, reference, critic, or `engine` of supervised training).
        path: of the group, for `Placement.keys`."""

    def misfits(self, placement: Placement, model: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """(key=value, what is wrong) for sizes of a placement that do not suit a model. model: entries of its
        config.json as far as they are known, "experts", how many a layer has, and "vision", whether it sees images."""
        return iter(())

    def build(
        self, model_path: str | None, *, role_cfg: Mapping[str, Any], placement: Placement, **options: Any
    ) -> TrainingEngine:
        """The engine of this process or rank. UserError if it cannot be built.

        role_cfg: the role's group. placement: what counts of it, where the caller changed something. options: those of
        `verl.engine.training.fsdp.engine.FSDPEngine`.
        """
        options |= {"role_cfg": role_cfg, "placement": placement}
        engine: TrainingEngine = resolve_name(self.builder)(model_path, **options)
        return engine


R = TypeVar("R", bound=EngineRecord)


class Registry(Mapping[str, R], Generic[R]):
    """Records by name. key: the key whose value is the name. folders: name → module with `ENGINE`."""

    def __init__(self, key: str, folders: Mapping[str, str]):
        self._key = key
        self._records: dict[str, R | str] = dict(folders)

    def register(self, record: R) -> None:
        """Add an engine; call it in a module that `model.external_lib` names."""
        self._records[record.name] = record

    def __getitem__(self, name: str) -> R:
        record = self._records[name]
        return import_module(record).ENGINE if isinstance(record, str) else record

    def named(self, name: str) -> R:
        """The record of that name. UserError if there is none."""
        if name in self._records:
            return self[name]
        raise UserError(f"{self._key}={name}: there is no such engine here; choose one of {', '.join(self)}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)


ROLLOUT_ENGINES: Registry[RolloutEngineRecord] = Registry(
    "rollout.name", {name: f"verl.engine.rollout.{name}" for name in ("native", "vllm", "sglang")}
)
"""Rollout engines; `rollout.name=auto` is the first."""
TRAINING_ENGINES: Registry[TrainingEngineRecord] = Registry(
    "strategy",
    {
        "fsdp": "verl.engine.training.fsdp",
        "fsdp2": "verl.engine.training.fsdp",
        "megatron": "verl.engine.training.megatron",
    },
)
register_rollout_engine = ROLLOUT_ENGINES.register
register_training_engine = TRAINING_ENGINES.register


def records() -> list[EngineRecord]:
    """All engines, each once."""
    return list(dict.fromkeys([*ROLLOUT_ENGINES.values(), *TRAINING_ENGINES.values()]))


def packages() -> tuple[str, ...]:
    """Distributions of all engines."""
    return tuple(package for record in records() for package in record.packages)


def holes() -> dict[str, str]:
    """Distribution → versions with known security holes, which are refused."""
    return HOLES | {name: record.holes for record in records() if record.holes for name in record.packages}


def capabilities(name: str) -> Capabilities:
    """Those of a rollout engine; of a name that is refused elsewhere, those that refuse nothing."""
    return ROLLOUT_ENGINES[name].capabilities if name in ROLLOUT_ENGINES else Capabilities()


def placement(role: Mapping[str, Any], path: str = "") -> Placement:
    """What the engine of a role says of its group; where the strategy is refused elsewhere, one rank for each row."""
    strategy = role["strategy"]
    return TRAINING_ENGINES[strategy].placement(role, path) if strategy in TRAINING_ENGINES else Placement()


def not_sampled(engine: str, key: str, trainer: object) -> str:
    """What to say of a type, at `key`, that a rollout engine lacks. trainer: the trainer's type, which null means."""
    dtypes, of_trainer = capabilities(engine).dtypes, float_name(trainer)
    advice = f"the {engine} engine computes in {' or '.join(dtypes)}; set {key}={' or '.join(dtypes)}"
    if of_trainer is None or of_trainer in dtypes:
        return f"{advice}, or leave it null for the trainer's"
    return f"{advice} (null is the trainer's type, {of_trainer})"


def not_quantized(engine: str) -> str:
    """What to say of a quantization that a rollout engine does not have."""
    kinds = capabilities(engine).quantization
    if kinds:
        return f"the {engine} engine makes {' or '.join(kinds)} of the trainer's weights; set one, or leave it null"
    able = [name for name, record in ROLLOUT_ENGINES.items() if record.capabilities.quantization]
    return f"the {engine} engine cannot make such weights of the trainer's at each transfer; {' and '.join(able)} can"


def sampler_dtype(engine: str, dtype: str | None, trainer: str) -> str:
    """rollout.dtype under torch's name, or the trainer's. UserError for one in which the engine does not compute."""
    name = float_name(dtype or trainer)
    if name is None or name not in capabilities(engine).dtypes:
        key = "actor_rollout_ref.rollout.dtype"
        raise UserError(f"{key}={dtype}: {not_sampled(engine, key, trainer)}")
    return name
