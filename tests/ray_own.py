"""A plug-in, and what `ray start` imports: the workers of a Ray that this process starts are forked, see
`ray_setup_worker`."""

from __future__ import annotations

import os
from typing import Any

from ray._private.parameter import RayParams

from tests import ray_setup_worker

_init = RayParams.__init__


def _with_shim(self: Any, *arguments: Any, **options: Any) -> None:
    shim = ray_setup_worker.__file__
    _init(self, *arguments, **{"worker_path": shim, "setup_worker_path": shim, **options})


if ray_setup_worker.SERVER in os.environ:
    RayParams.__init__ = _with_shim
