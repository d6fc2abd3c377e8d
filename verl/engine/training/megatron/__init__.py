"""The Megatron training engine: tensor, pipeline, context and expert parallelism by megatron-core."""
