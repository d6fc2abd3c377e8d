"""Workers on many devices, as Ray actors. The only part that imports ray.

driver: loop, schedule, rewards      cluster       start or join Ray; what its nodes have
   │ WorkerGroup over RayCalls       nodes         one agent a node: facts before the start, stacks of a hung worker
   │ ReplicaPool, RemoteWeightSync   placement     which devices of which node a role gets
   ▼                                 calls         calls to a group of actors; who died, and why
Worker × devices, RolloutWorker × engines
"""
