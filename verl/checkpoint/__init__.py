"""Sealed checkpoints: written beside, synced, sealed by a manifest, renamed; the newest complete one is found again.

`write.save` writes, `read.newest` / `read.open_checkpoint` / `read.resolve_resume` find and verify,
`layouts` recognises the directories of other systems, `rng` keeps random states. No torch on import.
"""

from verl.checkpoint.manifest import CheckpointError
from verl.checkpoint.read import Checkpoint, newest, open_checkpoint, resolve_resume
from verl.checkpoint.write import save

__all__ = ["Checkpoint", "CheckpointError", "newest", "open_checkpoint", "resolve_resume", "save"]
