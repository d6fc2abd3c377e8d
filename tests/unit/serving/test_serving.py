"""The Tinker API, spoken by a plain client: numbers against transformers and peft, order, futures, resume, refusals."""

from __future__ import annotations

import asyncio
import copy
import http.client
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny import tiny_model
from verl.checkpoint.read import newest_sealed
from verl.cli.serve import main
from verl.errors import UserError
from verl.serving.losses import LOSSES
from verl.serving.models import Base
from verl.serving.server import TinkerServer
from verl.serving.service import Service
from verl.serving.wire import CLASSES
from verl.serving.work import Job, Lane, Work

KEY = "tml-secret"
IDS = np.random.default_rng(0).integers(0, 256, 24)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    path = tiny_model(tmp_path_factory.mktemp("base") / "model", scale=2.0)
    return Base(str(path), name="tiny", dtype="float32", max_length=256)


class Client:
    """A server in a thread, and a program that speaks to it with the standard library."""

    def __init__(self, base: Base, root: Path):
        self.base, self.root, self._ready = base, root, threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        self._ready.wait(60)
        self.session = self.call("create_session", {"tags": []})["session_id"]

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.service = Service(self.base, self.root, most_adapters=6)
        self.address = TinkerServer(("127.0.0.1", 0), self.service, KEY).base.removeprefix("http://")
        self._ready.set()
        await self._stop.wait()
        self.service.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)

    def ask(
        self, path: str, body: Any = None, *, method: str = "", key: str | None = KEY, protobuf: bool = False
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.address, timeout=60)
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/x-protobuf" if protobuf else "application/json"}
        headers |= {} if key is None else {"X-API-Key": key}
        connection.request(method or ("GET" if body is None else "POST"), f"/api/v1/{path}", data, headers)
        answer = connection.getresponse()
        result = answer.status, answer.read()
        connection.close()
        return result

    def call(self, path: str, body: Any = None, **options: Any) -> dict[str, Any]:
        status, data = self.ask(path, body, **options)
        assert status == 200, data
        return json.loads(data)

    def result(self, future: dict[str, Any], kind: str = "") -> Any:
        while True:
            status, data = self.ask("retrieve_future", {"request_id": future["request_id"]})
            if status != 408:
                assert status == 200, data
                return CLASSES[kind].FromString(data) if kind else json.loads(data)

    def run(self, number: int = 0, rank: int = 4, seed: int = 1, **lora: bool) -> Run:
        config = {"rank": rank, "seed": seed, **lora}
        body = {"session_id": self.session, "model_seq_id": number, "base_model": "tiny", "lora_config": config}
        return Run(self, self.result(self.call("create_model", body))["model_id"])


class Run:
    """A training run, whose requests are numbered."""

    def __init__(self, client: Client, name: str):
        self.client, self.name, self.number = client, name, 0

    def ask(self, call: str, **body: Any) -> Any:
        self.number += 1
        future = self.client.call(call, {"model_id": self.name, "seq_id": self.number} | body)
        return self.client.result(future)

    def post(
        self, data: Sequence[dict[str, Any]], loss: str, number: int, *, forward: bool = False, **config: float
    ) -> Any:
        message = CLASSES["ForwardBackwardRequest"](model_id=self.name, seq_id=number, loss_fn=loss)
        message.forward_only = forward
        for name, value in config.items():
            message.loss_fn_config[name] = value
        for datum in data:
            entry = message.data.add()
            entry.model_input.add().encoded_text.tokens = np.asarray(datum["ids"], np.int32).tobytes()
            for name, array in datum.items():
                if name != "ids":
                    whole = array.dtype.kind == "i"
                    tensor = entry.loss_fn_inputs[name]
                    tensor.dense = array.astype(np.int64 if whole else np.float32).tobytes()
                    tensor.dtype, shape = (2 if whole else 1), array.shape
                    tensor.shape.extend(shape)
        return self.client.call("forward_backward", message.SerializeToString(), protobuf=True)

    def passes(self, data: Sequence[dict[str, Any]], loss: str, **options: Any) -> tuple[list[np.ndarray], float]:
        """Log-probs of each datum, and the loss."""
        self.number += 1
        output = self.client.result(self.post(data, loss, self.number, **options), "ForwardBackwardOutput")
        arrays = []
        for record in output.loss_fn_outputs:
            field = record.fields["logprobs"]
            offsets = np.frombuffer(field.offsets, np.int64) // 4
            parts = np.split(np.frombuffer(field.data, np.float32), offsets[1:-1])
            arrays += [part.reshape(-1, *field.trailing_shape) for part in parts]
        return arrays, output.metrics["loss:sum"]

    def step(self, **params: float) -> float:
        return self.ask("optim_step", adam_params=params)["metrics"]["grad_norm"]

    def saved(self, kind: str, name: str) -> Path:
        path = newest_sealed(self.client.root / self.name / kind / name)
        assert path is not None
        return path / "actor" / "lora_adapter"

    def sampler(self, number: int, path: str | None = None) -> str:
        client = self.client
        if path is None:
            return self.ask("save_weights_for_sampler", sampling_session_seq_id=number)["sampling_session_id"]
        body = {"session_id": client.session, "sampling_session_seq_id": number, "model_path": path}
        return client.call("create_sampling_session", body)["sampling_session_id"]


