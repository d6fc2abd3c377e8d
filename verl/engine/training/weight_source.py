"""Where the weights of a sharded model come from, one parameter at a time, so that the whole is nowhere in memory.

FileSource      every rank reads what it needs from the safetensors files (mapped, so a host reads them once)
RankZeroSource  rank 0 loads the model as transformers does and sends each parameter to the others: for files of
                other kinds and names, where only transformers knows what belongs where
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from verl.engine.training.process_group import all_gather_json, on_all_ranks, this_rank
from verl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class WeightSource(ABC):
    """`read` is collective: all ranks ask for the same names in the same order."""

    @abstractmethod
    def read(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """The whole tensor of a `state_dict` name in host memory, with the shape and dtype of `like`."""

    def fill(
        self,
        parts: Iterable[torch.nn.Module],
        names: Mapping[int, str],
        *,
        trainable: bool = True,
        device: torch.device | None = None,
    ) -> None:
        """Put real parameters in the place of these modules' meta ones; tied ones stay one. names: id → name."""
        made: dict[int, torch.nn.Parameter] = {}
        for part in parts:
            for key, parameter in part._parameters.items():
                if parameter is None or not parameter.is_meta:
                    continue
                if id(parameter) not in made:
                    value = self.read(names[id(parameter)], parameter).to(device)
                    requires_grad = trainable and parameter.requires_grad
                    made[id(parameter)] = torch.nn.Parameter(value, requires_grad=requires_grad)
                part._parameters[key] = made[id(parameter)]


class FileSource(WeightSource):
    """The safetensors files of a Hugging Face directory. `module` knows which of its tensors are kept apart there."""

    def __init__(self, directory: Path, module: PreTrainedModel):
        self._module = module
        self._files = _names_in(directory)
        self._open: dict[Path, Any] = {}

    def missing(self, wanted: Mapping[str, torch.Tensor]) -> list[str]:
        """What the files lack of the parts that these tensors, by name, are made of."""
        parts = (part for name, like in wanted.items() for part in self._parts(name, like))
        return [part for part in parts if part not in self._files]

    def _parts(self, name: str, like: torch.Tensor) -> Iterable[str]:
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self._module, {name: torch.empty(like.shape, device="meta")})

    def read(self, name: str, like: torch.Tensor) -> torch.Tensor:
        from transformers.core_model_loading import revert_weight_conversion

        parts = list(self._parts(name, like))
        if len(parts) == 1:
            found = self._tensor(parts[0])
            if found.shape == like.shape:
                return found.to(like.dtype)
        # Where the elements of each stored tensor belong: number them, and have the numbers taken apart.
        # In the smallest type that can, and let go one after the other: fused experts are most of a large model.
        kind = torch.int32 if like.numel() < 2**31 else torch.int64
        numbers = torch.arange(like.numel(), dtype=kind).view(like.shape)
        apart = revert_weight_conversion(self._module, {name: numbers})
        del numbers
        out = torch.empty(like.numel(), dtype=like.dtype)
        for part in list(apart):
            places = apart.pop(part)
            found = self._tensor(part)
            if found.shape != places.shape:
                raise UserError(
                    f"{self._files[part]}: {part} is {list(found.shape)}, not {list(places.shape)}"
                )
            out[places.reshape(-1)] = found.reshape(-1).to(like.dtype)
        return out.view(like.shape)

    def _tensor(self, part: str) -> torch.Tensor:
        from safetensors import safe_open

        file = self._files[part]
        with reading(file):
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt")
            return self._open[file].get_tensor(part)


class RankZeroSource(WeightSource):
    """`load` runs on rank 0 alone and gives tensors by their `state_dict` name."""

    def __init__(self, load: Callable[[], Mapping[str, torch.Tensor]]):
        self._loaded = on_all_ranks(lambda: dict(load()) if this_rank() == 0 else {})

    def read(self, name: str, like: torch.Tensor) -> torch.Tensor:
        out = torch.empty(like.shape, dtype=like.dtype)
        if this_rank() == 0:
            out.copy_(self._loaded[name])
        if dist.is_initialized():
            dist.broadcast(out, 0)
        return out


def open_source(
    directory: str | Path,
    module: PreTrainedModel,
    wanted: Mapping[str, torch.Tensor],
    load: Callable[[], Mapping[str, torch.Tensor]],
) -> WeightSource:
    """The source for these tensors: the files where every rank can use them, else `load` on rank 0."""
    here = Path(directory)
    files = on_all_ranks(lambda: FileSource(here, module) if here.is_dir() else None)
    if all(all_gather_json(files is not None and not files.missing(wanted))):
        assert files is not None
        return files
    return RankZeroSource(load)


def _names_in(directory: Path) -> dict[str, Path]:
    """Tensor name → file, from the index, or from the one file. Empty without safetensors files."""
    from safetensors import safe_open

    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.is_file():
        with reading(index):
            listed = json.loads(index.read_text("utf-8"))["weight_map"]
        return {name: directory / file for name, file in listed.items()}
    if not single.is_file():
        return {}
    with reading(single), safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


@contextmanager
def reading(file: Path, what: str = "model") -> Iterator[None]:
    """UserError, naming the file, where it cannot be read in this block."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UserError(
            f"{file} is damaged or cut short ({error}); fetch or copy the {what} again"
        ) from error
