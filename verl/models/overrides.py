"""`model.override_config`: values of a model's configuration that the user replaces, positions included.

transformers keeps what used to be `rope_theta` and `rope_scaling` in one mapping, `rope_parameters`, per kind of
layer where layers differ. The old names are still what users write; here they reach that mapping.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from huggingface_hub.errors import StrictDataclassFieldValidationError

from verl.config.matching import nearest
from verl.config.model_facts import flat_overrides, merged_positions
from verl.errors import UserError
from verl.platform.host_resources import prepare_process

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

IGNORED = ("attn_implementation", "_attn_implementation")
"""Attention always goes through ours."""
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters")


def refused(folder: Path, overrides: Mapping[str, Any]) -> dict[str, str]:
    """Why overrides cannot be applied to the configuration in a folder, by name; it imports transformers and torch.

    Empty where that configuration itself cannot be read, which loading the model reports.
    """
    prepare_process()
    from transformers import AutoConfig

    try:
        config, original = AutoConfig.from_pretrained(folder), AutoConfig.from_pretrained(folder)
    except (OSError, ValueError):
        return {}
    problems = apply(config, overrides)
    if not problems and (why := _unbuildable(config)) and not _unbuildable(original):
        problems[", ".join(overrides)] = f"no model can be built so: {why}"
    return problems


def _unbuildable(config: PreTrainedConfig) -> str:
    """Why no model can be built of a configuration, on the meta device; "" if one can."""
    import torch
    from transformers import AutoModel

    try:
        config.validate()
        with torch.device("meta"):
            AutoModel.from_config(config)
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())
    return ""


def apply(config: PreTrainedConfig, overrides: Mapping[str, Any], within: str = "") -> dict[str, str]:
    """Set every override on the configuration, or on its text part; `model_config` may hold some of them.

    Returns by name why overrides were not set: unknown fields, values that cannot take effect. `within` precedes the
    names of a part of a configuration.
    """
    refused: dict[str, str] = {}
    for name, value in flat_overrides(overrides).items():
        if name in IGNORED:
            continue
        try:
            holder = _holder(config, name)
            if name in _ROPE and isinstance(getattr(holder, "rope_parameters", None), dict):
                _set_rope(holder, name, value)
            elif hasattr(part := getattr(holder, name, None), "to_dict"):
                if not isinstance(value, Mapping):
                    raise UserError(f"give a mapping of the fields of its {type(part).__name__}")
                refused |= apply(cast(Any, part), value, f"{within}{name}.")
            else:
                setattr(holder, name, value)
        except (UserError, StrictDataclassFieldValidationError) as error:
            refused[within + name] = " ".join(str(error).split())
    return refused


def _holder(config: PreTrainedConfig, name: str) -> Any:
    """The configuration that has the field: the model's own, else its text part's."""
    for candidate in (config, config.get_text_config()):
        has_field = hasattr(candidate, name) and not callable(getattr(candidate, name))
        if has_field or (name in _ROPE and hasattr(candidate, "rope_parameters")):
            return candidate
    fields = {*config.to_dict(), *config.get_text_config().to_dict()}
    raise UserError(f"a {type(config).__name__} has no such field{nearest(name, fields)}")


def _set_rope(config: PreTrainedConfig, name: str, value: Any) -> None:
    """Write a positions override into `rope_parameters`, whose other entries stay."""
    parameters = {k: dict(v) if isinstance(v, dict) else v for k, v in config.rope_parameters.items()}
    kinds = [k for k, v in parameters.items() if isinstance(v, dict)]
    if name == "rope_theta":
        if kinds:
            raise UserError(
                f"the layers of a {type(config).__name__} differ ({', '.join(kinds)}): "
                f"set rope_parameters.{kinds[0]}.rope_theta"
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise UserError("give a positive number")
        parameters["rope_theta"] = float(value)
    elif not isinstance(value, Mapping):
        raise UserError("give a mapping, as {rope_type:yarn,factor:4.0}")
    elif kinds and set(value) <= set(kinds):
        for kind, inner in value.items():
            parameters[kind] = merged_positions(parameters[kind], inner)
    elif kinds:
        raise UserError(
            f"the layers of a {type(config).__name__} differ; name the kind of layer ({', '.join(kinds)}) first"
        )
    else:
        parameters = merged_positions(parameters, value)
    config.rope_parameters = parameters
    try:
        config.standardize_rope_params()
        config.validate_rope()
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(str(error.args[0])) from error