@pytest.fixture(scope="module")
def client(base: Base, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    client = Client(base, tmp_path_factory.mktemp("runs"))
    yield client
    client.close()


def datum(ids: np.ndarray, seed: int, policy: bool = False) -> dict[str, np.ndarray]:
    """Its targets follow; with weights, or with log-probs and advantages."""
    generator, count = np.random.default_rng(seed), len(ids) - 1
    out = {"ids": ids[:-1], "target_tokens": ids[1:]}
    if policy:
        out["logprobs"] = generator.normal(-5, 1, count)
        out["advantages"] = generator.normal(0, 1, count) * (np.arange(count) > 4)
    else:
        out["weights"] = generator.uniform(0, 1, count) * (np.arange(count) > 2)
    return out


class Peft:
    """The same adapter trained by transformers, peft and torch's AdamW."""

    def __init__(self, base: Base, folder: Path):
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(base.path, dtype=torch.float32)
        self.model = PeftModel.from_pretrained(model, folder, is_trainable=True).eval()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters)

    def log_probs(self, ids: np.ndarray, targets: np.ndarray) -> torch.Tensor:
        logits = self.model(torch.from_numpy(ids)[None]).logits[0]
        return logits.log_softmax(-1).gather(1, torch.from_numpy(targets.reshape(len(ids), -1))).reshape(targets.shape)

    def passes(self, data: Sequence[dict[str, Any]], loss: str, **config: float) -> tuple[list[np.ndarray], float]:
        rows, total = [], 0.0
        for row in data:
            p = self.log_probs(row["ids"], row["target_tokens"])
            value = oracle(loss, p, {n: torch.from_numpy(a).float() for n, a in row.items()}, config)
            value.backward()
            rows.append(p.detach().numpy())
            total += float(value.detach())
        return rows, total

    def step(self, lr: float, clip: float, decay: float) -> float:
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, clip))
        for group in self.optimizer.param_groups:
            group.update(lr=lr, betas=(0.8, 0.9), eps=1e-4, weight_decay=decay)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm


def oracle(loss: str, p: torch.Tensor, row: dict[str, torch.Tensor], config: dict[str, float]) -> torch.Tensor:
    """Token by token, from the documentation."""
    total = torch.zeros(())
    for i in range(len(p)):
        if loss == "cross_entropy":
            total = total - (row["weights"][i] * p[i]).sum()
            continue
        q, advantage = row["logprobs"][i], row["advantages"][i]
        ratio = torch.exp(p[i] - q)
        low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
        clipped = min(max(ratio, torch.tensor(low)), torch.tensor(high))
        if loss == "importance_sampling":
            total = total - ratio * advantage
        elif loss == "ppo":
            total = total - min(ratio * advantage, clipped * advantage)
        elif loss == "cispo":
            total = total - clipped.detach() * advantage * p[i]
        elif loss == "dro":
            total = total - (p[i] * advantage - config["beta"] / 2 * (p[i] - q) ** 2)
    return total


