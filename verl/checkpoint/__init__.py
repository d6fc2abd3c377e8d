"""Sealed checkpoints: written beside, synced, sealed by a manifest, renamed; the newest complete one is found again.

`write.CheckpointWriter` writes, `read.newest` / `read.open_checkpoint` / `read.resolve_resume` find and verify,
`rng` keeps random states. No torch on import.
"""

from verl.checkpoint.manifest import CheckpointError
from verl.checkpoint.read import Checkpoint, newest, open_checkpoint, resolve_resume

__all__ = ["Checkpoint", "CheckpointError", "newest", "open_checkpoint", "resolve_resume"]
