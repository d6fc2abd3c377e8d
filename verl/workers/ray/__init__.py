"""Roles on many devices, as Ray actors behind the interfaces of one process. The only part that imports ray.

driver: loop, buffer, rewards        cluster   start or join Ray; what its nodes have
   │ ActorGroup, ReferenceGroup      nodes     one agent a node: facts before the start, stacks of a worker that hangs
   │ ReplicaPool, RemoteWeightSync        placement which devices of which node a role gets
   ▼                                 workers   calls to a group of actors; who died, and why
TrainWorker × devices, RolloutWorker × engines
"""

from verl.workers.ray.build import build_roles

__all__ = ["build_roles"]
