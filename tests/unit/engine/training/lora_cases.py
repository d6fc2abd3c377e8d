"""What the tests of adapters share: settings, and adapters moved away from their start, where they do nothing."""

from __future__ import annotations

from typing import Any

import torch

from tests.unit.engine.training.fsdp_cases import drive, role, rows, shares, total

RANK = 4


def lora(**more: Any) -> dict[str, Any]:
    """A model group with LoRA."""
    return {"lora_rank": RANK, "lora_alpha": 8, **more}


def trained(**changes: Any) -> dict[str, Any]:
    """A role whose steps move."""
    return role(optim={"lr": changes.pop("lr", 1e-2)}, **changes)


def engine(path: str, role_cfg: dict[str, Any] | None = None, **more: Any) -> Any:
    """One on this process, with LoRA."""
    from verl.engine.training.fsdp.engine import FSDPEngine

    return FSDPEngine(path, role_cfg=role_cfg or trained(), model_cfg=lora(**more), device="cpu")


def disturb(one: Any, size: float = 0.05) -> None:
    """Give B values, the same on any number of ranks, so that the adapter does something."""
    from verl.engine.training.process_group import take_share

    with torch.no_grad():
        for number, (name, parameter) in enumerate(one.module.named_parameters()):
            if ".lora_B." in name:
                generator = torch.Generator().manual_seed(number)
                take_share(parameter, torch.randn(parameter.shape, generator=generator) * size)


def on_ranks(path: str, cases: dict[str, tuple[dict[str, Any], dict[str, Any], str]], steps: int = 1) -> Any:
    """As `fsdp_cases.on_ranks`, with adapters that do something."""
    from verl.engine.training.fsdp.engine import FSDPEngine

    out = {}
    for name, (role_cfg, model_cfg, kind) in cases.items():
        one = FSDPEngine(path, role_cfg=role_cfg, model_cfg=model_cfg, device="cpu")
        disturb(one)
        mine = shares(kind, one.dp_size)[one.dp_rank]
        chosen = [rows()[i] for i in mine]
        with one.without_adapter():
            base = one.forward(chosen, temperature=1.0)["log_probs"]
        out[name] = drive(one, chosen, total(), steps) | {"rows": mine, "base": base}
    return out


def locally(path: str, role_cfg: dict[str, Any], model_cfg: dict[str, Any], steps: int = 1) -> Any:
    """The same on one device."""
    from verl.engine.training.fsdp.engine import FSDPEngine

    one = FSDPEngine(path, role_cfg=role_cfg, model_cfg=model_cfg, device="cpu")
    disturb(one)
    with one.without_adapter():
        base = one.forward(rows(), temperature=1.0)["log_probs"]
    return drive(one, rows(), total(), steps) | {"base": base}
