"""Sampling with vLLM. vllm itself is imported when an engine is made, not with these modules."""
