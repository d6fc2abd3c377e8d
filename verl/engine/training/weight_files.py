"""Weights on disk: a Hugging Face directory, every rank writing some of its files at once, or one process all of them.

Files are planned from shapes alone, so all ranks know the plan. In a round each rank collects the tensors of one
file (gathering is collective, one parameter at a time), then all write. The peak is one file a rank.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from verl.config.model_facts import ADAPTER_FOLDER
from verl.engine.training.lora import Adapter, refuse_adapter_checkpoint
from verl.engine.training.process_group import all_gather_json, on_all_ranks, this_rank
from verl.engine.training.sharding import local, take_share, whole
from verl.engine.training.weight_source import FileSource
from verl.errors import UserError
from verl.models.adapters import PlainView

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FILE_BYTES = 4 << 30


@torch.no_grad()
def load_weights(module: PreTrainedModel, directory: Path) -> None:
    """Read what `save_weights` wrote, in place. Collective."""

    def load() -> None:
        refuse_adapter_checkpoint(directory)
        state, source = untied(module), FileSource(directory, module)
        if missing := source.missing(state):
            raise UserError(f"{directory}: weights are missing, for example {missing[0]}")
        for name, tensor in state.items():
            take_share(tensor, source.read(name, tensor))

    on_all_ranks(load)


@torch.no_grad()
def save_adapter(adapter: Adapter, directory: Path) -> None:
    """Write the adapter as peft loads it. Collective."""
    tensors, folder = dict(adapter.tensors(whole)), directory / ADAPTER_FOLDER
    on_all_ranks(lambda: adapter.save(folder, tensors) if this_rank() == 0 else None)


@torch.no_grad()
def load_adapter(adapter: Adapter, module: PreTrainedModel, directory: Path) -> None:
    """Read what `save_adapter` wrote, in place. Collective. UserError if the base is not the one that it was trained on."""
    saved = on_all_ranks(lambda: adapter.read(directory / ADAPTER_FOLDER))
    for name, tensor in PlainView(module).adapter_state().items():
        take_share(tensor, saved[name])
    adapter.check_base(directory, whole)


@torch.no_grad()
def refuse_non_finite(module: PreTrainedModel) -> None:
    """UserError naming the first tensor whose norm is not finite: a NaN, an infinity, or numbers near to one.
    Collective."""

    def look() -> None:
        for name, parameter in module.named_parameters():
            norm = float(torch.linalg.vector_norm(local(parameter), dtype=torch.float32))
            if not math.isfinite(norm):
                raise UserError(
                    f"the norm of the weight {name} is {norm}: training has blown it up (lower optim.lr)"
                )

    on_all_ranks(look)


@torch.no_grad()
def save_weights(module: PreTrainedModel, directory: Path, serving_dtype: str) -> None:
    """Write what `from_pretrained` loads: safetensors files with an index, configuration, generation config.

    Adapters are merged. Collective: what fails on one rank (a full disk) is raised by all.
    """
    on_all_ranks(lambda: directory.mkdir(parents=True, exist_ok=True))
    state, view, rank = untied(module), PlainView(module), this_rank()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    files = plan_files([(name, t.numel() * t.element_size()) for name, t in state.items()], ranks)
    listed: dict[str, str] = {}
    for start in range(0, len(files), ranks):
        mine: dict[str, torch.Tensor] = {}
        for number, names in enumerate(files[start : start + ranks]):
            for name in names:
                full = view.merged(name, state[name], whole)
                if number == rank:
                    mine |= _stored(module, name, full)
        file = file_name(start + rank, len(files))
        on_all_ranks(lambda mine=mine, file=file: _write_file(mine, directory / file))  # type: ignore[misc]
        listed |= dict.fromkeys(mine, file)
    index = all_gather_json(listed)
    on_all_ranks(
        lambda: _describe(module, directory, serving_dtype, index, len(files)) if rank == 0 else None
    )


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
    from transformers.core_model_loading import revert_weight_conversion

    parts = revert_weight_conversion(module, {name: full.detach()})
    return {part: tensor.cpu().contiguous() for part, tensor in parts.items()}


def file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _write_file(tensors: dict[str, torch.Tensor], file: Path) -> None:
    from safetensors.torch import save_file

    if tensors:
        save_file(tensors, file, metadata={"format": "pt"})


def _describe(
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
    # The data type that a server shall load the weights in.
    file = directory / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) | {"dtype": serving_dtype}
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
