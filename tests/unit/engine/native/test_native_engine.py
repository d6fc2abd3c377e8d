"""The embedded sampler's behaviour: batching, sharing, memory, stopping, aborting, new weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny import LINEAR_ATTENTION, tiny_model, tiny_tokenizer
from verl.engine.rollout.base import Completion, SamplingParams
from verl.engine.rollout.native.engine import NativeEngine
from verl.engine.rollout.native.states import StatePool
from verl.errors import UserError
from verl.models.recurrent import recurrent_layers

GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=40, ignore_eos=True)


LINEAR = "qwen3_5_text"  # every other layer carries a state along each sequence


@pytest.fixture(scope="module", params=["qwen3", pytest.param(LINEAR, marks=pytest.mark.long)])
def model_path(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    arch = request.param
    return tiny_model(tmp_path_factory.mktemp("model"), arch, scale=8.0, **LINEAR_ATTENTION.get(arch, {}))


@pytest.fixture
def model(model_path: Path) -> Iterator[Any]:
    from transformers import AutoModelForCausalLM

    yield AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


def engine_of(model: Any, **overrides: Any) -> NativeEngine:
    return NativeEngine(model, **({"eos_token_ids": [258], "max_model_len": 128, "max_num_seqs": 16} | overrides))


def prompt(number: int, length: int = 12) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(number)).tolist()


def run(engine: NativeEngine, work: list[tuple[list[int], SamplingParams, str | None]]) -> list[Completion]:
    async def go() -> list[Completion]:
        calls = [engine.generate(p, s, request_id=f"r{i}", group=g) for i, (p, s, g) in enumerate(work)]
        return await asyncio.gather(*calls)

    return asyncio.run(go())


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [c.token_ids.tolist() for c in completions]


def test_a_response_does_not_depend_on_the_batch(model: Any) -> None:
    work = [(prompt(i, 3 + 9 * i), replace(DRAWN, seed=i, max_tokens=10 + 7 * i), None) for i in range(6)]
    together = tokens(run(engine_of(model), work))
    assert together == [tokens(run(engine_of(model), [w]))[0] for w in work]
    assert together == tokens(run(engine_of(model, max_num_seqs=2), work))
    assert together == tokens(run(engine_of(model, max_num_batched_tokens=5), work))
    assert together[0] != tokens(run(engine_of(model), [(work[0][0], replace(DRAWN, seed=77), None)]))[0]


@pytest.mark.parametrize(("model_path", "prefilled"), [("qwen3", 1), (LINEAR, 12)], indirect=["model_path"])
def test_a_late_member_uses_the_cached_prompt(model: Any, prefilled: int) -> None:
    engine = engine_of(model)
    first = run(engine, [(prompt(0), GREEDY, "g")])
    assert first[0].prefilled == 12
    again = run(engine, [(prompt(0), GREEDY, "g")])
    assert tokens(again) == tokens(first)
    assert again[0].prefilled == prefilled  # the last one again, for its logits; with a state that has passed it, all
    other = run(engine, [(prompt(1), GREEDY, "g")])  # the name used again for another prompt
    assert tokens(other) == tokens(run(engine_of(model), [(prompt(1), GREEDY, None)]))


def dialogue(engine: NativeEngine, number: int, *, session: bool, how: SamplingParams, cut: int = 0) -> Any:
    """Four turns of the response `number` of a group; before the third `cut` tokens of the second are taken back."""

    async def go() -> list[Completion]:
        ids, done, name = prompt(0, 20), [], f"d{number}"
        for turn in range(4):
            which = {"group": "g"} if turn == 0 else {}
            params = replace(how, seed=number, call=turn)
            done.append(
                await engine.generate(
                    ids, params, request_id=f"{name}.{turn}", session=name if session else None, **which
                )
            )
            ids = [*ids, *done[-1].token_ids.tolist()]
            ids = ids[: len(ids) - cut] if turn == 1 else ids
            ids += prompt(10 * number + turn + 1, 3 + number)
            await asyncio.sleep(0)
        engine.end_session(name)
        return done

    return go()


@pytest.mark.parametrize(
    ("model_path", "more"),
    [
        ("qwen3", {}),
        ("qwen3", {"max_num_batched_tokens": 7}),
        ("qwen3", {"cache_tokens": 400}),
        ("qwen3", {"max_num_seqs": 2}),
        ("qwen3", {"cut": 9}),
        ("qwen3", {"how": "end"}),
        (LINEAR, {"cut": 9}),
        pytest.param(LINEAR, {}, marks=pytest.mark.long),
        pytest.param(LINEAR, {"max_num_batched_tokens": 7}, marks=pytest.mark.long),
        pytest.param(LINEAR, {"max_num_seqs": 2}, marks=pytest.mark.long),
    ],
    indirect=["model_path"],
    ids=str,
)
def test_later_turns_prefill_only_what_is_new(model: Any, more: dict[str, Any]) -> None:
    """Whatever the cache has room for, the responses are those of an engine that computes every turn anew."""
    cut, stops = more.pop("cut", 0), more.pop("how", "") == "end"
    how = SamplingParams(max_tokens=12, ignore_eos=True, repetition_penalty=1.2, stop=("e", "a") if stops else ())

    def play(session: bool, **options: Any) -> tuple[list[list[Completion]], NativeEngine]:
        engine = engine_of(model, **({"tokenizer": tiny_tokenizer()} | options))

        async def all_of_them() -> Any:
            calls = [dialogue(engine, i, session=session, how=how, cut=cut) for i in range(5)]
            return await asyncio.gather(*calls)

        return asyncio.run(all_of_them()), engine

    (found, engine), (expected, _) = play(True, **more), play(False)
    for ours, theirs in zip(found, expected, strict=True):
        assert tokens(ours) == tokens(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert np.allclose(one.log_probs, other.log_probs, atol=1e-5)
    assert engine._scheduler.idle == {} and not engine._scheduler.responses.taken.any()
    if not more:
        new = [[1 + 3 + i] * 3 for i in range(5)]  # the last token of the turn before, and what was said after it
        if cut:
            # a state does not forget what is taken back: all that follows the first prompt is computed again
            again = [12 + 3 + i + 12 - cut if engine._pool.states else -1 for i in range(5)]
            new = [[n[0], n[1] + again[i] - (again[i] > 0), n[2]] for i, n in enumerate(new)]
        assert [[done.prefilled for done in turns[1:]] for turns in found] == new
    if more == {"max_num_seqs": 2}:
        assert found[4][3].prefilled == 1 + 3 + 4, "those that wait keep their places"


@pytest.mark.parametrize("model_path", [LINEAR], indirect=True)
def test_responses_wait_for_a_free_state(model: Any) -> None:
    work = [(prompt(i // 2), replace(DRAWN, seed=i, max_tokens=9), f"{i // 2}") for i in range(6)]
    engine = engine_of(model)
    engine._pool.states = StatePool(3, torch.device("cpu"))
    assert tokens(run(engine, work)) == tokens(run(engine_of(model), work))
    engine._scheduler.forget_cache()
    assert engine._pool.states.free == 3
    with pytest.raises(UserError, match=r"need states of 200 bytes .* may take 199: raise rollout.gpu_memory"):
        StatePool.fit(100, 399, 4, torch.device("cpu"))


def test_new_weights_end_what_sessions_share(model: Any) -> None:
    engine = engine_of(model)

    async def two_turns() -> list[Completion]:
        first = await engine.generate(prompt(0), GREEDY, request_id="s", session="s")
        with torch.no_grad():
            model.lm_head.weight.mul_(-1.0)
            model.model.layers[-1].self_attn.k_proj.weight.mul_(0.5)
        engine.weights_updated(1)
        longer = [*prompt(0), *first.token_ids.tolist(), 5]
        return [
            await engine.generate(longer, GREEDY, request_id="s.1", session="s"),
            await engine_of(model).generate(longer, GREEDY, request_id="r"),
        ]

    ours, fresh = asyncio.run(two_turns())
    assert ours.token_ids.tolist() == fresh.token_ids.tolist() and ours.prefilled == 12 + 40 + 1


def test_a_small_cache_gives_the_same_responses(model: Any) -> None:
    work = [
        (prompt(i // 3, 20), replace(GREEDY if i % 2 else DRAWN, seed=i, max_tokens=60), f"{i // 3}") for i in range(9)
    ]
    roomy = run(engine_of(model), work)
    engine = engine_of(model, cache_tokens=350)
    tight = run(engine, work)
    assert sum(c.num_preempted for c in tight) > 0
    assert tokens(tight) == tokens(roomy)
    for a, b in zip(tight, roomy, strict=True):
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-4)


def test_one_that_begins_beside_one_that_is_computed_again(model: Any) -> None:
    """Prompt, response so far and new sibling in one pass: the sibling's row, the prompt's last, lies before the
    other's."""
    work = [(prompt(0), replace(DRAWN, seed=seed), "g") for seed in range(4)]
    expected = run(engine_of(model), work)

    async def go() -> list[Completion]:
        engine, calls = engine_of(model), []
        for number, (ids, sampling, group) in enumerate(work):
            calls.append(asyncio.create_task(engine.generate(ids, sampling, request_id=f"r{number}", group=group)))
            while len(engine._requests) <= number:
                await asyncio.sleep(0)
            engine.weights_updated(0)  # the same values: what runs is prefilled again, with who has just come
            while not all(request.tokens for request in engine._requests.values()):
                await asyncio.sleep(0)
        return await asyncio.gather(*calls)

    found = asyncio.run(go())
    assert tokens(found) == tokens(expected)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-4)


