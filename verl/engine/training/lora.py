"""Low-rank adapters in training: put into the model by peft, filled, read and written here.

Only the adapters are trained; the base keeps the bytes it was loaded with, so a run goes on exactly from its adapter
and the base, and not from their sum. Start values depend on the seed and on a layer's name alone: any number of ranks
begins with the same.
"""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from verl.config import model_facts
from verl.config.schema.base import setting
from verl.engine.training.process_group import local, on_all_ranks, take_share, this_rank, whole
from verl.engine.training.weight_files import FileSource, WeightSource, reading, untied
from verl.errors import UserError
from verl.models import adapters
from verl.models.pretrained import value_layer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ALL_LINEAR = "all-linear"
_PREFIX = "base_model.model."
_TOLERANCE = 1e-5  # of a weight's largest element: what orders of summation may change in B·A

# Settings of an adapter by which it is more than A and B, those that are only a record, and starts that write into the
# base.
_MORE = {"use_dora", "lora_bias", "use_qalora", "use_bdlora", "alora_invocation_tokens", "modules_to_save"}
_MORE |= {"bias", "layer_replication", "trainable_token_indices"}
_NO_EFFECT = ("megatron_config", "runtime_config", "loftq_config")
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")


# -- what is asked for -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """`model.lora_*`. `adapter` is the directory of an adapter to go on with, whose own settings then count."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    exclude: tuple[str, ...]
    adapter: Path | None
    base: str

    @classmethod
    def of(cls, model_cfg: Any, base: str | Path) -> LoraSettings | None:
        """From the model group; None where no adapter is asked for. UserError for an adapter that is not there."""
        rank, path = int(setting(model_cfg, "lora_rank", 0)), setting(model_cfg, "lora_adapter_path")
        if rank <= 0 and not path:
            return None
        return cls(
            rank,
            float(setting(model_cfg, "lora_alpha", 16)),
            _patterns(setting(model_cfg, "target_modules", _ALL_LINEAR)),
            _patterns(setting(model_cfg, "exclude_modules") or ()),
            model_facts.adapter_directory(path) if path else None,
            str(base),
        )

    def described(self) -> dict[str, Any]:
        """What adapter_config.json says, as far as a server needs it; the adapter's own file where there is one."""
        if self.adapter is not None:
            return model_facts.read_adapter_config(self.adapter)
        return {"peft_type": "LORA", "bias": "none", **self.arguments()}

    def arguments(self) -> dict[str, Any]:
        """The arguments of peft's LoraConfig for a new adapter."""
        return {
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base,
            "r": self.rank,
            "lora_alpha": int(self.alpha) if self.alpha == int(self.alpha) else self.alpha,
            "target_modules": _peft_pattern(self.targets),
            "exclude_modules": _peft_pattern(self.exclude),
        }


def _patterns(patterns: Any) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(str(g) for g in patterns)


def _peft_pattern(patterns: tuple[str, ...]) -> str | list[str] | None:
    """As peft takes it: the word all-linear, one regular expression, or names that modules end with."""
    if not patterns:
        return None
    if len(patterns) == 1 and (patterns[0] == _ALL_LINEAR or not re.fullmatch(r"[\w.\-]+", patterns[0])):
        return patterns[0]
    return list(patterns)


def _peft_config(peft: Any, settings: LoraSettings) -> Any:
    """peft's LoraConfig: new, or the given adapter's. UserError for an adapter that is more than A and B."""
    if settings.adapter is None:
        return peft.LoraConfig(**settings.arguments())
    where = settings.adapter / model_facts.ADAPTER_CONFIG
    try:
        config = peft.PeftConfig.from_pretrained(str(settings.adapter))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{where}: peft cannot read it: {error}") from error
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind != "LORA":
        raise UserError(f"{where}: peft_type={kind}; LORA is what can be trained here")
    odd = []
    for name, value in vars(config).items():
        if name in _MORE or (name.endswith("_config") and name not in _NO_EFFECT):
            odd += [f"{name}={value!r}"] if value and value != "none" else []
    start = config.init_lora_weights
    if isinstance(start, str) and start.startswith(_CHANGES_BASE):
        odd.append(f"init_lora_weights={start!r}, which changes the base weights")
    if odd:
        raise UserError(f"{where}: {'; '.join(odd)}; adapters here are A and B of linear layers alone")
    if settings.rank > 0 and config.r != settings.rank:
        raise UserError(
            f"model.lora_rank={settings.rank}, but the adapter of model.lora_adapter_path has rank {config.r} "
            f"({where}): set model.lora_rank={config.r}"
        )
    config.lora_dropout = 0.0
    config.base_model_name_or_path = settings.base
    return config


