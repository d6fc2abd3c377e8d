"""Weights on disk, a Hugging Face directory: read one parameter at a time, so that the whole is nowhere in memory, and
written by all ranks at once, or by one process.

FileSource      every rank reads what it needs from the safetensors files (mapped, so a host reads them once)
RankZeroSource  rank 0 loads the model as transformers does and sends each parameter to the others: for files of
                other kinds and names, where only transformers knows what belongs where

Files to write are planned from shapes alone, so all ranks know the plan. In a round each rank collects the tensors of
one file (gathering is collective, one parameter at a time), then all write. The peak is one file a rank.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.utils import swap_tensors

from verl.engine.training import process_group
from verl.engine.training.process_group import all_gather_json, on_all_ranks, this_rank, whole
from verl.errors import UserError
from verl.models import mtp
from verl.models.adapters import PlainView
from verl.models.checkpoint_names import checkpoint_parts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FILE_BYTES = 4 << 30
_FIRST, _FURTHER = "model-00001-of-00001.safetensors", "model-mtp.safetensors"


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
        """Give these modules' meta parameters their values, in place, so that tied ones stay tied. names: id → name."""
        for part in parts:
            for parameter in part.parameters(recurse=False):
                if parameter.is_meta:
                    value = self.read(names[id(parameter)], parameter).to(device)
                    requires_grad = trainable and parameter.requires_grad
                    swap_tensors(parameter, torch.nn.Parameter(value, requires_grad=requires_grad))


class FileSource(WeightSource):
    """The safetensors files of a Hugging Face directory. `module` knows which of its tensors are kept apart there.

    fresh: weights that start at 0 where the files lack them.
    """

    def __init__(self, directory: Path, module: PreTrainedModel, fresh: Iterable[str] = ()):
        self._module = module
        self._files = _names_in(directory)
        self._open: dict[Path, Any] = {}
        self._zero = {name for name in fresh if name not in self._files}

    def missing(self, wanted: Mapping[str, torch.Tensor]) -> list[str]:
        """What the files lack of the parts that these tensors, by name, are made of."""
        needed = ((name, like) for name, like in wanted.items() if name not in self._zero)
        parts = (part for name, like in needed for part in self._parts(name, like))
        return [part for part in parts if part not in self._files]

    def _parts(self, name: str, like: torch.Tensor) -> Iterable[str]:
        return checkpoint_parts(self._module, {name: torch.empty(like.shape, device="meta")})

    def read(self, name: str, like: torch.Tensor) -> torch.Tensor:
        if name in self._zero:
            return torch.zeros(like.shape, dtype=like.dtype)
        parts = list(self._parts(name, like))
        if len(parts) == 1:
            stored = self.tensor(parts[0])
            if stored.shape == like.shape:
                return stored.to(like.dtype)
        # Where the elements of each stored tensor belong: number them, and have the numbers taken apart.
        # In the smallest type that can, and let go one after the other: fused experts are most of a large model.
        kind = torch.int32 if like.numel() < 2**31 else torch.int64
        numbers = torch.arange(like.numel(), dtype=kind).view(like.shape)
        apart = checkpoint_parts(self._module, {name: numbers})
        del numbers
        out = torch.empty(like.numel(), dtype=like.dtype)
        for part in list(apart):
            places = apart.pop(part)
            stored = self.tensor(part)
            if stored.shape != places.shape:
                shapes = f"{list(stored.shape)}, not {list(places.shape)}"
                raise UserError(f"{self._files[part]}: {part} is {shapes}")
            out[places.reshape(-1)] = stored.reshape(-1).to(like.dtype)
        return out.view(like.shape)

    def names(self) -> Mapping[str, Path]:
        """The checkpoint's tensors, each with its file."""
        return self._files

    def tensor(self, part: str) -> torch.Tensor:
        """One of `names`, as it is stored."""
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
    fresh: Iterable[str] = (),
) -> WeightSource:
    """The source for these tensors: the files if every rank can use them, else `load` on rank 0. See `FileSource`."""
    files = on_all_ranks(lambda: FileSource(model_folder(directory), module, fresh))
    return files if all(all_gather_json(not files.missing(wanted))) else RankZeroSource(load)


def model_folder(path: str | Path) -> Path:
    """The directory of a model: itself, or where its files are that a hub id names and that were fetched."""
    if Path(path).is_dir():
        return Path(path)
    from transformers.utils import cached_file

    file = cached_file(str(path), "config.json", local_files_only=True, _raise_exceptions_for_missing_entries=False)
    return Path(path) if file is None else Path(file).parent