def test_two_adapters_train_like_two_runs_of_peft(client: Client, base: Base) -> None:
    """Interleaved, of two ranks and kinds, with all losses, gradients added over calls, clipping and decay."""
    runs = [client.run(0, rank=4), client.run(1, rank=8, seed=2, train_unembed=False, train_attn=False)]
    for run in runs:
        run.ask("save_weights", path="start")
    hands = [Peft(base, run.saved("weights", "start")) for run in runs]
    plan = [
        ("cross_entropy", {}),
        ("importance_sampling", {}),
        ("ppo", {"clip_low_threshold": 0.7, "clip_high_threshold": 1.5}),
        ("cispo", {}),
        ("dro", {"beta": 0.3}),
    ]
    for number, (loss, config) in enumerate(plan):
        policy = loss != "cross_entropy"
        data = [[datum(IDS[: 12 + 5 * k], 10 * number + k, policy) for k in (0, 1)] for _ in runs]
        data[1].append(datum(IDS[3:9], number, policy))
        for part in (slice(0, 1), slice(1, None)):  # two calls, each of one run between those of the other
            for run, hand, rows in zip(runs, hands, data, strict=True):
                before = run.passes(rows[part], loss, forward=True, **config)
                results = run.passes(rows[part], loss, **config), hand.passes(rows[part], loss, **config)
                for theirs in (before, results[0]):
                    for mine, expected in zip(theirs[0], results[1][0], strict=True):
                        np.testing.assert_allclose(mine, expected, atol=1e-5)
                    assert theirs[1] == pytest.approx(results[1][1], rel=1e-5, abs=1e-4)
        clip = 0.5 if number % 2 else 1e9
        for run, hand in zip(runs, hands, strict=True):
            norm = run.step(
                learning_rate=0.01,
                beta1=0.8,
                beta2=0.9,
                eps=1e-4,
                weight_decay=0.1,
                grad_clip_norm=clip if clip < 1 else 0,
            )
            assert norm == pytest.approx(hand.step(0.01, clip, 0.1), rel=1e-4)
    for run, hand in zip(runs, hands, strict=True):
        run.ask("save_weights_for_sampler", path="end")
        from safetensors.torch import load_file

        saved = load_file(run.saved("sampler_weights", "end") / "adapter_model.safetensors")
        for name, tensor in saved.items():
            trained = hand.model.state_dict()[name.replace(".weight", ".default.weight")]
            torch.testing.assert_close(tensor, trained, atol=2e-5, rtol=0)