# -- in the model ----------------------------------------------------------------------------------------------


def inject(module: PreTrainedModel, settings: LoraSettings) -> Adapter:
    """Put adapters into the model, on the meta device, and freeze everything else.

    UserError if peft is not installed, if no module is picked, or one that cannot have an adapter here.
    """
    try:
        import peft
    except ImportError as error:
        raise UserError(
            f"model.lora_rank asks for LoRA, which needs peft, and it cannot be imported ({error}): "
            "pip install 'verl[lora]', or set model.lora_rank=0"
        ) from error
    config = _peft_config(peft, settings)
    if settings.adapter is None and value_layer(module) is not None:
        config.target_modules = _with_value_layer(config.target_modules)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            peft.inject_adapter_in_model(config, module, low_cpu_mem_usage=True)
        except (ValueError, TypeError, RuntimeError) as error:
            raise UserError(_no_match(module, settings, error)) from error
    for key in ("target_modules", "target_parameters", "exclude_modules"):
        if isinstance(getattr(config, key, None), set):
            setattr(config, key, sorted(getattr(config, key)))  # the same file in every process
    _refuse_unfit(module, adapters.adapted_layers(module))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(adapters.plain_name(name) is None)
    return Adapter(module, config, settings)


def _with_value_layer(targets: set[str] | str) -> set[str] | str:
    """Targets and the layer of values: a new one is 0, and as long as it stays so nothing below it learns."""
    if isinstance(targets, str):
        return targets if targets == _ALL_LINEAR else "|".join((targets, *model_facts.VALUE_LAYERS))
    return {*targets, *model_facts.VALUE_LAYERS}


def _no_match(module: PreTrainedModel, settings: LoraSettings, error: Exception) -> str:
    """peft's refusal, mostly of patterns that match nothing, with the names of the model's modules."""
    option = f"target_modules=[{', '.join(settings.targets)}]"
    if settings.adapter is not None:
        option = f"lora_adapter_path={settings.adapter}"
    ends = sorted({n.rpartition(".")[2] for n, part in module.named_modules() if hasattr(part, "weight")})
    return f"model.{option}: {error}; the model's modules are {', '.join(ends)}"


def _refuse_unfit(module: PreTrainedModel, layers: Mapping[str, Any]) -> None:
    """UserError where an adapter sits on something that it cannot be merged into, or that is tied to another weight."""
    for name, layer in layers.items():
        why = ""
        if not isinstance(layer.lora_A[adapters.NAME] if len(layer.lora_A) else None, torch.nn.Linear):
            why = f"a {type(layer.base_layer).__name__} cannot have an adapter here, linear layers can"
        elif f"{name}.weight" in (getattr(module, "all_tied_weights_keys", None) or {}):
            why = "it shares its weight with the embedding, so an adapter of it alone cannot be merged"
        if why:
            part = name.rpartition(".")[2]
            raise UserError(f"{name}: {why}: leave {part} out of model.target_modules or lora_adapter_path")


