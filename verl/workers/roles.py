"""What a controller hands to the loop: the roles, wherever they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl.engine.rollout.base import RolloutEngine
    from verl.profiling.profiler import Profiler
    from verl.weight_sync.base import WeightSync
    from verl.workers.actor import ActorRole
    from verl.workers.reference import ReferenceRole


@dataclass(slots=True)
class Roles:
    """What the loop talks to.

    devices  training and sampling devices together, for rates per device
    release  gives the workers back at the end of a run
    profiler of all processes that the roles run in; None when nothing is to be profiled
    """

    actor: ActorRole
    reference: ReferenceRole | None
    sampler: RolloutEngine
    weight_sync: WeightSync
    devices: int = 1
    release: Callable[[], None] | None = None
    profiler: Profiler | None = None

    def close(self) -> None:
        """Write what there is of a profile, stop sampling, then give everything back."""
        if self.profiler is not None:
            self.profiler.close()
        self.sampler.close()
        if self.release is not None:
            self.release()
