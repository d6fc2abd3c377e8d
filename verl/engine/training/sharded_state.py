"""Weights of a sharded model on disk: a Hugging Face directory, every rank writing some of its files at once.

Files are planned from shapes alone, so all ranks know the plan. In a round each rank collects the tensors of one
file (gathering is collective, one parameter at a time), then all write. The peak is one file a rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from verl.engine.training.collectives import all_gather_json, on_all_ranks
from verl.engine.training.sharding import whole
from verl.models import load as models
from verl.models.adapters import PlainView, exported

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FILE_BYTES = 4 << 30


def gathered(module: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Full tensors under checkpoint names, tied ones too, one parameter at a time on every rank. Collective."""
    yield from exported(module, whole)


def write_weights(module: PreTrainedModel, directory: Path, serving_dtype: str) -> None:
    """Write what `from_pretrained` loads: safetensors files with an index, configuration, generation config.

    Collective. What fails on one rank (a full disk) is raised by all.
    """
    on_all_ranks(lambda: directory.mkdir(parents=True, exist_ok=True))
    state, view = untied(module), PlainView(module)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    files = plan_files([(name, t.numel() * t.element_size()) for name, t in state.items()], ranks)
    listed: dict[str, str] = {}
    for start in range(0, len(files), ranks):
        mine: dict[str, torch.Tensor] = {}
        for number, names in enumerate(files[start : start + ranks]):
            for name in names:
                full = view.merged(name, state[name], whole)
                if number == rank:
                    mine |= stored(module, name, full)
        file = file_name(start + rank, len(files))
        on_all_ranks(lambda mine=mine, file=file: write_file(mine, directory / file))  # type: ignore[misc]
        listed |= dict.fromkeys(mine, file)
    index = all_gather_json(listed)
    on_all_ranks(lambda: describe(module, directory, serving_dtype, index, len(files)) if rank == 0 else None)


def write_alone(module: PreTrainedModel, directory: Path, serving_dtype: str) -> None:
    """The same of a model that is whole in this process, adapters merged one file at a time. Not collective."""
    directory.mkdir(parents=True, exist_ok=True)
    state, view = untied(module), PlainView(module)
    files = plan_files([(name, t.numel() * t.element_size()) for name, t in state.items()], 1)
    listed: dict[str, str] = {}
    for number, names in enumerate(files):
        file, tensors = file_name(number, len(files)), {}
        for name in names:
            tensors |= stored(module, name, view.merged(name, state[name]))
        write_file(tensors, directory / file)
        listed |= dict.fromkeys(tensors, file)
    describe(module, directory, serving_dtype, [listed], len(files))


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


def stored(module: PreTrainedModel, name: str, full: torch.Tensor) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    parts = revert_weight_conversion(module, {name: full.detach()})
    return {part: tensor.cpu().contiguous() for part, tensor in parts.items()}


def file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def write_file(tensors: dict[str, torch.Tensor], file: Path) -> None:
    from safetensors.torch import save_file

    if tensors:
        save_file(tensors, file, metadata={"format": "pt"})


def describe(
    module: PreTrainedModel, directory: Path, serving_dtype: str, index: Sequence[dict[str, str]], files: int
) -> None:
    """The small files beside the weights."""
    module.config.architectures = [type(module).__name__]
    module.config.save_pretrained(directory)
    if module.can_generate():
        module.generation_config.save_pretrained(directory)
    if files > 1:
        where = {name: file for part in index for name, file in part.items()}
        size = sum((directory / file).stat().st_size for file in set(where.values()))
        text = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
        (directory / "model.safetensors.index.json").write_text(json.dumps(text, indent=2) + "\n", "utf-8")
    models.name_serving_dtype(directory, serving_dtype)
