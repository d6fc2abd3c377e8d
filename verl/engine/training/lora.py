"""Low-rank adapters in training: put into the model by peft, filled, read and written here.

Only the adapters are trained; the base keeps the bytes it was loaded with, so a run goes on exactly from its adapter
and the base, and not from their sum. Start values depend on the seed and on a layer's name alone: any number of ranks
begins with the same.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verl.config.model_facts import ADAPTER_CONFIG, ADAPTER_FOLDER, ADAPTER_WEIGHTS, read_adapter_config
from verl.engine.training.lora_config import LoraSettings, import_peft, peft_config, said
from verl.engine.training.weight_source import FileSource, WeightSource, reading
from verl.errors import UserError
from verl.models import adapters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PREFIX = "base_model.model."
_TOLERANCE = 1e-5  # of a weight's largest element: what orders of summation may change in B·A


def inject(module: PreTrainedModel, settings: LoraSettings) -> Adapter:
    """Put adapters into the model, on the meta device, and freeze everything else.

    UserError if peft is not installed, if no module is picked, or one that cannot have an adapter here.
    """
    peft = import_peft()
    config = peft_config(peft, settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            peft.inject_adapter_in_model(config, module, low_cpu_mem_usage=True)
        except (ValueError, TypeError, RuntimeError) as error:
            raise UserError(_no_match(module, settings, error)) from error
    for key in ("target_modules", "target_parameters", "exclude_modules"):
        if isinstance(getattr(config, key, None), set):
            setattr(config, key, sorted(getattr(config, key)))  # the same file in every process
    layers = adapters.adapted_layers(module)
    _refuse_unfit(module, layers, settings)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(adapters.plain_name(name) is None)
    return Adapter(module, config, settings)


class Adapter:
    """The adapter in a model."""

    def __init__(self, module: PreTrainedModel, config: Any, settings: LoraSettings):
        self._module, self._config, self._settings = module, config, settings
        self._layers = list(adapters.adapted_layers(module).values())

    @property
    def words(self) -> str:
        """Rank and how many layers, for messages."""
        return f"rank {self._config.r} on {len(self._layers)} layers"

    def off(self) -> AbstractContextManager[None]:
        """In this block the model is its base."""
        return adapters.switched_off(self._layers)

    def tensors(self, whole: adapters.Gather = adapters.as_is) -> Iterator[tuple[str, torch.Tensor]]:
        """(name in peft's files less the prefix, whole tensor), one at a time."""
        for name, tensor in adapters.PlainView(self._module).adapter_state().items():
            yield name, whole(tensor).detach()

    def materialise(self, source: WeightSource, device: torch.device) -> None:
        """Give the meta tensors their values, in a model that is whole on this device."""
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        source.fill(self._module.modules(), names, device=device)

    # -- files -----------------------------------------------------------------------------------------------

    def save(self, directory: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write adapter_config.json and adapter_model.safetensors, which peft and inference servers load."""
        from safetensors.torch import save_file

        directory.mkdir(parents=True, exist_ok=True)
        stored = {_PREFIX + name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        save_file(stored, directory / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        inference, self._config.inference_mode = self._config.inference_mode, True
        self._config.save_pretrained(str(directory))
        self._config.inference_mode = inference

    def read(self, directory: Path) -> dict[str, torch.Tensor]:
        """The tensors of a saved adapter by name. UserError if they are not this model's."""
        return read_tensors(directory, adapters.PlainView(self._module).adapter_state())

    def check_base(self, directory: Path, whole: adapters.Gather = adapters.as_is) -> None:
        """UserError unless base and adapter add up to the merged weights in a directory (if there are any).

        That is what tells that the base is the one the adapter was trained on.
        """
        source, view = FileSource(directory, self._module), adapters.PlainView(self._module)
        state = view.state()
        tied = set(getattr(self._module, "all_tied_weights_keys", None) or {})
        kept = {name: tensor for name, tensor in state.items() if name not in tied}
        if source.missing(kept):
            return
        for name, tensor in kept.items():
            ours = view.merged(name, tensor, whole).cpu()
            saved = source.read(name, ours)
            largest = float(saved.abs().max()) if saved.numel() else 0.0
            if saved.numel() and not float((ours - saved).abs().max()) <= _TOLERANCE * largest:
                raise UserError(
                    f"{directory}: {name} is not the base of this run plus the saved adapter: model.path="
                    f"{self._settings.base} is not the model that the checkpoint was trained on. Put that model back, or "
                    f"start anew from the merged weights: model.path={directory}"
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
        return start_value(name, like, self._seed)


def start_value(name: str, like: torch.Tensor, seed: int) -> torch.Tensor:
    """B = 0; A uniform in ±1/√in, of a generator that the seed and the tensor's name decide."""
    out = torch.zeros(like.shape, dtype=like.dtype)
    if ".lora_A." not in name:
        return out
    digest = hashlib.blake2b(f"{seed}:{adapters.adapter_name(name)}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    bound = 1.0 / math.sqrt(like.shape[-1])
    return out.uniform_(-bound, bound, generator=generator)


def read_tensors(directory: Path, wanted: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """adapter_model.safetensors under names less peft's prefix. UserError if it is damaged or fits another model."""
    from safetensors.torch import load_file

    file = directory / ADAPTER_WEIGHTS
    if not file.is_file():
        raise UserError(f"{directory}: no {ADAPTER_WEIGHTS} here; is it a peft adapter?")
    with reading(file, "adapter"):
        found = {name.removeprefix(_PREFIX): tensor for name, tensor in load_file(file).items()}
    for name in sorted(wanted.keys() | found.keys()):
        if name not in found or name not in wanted:
            where = "lacks" if name not in found else "holds"
            raise UserError(
                f"{file} {where} {name}: it is an adapter of other layers (or of another model) than those of this run"
            )
        if found[name].shape != wanted[name].shape:
            raise UserError(
                f"{file}: {name} is {list(found[name].shape)}, this run's is {list(wanted[name].shape)}: another rank or model"
            )
    return found


def refuse_adapter_checkpoint(directory: Path) -> None:
    """UserError for a checkpoint of a run with LoRA, in a run without."""
    if (Path(directory) / ADAPTER_FOLDER / ADAPTER_CONFIG).is_file():
        rank = read_adapter_config(Path(directory) / ADAPTER_FOLDER).get("r")
        raise UserError(
            f"{directory}: the checkpoint was trained with LoRA (rank {rank}), this run trains all weights: set "
            f"actor_rollout_ref.model.lora_rank={rank} (sft: model.lora_rank) to go on, or start anew from its merged "
            f"weights with actor_rollout_ref.model.path={directory}"
        )


# -- which modules -------------------------------------------------------------------------------------------


def _no_match(module: PreTrainedModel, settings: LoraSettings, error: Exception) -> str:
    """What peft's refusal means: mostly patterns that match nothing, so with the names of the model's modules."""
    where = "model.lora_adapter_path" if settings.adapter is not None else "model.target_modules"
    given = str(settings.adapter) if settings.adapter is not None else said(settings.targets)
    if not type(error).__name__.startswith("NoMatching"):
        return f"{where}={given}: {error}"
    ends = sorted({n.rpartition(".")[2] for n, part in module.named_modules() if hasattr(part, "weight")})
    parts = [pattern.rpartition(".")[2] for pattern in settings.targets]
    close = dict.fromkeys(m for part in parts for m in difflib.get_close_matches(part, ends, 1, 0.5))
    hint = f"; nearest: {', '.join(close)}" if close else ""
    return f"{where}={given} matches no module of the model{hint}; its modules are {', '.join(ends)}"


def _refuse_unfit(module: PreTrainedModel, layers: Mapping[str, Any], settings: LoraSettings) -> None:
    """UserError where an adapter sits on something that it cannot be merged into, or that is tied to another weight."""
    key = "model.exclude_modules" if settings.adapter is None else "model.lora_adapter_path"
    if not layers:
        raise UserError(f"model.target_modules={said(settings.targets)} leaves no module to adapt")
    tied = set(getattr(module, "all_tied_weights_keys", None) or {})
    for name, layer in layers.items():
        part = name.rpartition(".")[2]
        if not isinstance(layer.lora_A[adapters.NAME] if len(layer.lora_A) else None, torch.nn.Linear):
            kind = type(layer.base_layer).__name__
            raise UserError(
                f"{name} ({kind}) cannot have an adapter here, linear layers can: leave {part} out of model.target_modules "
                f"(or name it in {key})"
            )
        if f"{name}.weight" in tied:
            raise UserError(
                f"{name} shares its weight with the embedding, so an adapter of it alone cannot be merged: leave {part} out "
                "of model.target_modules"
            )