def _names_in(directory: Path) -> dict[str, Path]:
    """Tensor name → file, from the index, or from the one file. Empty without safetensors files."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.is_file():
        with reading(index):
            weight_map = json.loads(index.read_text("utf-8"))["weight_map"]
        return {name: directory / file for name, file in weight_map.items()}
    if not single.is_file():
        return {}
    with reading(single), safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """UserError, naming the file, where it cannot be read in this block."""
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UserError(f"{file} is damaged or cut short ({error}): a whole one is needed") from error


@torch.no_grad()
def load_weights(module: PreTrainedModel, directory: Path) -> None:
    """Read what `save_weights` wrote, in place. Collective."""

    def load() -> None:
        state, source = untied(module), FileSource(directory, module)
        if missing := source.missing(state):
            raise UserError(f"{directory}: weights are missing, for example {missing[0]}")
        for name, tensor in state.items():
            process_group.take_share(tensor, source.read(name, tensor))

    on_all_ranks(load)


# -- writing -------------------------------------------------------------------------------------------------


@torch.no_grad()
def refuse_non_finite(module: PreTrainedModel) -> None:
    """UserError naming the first tensor whose norm is not finite: a NaN, an infinity, or numbers near to one.
    Collective."""

    def look() -> None:
        for name, parameter in module.named_parameters():
            norm = float(torch.linalg.vector_norm(process_group.local(parameter), dtype=torch.float32))
            if not math.isfinite(norm):
                raise UserError(f"the norm of the weight {name} is {norm}: training blew it up (lower optim.lr)")

    on_all_ranks(look)


@torch.no_grad()
def save_weights(module: PreTrainedModel, directory: Path, serving: str, source: str | Path | None = None) -> None:
    """Write what `from_pretrained` loads: safetensors files with an index, configuration, generation config.

    Adapters are merged; `serving` is the data type that the configuration names. Layers that predict further tokens are
    taken from the files of `source` where the model has none (`verl.models.mtp`). Collective: an error on one rank (a
    full disk) is raised by all.
    """
    on_all_ranks(lambda: directory.mkdir(parents=True, exist_ok=True))
    state, view, rank = untied(module), PlainView(module), this_rank()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    files = plan_files([(name, t.numel() * t.element_size()) for name, t in state.items()], ranks)
    weight_map: dict[str, str] = {}
    for start in range(0, len(files), ranks):
        mine: dict[str, torch.Tensor] = {}
        for number, names in enumerate(files[start : start + ranks]):
            for name in names:
                full = view.merged(name, state[name], whole)
                if number == rank:
                    mine |= _stored(module, name, full)
        file = file_name(start + rank, len(files))
        on_all_ranks(lambda mine=mine, file=file: write_file(mine, directory / file))  # type: ignore[misc]
        weight_map |= dict.fromkeys(mine, file)
    index = all_gather_json(weight_map)
    on_all_ranks(lambda: describe(module, directory, serving, index, len(files)) if rank == 0 else None)
    if source is not None and mtp.layer_count(module.config):
        on_all_ranks(lambda: _copy_further_layers(module, directory, model_folder(source)) if rank == 0 else None)


def _copy_further_layers(module: PreTrainedModel, directory: Path, source: Path) -> None:
    """Write, beside the weights in `directory`, those of layers that predict further tokens which only `source` has.
    Such layers hold embedding and head again: these are the ones that were saved."""
    layers = module.config.get_text_config().num_hidden_layers
    saved, before = FileSource(directory, module), FileSource(source, module)
    names = [name for name in before.names() if mtp.is_extra(name, layers) and name not in saved.names()]
    if not names:
        return

    def current(name: str) -> torch.Tensor:
        ends = {  # the second of a tied head
            "shared_head.head.weight": ["lm_head.weight", "embed_tokens.weight"],
            "embed_tokens.weight": ["embed_tokens.weight"],
        }
        shared = next((mains for end, mains in ends.items() if name.endswith(end)), [])
        of_main = (
            key for end in shared for key in saved.names() if key.endswith(end) and not mtp.is_extra(key, layers)
        )
        main = next(of_main, None)
        return before.tensor(name) if main is None else saved.tensor(main)

    tensors = {name: current(name) for name in names}
    where, single = {name: file.name for name, file in saved.names().items()}, directory / "model.safetensors"
    if single.is_file():
        single.rename(directory / _FIRST)
        where = dict.fromkeys(where, _FIRST)
    write_file(tensors, directory / _FURTHER)
    _write_index(directory, where | dict.fromkeys(tensors, _FURTHER))


def plan_files(sizes: Sequence[tuple[str, int]], ranks: int, limit: int = FILE_BYTES) -> list[list[str]]:
    """Names in order, cut into files of about equal size: at least one a rank, none much above `limit` bytes.

    A file too many (fewer tensors than ranks, one huge tensor) is left out.
    """
    total = max(1, sum(size for _, size in sizes))
    count = max(ranks, -(-total // limit))
    files: list[list[str]] = [[] for _ in range(count)]
    start = 0
    for name, size in sizes:
        # A tensor belongs to the file that its middle falls into.
        files[min(count - 1, (2 * start + size) * count // (2 * total))].append(name)
        start += size
    return [names for names in files if names]


def untied(module: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The state without adapters, each tied weight once."""
    tied = set(getattr(module, "all_tied_weights_keys", None) or {})
    return {name: t for name, t in PlainView(module).state().items() if name not in tied}


def _stored(module: PreTrainedModel, name: str, full: torch.Tensor) -> dict[str, torch.Tensor]:
    parts = checkpoint_parts(module, {name: full.detach()})
    return {part: tensor.cpu().contiguous() for part, tensor in parts.items()}


def file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def write_file(tensors: dict[str, torch.Tensor], file: Path) -> None:
    if tensors:
        save_file(tensors, file, metadata={"format": "pt"})


def _write_index(directory: Path, where: Mapping[str, str]) -> None:
    size = sum((directory / file).stat().st_size for file in set(where.values()))
    text = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(text, indent=2) + "\n", "utf-8")


def describe(
    module: PreTrainedModel, directory: Path, serving_dtype: str, index: Sequence[dict[str, str]], files: int
) -> None:
    """The small files beside the weights."""
    module.config.architectures = [type(module).__name__]
    module.config.save_pretrained(directory)
    if module.can_generate():
        module.generation_config.save_pretrained(directory)
    if files > 1:
        _write_index(directory, {name: file for part in index for name, file in part.items()})
    # The data type that a server shall load the weights in.
    file = directory / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) | {"dtype": serving_dtype}
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
