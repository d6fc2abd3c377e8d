"""`verl serve` for the unmodified SDK `tinker`, and the supervised and reinforcement loops of `tinker-cookbook`."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_model, tiny_tokenizer

tinker = pytest.importorskip("tinker", reason="the SDK is not installed")
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]  # `make test-packages`
os.environ["TINKER_TELEMETRY"] = "0"
TEXTS = ["the cat sat on the mat", "a dog ran to the park", "the sun is hot today", "we eat bread and jam"]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of `verl serve` in a process of its own."""
    folder = tmp_path_factory.mktemp("serve")
    model = tiny_model(folder / "model", scale=1.5)
    command = [
        "-m",
        "verl.cli.main",
        "serve",
        "--model",
        str(model),
        "--name",
        "tiny",
        "--port",
        "0",
        "--dtype",
        "float32",
    ]
    with open(folder / "log", "w+") as log:
        process = subprocess.Popen([sys.executable, *command, "--dir", str(folder / "runs")], stdout=log, stderr=log)
        while process.poll() is None and "runs in" not in (text := (folder / "log").read_text()):
            pass
        yield re.search(r"http://[\d.:]+", text)[0]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, (folder / "log").read_text()


def datum(ids: Sequence[int]) -> Any:
    inputs = {"target_tokens": list(ids[1:]), "weights": [1.0] * (len(ids) - 1)}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(list(ids[:-1])), loss_fn_inputs=inputs)


