"""Parts of the vLLM engine. Nothing here but `adapter`, `worker` and `host` imports vllm, and only when called."""
