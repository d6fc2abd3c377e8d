"""A LoRA adapter that SGLang adds to the model itself: what it is built with, and its replacement in place."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from verl.errors import UserError
from verl.weight_sync.verify import WeightSyncError

NAME = "policy"
_PREFIX = "base_model.model."
_PROJECTIONS = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"


def adapter_arguments(described: Mapping[str, Any], *, cpu: bool) -> dict[str, Any]:
    """Arguments of SGLang's ServerArgs. described: what adapter_config.json says. UserError for an adapter whose ranks
    or scales differ between modules, which SGLang does not look at."""
    if differing := [name for name in ("rank_pattern", "alpha_pattern") if described.get(name)]:
        raise UserError(
            f"SGLang passes over {differing[0]} of an adapter: "
            "set rollout.engine_kwargs.sglang.enable_lora=False, so that it gets merged weights"
        )
    modules = described["target_modules"]
    names = _PROJECTIONS.split() if isinstance(modules, str) else [name.rpartition(".")[2] for name in modules]
    return {
        "enable_lora": True,
        "max_lora_rank": int(described["r"]),
        "lora_target_modules": sorted(set(names)),
        "max_loras_per_batch": 1,
        "lora_strict_loading": True,
        **({"lora_backend": "torch_native"} if cpu else {}),
    }


class Adapter:
    """The adapter of one engine. described: what adapter_config.json says; payloads: see
    `EngineSettings.payloads`."""

    def __init__(self, described: Mapping[str, Any], payloads: Callable[[Any], list[bytes]]):
        rank, alpha = int(described["r"]), float(described["lora_alpha"])
        # SGLang computes alpha / r in any case.
        self._alpha = alpha * math.sqrt(rank) if described.get("use_rslora") else alpha
        self._rank, self._payloads = rank, payloads
        self._id: str | None = None

    async def place(self, manager: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the adapter in place of the one before, under the same id, so that requests under way go on with it.
        They must be paused. tensors: by names of peft's files less their prefix. WeightSyncError with SGLang's message.
        """
        from sglang.srt.managers.io_struct import LoadLoRAAdapterFromTensorsReqInput, UnloadLoRAAdapterReqInput

        weights = {_PREFIX + name: tensor for name, tensor in tensors.items()}
        modules = sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors})
        config = {"peft_type": "LORA", "r": self._rank, "lora_alpha": self._alpha, "target_modules": modules}
        payloads = self._payloads(weights)
        load = LoadLoRAAdapterFromTensorsReqInput(
            lora_name=NAME, config_dict=config, serialized_named_tensors=payloads, lora_id=self._id
        )
        if self._id is None:
            results = [await manager.load_lora_adapter_from_tensors(load)]
            self._id = load.lora_id
        else:
            # Past its book-keeping, which gives every adapter another id and waits for the requests of the one before.
            unload = UnloadLoRAAdapterReqInput(lora_name=NAME, lora_id=self._id)
            results = [*await manager.update_lora_adapter_communicator(unload)]
            results += await manager.update_lora_adapter_communicator(load)
        if failed := next((result for result in results if not result.success), None):
            raise WeightSyncError(f"SGLang did not take the adapter: {failed.error_message}")
