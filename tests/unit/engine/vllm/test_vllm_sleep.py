"""What our engine asks of vLLM's sleep mode, against a stand-in that has its states. No CPU build of vLLM can sleep."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from verl.engine.rollout.base import SamplingParams
from verl.engine.rollout.hosted import BusyTime, LoopThread
from verl.engine.rollout.vllm import launch
from verl.engine.rollout.vllm.engine import VLLMEngine
from verl.engine.rollout.vllm.weights import WorkerChannel
from verl.weight_sync.channel import BucketSender, receive

BOTH = {"weights", "kv_cache"}


class Sleeper:
    """vLLM's asynchronous engine: which memory it has, and whether the weights in it are good. Level 1 keeps the
    weights in host memory, level 2 forgets them."""

    errored = False
    model_config = SimpleNamespace(dtype=torch.float32)

    def __init__(self, good: bool) -> None:
        self.awake, self.good, self.kept = set(BOTH), good, False
        self.calls: list[str] = []
        self.arrived: list[str] = []

    async def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")
        self.awake, self.kept, self.good = set(), level == 1 and self.good, False

    async def wake_up(self, tags: list[str] | None = None) -> None:
        woken = set(tags or BOTH) - self.awake
        assert woken, "woken twice"
        self.calls.append(f"wake {'+'.join(sorted(woken))}")
        self.awake |= woken
        self.good = self.good or ("weights" in woken and self.kept)

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        assert method == "verl_load_weights" and "weights" in self.awake, "there is no memory to load into"
        self.calls.append(f"load beside {'a cache' if 'kv_cache' in self.awake else 'the trainer'}")
        (place,), version, timeout, _ = args
        names = await asyncio.to_thread(lambda: [n for n, _ in receive(*place, timeout=timeout, version=version)])
        self.arrived, self.good = names, True
        return [{}]

    async def add_lora(self, request: Any) -> bool:
        assert self.good and "weights" in self.awake, "an adapter is added to a base"
        self.calls.append("adapter")
        return True

    async def reset_prefix_cache(self) -> bool:
        return True

    async def generate(self, *_: Any, **__: Any) -> Any:
        assert self.awake == BOTH and self.good
        self.calls.append("generate")
        yield SimpleNamespace(
            outputs=[SimpleNamespace(token_ids=[5], logprobs=SimpleNamespace(logprobs=[-0.5]), finish_reason="stop")],
            num_cached_tokens=0,
        )


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """engine(load_format, free=True) → (our engine around a stand-in, the stand-in)."""
    hosts: list[LoopThread] = []
    monkeypatch.setattr(launch, "request_parameters", lambda arguments: None)
    monkeypatch.setattr(launch, "lora_requests", lambda path: (None, None))

    def engine(load_format: str, *, free: bool = True, adapter: Any = None) -> tuple[VLLMEngine, Sleeper]:
        one, stand_in = VLLMEngine.__new__(VLLMEngine), Sleeper(good=load_format != "dummy")
        hosts.append(LoopThread("test-vllm"))
        values: dict[str, Any] = {
            "_settings": SimpleNamespace(
                copies=1,
                load_format=load_format,
                skip_tokenizer_init=True,
            ),
            "_routed": [],
            "_sleeps": free,
            "_shortest": 1,
            "_host": hosts[-1],
            "_engine": stand_in,
            "_images": None,
            "_adapter": adapter,
            "_adapter_request": None,
            "_live": {},
            "_eos": [0],
            "_version": 0,
            "_ready": load_format != "dummy",
            "_asleep": False,
            "_weights_gone": False,
            "_broken": "",
            "_channel": WorkerChannel(hosts[-1], stand_in.collective_rpc, [""], 4096, print),
            "_max_model_len": 32,
            "_busy": BusyTime(),
        }
        for name, value in values.items():
            setattr(one, name, value)
        return one, stand_in

    yield engine
    for host in hosts:
        host.stop()


WEIGHTS = [("a", torch.ones(3)), ("b", torch.zeros(2, 2))]


def sample(engine: VLLMEngine) -> None:
    sampling = SamplingParams(max_tokens=1)
    asyncio.run(engine.sample(np.arange(4), sampling, request_id="r"))


def test_weights_that_were_given_up_come_back_before_the_cache(made: Any) -> None:
    """Trainer and both memories of the sampler never have to fit on the device together."""
    engine, vllm = made("dummy")
    engine.load_weights(WEIGHTS, 0)
    for version in (1, 2):
        sample(engine)
        engine.sleep()
        assert not vllm.awake
        engine.load_weights(WEIGHTS, version)
        assert vllm.awake == {"weights"} and vllm.arrived == ["a", "b"]
        with pytest.raises(RuntimeError, match="asleep"):
            sample(engine)
        engine.wake()
    sample(engine)
    step = ["generate", "sleep 2", "wake weights", "load beside the trainer", "wake kv_cache"]
    assert vllm.calls == ["load beside a cache", *step, *step, "generate"]
    assert engine.version == 2


def test_a_channel_is_read_asleep_too(made: Any) -> None:
    engine, vllm = made("dummy")
    engine.sleep()
    sender = BucketSender("verl-test-sleep", 1, 4096, timeout=20)
    sending = asyncio.run(_together(sender, engine))
    assert sending.bytes == 28 and vllm.awake == {"weights"} and engine.version == 3
    engine.wake()
    sample(engine)


async def _together(sender: BucketSender, engine: VLLMEngine) -> Any:
    sending = asyncio.to_thread(sender.send, WEIGHTS, 3)
    places = [("verl-test-sleep", 0)]
    receiving = asyncio.to_thread(engine.receive_weights, places, 3, timeout=20.0)
    return (await asyncio.gather(sending, receiving))[0]


def test_woken_without_new_weights_it_refuses_at_level_two_and_goes_on_at_level_one(made: Any) -> None:
    for load_format, goes_on in (("dummy", False), ("auto", True)):
        engine, vllm = made(load_format)
        if load_format == "dummy":
            engine.load_weights(WEIGHTS, 0)
        engine.sleep()
        engine.sleep()
        engine.wake()
        engine.wake()
        assert vllm.awake == BOTH and vllm.calls.count("wake kv_cache+weights") == 1
        if goes_on:
            sample(engine)
        else:
            with pytest.raises(RuntimeError, match="no weights yet"):
                sample(engine)


def test_an_adapter_is_added_to_the_base_that_was_kept(made: Any, tmp_path: Any) -> None:
    class Folder:
        def write(self, weights: Any, version: int, dtype: Any) -> Any:
            return tmp_path if list(weights) else None

    engine, vllm = made("auto", adapter=Folder())
    engine.sleep()
    engine.load_weights(WEIGHTS, 1)
    engine.wake()
    sample(engine)
    assert vllm.calls == ["sleep 1", "wake weights", "adapter", "wake kv_cache", "generate"]


def test_without_free_cache_engine_nothing_of_vllm_sleeps(made: Any) -> None:
    engine, vllm = made("auto", free=False)
    engine.sleep()
    engine.load_weights(WEIGHTS, 1)
    engine.wake()
    sample(engine)
    assert vllm.calls == ["load beside a cache", "generate"]


RESULT = SimpleNamespace(verified=False)


def test_the_loop_pushes_to_a_sleeping_sampler_and_wakes_it_after() -> None:
    from verl.rollout.schedule import Versions
    from verl.trainer.ppo_trainer import PPOTrainer

    calls: list[str] = []

    def note(name: str, result: Any = None) -> Any:
        return lambda *_, **__: calls.append(name) or result

    parts = SimpleNamespace(
        loop=SimpleNamespace(run=lambda value: value),
        phases=lambda name: contextlib.nullcontext(),
        rollouts=SimpleNamespace(requests=SimpleNamespace(pause=note("pause"), resume=note("resume"))),
    )
    trainer = PPOTrainer.__new__(PPOTrainer)
    trainer.parts = parts  # type: ignore[assignment]
    trainer.weight_sync = SimpleNamespace(push=note("push", RESULT))  # type: ignore[assignment]
    trainer.versions, trainer.total_steps = Versions(), 2
    trainer.colocation = SimpleNamespace(to_sampling=note("wake"))  # type: ignore[assignment]
    settings = SimpleNamespace(max_staleness=0, verify_weight_sync=False, partial_rollout=True)
    trainer.config = SimpleNamespace(trainer=settings)  # type: ignore[assignment]
    trainer.probe = SimpleNamespace(before_push=lambda: None, after_push=lambda version: {})  # type: ignore[assignment]
    assert trainer.push(1, {}) is RESULT and calls == ["pause", "push", "wake", "resume"]
