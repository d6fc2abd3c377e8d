"""What this release does not have yet. A later release deletes rows; nothing else changes.

`FEATURES`: (key, is it on?, what it is). `MACHINE`: the same for what counts as "this machine lacks", so that a
command written for a cluster passes its check up to the machine.
"""

from __future__ import annotations

MAX_DEVICES = 1
