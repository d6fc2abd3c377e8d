"""`python3 -m verl.model_merger merge|test`: checkpoints in the public system's layouts as Hugging Face directories.

actor/model_world_size_{W}_rank_{R}.pt + actor/huggingface/   FSDP: the shards of all ranks are joined
actor/huggingface/*.safetensors, actor/*.safetensors          weights that are whole already: copied
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from verl.errors import UserError

_SHARD = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")


def _shards(folder: Path) -> list[Path]:
    """The files of all ranks, in order. UserError where one is missing."""
    named = {
        int(match[2]): (path, int(match[1])) for path in folder.iterdir() if (match := _SHARD.fullmatch(path.name))
    }
    if not named:
        raise UserError(f"{folder}: it has no model_world_size_W_rank_R.pt, and no *.safetensors beside a config.json")
    size = named[min(named)][1]
    if missing := [rank for rank in range(size) if rank not in named]:
        raise UserError(f"{folder}: of {size} ranks the files of {missing} are missing")
    return [named[rank][0] for rank in range(size)]


def _joined(name: str, parts: Sequence[Any]) -> torch.Tensor:
    """The whole tensor of its parts on the ranks. UserError for one that is sharded in two dimensions."""
    from torch.distributed.tensor import DTensor

    first = parts[0]
    if not isinstance(first, DTensor):
        return first  # type: ignore[no-any-return]
    *outer, placement = first.placements
    if any(not where.is_replicate() for where in outer):
        raise UserError(f"{name}: it is sharded as {first.placements}; one dimension of FSDP can be joined")
    local = [part.to_local() for part in parts[: first.device_mesh.shape[-1]]]
    if placement.is_replicate():
        return local[0]
    whole = torch.cat([part for part in local if part.numel()], dim=placement.dim)
    return whole.narrow(placement.dim, 0, first.shape[placement.dim])


def merged(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of an FSDP checkpoint by name; the files are read without running code of theirs. UserError for one
    that is damaged or incomplete, and for adapters."""
    from torch.distributed.tensor import DTensor  # allows its own classes in files

    states = []
    for path in _shards(folder):
        try:
            states.append(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
        except Exception as error:
            raise UserError(f"{path}: cannot be read as weights ({DTensor.__name__}s): {error}") from error
    if adapters := [name for name in states[0] if "lora_" in name]:
        raise UserError(f"{folder}: it holds an adapter ({adapters[0]}); lora_adapter/ beside it has it for peft")
    return {name: _joined(name, [state[name] for state in states]) for name in states[0]}


def _configuration(folder: Path) -> Path:
    """Where the configuration and the tokenizer lie."""
    places = [folder / "huggingface", folder]
    return next((place for place in places if (place / "config.json").is_file()), places[0])


def _architecture(source: Path, trusted: bool) -> Any:
    """A model of the configuration without weights."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=trusted)
    name = (config.architectures or [""])[0]
    kind = getattr(transformers, name, None)
    with torch.device("meta"):
        if kind is not None:
            return kind(config)
        return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=trusted)


def _save(folder: Path, target: Path, trusted: bool) -> None:
    source = _configuration(folder)
    if any(source.glob("*.safetensors")):
        shutil.copytree(source, target, dirs_exist_ok=True)
        return
    if not _SHARD.search(" ".join(path.name for path in folder.iterdir())) and (folder / "dist_ckpt").is_dir():
        raise UserError(
            f"{folder}/dist_ckpt: Megatron's own format is not read here; save with "
            "actor.checkpoint.save_contents=[hf_model] or megatron.use_mbridge=True there, which writes huggingface/"
        )
    state = merged(folder)
    model = _architecture(source, trusted)
    _check_names(model, state.keys())
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file():
            shutil.copy2(path, target)
    model.save_pretrained(target, state_dict=state)


def _check_names(model: Any, names: Iterable[str]) -> None:
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    missing = sorted(set(model.state_dict()) - set(names) - set(tied))
    if missing:
        raise UserError(f"{type(model).__name__} needs weights that the checkpoint lacks: {', '.join(missing[:5])}")


def _whole(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a Hugging Face directory by name; none where it has no files of them."""
    from safetensors.torch import load_file

    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def _compare(folder: Path, reference: Path) -> None:
    """UserError unless the merged weights are those of the directory `reference`."""
    expected = _whole(reference)
    if not expected:
        raise UserError(f"--test_hf_dir={reference}: it has no *.safetensors")
    state = _whole(_configuration(folder)) or merged(folder)
    if missing := sorted(expected.keys() - state.keys()):
        raise UserError(f"the checkpoint lacks {', '.join(missing[:5])}")
    for name, value in expected.items():
        if state[name].shape != value.shape or not torch.allclose(state[name].to(value.dtype), value, atol=1e-6):
            raise UserError(f"{name} differs from that of {reference}")


def main(argv: list[str]) -> int:
    """Merge or compare; 0, or 2 with one line on what is wrong."""
    parser = argparse.ArgumentParser(prog="verl.model_merger", description=__doc__)
    parser.add_argument("operation", choices=("merge", "test"))
    parser.add_argument("--local_dir", type=Path, required=True, help="the role's folder: global_step_N/actor")
    parser.add_argument("--target_dir", type=Path, default=Path("tmp"), help="where the directory is written")
    parser.add_argument("--test_hf_dir", type=Path, help="test: the directory to compare with")
    parser.add_argument("--trust-remote-code", action="store_true")
    for name in ("--backend", "--hf_model_path", "--hf_upload_path"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    for name in ("--tie-word-embedding", "--is-value-model", "--use_cpu_initialization", "--private"):
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    try:
        if args.hf_upload_path:
            raise UserError("--hf_upload_path: nothing is uploaded here; `hf upload` does it")
        if not args.local_dir.is_dir():
            raise UserError(f"--local_dir={args.local_dir}: there is no such folder")
        if args.operation == "test":
            if args.test_hf_dir is None:
                raise UserError("test needs --test_hf_dir")
            _compare(args.local_dir, args.test_hf_dir)
            print(f"the weights are those of {args.test_hf_dir}")
        else:
            _save(args.local_dir, args.target_dir, args.trust_remote_code)
            print(args.target_dir)
    except UserError as error:
        print(f"verl.model_merger: {error}", file=sys.stderr)
        return 2
    return 0
