"""Roles on a Ray cluster: devices are set aside, workers started, joined and filled with models."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from verl.config import Config
from verl.config.layout import own_pools, sampler_devices
from verl.config.schema.fields import for_elsewhere
from verl.platform import platform_of, thread_stacks
from verl.tracking.hooks import SILENT, RunHooks
from verl.tracking.profiler import nsight_options, plan_of
from verl.workers.build import judge_config
from verl.workers.compare_nodes import needs_of
from verl.workers.group import WorkerGroup
from verl.workers.ray.actors import RolloutActor, SpanningActor, WorkerActor, WorkerProfiler
from verl.workers.ray.calls import RayCalls, WorkerDied, WorkerHandle, kill
from verl.workers.ray.cluster import LOOPBACK, Cluster, address_of
from verl.workers.ray.nodes import Agents
from verl.workers.ray.placement import DevicePool, share_cores
from verl.workers.ray.remote_weight_sync import RemoteWeightSync
from verl.workers.ray.replicas import Replica, ReplicaPool, end_workers
from verl.workers.ray.watch import ClusterLost, Watch
from verl.workers.roles import WorkerSet, critic_plan, roles_of, update_plan

_RESTART_S, _PATIENCE = 180.0, 3.0
"""A sampler that is started again has so many seconds, or so many times as long as the first start took."""


def start_on_cluster(config: Config, hooks: RunHooks = SILENT, total_steps: int | None = None) -> WorkerSet:
    """Start or join Ray and place every role; without `total_steps` samplers alone, on the devices of `trainer.*`, with
    the weights of the model's files. UserError for a cluster or a model that cannot be used."""
    builder = _Builder(config, hooks)
    try:
        return builder.build_samplers() if total_steps is None else builder.build(total_steps)
    except BaseException:
        builder.release()
        raise


