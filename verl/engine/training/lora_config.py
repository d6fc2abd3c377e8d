"""Which adapters are asked for: the `model.lora_*` keys, and peft's configuration of them or of a given adapter."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.config.model_facts import ADAPTER_CONFIG, read_adapter_config
from verl.config.model_facts import adapter_directory as find_adapter
from verl.engine.training.settings import read
from verl.errors import UserError

ALL_LINEAR = "all-linear"


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
        rank, path = int(read(model_cfg, "lora_rank", 0)), read(model_cfg, "lora_adapter_path")
        if rank <= 0 and not path:
            return None
        return cls(
            rank,
            float(read(model_cfg, "lora_alpha", 16)),
            _patterns(read(model_cfg, "target_modules", ALL_LINEAR)),
            _patterns(read(model_cfg, "exclude_modules") or ()),
            find_adapter(path) if path else None,
            str(base),
        )

    def described(self) -> dict[str, Any]:
        """What adapter_config.json says, as far as a server needs it; the adapter's own file where there is one."""
        if self.adapter is not None:
            return read_adapter_config(self.adapter)
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": peft_pattern(self.targets),
            "exclude_modules": peft_pattern(self.exclude),
            "bias": "none",
        }


def import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise UserError(
            f"model.lora_rank asks for LoRA, which needs peft, and it cannot be imported ({error}): "
            "pip install 'verl[lora]', or set model.lora_rank=0"
        ) from error
    return peft


_PLAIN = {"bias": "none", "modules_to_save": None, "layer_replication": None, "trainable_token_indices": None}
_SWITCHES = ("use_dora", "lora_bias", "use_qalora", "use_bdlora", "alora_invocation_tokens")
_NO_EFFECT = ("megatron_config", "runtime_config", "loftq_config")
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")


def peft_config(peft: Any, settings: LoraSettings) -> Any:
    """peft's LoraConfig: new, or the given adapter's. UserError for an adapter that is more than A and B."""
    if settings.adapter is None:
        return peft.LoraConfig(
            r=settings.rank,
            lora_alpha=int(settings.alpha) if settings.alpha == int(settings.alpha) else settings.alpha,
            target_modules=peft_pattern(settings.targets),
            exclude_modules=peft_pattern(settings.exclude),
            task_type="CAUSAL_LM",
            base_model_name_or_path=settings.base,
        )
    where = settings.adapter / ADAPTER_CONFIG
    try:
        config = peft.PeftConfig.from_pretrained(str(settings.adapter))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{where}: peft cannot read it: {error}") from error
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind != "LORA":
        raise UserError(f"{where}: peft_type={kind}; LORA is what can be trained here")
    odd = [f"{k}={getattr(config, k)!r}" for k, v in _PLAIN.items() if (getattr(config, k, None) or v) != v]
    for name, value in vars(config).items():
        if value and (name in _SWITCHES or (name.endswith("_config") and name not in _NO_EFFECT)):
            odd.append(f"{name}={value!r}")
    start = config.init_lora_weights
    if isinstance(start, str) and start.startswith(_CHANGES_BASE):
        odd.append(f"init_lora_weights={start!r}, which changes the base weights")
    if odd:
        raise UserError(f"{where}: {'; '.join(odd)}; adapters here are A and B of linear layers alone")
    if settings.rank > 0 and config.r != settings.rank:
        raise UserError(
            f"model.lora_rank={settings.rank}, but the adapter of model.lora_adapter_path has rank {config.r} ({where}): "
            f"set model.lora_rank={config.r}"
        )
    config.lora_dropout = 0.0
    config.base_model_name_or_path = settings.base
    return config


def peft_pattern(patterns: tuple[str, ...]) -> str | list[str] | None:
    """As peft takes it: the word all-linear, one regular expression, or names that modules end with."""
    if not patterns:
        return None
    if len(patterns) == 1 and (patterns[0] == ALL_LINEAR or _is_expression(patterns[0])):
        return patterns[0]
    return list(patterns)


def _patterns(given: Any) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(str(g) for g in given)


def _is_expression(pattern: str) -> bool:
    return re.fullmatch(r"[\w.\-]+", pattern) is None


def said(patterns: Iterable[str]) -> str:
    return f"[{', '.join(patterns)}]"