def test_the_cache_is_empty_afterwards(model: Any) -> None:
    engine = engine_of(model, max_num_seqs=4)
    run(engine, [(prompt(i), replace(DRAWN, seed=i, max_tokens=1 + 5 * i), f"{i}") for i in range(12)])
    engine.weights_updated(1)
    assert engine._pool.free_blocks == engine._pool.layout.blocks and not engine._scheduler.responses.taken.any()


def test_slots_are_reused_as_responses_finish(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty steps for the long one; the others pass through the second slot meanwhile."""
    engine, steps, step = engine_of(model, max_num_seqs=2), [], NativeEngine.step
    monkeypatch.setattr(engine, "step", lambda: steps.append(step(engine)))
    work = [(prompt(0), GREEDY, None)] + [(prompt(i), replace(GREEDY, max_tokens=5), None) for i in range(1, 6)]
    assert sum(map(len, tokens(run(engine, work)))) == 40 + 25
    assert len(steps) <= 40 + 6


def test_stop_strings(model: Any) -> None:
    tokenizer = tiny_tokenizer()
    with torch.no_grad():  # a model that spells: byte-level ids, one token each
        text = "so a = 1é €END more"
        script = tokenizer.encode(text)
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        run(engine_of(model), [(prompt(0), replace(GREEDY, stop=("x",)), None)])
    engine = engine_of(model, tokenizer=tokenizer, max_model_len=300)
    spell(model, script)
    for stop, want in (
        (("END",), "so a = 1é €END"),
        (("€",), "so a = 1é €"),
        (("1é", "zzz"), "so a = 1é"),
        (("no",), text),
    ):
        done = run(engine, [(prompt(0, 1), replace(GREEDY, max_tokens=len(script), stop=stop), None)])[0]
        assert tokenizer.decode(done.token_ids) == want
        assert done.finish_reason == ("length" if want == text else "stop")


def spell(model: Any, script: list[int]) -> None:
    """Make the model write `script` at positions 0, 1, … whatever it read, by replacing its forward."""
    from types import SimpleNamespace

    def forward(input_ids: torch.Tensor, position_ids: torch.Tensor, logits_to_keep: Any, **_: Any) -> Any:
        rows = position_ids[0] if isinstance(logits_to_keep, int) else position_ids[0, logits_to_keep]
        logits = torch.zeros(1, len(rows), 264)
        for i, position in enumerate(rows.tolist()):
            logits[0, i, script[position % len(script)]] = 50.0
        return SimpleNamespace(logits=logits)

    model.forward = forward


def test_forbidden_tokens(model: Any) -> None:
    free = run(engine_of(model), [(prompt(0), GREEDY, None)])[0].token_ids.tolist()
    bound = run(engine_of(model, forbidden_token_ids=free), [(prompt(0), GREEDY, None)])[0].token_ids.tolist()
    assert not set(free) & set(bound)


def test_abort_keeps_what_there_is(model: Any) -> None:
    engine = engine_of(model, max_num_seqs=2)

    async def go() -> list[Completion]:
        tasks = [
            asyncio.ensure_future(engine.generate(prompt(i), replace(GREEDY, max_tokens=100), request_id=f"r{i}"))
            for i in range(4)
        ]
        while sum(request.written for request in engine._requests.values()) < 20:
            await asyncio.sleep(0)
        engine.abort(["r0", "r3", "unknown"])  # one running, one waiting
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.sleep(0)
        assert set(engine._requests) == {"r2"}
        done = [await tasks[0], await tasks[2], await tasks[3]]
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]
        return done

    running, other, waiting = asyncio.run(go())
    whole = tokens(run(engine_of(model), [(prompt(0), replace(GREEDY, max_tokens=100), None)]))[0]
    assert running.finish_reason == waiting.finish_reason == "abort"
    assert len(waiting.token_ids) == 0 and 0 < len(running.token_ids) < 100
    assert running.token_ids.tolist() == whole[: len(running.token_ids)]
    assert len(other.token_ids) == 100


def test_a_session_that_ends_while_its_turn_is_sampled_keeps_no_place(model: Any) -> None:
    engine = engine_of(model, max_num_seqs=1)

    async def go() -> None:
        tasks = [
            asyncio.ensure_future(engine.generate(prompt(i), GREEDY, request_id=f"r{i}", session=f"s{i}"))
            for i in range(2)
        ]
        while not any(r.written > 4 for r in engine._scheduler.running):
            await asyncio.sleep(0)
        for i, task in enumerate(tasks):
            task.cancel()
            engine.end_session(f"s{i}")
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(go())
    assert engine._scheduler.idle == {} and not engine._scheduler.responses.taken.any()


def test_new_weights_in_the_middle_of_an_response(model: Any) -> None:
    engine = engine_of(model)

    async def go() -> Completion:
        task = asyncio.ensure_future(engine.generate(prompt(0), GREEDY, request_id="r", group="g"))
        while engine._requests.get("r") is None or engine._requests["r"].written < 10:
            await asyncio.sleep(0)
        with torch.no_grad():
            model.lm_head.weight.neg_()
            model.model.layers[-1].self_attn.k_proj.weight.neg_()
        engine.weights_updated(1)
        return await task

    done = asyncio.run(go())
    assert done.versions == (0, 1) and len(done.token_ids) == 40
    ids = torch.tensor([prompt(0) + done.token_ids.tolist()])
    with torch.no_grad():
        want = model(ids).logits[0, 11:-1].log_softmax(-1).gather(1, ids[0, 12:, None])[:, 0]
    np.testing.assert_allclose(done.log_probs[10:], want[10:].numpy(), atol=1e-4)
    assert abs(done.log_probs[:10] - want[:10].numpy()).max() > 0.1


def test_training_sees_the_model_as_it_was(model: Any) -> None:
    model.train()
    before = model.config._attn_implementation
    engine = engine_of(model, dtype="bfloat16")
    run(engine, [(prompt(0), GREEDY, None)])
    assert model.training and model.config._attn_implementation == before
    if not recurrent_layers(model):
        assert all("forward" not in m.__dict__ for m in model.modules())
    loss = model(torch.tensor([prompt(0)]), labels=torch.tensor([prompt(0)])).loss
    loss.backward()
    assert all(p.grad is not None and p.dtype == torch.float32 for p in model.parameters())


def test_several_event_loops_and_sleep(model: Any) -> None:
    engine = engine_of(model)
    first = tokens(run(engine, [(prompt(0), GREEDY, "g")]))
    engine.sleep()
    with pytest.raises(RuntimeError, match="asleep"):
        run(engine, [(prompt(0), GREEDY, "g")])
    engine.wake()
    assert tokens(run(engine, [(prompt(0), GREEDY, "g")])) == first

    async def cut_short() -> None:
        task = asyncio.ensure_future(engine.generate(prompt(0), GREEDY, request_id="left over"))
        await asyncio.sleep(0)
        assert not task.done()

    asyncio.run(cut_short())
    assert tokens(run(engine, [(prompt(0), GREEDY, "g")])) == first


@pytest.mark.parametrize("owns", [False, True])
def test_weights_of_its_own_leave_the_device_in_its_sleep(
    model: Any, owns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New ones come asleep: to where they are computed with, before there is a cache."""
    engine, work = engine_of(model, owns_weights=owns), [(prompt(0), GREEDY, None)]
    first, moves = tokens(run(engine, work)), []
    device = engine._runner.device = torch.device("cpu", 0)
    monkeypatch.setattr(model, "to", moves.append)
    engine.sleep()
    assert moves == [torch.device("cpu")] * owns
    engine.load_weights({name: value.clone() for name, value in engine.named_weights()}.items(), 1)
    engine.wake()
    assert moves[1:] == [device, device] * owns
    assert tokens(run(engine, work)) == first and engine.version == 1


def test_a_failing_forward_reaches_every_caller(model: Any) -> None:
    engine = engine_of(model)
    good = tokens(run(engine, [(prompt(0), GREEDY, None)]))
    forward = model.forward

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("device on fire")

    model.forward = broken
    with pytest.raises(RuntimeError, match="device on fire"):
        run(engine, [(prompt(0), GREEDY, None), (prompt(1), GREEDY, None)])
    model.forward = forward
    assert tokens(run(engine, [(prompt(0), GREEDY, None)])) == good


def test_one_group_has_one_prompt(model: Any) -> None:
    with pytest.raises(ValueError, match="one group, one prompt"):
        run(engine_of(model), [(prompt(0), GREEDY, "g"), (prompt(1), GREEDY, "g")])


def test_unknown_layers_are_refused(model: Any) -> None:
    model.config.layer_types = ["linear_attention", "conv"]
    with pytest.raises(UserError, match=r"conv.* are no attention"):
        engine_of(model)


def test_long_mixed_run_keeps_the_cache_tidy(model: Any) -> None:
    """Very different lengths through few slots: repacking happens, and responses stay what they are alone."""
    lengths = [3, 90, 5, 60, 2, 7, 80, 1, 33, 4, 66, 2, 9, 50, 3, 3, 70, 2]
    work = [(prompt(i, 4 + i), replace(DRAWN, seed=i, max_tokens=n), None) for i, n in enumerate(lengths)]
    engine = engine_of(model, max_num_seqs=8, cache_tokens=1500)
    done = run(engine, work)
    assert [len(c.token_ids) for c in done] == lengths
    roomy = engine_of(model, max_num_seqs=18)
    assert tokens(done) == tokens(run(roomy, work))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sleep_lets_go_of_the_memory_and_changes_no_response(model: Any, dtype: str) -> None:
    import weakref

    from torch.multiprocessing.reductions import StorageWeakRef

    engine = engine_of(model, dtype=dtype)
    work = [(prompt(1), replace(DRAWN, seed=i), "a") for i in range(2)]
    before = run(engine, work)
    # a view keeps its storage: the storages themselves must be gone, not only the pool's list of them
    stored = [StorageWeakRef(tensor.untyped_storage()) for tensor in engine._pool.tensors()]
    copies = [weakref.ref(c) for c, *_ in engine._runner.linears._copies.values()]
    assert stored and copies and not any(ref.expired() for ref in stored)
    engine.sleep()
    assert all(ref.expired() for ref in stored)
    assert all(ref() is None for ref in copies)
    engine.wake()
    assert tokens(run(engine, work)) == tokens(before)
