"""A sampler host without a model: the texts that leave with the responses are those that the driver would decode."""

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.tiny import SPECIAL, tiny_tokenizer
from tests.weight_sync_processes import channel_name, check_clean, weights
from verl.data.rows import text_of
from verl.engine.rollout.base import Completion, EngineDead, RolloutEngine, SamplingParams
from verl.rollout.resumable import ResumableGeneration
from verl.weight_sync.channel import BucketSender
from verl.weight_sync.receiver import WeightReceiver
from verl.weight_sync.verify import WeightSyncError
from verl.workers import payloads
from verl.workers.rollout_worker import RolloutWorker


class Given(RolloutEngine, WeightReceiver):
    """Responses a request with the ids it was given for it, at once; those of `cut` when the request is stopped."""

    version = 1

    def __init__(self, ids: dict[str, np.ndarray], cut: dict[str, np.ndarray] | None = None):
        self.ids, self.cut = ids, cut or {}
        self.stopped = asyncio.Event()

    async def generate(self, prompt_ids, sampling, *, request_id, group=None, media=None):
        if request_id in self.cut:
            await self.stopped.wait()
        ids = self.cut.get(request_id, self.ids.get(request_id))
        return Completion(ids, np.zeros(len(ids), np.float32), "abort" if request_id in self.cut else "stop")

    def abort(self, request_ids=None):
        self.stopped.set()

    def load_weights(self, weights, version, *, verify): ...

    def sleep(self): ...

    def wake(self): ...


class Pool(Given):
    """The driver's end of one host, as `ReplicaPool` is, without Ray; one request at a time."""

    def __init__(self, host: RolloutWorker):
        self.host = host

    async def generate(self, prompt_ids, sampling, *, request_id, group=None, media=None):
        ask = payloads.GenerateRequest(request_id, np.asarray(prompt_ids), sampling, group)
        await self.host.submit(payloads.encode_requests([ask]))
        (response,) = payloads.decode_results(await self.host.results(5.0))
        assert response.completion is not None, response.error
        return response.completion

    def abort(self, request_ids=None):
        self.host.engine.abort(request_ids)


@pytest.fixture(scope="module")
def byte_tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def merged_tokenizer() -> Any:
    """A byte-level BPE with merges and two special tokens, one of them no end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=list(SPECIAL[:2]), initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(["naïve 漢字 漢語 🙂🙃 and , some . text don't n't " * 9], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=SPECIAL[1], pad_token=SPECIAL[0])


def _host(tokenizer: Any, engine: RolloutEngine) -> RolloutWorker:
    host = RolloutWorker({}, 0)
    host.engine, host._decode = engine, partial(text_of, tokenizer)
    return host


def _responses(tokenizer: Any) -> Iterable[np.ndarray]:
    """Random ids, ids past the vocabulary's end, characters cut in the middle, special tokens, nothing."""
    rng = np.random.default_rng(0)
    size = len(tokenizer)
    special = tokenizer.convert_tokens_to_ids(list(SPECIAL[:2]))
    face = tokenizer.encode("🙂 漢", add_special_tokens=False)
    for length in (1, 2, 7, 300):
        yield rng.integers(0, size, length)
        yield rng.integers(0, size + 3, length)
        yield np.array([*rng.integers(0, size, length), *special])
    yield np.array([*special, *face, special[1], *face[:-1]])
    yield np.array(face[1:])
    yield np.array(face[:1] * 5)
    yield np.array(special)
    yield np.array(tokenizer.encode("a , b . c don't  \n\n x ", add_special_tokens=False))
    yield np.zeros(0, np.int64)