def test_targets_that_do_not_follow(client: Client, base: Base) -> None:
    run, generator = client.run(2), np.random.default_rng(1)
    run.ask("save_weights", path="start")
    hand = Peft(base, run.saved("weights", "start"))
    wide = {
        "ids": IDS[:8],
        "target_tokens": generator.integers(0, 256, (8, 3)),
        "weights": generator.uniform(0, 1, (8, 3)),
    }
    other = {"ids": IDS[:5], "target_tokens": generator.integers(0, 256, 5), "weights": np.ones(5)}
    mine, expected = run.passes([wide, other], "cross_entropy"), hand.passes([wide, other], "cross_entropy")
    for a, b in zip(mine[0], expected[0], strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert run.step(eps=1e-4) == pytest.approx(hand.step(1e-4, 1e9, 0.0), rel=1e-4)


def sampled(client: Client, sampler: str, number: int, prompt: np.ndarray, params: dict[str, Any], **more: Any) -> Any:
    chunks = {"chunks": [{"type": "encoded_text", "tokens": prompt.tolist()}]}
    body = {"sampling_session_id": sampler, "seq_id": number, "prompt": chunks, "sampling_params": params} | more
    return client.result(client.call("asample", body), "SampleResponse")


def test_sampling_is_of_the_snapshot(client: Client, base: Base) -> None:
    run = client.run(3)
    for _ in range(3):
        run.passes([datum(IDS, 1)], "cross_entropy")
        run.step(learning_rate=0.05, eps=1e-4)
    path = run.ask("save_weights_for_sampler", path="named")["path"]
    first = run.sampler(0)
    hand = Peft(base, run.saved("sampler_weights", "named"))
    run.passes([datum(IDS, 1)], "cross_entropy")
    run.step(learning_rate=0.05, eps=1e-4)  # the snapshots stay as they are
    asked = {"num_samples": 3, "prompt_logprobs": True, "topk_prompt_logprobs": 2, "topk_sample_logprobs": 2}
    answer = sampled(client, first, 0, IDS[:6], {"max_tokens": 8, "seed": 5, "stop": []}, **asked)
    texts = [np.frombuffer(entry.tokens, np.int32).astype(np.int64) for entry in answer.sequences]
    assert len({text.tobytes() for text in texts}) == 3
    for entry, text in zip(answer.sequences, texts, strict=True):
        assert entry.stop_reason == 1 and len(text) == 8
        whole = np.concatenate((IDS[:6], text))
        expected = hand.log_probs(whole[:-1], whole[1:]).detach().numpy()
        np.testing.assert_allclose(np.frombuffer(entry.logprobs, np.float32), expected[5:], atol=1e-5)
        top = np.frombuffer(entry.topk_sampled_logprobs.logprobs, np.float32).reshape(8, 2)
        assert (top[:, 0] >= top[:, 1]).all() and (top[:, 0] >= expected[5:] - 1e-5).all()
    prompt = np.frombuffer(answer.prompt_logprobs, np.float32)
    assert np.isnan(prompt[0])
    np.testing.assert_allclose(prompt[1:], expected[:5], atol=1e-5)
    best = hand.model(torch.from_numpy(IDS[None, :6])).logits[0, :-1].log_softmax(-1).topk(2)
    np.testing.assert_array_equal(
        np.frombuffer(answer.topk_prompt_logprobs.token_ids, np.int32).reshape(6, 2)[1:], best.indices.numpy()
    )
    named = run.sampler(1, path)
    again = sampled(client, named, 0, IDS[:6], {"max_tokens": 8, "seed": 5, "stop": []}, num_samples=3)
    assert [entry.tokens for entry in again.sequences] == [entry.tokens for entry in answer.sequences]
    state = run.ask("save_weights", path="state")["path"]
    saved = run.sampler(3, state)
    before = sampled(client, saved, 0, IDS[:6], {"max_tokens": 1}, prompt_logprobs=True).prompt_logprobs
    run.step(learning_rate=0.05)
    run.ask("save_weights", path="state", overwrite=True)
    assert sampled(client, saved, 1, IDS[:6], {"max_tokens": 1}, prompt_logprobs=True).prompt_logprobs != before
    newer = sampled(
        client, run.sampler(2), 0, IDS[:6], {"max_tokens": 1}, prompt_logprobs=True, prompt_logprobs_last_n=2
    )
    last = np.frombuffer(newer.prompt_logprobs, np.float32)
    assert np.isnan(last[:4]).all() and np.abs(last[4:] - prompt[4:]).max() > 1e-3


def test_snapshots_that_nobody_uses_leave_the_disk(base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the newest ones, nor one that is sampled from now and then, nor one with a request under way."""
    monkeypatch.setattr("verl.serving.service._SNAPSHOTS", 2)
    client, greedy = Client(base, tmp_path), {"max_tokens": 2, "temperature": 0.0}
    run = client.run()
    assert client.call("training_runs")["cursor"]["total_count"] == 1
    samplers = [run.sampler(number) for number in range(6)]
    for name in samplers:
        client.service.samplings[name].used -= 4000
    sampled(client, samplers[0], 0, IDS[:6], greedy)
    waiting = Job(f"{samplers[1]}:0", None)
    client.service.work._jobs[waiting.id] = waiting
    client.service.remove_snapshots()
    assert {path.name for path in (tmp_path / run.name / "ephemeral").iterdir()} == {"0", "1", "4", "5"}
    body = {"sampling_session_id": samplers[2], "seq_id": 0, "prompt": {"chunks": []}, "sampling_params": {}}
    status, answer = client.ask("asample", body)
    assert status == 404 and b"save_weights_for_sampler with a name keeps one" in answer
    sampled(client, samplers[4], 0, IDS[:6], greedy)
    client.close()
    assert not (tmp_path / run.name / "ephemeral").exists()


def test_stop_and_temperature(client: Client) -> None:
    run = client.run(4)
    sampler = run.sampler(10)
    greedy = sampled(client, sampler, 0, IDS[:6], {"max_tokens": 6, "temperature": 0.0, "stop": []}).sequences[0]
    ids = np.frombuffer(greedy.tokens, np.int32)
    stopped = sampled(client, sampler, 1, IDS[:6], {"max_tokens": 6, "temperature": 0.0, "stop": [int(ids[0])]})
    assert stopped.sequences[0].stop_reason == 0 and stopped.sequences[0].tokens == ids[:1].tobytes()
    narrow = sampled(client, sampler, 2, IDS[:6], {"max_tokens": 6, "top_p": 1e-6, "stop": []})
    assert narrow.sequences[0].tokens == greedy.tokens


def test_requests_run_once_and_in_their_order(client: Client) -> None:
    run = client.run(5)
    rows = [datum(IDS, 3)]
    late = client.call("optim_step", {"model_id": run.name, "seq_id": 2, "adam_params": {"learning_rate": 0.1}})
    future = run.post(rows, "cross_entropy", 1)
    assert run.post(rows, "cross_entropy", 1) == future  # a client that has lost the answer
    norm = client.result(late)["metrics"]["grad_norm"]
    assert client.call("optim_step", {"model_id": run.name, "seq_id": 2, "adam_params": {}}) == late
    assert client.result(late)["metrics"]["grad_norm"] == norm > 0
    first = [client.ask("retrieve_future", {"request_id": future["request_id"]}) for _ in range(2)]
    assert first[0] == first[1]
    assert client.service.models[run.name].adapter.steps == 1
    run.number = 2
    bad = client.result(run.post(rows, "importance_sampling", 3))
    assert bad["category"] == "user" and "lacks advantages, logprobs" in bad["error"]
    worse = client.result(run.post([rows[0] | {"weights": np.full(23, np.inf)}], "cross_entropy", 4))
    assert "gradients since the last optim_step are dropped" in worse["error"]
    lost = {"model_id": run.name, "seq_id": 5, "path": f"tinker://{run.name}/weights/lost"}
    assert client.result(client.call("load_weights", lost))["category"] == "user"  # and later ones are not held up
    assert client.result(client.call("optim_step", {"model_id": run.name, "seq_id": 6, "adam_params": {}})) == {
        "metrics": {"grad_norm": 0.0}
    }
    assert client.ask("retrieve_future", {"request_id": "nobody:1"})[0] == 410
    assert (
        client.ask("create_model", {"session_id": client.session, "model_seq_id": 6, "lora_config": {"rank": 1}})[0]
        == 400
    )


def test_a_run_goes_on_exactly_in_another_server(base: Base, tmp_path: Path) -> None:
    def steps(run: Run, numbers: range) -> None:
        for number in numbers:
            run.passes([datum(IDS, number)], "cross_entropy")
            run.step(learning_rate=0.02)

    first = Client(base, tmp_path)
    whole, part = first.run(0), first.run(1)
    steps(whole, range(4))
    expected = whole.passes([datum(IDS, 9)], "cross_entropy", forward=True)
    steps(part, range(2))
    path = part.ask("save_weights", path="half")["path"]
    assert "is there already" in part.ask("save_weights", path="half")["error"]
    first.close()
    second = Client(base, tmp_path)
    for number, (optimizer, same) in enumerate(((True, True), (False, False))):
        body = {"session_id": second.session, "model_seq_id": number, "path": path, "optimizer": optimizer}
        run = Run(second, second.result(second.call("load_weights", body))["model_id"])
        steps(run, range(2, 4))
        mine = run.passes([datum(IDS, 9)], "cross_entropy", forward=True)
        assert (mine[1] == expected[1] and np.array_equal(mine[0][0], expected[0][0])) == same
    assert second.call("weights_info", {"tinker_path": path})["lora_rank"] == 4
    assert second.call(f"training_runs/{part.name}")["lora_rank"] == 4
    assert [entry["tinker_path"] for entry in second.call(f"training_runs/{part.name}/checkpoints")["checkpoints"]] == [
        path
    ]
    everywhere = second.call("checkpoints?limit=9")
    assert [entry["tinker_path"] for entry in everywhere["checkpoints"]] == [path]
    assert everywhere["cursor"]["total_count"] == 1
    listed = second.call("training_runs?limit=3&offset=1&access_scope=owned")
    assert listed["cursor"] == {"offset": 1, "limit": 3, "total_count": 4} and len(listed["training_runs"]) == 3
    names = {entry["training_run_id"] for entry in second.call("training_runs")["training_runs"]}
    assert names == {path.name for path in tmp_path.iterdir()} and second.ask("training_runs?limit=-1")[0] == 400
    second.call(f"training_runs/{part.name}/checkpoints/weights/half", method="DELETE")
    assert second.ask("weights_info", {"tinker_path": path})[0] == 404
    second.call(f"sessions/{second.session}/finish", {})
    assert not second.service.models and second.ask("session_heartbeat", {"session_id": second.session})[0] == 404
    second.close()


def test_who_may_ask_for_what(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    for key in (None, "tml-other"):
        assert client.ask("healthz", key=key)[0] == 401
    assert client.ask("healthz", {})[0] == 405 and client.ask("nothing")[0] == 404
    for path in ("tinker://../../weights/a", "tinker://a:train:0/weights/..", "tinker://a:train:0/state/a", "/etc"):
        assert client.ask("weights_info", {"tinker_path": path})[0] == 404
    body = {"session_id": client.session, "model_seq_id": 9, "base_model": "other", "lora_config": {"rank": 1}}
    status, answer = client.ask("create_model", body)
    assert status == 400 and b"'tiny' is" in answer
    with pytest.raises(UserError, match="VERL_SERVE_API_KEY"):
        main(["--model", "m", "--host", "192.0.2.1"])


async def _queue() -> list[str]:
    work, log, lane = Work(), [], Lane()

    def job(name: str, shares: str | None = None) -> Job:
        async def make() -> dict[str, Any]:
            log.append(f"{name} begins")
            await asyncio.sleep(0.05)
            log.append(f"{name} ends")
            return {}

        return Job(name, make, shares)

    jobs = [job("a1", "a"), job("a2", "a"), job("b", "b")]
    for each in jobs:
        work.submit(each)
    numbered = [work.submit(job("2"), lane, 2), work.submit(job("1"), lane, 1)]
    for each in (*jobs, *numbered):
        assert await work.fetch(each.id, 10) == {}
    await asyncio.get_running_loop().run_in_executor(None, work.close)
    return log


def test_samples_of_the_same_weights_run_together() -> None:
    log = asyncio.run(_queue())
    assert log[:2] == ["a1 begins", "a2 begins"]
    assert log[4:] == [f"{name} {what}" for name in ("b", "1", "2") for what in ("begins", "ends")]


def test_every_loss_is_tried() -> None:
    assert set(LOSSES) == {"cross_entropy", "importance_sampling", "ppo", "cispo", "dro"}


def test_programs_that_ended_make_room(base: Base, tmp_path: Path) -> None:
    """The SDK ends without a word: its adapters go when others need the room, those of a program that lives stay."""
    client = Client(base, tmp_path)
    runs = [client.run(number) for number in range(5)]
    living = client.session
    client.session = client.call("create_session", {"tags": []})["session_id"]
    gone = client.run(0)
    client.session = client.call("create_session", {"tags": []})["session_id"]
    body = {"session_id": client.session, "model_seq_id": 0, "lora_config": {"rank": 1}}
    status, answer = client.ask("create_model", body)
    assert status == 400 and b"--max-adapters" in answer
    for session in client.service.sessions.values():
        session.seen -= 300
    runs[0].step()
    client.call("session_heartbeat", {"session_id": client.session})
    client.run(0)
    assert living in client.service.sessions and gone.name not in client.service.models
    client.close()


def test_what_cannot_be_loaded_changes_nothing(base: Base, tmp_path: Path) -> None:
    """A state without its optimizer, a checkpoint of another model, an adapter of no rank."""
    client = Client(base, tmp_path)
    run = client.run()
    run.passes([datum(IDS, 1)], "cross_entropy")
    run.step(learning_rate=0.1)
    paths = [run.ask(call, path="x")["path"] for call in ("save_weights_for_sampler", "save_weights")]
    trained = run.passes([datum(IDS, 1)], "cross_entropy", forward=True)[1]
    assert "has no optimizer: save_state writes one" in run.ask("load_weights", path=paths[0], optimizer=True)["error"]
    assert run.passes([datum(IDS, 1)], "cross_entropy", forward=True)[1] == trained
    for rank in (0, -3):
        body = {"session_id": client.session, "model_seq_id": 1, "lora_config": {"rank": rank}}
        assert b"a rank of at least 1" in client.ask("create_model", body)[1]
    client.close()
    other = copy.copy(base)
    other.path, other.name = "/models/other", "other"
    second = Client(other, tmp_path)
    assert [second.call("weights_info", {"tinker_path": path})["base_model"] for path in paths] == ["tiny", "tiny"]
    body = {"session_id": second.session, "path": paths[1], "model_path": paths[1]}
    for call, number in (("load_weights", "model_seq_id"), ("create_sampling_session", "sampling_session_seq_id")):
        status, answer = second.ask(call, body | {number: 0})
        assert status == 400 and b"of the model 'tiny'" in answer and b"--name tiny" in answer
    second.close()


def test_a_command_that_cannot_serve_says_why(base: Base, tmp_path: Path) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    (tmp_path / "file").touch()
    common = ["--model", base.path, "--dir", str(tmp_path / "runs"), "--port"]
    for words, problem in (
        ([str(taken.getsockname()[1])], "Address already in use"),
        (["99999"], "port must be 0-65535"),
        (["0", "--dir", str(tmp_path / "file")], "File exists"),
        (["0", "--max-length", "0"], "--max-length 0: at least 1"),
    ):
        with pytest.raises(UserError, match=problem):
            main([*common, *words])
    taken.close()
