"""The parts on Ray on the shared cluster of four nodes, with hosts that have no model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.chaos.fork_server import until
from verl.config import load
from verl.engine.rollout.base import Completion, SamplingParams
from verl.errors import UserError
from verl.trajectory import Batch, Prompt, Trajectory

ray = pytest.importorskip("ray")
from tests import ray_stubs  # noqa: E402
from verl.workers.group import WorkerGroup  # noqa: E402
from verl.workers.ray.calls import NoRoom, RayCalls, WorkerDied, WorkerHandle  # noqa: E402
from verl.workers.roles import Role  # noqa: E402
from verl.workers.update_plan import UpdatePlan  # noqa: E402

OUTPUTS = {"log_probs": "old_log_probs", "entropy": "entropy"}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("ray_driver")]


def joined(kind: str) -> Any:
    from verl.workers.ray.cluster import Cluster

    return Cluster(load(["actor_rollout_ref.model.path=none"]), kind)


# -- placement --------------------------------------------------------------------------------------------------


def test_a_pool_of_four_nodes_gives_every_rank_its_own_device() -> None:
    from verl.workers.ray.placement import DevicePool

    pool = DevicePool(joined("npu"), "training", 4, 2, float("inf"), print)
    actor = ray.remote(ray_stubs.Where)
    owners = [actor.options(**pool.owner_options(rank // 2, 1)).remote() for rank in range(8)]
    seen = ray.get([owner.look.remote() for owner in owners])
    assert len({node for node, _ in seen}) == 4 and len(set(seen)) == 8, "two ranks a node, a device each"
    assert [node for node, _ in seen] == [pool.node_of(rank // 2) for rank in range(8)]
    guest = actor.options(**pool.guest_options(1, ["0", "1"])).remote()
    assert ray.get(guest.look.remote()) == (pool.node_of(1), "0,1"), "a sampler shares what the ranks own"
    with pytest.raises(UserError, match="another job holds them"):
        DevicePool(joined("npu"), "sampling", 1, 1, 2, print)
    for one in (*owners, guest):
        ray.kill(one)
    pool.release()


def test_a_pool_that_the_cluster_does_not_have_says_what_it_has() -> None:
    from verl.workers.ray.placement import DevicePool

    said: list[str] = []
    with pytest.raises(UserError, match=r"training asks for 5 nodes of 2 npu devices; the cluster has: .*2 devices"):
        DevicePool(joined("npu"), "training", 5, 2, 1.5, said.append)
    assert "waiting for nodes: 4 of 5" in said[0]
    with pytest.raises(UserError, match="1 node of 3 npu"):
        DevicePool(joined("npu"), "training", 1, 3, 0, print)
    with pytest.raises(UserError, match=r"1 node of 64 cpu devices, a rank needs a core; the cluster has: .*1 dev"):
        DevicePool(joined("cpu"), "training", 1, 64, 0, print)


def test_pools_share_a_node_as_far_as_it_has_devices(monkeypatch) -> None:
    from verl.workers.ray import placement
    from verl.workers.ray.placement import DevicePool

    monkeypatch.setattr(placement, "_QUIET_S", 0.5)
    said: list[str] = []
    first, second = (DevicePool(joined("npu"), name, 4, 1, 60, print) for name in ("training", "sampling"))
    assert [pool.devices for pool in (first, second)] == [4, 4]
    with pytest.raises(UserError, match="another job holds them, or two pools ask for the same ones"):
        DevicePool(joined("npu"), "more", 1, 1, 2, said.append)
    assert said[0].startswith("waiting for free devices: more; free in the whole cluster: ") and " 0 NPU" in said[0]
    first.release()
    second.release()


# -- groups -----------------------------------------------------------------------------------------------------


@pytest.fixture
def group(ray_driver):
    handles = [ray.remote(ray_stubs.Rank).options(num_cpus=0).remote() for _ in range(2)]
    yield RayCalls([WorkerHandle(h, f"training worker {i}", "here") for i, h in enumerate(handles)])
    for handle in handles:
        ray.kill(handle)


def test_answers_come_in_the_workers_order(group) -> None:
    assert group.call("work", each=[("a",), ("b",)]) == ["a", "b"] and group.waiting == []


@pytest.mark.parametrize(
    ("words", "error", "text"),
    [
        (("user", "ok"), "UserError", "^set another key$"),
        (("ok", "bug"), "WorkerFailed", "training worker 1 .* failed in phase: KeyError: 'lost'"),
        (("peer", "die"), "WorkerDied", "training worker 1 .* died in phase: .*killed by a signal"),
        (("die", "ok"), "WorkerDied", "training worker 0 .* died in "),
    ],
)
def test_what_went_wrong_is_said_as_the_user_needs_it(group, words, error, text) -> None:
    with pytest.raises(Exception, match=text) as caught:
        group.call("work", each=[(word,) for word in words], doing="phase")
    assert type(caught.value).__name__ == error


def test_a_batch_larger_than_the_object_store_goes_through(group) -> None:
    rng = np.random.default_rng(0)
    rows = []
    for number in range(40):
        prompt = Prompt(f"0:{number}@0", np.arange(5), messages=None)
        ids = rng.integers(0, 1 << 20, 600_000)
        rows.append(Trajectory(prompt, 0, response_ids=ids, response_mask=np.ones(len(ids), bool)))
    cfg = SimpleNamespace(ppo_mini_batch_size=20, ppo_epochs=1, shuffle=False)
    plan = UpdatePlan(cfg, max_response_length=1.0, batch_prompts=40)
    training = WorkerGroup(group, [{"dp_rank": rank} for rank in range(2)], plan=plan)
    Role("actor", training).forward(Batch(rows), "old_log_prob", OUTPUTS)
    for row in rows:
        assert np.array_equal(row.old_log_probs, row.response_ids.astype(np.float32))
        assert row.entropy is not None and row.entropy.flags.writeable


def test_a_worker_that_dies_while_nobody_calls_it_is_noticed() -> None:
    from verl.workers.ray.watch import Watch

    handle = ray.remote(num_cpus=0, concurrency_groups={"other": 1})(ray_stubs.Staying).remote()
    found: list[Exception] = []
    watch = Watch(found.append)
    watch.add(RayCalls([WorkerHandle(handle, "training worker 0", "here")]))
    os.kill(ray.get(handle.pid.remote()), signal.SIGKILL)
    until(lambda: found)
    watch.stop()
    assert "training worker 0" in str(found[0])


def test_a_meeting_port_that_was_taken_meanwhile_is_named_soon(ray_driver, monkeypatch) -> None:
    """The other rank waits for the first one for ten minutes; the user does not."""
    from verl.workers.ray import calls
    from verl.workers.ray.actors import WorkerActor

    monkeypatch.setattr(calls, "_GRACE_S", 1.0)
    plain = json.loads(json.dumps(load(["trainer.device=cpu"]).to_dict(), default=str))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        handles = [WorkerActor.options(num_cpus=0).remote(plain, rank, 2) for rank in range(2)]
        group = RayCalls([WorkerHandle(h, f"training worker {i}", "here") for i, h in enumerate(handles)])
        group.call("prepare")
        port, before = taken.getsockname()[1], time.monotonic()
        with pytest.raises(UserError, match=rf"rank 0 of 2 cannot meet .* 127\.0\.0\.1:{port}: .*in use"):
            group.call("join", "127.0.0.1", port, doing="joining the training ranks")
        assert time.monotonic() - before < 60
        group.kill()


# -- samplers ---------------------------------------------------------------------------------------------------


FACTS = {"pid": 0, "readers": [], "devices": [], "dtype": None}


@pytest.fixture
def pool(tmp_path):
    from verl.workers.ray.replicas import Replica, ReplicaPool

    made: list[ReplicaPool] = []

    def make(hosts: int = 2, delay: float = 0.05, grave: str = "") -> tuple[ReplicaPool, list[Any]]:
        seen: list[Any] = []

        def start(number: int) -> WorkerHandle:
            handle = ray.remote(num_cpus=0, max_concurrency=16)(ray_stubs.Sampler).remote(
                delay, grave or str(tmp_path / "grave")
            )
            return WorkerHandle(handle, f"sampler {number}", "here")

        members = [Replica(i, lambda i=i: (start(i), "node", FACTS), start(i), "node") for i in range(hosts)]
        one = ReplicaPool(members, event=lambda kind, **fields: seen.append((kind, fields)))

        def refill(host: Replica) -> None:
            seen.append(("refill", host.number))
            host.reviving = False

        one.refill = refill
        made.append(one)
        return one, seen

    yield make
    for one in made:
        one.close()


def ask(pool: Any, name: str, group: str | None = None, *stop: str) -> Any:
    prompt = np.arange(len(name) + 2)
    return pool.generate(prompt, SamplingParams(8, stop=stop), request_id=name, group=group)


def test_a_group_is_sampled_on_one_host_and_groups_are_spread(pool) -> None:
    one, _ = pool()

    async def run() -> list[Completion]:
        return await asyncio.gather(*(ask(one, f"{g}#{i}", g) for g in "abcd" for i in range(3)))

    found = asyncio.run(run())
    assert all(np.array_equal(c.token_ids, np.arange(len("a#0") + 2)[::-1]) and c.versions == (3,) for c in found)
    hosts = [[c.log_probs[0] for c in found[3 * g : 3 * g + 3]] for g in range(4)]
    assert all(len(set(group)) == 1 for group in hosts) and len({group[0] for group in hosts}) == 2
    assert one.stats() == {"tokens": 4.0, "busy_s": 0.05}
    again = asyncio.run(run())
    assert len(again) == 12, "another event loop, the same pool"


def test_each_host_by_itself(pool) -> None:
    """The probe asks every one of them, whatever it has to do."""
    one, _ = pool()

    async def run() -> list[Completion]:
        engines = [SimpleNamespace(generate=generate) for generate in one.each_generate]
        return await asyncio.gather(*(ask(engine, f"{n}{i}") for n, engine in enumerate(engines) for i in range(3)))

    hosts = [c.log_probs[0] for c in asyncio.run(run())]
    assert len(one.each_generate) == 2 and hosts[:3] == [hosts[0]] * 3 and hosts[3:] == [hosts[3]] * 3
    assert hosts[0] != hosts[3]


def test_a_host_that_dies_is_replaced_and_asked_again(pool) -> None:
    one, seen = pool()

    async def run() -> list[Completion]:
        work = [ask(one, "a", None, "die"), ask(one, "b"), ask(one, "c"), ask(one, "d")]
        return await asyncio.gather(*work)

    found = asyncio.run(run())
    assert [len(c.token_ids) for c in found] == [3, 3, 3, 3]
    kinds = [kind for kind, _ in seen]
    assert kinds == ["sampler_died", "refill", "sampler_restarted"], "weights come before the first request"
    assert seen[2][1]["asked_again"] == seen[0][1]["unfinished"] == 2


def test_a_dead_engine_in_a_living_host_is_a_dead_host(pool) -> None:
    one, seen = pool()

    async def run() -> list[Completion]:
        return await asyncio.gather(ask(one, "a", None, "engine"), *(ask(one, name) for name in "bcd"))

    assert len(asyncio.run(run())) == 4
    assert [kind for kind, _ in seen] == ["sampler_died", "refill", "sampler_restarted"]
    assert seen[0][1]["reason"] == "its engine died (Core: killed)"


@pytest.mark.parametrize("ends", [False, True])
def test_a_fresh_host_may_die_before_it_samples(pool, monkeypatch, ends: bool) -> None:
    """Once in its start, once (or for good) while it loads weights: these are deaths as any other."""
    from verl.workers.ray import replicas

    monkeypatch.setattr(replicas, "_OTHERS_S", 1.0)
    one, seen = pool(hosts=1)
    host, starts, loads = one.replicas[0], [], []
    start, refill = host.start, one.refill

    def dying() -> Any:
        starts.append(0)
        if len(starts) == 1:
            raise WorkerDied("sampler 0 died in starting a sampler again")
        return start()

    def loading(one_host: Any) -> str | None:
        loads.append(0)
        return "no value came for q_proj" if ends or len(loads) == 1 else refill(one_host)

    host.start, one.refill = dying, loading

    async def run() -> Completion:
        return await ask(one, "a", None, "die")

    if ends:
        words = r"sampler 0 .* died 4 times since the last weight transfer.* the last time: no value came for q_proj"
        with pytest.raises(Exception, match=words) as caught:
            asyncio.run(run())
        assert caught.value.ends_the_run
        return
    assert asyncio.run(run()).finish_reason == "stop"
    died = [fields["reason"] for kind, fields in seen if kind == "sampler_died"]
    assert died[1:] == ["sampler 0 died in starting a sampler again", "no value came for q_proj"]
    assert [kind for kind, _ in seen].count("sampler_restarted") == 1


def test_a_host_without_room_is_not_tried_again(pool) -> None:
    one, _ = pool(hosts=1)

    def nowhere() -> Any:
        raise NoRoom("no other node had 1 cpu devices free")

    one.replicas[0].start = nowhere
    threading.Timer(2, lambda: one.end(RuntimeError("training worker 0 died"))).start()

    async def run() -> Completion:
        return await ask(one, "a", None, "die")

    with pytest.raises(RuntimeError, match="training worker 0 died"):
        asyncio.run(run())


def test_a_full_object_store_ends_the_run(pool) -> None:
    one, _ = pool(hosts=1)

    def full(*_: Any) -> None:
        raise ray.exceptions.ObjectStoreFullError("no room")

    real = one.replicas[0].worker.handle
    one.replicas[0].worker.handle = SimpleNamespace(submit=SimpleNamespace(remote=full))

    async def run() -> Completion:
        return await asyncio.wait_for(ask(one, "a"), 10)

    with pytest.raises(Exception, match="object_store_memory") as caught:
        asyncio.run(run())
    assert caught.value.ends_the_run
    one.replicas[0].worker.handle = real


def test_requests_that_a_host_cannot_take_fail_with_its_error(pool, monkeypatch) -> None:
    from verl.workers.ray import replicas

    one, _ = pool(hosts=1)
    monkeypatch.setattr(replicas.payloads, "encode_requests", lambda asks: {"broken": np.zeros(1)})

    async def run() -> Completion:
        return await asyncio.wait_for(ask(one, "a"), 20)

    with pytest.raises(Exception, match=r"^sampler 0 \(node here\): KeyError: 'prompt_ids'$"):
        asyncio.run(run())


def test_a_host_that_does_not_answer_is_named(pool, monkeypatch) -> None:
    from verl.workers.ray import replicas

    one, seen = pool()
    pid = ray.get(one.replicas[1].worker.handle.pid.remote())
    monkeypatch.setattr(replicas, "_CALL_S", 1.0)
    os.kill(pid, signal.SIGSTOP)
    try:
        assert one.stats()["tokens"] == 2.0, "counters of the one that responses"
        assert seen == [("sampler_silent", {"sampler": "sampler 1 (node here)", "call": "stats"})]
        with pytest.raises(replicas.SamplerLost, match=r"sampler 1 .* has not answered 'sleep' for 1 s"):
            one.sleep()
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_push_while_every_host_is_started_again_moves_nothing(pool) -> None:
    """They take the version that is then the current one when they are there."""
    from verl.workers.ray.remote_weight_sync import RemoteWeightSync

    one, _ = pool(hosts=1)
    training = SimpleNamespace(lock=threading.RLock(), moved=True, facts=[{"device_id": ""}])
    sync = RemoteWeightSync(training, ["node"], one, 10.0)
    one.replicas[0].reviving = True
    assert sync.push(4).bytes == 0
    assert (one.version, sync._version, training.moved) == (4, 4, False)


def test_a_host_that_died_idle_is_found_and_started_once(pool, tmp_path) -> None:
    """The weight transfer and whoever waits for responses may both find it dead: one of them starts it again."""
    one, seen = pool()
    pids = [ray.get(host.worker.handle.pid.remote()) for host in one.replicas]
    assert one.find_dead(one.replicas) == []
    os.kill(pids[1], signal.SIGKILL)
    dead = until(lambda: one.find_dead(one.replicas), pause=0.1)
    assert [host.number for host, _ in dead] == [1]
    assert one.replace_dead(*dead[0]) and not one.replace_dead(*dead[0]), "the second one leaves it to the first"
    assert ray.get(one.replicas[1].worker.handle.pid.remote()) not in pids

    async def run() -> list[Completion]:
        asks = [asyncio.ensure_future(ask(one, name)) for name in ("a", "b", "c", "d")]
        await asyncio.sleep(0.5)
        assert sum(done.done() for done in asks) == 2, "the fresh one has no weights yet"
        one.replicas[1].reviving = False
        one._flush()
        return await asyncio.gather(*asks)

    assert len(asyncio.run(run())) == 4
    assert [kind for kind, _ in seen] == ["sampler_died", "sampler_restarted"]
    one.close()
    assert len((tmp_path / "grave.closed").read_text().splitlines()) == 2, "an engine may have to clean up"


def test_errors_and_aborts_reach_whoever_asked(pool) -> None:
    one, _ = pool(hosts=1, delay=20)

    async def run() -> Completion:
        with pytest.raises(ValueError, match="too long"):
            await ask(one, "a", None, "bad")
        slow = asyncio.ensure_future(ask(one, "b"))
        await asyncio.sleep(0.3)
        one.abort()
        return await slow

    assert asyncio.run(run()).finish_reason == "abort"


def test_when_training_died_nothing_is_sampled_any_more(pool) -> None:
    one, _ = pool(hosts=1, delay=20)

    async def run() -> None:
        slow = asyncio.ensure_future(ask(one, "a"))
        await asyncio.sleep(0.3)
        threading.Thread(target=one.end, args=(RuntimeError("worker 1 died"),)).start()
        with pytest.raises(RuntimeError, match="worker 1 died"):
            await slow
        with pytest.raises(RuntimeError, match="worker 1 died"):
            await ask(one, "b")

    asyncio.run(run())


# -- nodes ------------------------------------------------------------------------------------------------------


def test_nodes_that_do_not_fit_are_named(tmp_path) -> None:
    from verl.workers.compare_nodes import NodeNeeds
    from verl.workers.ray.nodes import Agents

    agents = Agents(joined("cpu").nodes())
    assert agents.check(NodeNeeds(files=8, folder=tmp_path)) == []
    assert not list(tmp_path.iterdir()), "the token of the run folder is gone again"
    with pytest.raises(UserError, match=r"open files \d+; the run needs 999999999"):
        agents.check(NodeNeeds(files=999999999))
    agents.release()
