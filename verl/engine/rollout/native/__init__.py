"""The embedded sampler: continuous batching in the trainer's process, on the trainer's weights."""

from verl.engine.rollout.native.engine import NativeEngine

__all__ = ["NativeEngine"]