class Adapter:
    """The adapter in a model."""

    def __init__(self, module: PreTrainedModel, config: Any, settings: LoraSettings):
        self._module, self._config, self._settings = module, config, settings
        self._named = adapters.adapted_layers(module)
        self._layers = list(self._named.values())

    @property
    def is_on(self) -> bool:
        """False in a block of `off`."""
        return not any(layer.disable_adapters for layer in self._layers)

    @contextmanager
    def off(self) -> Iterator[None]:
        """In this block the model is its base: its layers compute what they did before they had adapters. Trained
        parameters stay as they are."""
        try:
            for layer in self._layers:
                # peft's own switch changes requires_grad too, which would take parameters out of the optimizer's
                # reach.
                layer._disable_adapters = True
            yield
        finally:
            for layer in self._layers:
                layer._disable_adapters = False

    @torch.no_grad()
    def fill(self, value: float, layers: Collection[str] | None = None) -> list[str]:
        """Set the B of these layers (None: of all) to one value and that of others to 0, in place; returns the names of
        all layers."""
        for name, layer in self._named.items():
            local(layer.lora_B[adapters.NAME].weight).fill_(value if layers is None or name in layers else 0.0)
        return list(self._named)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name in peft's files less the prefix, whole tensor), one at a time. Collective."""
        for name, tensor in adapters.PlainView(self._module).adapter_state().items():
            yield name, whole(tensor).detach()

    def materialise(self, source: WeightSource, device: torch.device) -> None:
        """Give the meta tensors their values, in a model that is whole on this device."""
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        source.fill(self._module.modules(), names, device=device)

    @torch.no_grad()
    def save(self, directory: Path) -> None:
        """Write the adapter's folder of a checkpoint, which peft and inference servers load. Collective."""
        stored = {_PREFIX + name: tensor.cpu().contiguous() for name, tensor in self.tensors()}

        def write() -> None:
            folder = directory / model_facts.ADAPTER_FOLDER
            folder.mkdir(parents=True, exist_ok=True)
            save_file(stored, folder / model_facts.ADAPTER_WEIGHTS, metadata={"format": "pt"})
            inference, self._config.inference_mode = self._config.inference_mode, True
            self._config.save_pretrained(str(folder))
            self._config.inference_mode = inference

        on_all_ranks(lambda: write() if this_rank() == 0 else None)

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        """Read what `save` wrote, in place. Collective.

        UserError if the adapter is not this model's, or the base not the one that it was trained on: base and adapter
        must add up to the merged weights of the checkpoint, if there are any.
        """
        state = adapters.PlainView(self._module).adapter_state()
        saved = on_all_ranks(lambda: read_tensors(directory / model_facts.ADAPTER_FOLDER, state))
        for name, tensor in state.items():
            take_share(tensor, saved[name])
        source, weights = FileSource(directory, self._module), untied(self._module)
        view = adapters.PlainView(self._module)
        for name, tensor in weights.items() if not source.missing(weights) else ():
            current = view.merged(name, tensor, whole).cpu()
            self.refuse_other_base(directory, name, current, source.read(name, current))

    def refuse_other_base(self, directory: Path, name: str, current: torch.Tensor, saved: torch.Tensor) -> None:
        """UserError where a merged weight is not the saved one."""
        if current.numel() and not (current - saved).abs().max() <= _TOLERANCE * saved.abs().max():
            raise UserError(
                f"{directory}: {name} is not the base of this run plus the saved adapter: model.path="
                f"{self._settings.base} is not the model that the checkpoint was trained on. Put that model "
                f"back, or start anew from the merged weights: model.path={directory}"
            )


class AdapterSource(WeightSource):
    """The base's tensors from another source under their plain names, the adapter's from a file or made here."""

    def __init__(self, module: PreTrainedModel, settings: LoraSettings, seed: int, base: WeightSource | None):
        self._base, self._seed = base, seed
        self._given: dict[str, torch.Tensor] | None = None
        if settings.adapter is not None:
            self._given = read_tensors(settings.adapter, adapters.PlainView(module).adapter_state())

    def read(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """See `WeightSource.read`; names of the model with adapters."""
        plain = adapters.plain_name(name)
        if plain is not None:
            assert self._base is not None
            return self._base.read(plain, like)
        if self._given is not None:
            return self._given[adapters.adapter_name(name)].to(like.dtype)
        return _start_value(name, like, self._seed)


def _start_value(name: str, like: torch.Tensor, seed: int) -> torch.Tensor:
    """B = 0; A uniform in ±1/√in, of a generator that the seed and the tensor's name decide."""
    out = torch.zeros(like.shape, dtype=like.dtype)
    if ".lora_A." not in name:
        return out
    digest = hashlib.blake2b(f"{seed}:{adapters.adapter_name(name)}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    bound = 1.0 / math.sqrt(like.shape[-1])
    return out.uniform_(-bound, bound, generator=generator)


def read_tensors(directory: Path, expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """adapter_model.safetensors under names less peft's prefix. UserError if it is damaged or fits another model."""
    file = directory / model_facts.ADAPTER_WEIGHTS
    if not file.is_file():
        raise UserError(f"{directory}: no {model_facts.ADAPTER_WEIGHTS} here; is it a peft adapter?")
    with reading(file):
        tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in load_file(file).items()}
    for name in sorted(expected.keys() | tensors.keys()):
        saved, shape = (list(side[name].shape) if name in side else "absent" for side in (tensors, expected))
        if saved != shape:
            raise UserError(
                f"{file}: {name} is {saved}, in this run it is {shape}: an adapter of other layers, of another rank "
                "or model"
            )
    return tensors


def refuse_adapter_checkpoint(directory: Path) -> None:
    """UserError for a checkpoint of a run with LoRA, in a run without."""
    if (directory / model_facts.ADAPTER_FOLDER / model_facts.ADAPTER_CONFIG).is_file():
        rank = model_facts.read_adapter_config(directory / model_facts.ADAPTER_FOLDER).get("r")
        raise UserError(
            f"{directory}: the checkpoint was trained with LoRA (rank {rank}), this run trains all weights: set "
            f"actor_rollout_ref.model.lora_rank={rank} (sft: model.lora_rank) to go on, or start anew from its merged "
            f"weights with actor_rollout_ref.model.path={directory}"
        )
