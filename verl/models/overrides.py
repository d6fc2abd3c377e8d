"""`model.override_config`: values of a model's configuration that the user replaces, positions included.

transformers keeps what used to be `rope_theta` and `rope_scaling` in one mapping, `rope_parameters`, per kind of
layer where layers differ. The old names are still what users write; here they reach that mapping.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.config.model_facts import flat_overrides
from verl.errors import UserError

_IGNORED = ("attn_implementation", "_attn_implementation")
"""Attention always goes through ours."""
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters")


def apply(config: Any, overrides: Mapping[str, Any]) -> None:
    """Set every override on the configuration, or on its text part; `model_config` may hold some of them.

    UserError for a field that there is not, and for a value that cannot take effect.
    """
    for name, value in flat_overrides(overrides).items():
        if name in _IGNORED:
            continue
        holder = _holder(config, name)
        if name in _ROPE and isinstance(getattr(holder, "rope_parameters", None), dict):
            _set_rope(holder, name, value)
        elif isinstance(value, Mapping) and hasattr(getattr(holder, name), "to_dict"):
            apply(getattr(holder, name), value)
        else:
            try:
                setattr(holder, name, value)
            except Exception as error:  # of transformers' own, which derives from nothing else
                raise UserError(f"model.override_config.{name}={value!r}: {error}") from error


def _holder(config: Any, name: str) -> Any:
    """The configuration that has the field: the model's own, else its text part's."""
    for candidate in (config, config.get_text_config()):
        there = hasattr(candidate, name) and not callable(getattr(candidate, name))
        if there or (name in _ROPE and hasattr(candidate, "rope_parameters")):
            return candidate
    raise UserError(f"model.override_config.{name}: a {type(config).__name__} has no such field")


def _set_rope(config: Any, name: str, value: Any) -> None:
    """Write a positions override into `rope_parameters`, whose other entries stay."""
    parameters = {k: dict(v) if isinstance(v, dict) else v for k, v in config.rope_parameters.items()}
    kinds = [k for k, v in parameters.items() if isinstance(v, dict)]
    if name == "rope_theta":
        if kinds:
            raise UserError(
                f"model.override_config.rope_theta={value}: the layers of a {type(config).__name__} differ "
                f"({', '.join(kinds)}): set model.override_config.rope_parameters.{kinds[0]}.rope_theta"
            )
        parameters["rope_theta"] = float(value)
    elif not isinstance(value, Mapping):
        raise UserError(
            f"model.override_config.{name}={value!r}: give a mapping, as {{rope_type:yarn,factor:4.0}}"
        )
    elif kinds and set(value) <= set(kinds):
        for kind, inner in value.items():
            parameters[kind] = _merged(parameters[kind], inner)
    elif kinds:
        raise UserError(
            f"model.override_config.{name}: the layers of a {type(config).__name__} differ; name the kind of layer "
            f"({', '.join(kinds)}) first"
        )
    else:
        parameters = _merged(parameters, value)
    config.rope_parameters = parameters
    try:
        config.standardize_rope_params()
        config.validate_rope()
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"model.override_config.{name}={value!r}: {error.args[0]}") from error


def _merged(parameters: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters with those given in their place; another kind of scaling keeps nothing of the old but theta."""
    new = dict(given)
    if "type" in new:
        new.setdefault("rope_type", new.pop("type"))
    if new.get("rope_type", parameters.get("rope_type")) != parameters.get("rope_type"):
        parameters = {k: v for k, v in parameters.items() if k in ("rope_theta", "partial_rotary_factor")}
    return {**parameters, **new}