@pytest.mark.parametrize("cleaned", [False, True], ids=["as-is", "clean_up"])
@pytest.mark.parametrize("name", ["byte_tokenizer", "merged_tokenizer"])
def test_texts_are_those_of_the_tokenizer_without_special_tokens(
    name: str, cleaned: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = request.getfixturevalue(name)
    monkeypatch.setattr(tokenizer, "clean_up_tokenization_spaces", cleaned)
    ids = {str(i): found.astype(np.int64) for i, found in enumerate(_responses(tokenizer))}

    async def go() -> dict[str, Completion]:
        pool = Pool(_host(tokenizer, Given(ids)))
        sampling = SamplingParams(max_tokens=400)
        return {key: await pool.generate(np.arange(3), sampling, request_id=key) for key in ids}

    done = asyncio.run(go())
    for key, given in ids.items():
        assert done[key].token_ids.tolist() == given.tolist()
        assert done[key].text == tokenizer.decode(given.tolist(), skip_special_tokens=True), given
    texts = [c.text for c in done.values()]
    assert "" in texts and any("\ufffd" in text for text in texts) and any("漢" in text for text in texts)


def test_a_tokenizer_with_a_decode_of_its_own_gets_a_list() -> None:
    class Own:
        def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
            return "".join(chr(97 + i) for i in token_ids) if type(token_ids) is list else "not a list"

    assert text_of(Own(), np.array([0, 1])) == "ab"


def test_a_stopped_response_has_no_text_and_one_that_goes_on_the_whole_text(byte_tokenizer: Any) -> None:
    face = byte_tokenizer.encode("🙂", add_special_tokens=False)
    cut, rest = np.array([72, *face[:2]]), np.array([*face[2:], 72])
    host = _host(byte_tokenizer, Given({"a~1": rest}, cut={"a": cut}))
    sampling = SamplingParams(max_tokens=9)

    async def go() -> tuple[Completion, Completion]:
        requests = ResumableGeneration(Pool(host))
        work = asyncio.ensure_future(requests.generate(np.arange(3), sampling, request_id="a"))
        await asyncio.sleep(0)
        assert await requests.pause() == 1
        await requests.resume()
        return await work, await Pool(host).generate(np.arange(3), sampling, request_id="a")

    whole, stopped = asyncio.run(go())
    assert stopped.finish_reason == "abort" and stopped.text is None
    assert whole.parts == 2 and whole.token_ids.tolist() == [*cut, *rest]
    assert whole.text == byte_tokenizer.decode(whole.token_ids.tolist()) and "🙂" in whole.text


def test_a_response_that_began_elsewhere_has_no_text(byte_tokenizer: Any) -> None:
    """Its caller's tokens are in the text that the host gives, and not in the completion."""
    sampling = SamplingParams(max_tokens=9, start=2)

    async def go() -> tuple[Completion, Completion]:
        pool = Pool(_host(byte_tokenizer, Given({"a": np.array([74])})))
        given = await pool.generate(np.array([71, 72, 73]), sampling, request_id="a")
        return given, await ResumableGeneration(pool).generate(np.array([71, 72, 73]), sampling, request_id="a")

    given, kept = asyncio.run(go())
    assert given.text == byte_tokenizer.decode([72, 73, 74]) and kept.text is None


class Dying(Given):
    """Responses the first request, then dies; loads fail, with the engine if `fatal`."""

    gone, fatal = False, True

    @property
    def dead(self):
        return self.gone

    async def generate(self, prompt_ids, sampling, *, request_id, group=None, media=None):
        if request_id == "first":
            return await super().generate(prompt_ids, sampling, request_id=request_id)
        self.gone = True
        raise RuntimeError("core stopped")

    def receive_weights(self, places, version, *, timeout, verify):
        self.gone = self.fatal
        raise ValueError("no value came for q_proj")

    def stats(self):
        return {}


def test_a_dead_engine_gives_what_it_has_and_then_its_reason(byte_tokenizer: Any) -> None:
    host = _host(byte_tokenizer, Dying({"first": np.array([72])}))

    async def go() -> None:
        asks = [
            payloads.GenerateRequest(name, np.arange(2), SamplingParams(max_tokens=4)) for name in ("first", "b", "c")
        ]
        await host.alive()
        await host.submit(payloads.encode_requests(asks))
        (response,) = payloads.decode_results(await host.results(5.0))
        assert (response.id, response.error) == ("first", None), "no request has the engine's death for a response"
        for call in (host.results(5.0), host.results(5.0), host.alive()):
            with pytest.raises(EngineDead, match=r"its engine died \(RuntimeError: core stopped\)"):
                await call
        assert await host.stats() == {}

    asyncio.run(go())


def test_a_death_while_responses_are_waited_for_ends_the_wait(byte_tokenizer: Any) -> None:
    host = _host(byte_tokenizer, Dying({}))

    async def go() -> None:
        waiting = asyncio.create_task(host.results(30.0))
        await asyncio.sleep(0.05)
        await host.submit(
            payloads.encode_requests([payloads.GenerateRequest("b", np.arange(2), SamplingParams(max_tokens=4))])
        )
        with pytest.raises(EngineDead, match="core stopped"):
            await asyncio.wait_for(waiting, 5)

    asyncio.run(go())


@pytest.mark.parametrize("fatal", [True, False])
def test_a_load_that_fails_says_whether_the_engine_survived(byte_tokenizer: Any, fatal: bool) -> None:
    engine = Dying({})
    engine.fatal = fatal
    host = _host(byte_tokenizer, engine)

    async def go() -> None:
        kind = EngineDead if fatal else ValueError
        with pytest.raises(kind, match="no value came for q_proj"):
            await host.receive_weights([("channel", 0)], 3, 5.0, "")
        if not fatal:
            await host.alive()

    asyncio.run(go())


class Loading(Given):
    """Notes how its loads of weights end, in that order."""

    def __init__(self) -> None:
        super().__init__({})
        self.ends: list[Any] = []

    def load_weights(self, weights, version, *, verify):
        try:
            self.ends.append((version, [name for name, _ in weights]))
        except WeightSyncError as error:
            self.ends.append((version, str(error)))
            raise


def test_a_transfer_that_never_began_ends_before_the_next_one(byte_tokenizer: Any) -> None:
    """Its sender gave up before this host came: left alone it would fail minutes later, over the weights of the
    next."""
    engine = Loading()
    host = _host(byte_tokenizer, engine)
    name = channel_name("never-began")

    async def go() -> None:
        left = asyncio.create_task(host.receive_weights([(f"{name}-0", 1)], 4, 20.0, ""))
        await asyncio.sleep(0.1)
        sender = BucketSender(f"{name}-1", 1, 4096, timeout=10)
        sending = asyncio.create_task(asyncio.to_thread(sender.send, weights(), 4))
        await asyncio.wait_for(host.receive_weights([(f"{name}-1", 0)], 4, 20.0, ""), 10)
        await sending
        assert left.done(), "nobody waits for what does not come"
        with pytest.raises(WeightSyncError, match="another transfer has begun"):
            await left

    asyncio.run(go())
    (_, failed), (version, names) = engine.ends
    assert "another transfer has begun" in failed and version == 4 and "embed" in names
    check_clean(name)


def test_responses_are_gathered_where_many_are_under_way(byte_tokenizer: Any) -> None:
    """400 responses that end one by one leave in a few calls, a single one at once."""

    class Slow(Given):
        async def generate(self, prompt_ids, sampling, *, request_id, group=None, media=None):
            await asyncio.sleep(int(request_id) * 1e-3)
            return await super().generate(prompt_ids, sampling, request_id=request_id)

    ids = {str(i): np.array([72]) for i in range(400)}
    host = _host(byte_tokenizer, Slow(ids))

    async def go() -> list[int]:
        asks = [payloads.GenerateRequest(name, np.arange(2), SamplingParams(max_tokens=4)) for name in ids]
        await host.submit(payloads.encode_requests(asks))
        sizes: list[int] = []
        while sum(sizes) < 400:
            sizes.append(len(payloads.decode_results(await host.results(5.0))))
        return sizes

    sizes = asyncio.run(go())
    assert sum(sizes) == 400 and len(sizes) < 100
