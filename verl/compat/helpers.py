"""Small helpers that scripts and plug-ins of the public system import from `verl.utils`: tokenizers, configuration,
positions, tool responses of gpt-oss, a logger."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.config.schema.base import plain
from verl.data.load_object import load_extern_object
from verl.data.tokenizer import load_tokenizer
from verl.plugins import import_modules as import_external_libs  # noqa: F401

if TYPE_CHECKING:
    import torch


def hf_tokenizer(name_or_path: str, correct_pad_token: bool = True, correct_gemma2: bool = True, **kwargs: Any) -> Any:
    """The tokenizer of a directory or hub id, its end token for padding where it has none. DataError if there is
    none. kwargs: `trust_remote_code`, others have no effect."""
    return load_tokenizer(name_or_path, trust_remote_code=bool(kwargs.get("trust_remote_code")))


def hf_processor(name_or_path: str, **kwargs: Any) -> Any:
    """The processor of a model that sees images, None for others. DataError where it cannot be used here."""
    from verl.data.media import load_processor

    trusted = bool(kwargs.pop("trust_remote_code", False))
    tokenizer = load_tokenizer(name_or_path, trust_remote_code=trusted)
    kwargs = {name: value for name, value in kwargs.items() if name != "use_fast"}
    return load_processor(name_or_path, tokenizer, kwargs, trust_remote_code=trusted)


def normalize_token_ids(tokenized_output: Any) -> list[int]:
    """The ids of one sequence, whatever form a tokenizer or a chat template gave them in. ValueError for several."""
    ids = tokenized_output["input_ids"] if isinstance(tokenized_output, Mapping) else tokenized_output
    ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if ids and isinstance(ids[0], list):
        if len(ids) > 1:
            raise ValueError(f"{len(ids)} sequences where one is needed")
        ids = ids[0]
    return [int(i) for i in ids]


def compute_position_id_with_mask(mask: torch.Tensor) -> torch.Tensor:
    """Positions [..., L] of the tokens that an attention mask [..., L] shows, from 0; 0 in the padding before them."""
    return (mask.cumsum(-1) - 1).clip(min=0)


def omega_conf_to_dataclass(config: Any, dataclass_type: type | None = None) -> Any:
    """A configuration as a dataclass: of `dataclass_type`, else of its key `_target_`; one without either, which every
    group of a run is, as it stands: it has its keys as attributes."""
    from hydra.utils import instantiate
    from omegaconf import DictConfig, OmegaConf

    if dataclass_type is None:
        has_target = isinstance(config, Mapping | DictConfig) and "_target_" in config
        return instantiate(config, _convert_="partial") if has_target else config
    values = {name: value for name, value in _plain(config).items() if name != "_target_"}
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(dataclass_type), values))


def _plain(config: Any) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else plain(config or {})


def load_extern_type(file_path: str | None, type_name: str) -> Any:
    """`load_extern_object`; None without a path."""
    return load_extern_object(file_path, type_name) if file_path else None


# ------------------------------------------------------------------------------------------------ gpt-oss


def format_gpt_oss_tool_response_manually(tool_response: str, tool_call_name: str) -> str:
    """The answer of a tool as a message of the harmony format."""
    head = f"<|start|>functions.{tool_call_name} to=assistant<|channel|>commentary<|message|>"
    return f"{head}{tool_response}<|end|>"


def add_generation_prompt_for_gpt_oss(message_content: str) -> str:
    """The text and the opening of the model's next turn."""
    return f"{message_content}<|start|>assistant"


def build_gpt_oss_tool_response_text(messages: Sequence[Mapping[str, Any]], tool_call_names: Sequence[str]) -> str:
    """The answers of tools and the opening of the model's next turn."""
    pairs = zip(messages, tool_call_names, strict=True)
    return add_generation_prompt_for_gpt_oss(
        "".join(format_gpt_oss_tool_response_manually(message["content"], name) for message, name in pairs)
    )


# ------------------------------------------------------------------------------------------------ tracking


class Tracking:
    """A logger of programs beside a run: `log` to the console and to trackers. A tracker that cannot be used raises
    `verl.tracking.trackers.Unavailable`."""

    def __init__(
        self, project_name: str, experiment_name: str, default_backend: Any = "console", config: Any = None
    ) -> None:
        from verl.tracking.trackers import ALIASES, TrackerSession, open_tracker

        names = [default_backend] if isinstance(default_backend, str) else list(default_backend)
        session = TrackerSession(project_name, experiment_name, Path(os.getcwd()), _plain(config))
        self.console = "console" in names
        self.logger = {n: open_tracker(ALIASES.get(n, n), session, print) for n in names if n != "console"}

    def log(self, data: Mapping[str, Any], step: int, backend: Any = None) -> None:
        """Numbers of a step, to all trackers or to the named ones."""
        if self.console and (backend is None or "console" in backend):
            print(f"step:{step} - " + " - ".join(f"{name}:{value}" for name, value in data.items()))
        for name, tracker in self.logger.items():
            if backend is None or name in backend:
                tracker.log(step, {key: float(value) for key, value in data.items()})

    def finish(self, exit_code: int = 0) -> None:
        """Write everything out."""
        for tracker in self.logger.values():
            tracker.close()
        self.logger = {}