class _Builder:
    """One start. `release` frees what was taken so far."""

    def __init__(self, config: Config, hooks: RunHooks):
        self.config, self.hooks = config, hooks
        self.began = time.monotonic()
        address = address_of(config)
        self._say(f"joining the Ray cluster at {address}" if address else "starting Ray")
        self.cluster = Cluster(config, str(config.trainer.device))
        self.plain = for_elsewhere(config)
        self.pools: list[DevicePool] = []
        self.agents: Agents | None = None
        self.pool: ReplicaPool | None = None
        self.watch = Watch(self._on_death, hooks.phase)
        self.workers: list[WorkerHandle] = []
        self.ranks: list[tuple[str, WorkerHandle]] = []
        self.replicas: list[Replica] = []
        self.restart_limit = _RESTART_S
        self.groups: list[RayCalls] = []
        hooks.watch(self._stacks)

    def build(self, total_steps: int) -> WorkerSet:
        config, rollout = self.config, self.config.actor_rollout_ref.rollout
        self.kind = self.plain["trainer"]["device"] = self.cluster.settle_kind()
        trainer = self._pool("training", "trainer", config.trainer.nnodes, config.trainer.n_gpus_per_node)
        separate = rollout.nnodes > 0
        apart = {
            name: self._pool(name.replace("_", " "), pool.keys, pool.nodes, pool.per_node)
            for name, pool in own_pools(config).items()
        }
        sampling = trainer
        if separate:
            name = "actor_rollout_ref.rollout"
            sampling = self._pool("sampling", name, rollout.nnodes, rollout.n_gpus_per_node)
        share_cores(self.cluster, self.pools)
        self._check_nodes()
        self._say(f"starting {_some(trainer.devices, 'training worker')} on {_some(trainer.nodes, 'node')}")
        group, nodes, devices = self._ranks_of(trainer, "training worker")
        judge = self._judge(apart.pop("judge")) if "judge" in apart else None
        groups = {name: self._ranks_of(pool, f"{name.replace('_', ' ')} worker")[0] for name, pool in apart.items()}
        replicas = self.replicas = self._samplers(sampling, None if separate else devices)
        if guests := separate and rollout.trainer_memory_utilization > 0:
            replicas += self._guests(trainer, devices, len(replicas))
        engines = self._group([replica.worker for replica in replicas])
        self._say(f"loading the model, starting {_some(len(replicas), 'sampler')}")
        loading = {name: calls.start("build", total_steps, False, name) for name, calls in groups.items()}
        facts = self._load(group, engines, total_steps, separate and not guests)
        training = self._worker_group(group, facts)
        roles = roles_of(training, config)
        for name, calls in groups.items():
            role_facts = calls.wait(loading[name], f"loading the {name.replace('_', ' ')}")
            roles |= roles_of(self._worker_group(calls, role_facts), config)
        ranks = [handle for _, handle in self.ranks]
        pool = self._watched(replicas, ranks)
        words = f"{_some(len(group), 'rank')} on {_some(trainer.nodes, 'node')}, each {facts[0]['device']}"
        words += "".join(f"; {_some(len(calls), 'rank')} of the {name}" for name, calls in groups.items())
        limit = float(config.actor_rollout_ref.nccl_timeout)
        sync, plan = RemoteWeightSync(training, nodes, pool, limit), plan_of(config, "driver")
        return WorkerSet(
            roles,
            pool,
            sync,
            f"{words}; {_some(len(replicas), 'sampler')}",
            devices=sum(pool.devices for pool in self.pools),
            judge=judge,
            release=self.release,
            profiler=None if plan is None else WorkerProfiler(ranks, pool, plan),
        )

    def build_samplers(self) -> WorkerSet:
        """Samplers on all devices of the training pool, which has no ranks."""
        trainer = self.config.trainer
        self.kind = self.plain["trainer"]["device"] = self.cluster.settle_kind()
        pool = self._pool("sampling", "trainer", trainer.nnodes, trainer.n_gpus_per_node)
        share_cores(self.cluster, self.pools)
        self._check_nodes()
        replicas = self.replicas = self._samplers(pool, None)
        engines = self._group([replica.worker for replica in replicas])
        self._say(f"starting {_some(len(replicas), 'sampler')} on {_some(trainer.nnodes, 'node')}")
        self._note_processes(engines, "pid", "starting the samplers")
        starting, began = engines.start("start"), time.monotonic()
        self._note_started(engines.wait(starting, "starting the samplers"), began)
        words = f"{_some(len(replicas), 'sampler')} on {_some(trainer.nnodes, 'node')}, each {self.kind}"
        sampler = self._watched(replicas)
        return WorkerSet({}, sampler, None, words, devices=pool.devices, release=self.release)

    def _judge(self, pool: DevicePool) -> ReplicaPool:
        """Samplers of a judge's model on the devices of a pool, started."""
        config = judge_config(self.config)
        config.trainer.device = self.kind
        replicas = self._samplers(pool, None, config, "judge")
        engines = self._group([replica.worker for replica in replicas])
        self._say(f"starting {_some(len(replicas), 'judge')}")
        for replica, fact in zip(replicas, engines.call("start", doing="starting the judges"), strict=True):
            replica.started(fact)
        return ReplicaPool(replicas, event=self._of_sampler)

    def _guests(self, trainer: DevicePool, devices: list[list[str]], first: int) -> list[Replica]:
        """Samplers on the trainers' devices beside those of a pool of its own, numbered from `first`."""
        config = copy.deepcopy(self.config)
        rollout = config.actor_rollout_ref.rollout
        rollout.gpu_memory_utilization, rollout.nnodes = rollout.trainer_memory_utilization, 0
        rollout.n_gpus_per_node, config.trainer.device = config.trainer.n_gpus_per_node, self.kind
        return self._samplers(trainer, devices, config, first=first)

    def _watched(self, replicas: list[Replica], ranks: Sequence[WorkerHandle] = ()) -> ReplicaPool:
        """All workers are there: which process is which is recorded, and their deaths are noticed from now on."""
        workers = [*ranks, *(replica.worker for replica in replicas)]
        records = [{"name": worker.name, "node": worker.node, "pid": worker.pid} for worker in workers]
        self.hooks.event("workers", workers=records)
        self._say("all workers are ready")
        self.pool = ReplicaPool(replicas, event=self._of_sampler)
        self.watch.add(RayCalls(ranks))
        return self.pool

    def _say(self, message: str) -> None:
        """What happens outside of the loop, on the terminal, with the seconds since the start."""
        print(f"verl: {message} ({time.monotonic() - self.began:.0f} s)", file=sys.stderr, flush=True)

    def _check_nodes(self) -> None:
        """Agents on the nodes of the pools; UserError where a node is not like the driver's."""
        ids = {pool.node_of(bundle) for pool in self.pools for bundle in range(pool.nodes)}
        if len(ids) > 1:
            self._say(f"comparing {len(ids)} nodes")
        self.agents = Agents([node for node in self.cluster.nodes() if node.id in ids])
        for text in self.agents.check(needs_of(self.config)):
            self.hooks.notice(text)

    def _of_sampler(self, kind: str, **fields: Any) -> None:
        """An event of the pool, in the record and on the terminal."""
        self.hooks.event(kind, **fields)
        if kind == "sampler_died":
            self._say(f"{fields['sampler']} died: {fields['reason']}; it is started again")
        elif kind == "sampler_restarted":
            who = f"{fields['sampler']} (node {fields['node']}, process {fields['pid']})"
            self._say(f"{who} is there again; {fields['asked_again']} responses are asked for again")

    def _on_death(self, error: WorkerDied) -> None:
        lost = isinstance(error, ClusterLost)
        self.hooks.event("cluster_lost" if lost else "worker_died", error=str(error))
        if self.pool is not None:
            self.pool.end(error)

    def _stacks(self) -> str:
        """For the watchdog: who is waited for, what each of them does, and where it stands."""
        calling = [group.calling for group in self.groups if group.calling]
        waited = [worker for group in self.groups for worker in group.waiting]
        pairs = [(node, worker) for node, worker in self.ranks if worker in waited]
        pairs += [(r.node, r.worker) for r in self.replicas if r.requests or not waited or r.worker in waited]
        texts = {} if self.agents is None else self.agents.stacks(pairs)
        lines = [f"{name} {thread_stacks.summary(text)}" for name, text in texts.items()]
        whole = [f"--- {name}:\n{text}" for name, text in texts.items()]
        return "\n".join([*calling, *lines, *whole]).strip()

    def _group(self, workers: list[WorkerHandle]) -> RayCalls:
        """Workers that the watchdog knows are called together."""
        self.groups.append(RayCalls(workers, self.hooks.beat))
        return self.groups[-1]

    def _pool(self, name: str, keys: str, nodes: int, per_node: int) -> DevicePool:
        label = f"the {name} pool ({keys}.nnodes={nodes}, {keys}.n_gpus_per_node={per_node})"
        timeout = self.config.trainer.ray_wait_register_center_timeout
        pool = DevicePool(self.cluster, label, nodes, per_node, timeout, self.hooks.notice)
        pool.runtime_env = nsight_options(self.config)
        pool.variables = {name: str(value) for name, value in (self.config.select("trainer.worker_env") or {}).items()}
        self.pools.append(pool)
        return pool

    def _load(self, group: RayCalls, engines: RayCalls, total_steps: int, apart: bool) -> list[dict[str, Any]]:
        """Models into the trainers, engines into the samplers; what each training worker says of itself."""
        building = group.start("build", total_steps)
        self._note_processes(engines, "pid", "starting the samplers")
        facts = group.wait(building, "loading the model") if _take_turns(self.kind, apart) else []
        starting, began = engines.start("start"), time.monotonic()
        facts = facts or group.wait(building, "loading the model")
        self._note_started(engines.wait(starting, "starting the samplers"), began)
        return facts

    def _note_processes(self, workers: RayCalls, method: str, doing: str) -> None:
        """By a call that returns their ids, before they load anything: the stack of one that hangs can be read."""
        for worker, pid in zip(workers.workers, workers.call(method, doing=doing), strict=True):
            worker.pid = pid

    def _note_started(self, facts: list[dict[str, Any]], began: float) -> None:
        for replica, fact in zip(self.replicas, facts, strict=True):
            replica.started(fact)
        self.restart_limit = max(_RESTART_S, _PATIENCE * (time.monotonic() - began))

    def _worker_group(self, calls: RayCalls, facts: list[dict[str, Any]]) -> WorkerGroup:
        plan = critic_plan if facts[0]["roles"] == ["critic"] else update_plan
        return WorkerGroup(calls, facts, plan=plan(self.config), balance=self.config.trainer.balance_batch)

    def _ranks_of(self, pool: DevicePool, label: str) -> tuple[RayCalls, list[str], list[list[str]]]:
        """Ranks on all devices of a pool, which have met; the node of each, and the ids of its devices."""
        bundles = [rank // pool.per_node for rank in range(pool.devices)]
        nodes, addresses = [pool.node_of(bundle) for bundle in bundles], self.cluster.addresses()
        workers: list[WorkerHandle] = []
        for rank, (bundle, node) in enumerate(zip(bundles, nodes, strict=True)):
            options = pool.owner_options(bundle, 1)
            handle = WorkerActor.options(**options).remote(self.plain, rank, pool.devices)
            workers.append(WorkerHandle(handle, f"{label} {rank}", addresses[node]))
        self.workers += workers
        self.ranks += zip(nodes, workers, strict=True)
        group, doing = self._group(workers), "starting the workers"
        self._note_processes(group, "prepare", doing)
        address = LOOPBACK if len(set(nodes)) == 1 else addresses[nodes[0]]
        port = self._group(workers[:1]).call("free_port", address, doing=doing)[0]
        group.call("join", address, port, doing="joining the training ranks")
        return group, nodes, group.call("device_ids", doing=doing)

    def _samplers(
        self,
        pool: DevicePool,
        shared: list[list[str]] | None,
        config: Config | None = None,
        label: str = "sampler",
        first: int = 0,
    ) -> list[Replica]:
        """Replicas of `sampler_devices` each, of one node or of whole ones, not started; if `shared`, on the ranks'
        devices.

        config: what they are built from, if it is not the run's; label: their names begin with it; first: the number of
        the first, above 0 for guests of the trainers beside a pool of its own.
        """
        size = sampler_devices((config or self.config).actor_rollout_ref.rollout)
        plain = self.plain if config is None else for_elsewhere(config)
        spanned, local = max(1, size // pool.per_node), min(size, pool.per_node)
        replicas = []
        for number in range(first, first + pool.devices // size):
            bundle, place = divmod((number - first) * size, pool.per_node)
            options = []
            for each in range(bundle, bundle + spanned):
                if shared is None:
                    options.append(pool.owner_options(each, local))
                else:
                    rank = each * pool.per_node + place
                    visible = [device for devices in shared[rank : rank + local] for device in devices]
                    options.append(pool.guest_options(each, visible))
            node = pool.node_of(bundle)
            create = partial(self._sampler, pool, bundle, options, plain, number, label)
            again = partial(self._sampler_again, pool, bundle, create)
            replicas.append(Replica(number, again, create(node), node, guest=first > 0))
        return replicas

    def _sampler(
        self,
        pool: DevicePool,
        bundle: int,
        options: list[dict[str, Any]],
        plain: dict[str, Any],
        number: int,
        label: str,
        node: str,
    ) -> WorkerHandle:
        """The process of a sampler, on `node`; its engine is not there yet. It ends with the run. options: of its
        actor, and of those on the nodes of the bundles that follow."""
        addresses, arguments, kind = self.cluster.addresses(), [plain, number], RolloutActor
        if len(options) > 1:
            nodes = [pool.node_of(bundle + i) for i in range(1, len(options))]
            others = [(other, addresses[other], o) for other, o in zip(nodes, options[1:], strict=True)]
            kind, arguments = SpanningActor, [*arguments, (node, addresses[node]), others]
        handle = kind.options(**options[0]).remote(*arguments)
        worker = WorkerHandle(handle, f"{label} {number}", addresses[node])
        self.workers.append(worker)
        return worker

    def _sampler_again(
        self, pool: DevicePool, bundle: int, create: Callable[[str], WorkerHandle]
    ) -> tuple[WorkerHandle, str, dict[str, Any]]:
        """A sampler in the place of one that died: see `Replica.start`."""

        def start(node: str) -> tuple[WorkerHandle, dict[str, Any]]:
            worker = create(node)
            group = RayCalls([worker])
            try:
                return worker, group.wait(group.start("start"), "starting a sampler again", self.restart_limit)[0]
            except BaseException:
                end_workers([worker])  # it may live, and the next one needs its memory
                raise

        (worker, facts), node = pool.again(bundle, start)
        return worker, node, facts

    def release(self) -> None:
        """End the workers, give the devices back, stop a Ray of our own."""
        self.watch.stop()
        if self.agents is not None:
            self.agents.release()
        for worker in self.workers:
            kill(worker.handle)
        for pool in self.pools:
            pool.release()
        self.cluster.close()


def _take_turns(kind: str, apart: bool) -> bool:
    """True if samplers may start only when the trainers have their models: on shared devices, a sampler sizes its cache
    by how the free memory changes while it starts, and vLLM gives up when some becomes free."""
    return not platform_of(kind).on_host and not apart


def _some(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
