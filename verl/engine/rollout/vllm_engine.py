"""The import path of `VLLMEngine` that users' scripts name."""

from verl.engine.rollout.vllm.engine import VLLMEngine as VLLMEngine