class Unreliable:
    """A proxy that passes every fifth request on and cuts the connection before the answer."""

    def __init__(self, target: str):
        host, port = target.removeprefix("http://").split(":")
        self._target, self.cut, self._count = (host, int(port)), 0, 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._socket.accept()
            server = socket.create_connection(self._target)
            threading.Thread(target=self._requests, args=(client, server), daemon=True).start()
            threading.Thread(target=self._answers, args=(client, server), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        try:
            while data := client.recv(1 << 16):
                server.sendall(data)
                self._count += 1
                if self._count % 5 == 0:
                    self.cut += 1
                    client.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def _answers(self, client: socket.socket, server: socket.socket) -> None:
        try:
            while data := server.recv(1 << 16):
                client.sendall(data)
        except OSError:
            pass
        client.close()


def test_the_sdk_trains_samples_and_goes_on(url: str) -> None:
    """Several adapters at once, a loss of the client's own, checkpoints, a run that goes on exactly."""
    service = tinker.ServiceClient(base_url=url, api_key="tml-any")
    assert tinker.RestClient(base_url=url, api_key="tml-any").get_server_capabilities().result().supported_models
    first, second = (service.create_lora_training_client("tiny", rank=rank, seed=1).result() for rank in (4, 8))
    tokenizer = first.get_tokenizer()
    data = [datum(tokenizer.encode(text)) for text in TEXTS]

    def steps(client: Any, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            passes = client.forward_backward(data, "cross_entropy")
            client.optim_step(tinker.AdamParams(learning_rate=2e-2)).result()
            losses.append(passes.result().metrics["loss:sum"])
        return losses

    half = steps(first, 3)
    steps(second, 2)
    path = first.save_state("half").result().path
    rest = steps(first, 3)
    assert rest[-1] < half[0] / 1.5
    again = service.create_training_client_from_state_with_optimizer(path).result()
    assert steps(again, 3) == rest
    assert again.get_info().lora_rank == 4

    def squares(rows: Any, log_probs: Any) -> Any:
        loss = sum((p**2).sum() for p in log_probs)
        return loss, {"squares": float(loss.detach())}

    own = first.forward_backward_custom(data, squares)
    first.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
    assert own.result().metrics["squares"] > first.forward_backward_custom(data, squares).result().metrics["squares"]

    sampler = again.save_weights_and_get_sampling_client().result()
    prompt = tinker.ModelInput.from_ints(tokenizer.encode("the c"))
    greedy = tinker.SamplingParams(max_tokens=5, temperature=0.0)
    answer = sampler.sample(prompt, 2, greedy, include_prompt_logprobs=True, topk_prompt_logprobs=3).result()
    assert answer.sequences[0].tokens == answer.sequences[1].tokens
    assert answer.prompt_logprobs[0] is None and len(answer.topk_prompt_logprobs[1]) == 3
    ids = tokenizer.encode("the c") + answer.sequences[0].tokens
    forward = again.forward([datum(ids)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    assert sampler.compute_logprobs(tinker.ModelInput.from_ints(ids)).result()[1:] == pytest.approx(forward, abs=1e-5)
    assert answer.sequences[0].logprobs == pytest.approx(forward[4:], abs=1e-5)
    base = service.create_sampling_client(base_model="tiny").result()
    assert base.compute_logprobs(prompt).result() != sampler.compute_logprobs(prompt).result()
    with pytest.raises(tinker.RequestFailedError, match="dro needs"):
        first.forward_backward(data, "dro").result()
    service.close("success").result()


def test_futures_survive_lost_connections(url: str) -> None:
    def losses(address: str) -> list[float]:
        service = tinker.ServiceClient(base_url=address, api_key="tml-any")
        client = service.create_lora_training_client("tiny", rank=4, seed=3).result()
        data, out = [datum(client.get_tokenizer().encode(text)) for text in TEXTS], []
        for _ in range(4):
            passes = client.forward_backward(data, "cross_entropy")
            client.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
            out.append(passes.result().metrics["loss:sum"])
        return out

    proxy = Unreliable(url)
    assert losses(proxy.url) == losses(url)
    assert proxy.cut >= 3


cookbook = pytest.importorskip("tinker_cookbook", reason="tinker-cookbook is not installed")


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def registered() -> None:
    from tinker_cookbook.tokenizer_utils import register_tokenizer

    os.environ["TINKER_API_KEY"] = "tml-any"
    register_tokenizer("tiny", tiny_tokenizer)


def test_the_supervised_loop_of_the_cookbook(url: str, tmp_path: Path, registered: None) -> None:
    import chz
    from tinker_cookbook import renderers
    from tinker_cookbook.supervised import train
    from tinker_cookbook.supervised.data import conversation_to_datum
    from tinker_cookbook.supervised.types import SupervisedDataset, SupervisedDatasetBuilder

    class Dialogues(SupervisedDataset):
        def get_batch(self, index: int) -> list[Any]:
            renderer = renderers.get_renderer("role_colon", tiny_tokenizer())
            rows = [[{"role": "user", "content": "Say."}, {"role": "assistant", "content": text}] for text in TEXTS]
            what = renderers.TrainOnWhat.ALL_ASSISTANT_MESSAGES
            return [conversation_to_datum(row, renderer, 200, what) for row in rows]

        def set_epoch(self, seed: int = 0) -> None:
            pass

        def __len__(self) -> int:
            return 4

    @chz.chz
    class Builder(SupervisedDatasetBuilder):
        def __call__(self) -> tuple[SupervisedDataset, None]:
            return Dialogues(), None

    def config(epochs: int) -> Any:
        about = {
            "model_name": "tiny",
            "recipe_name": "test",
            "renderer_name": "role_colon",
            "dataset_builder": Builder(),
        }
        numbers = {"learning_rate": 2e-2, "lora_rank": 8, "num_epochs": epochs, "save_every": 3, "eval_every": 0}
        constant = {"lr_schedule": "constant", "base_url": url, "log_path": str(tmp_path)}
        return train.Config(**about, **numbers, **constant)

    asyncio.run(train.main(config(2)))
    asyncio.run(train.main(config(3)))  # goes on from the checkpoint at its end
    losses = [record["train_mean_nll"] for record in records(tmp_path) if "train_mean_nll" in record]
    assert len(losses) == 12 and losses[-1] < losses[7] < losses[0] / 1.2


def test_the_reinforcement_loop_of_the_cookbook(url: str, tmp_path: Path, registered: None) -> None:
    import chz
    from tinker_cookbook.rl import train
    from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder, StepResult

    class Vowels(Env):
        """The reward is the share of bytes that are vowels."""

        async def initial_observation(self) -> Any:
            return tinker.ModelInput.from_ints(tiny_tokenizer().encode("the ")), []

        async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
            vowels = set(tiny_tokenizer().encode("aeiou"))
            reward = sum(token in vowels for token in action) / len(action)
            nothing = tinker.ModelInput.from_ints([])
            return StepResult(reward=reward, episode_done=True, next_observation=nothing, next_stop_condition=[])

    class Group(EnvGroupBuilder):
        async def make_envs(self) -> Sequence[Env]:
            return [Vowels() for _ in range(16)]

    class Groups(RLDataset):
        def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
            return [Group() for _ in range(4)]

        def __len__(self) -> int:
            return 12

    @chz.chz
    class Builder(RLDatasetBuilder):
        async def __call__(self) -> tuple[RLDataset, None]:
            return Groups(), None

    config = train.Config(
        model_name="tiny",
        recipe_name="test",
        dataset_builder=Builder(),
        learning_rate=3e-2,
        lora_rank=8,
        max_tokens=6,
        eval_every=0,
        save_every=6,
        base_url=url,
        log_path=str(tmp_path),
    )
    asyncio.run(train.main(config))
    name = "env/all/reward/total"
    rewards = [record[name] for record in records(tmp_path) if name in record]
    assert len(rewards) == 12 and sum(rewards[-3:]) > 3 * sum(rewards[:3])
