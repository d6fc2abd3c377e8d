"""Sampling with SGLang, which is imported when an engine is made, not with these modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl.config.model_facts import QWEN_VISION
from verl.engine.registry import Capabilities, EngineCheck, NodePart, RolloutEngineRecord
from verl.engine.rollout.sglang import kwargs

if TYPE_CHECKING:
    from verl.config.schema.entries import Config


class SGLang(RolloutEngineRecord):
    """See `RolloutEngineRecord`."""

    name = "sglang"
    builder = "verl.engine.rollout.sglang.engine:build"
    packages = ("sglang",)
    versions = "==0.5.23"
    install = "install it in an environment of its own (docs/sglang.md), or set rollout.name=native or vllm"
    capabilities = Capabilities(
        several_nodes=True,
        lora_experts=False,
        lora_head=False,
        images=QWEN_VISION,
        routes=True,
        sampling_mask=True,
    )
    environment = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}  # noqa: RUF012
    unread = {  # noqa: RUF012
        "multi_stage_wake_up disable_log_stats calculate_log_probs": "the sglang engine always does what is best here",
        "logprobs_mode": "log-probs are of the distribution that is sampled from",
        "cudagraph_capture_sizes scheduling_policy skip_tokenizer_init": "the sglang engine decides it by itself",
    }

    def check(self, check: EngineCheck) -> None:
        """See `EngineRecord.check`."""
        kwargs.check(check, self.installed)

    def span(self, config: Config, part: NodePart) -> None:
        """See `RolloutEngineRecord.span`."""
        meeting = {"nnodes": part.count, "dist_init_addr": f"{part.first_address}:{part.port}"}
        config.actor_rollout_ref.rollout.engine_kwargs.sglang |= {"node_rank": part.number, **meeting}


ENGINE = SGLang()
