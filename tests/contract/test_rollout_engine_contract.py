"""What every rollout engine does: seeds, truncation, stopping, abort and going on, a shared prompt, refusals."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from tests.contract.conftest import Sampler
from tests.vllm_cases import sample
from verl.engine.rollout.base import Completion, RolloutEngine, SamplingParams

PROMPT = list(range(3, 103))
BUDGET = 150


def test_it_is_a_rollout_engine(sampler: Sampler) -> None:
    assert isinstance(sampler.engine, RolloutEngine) and sampler.engine.version >= 0
    assert not sampler.engine.dead


def skip_without_seeds(sampler: Sampler) -> None:
    if sampler.kind == "sglang":
        pytest.skip("SGLang's draws follow seeds only on a device")


def test_a_seed_decides_a_response_whatever_else_is_sampled(sampler: Sampler) -> None:
    skip_without_seeds(sampler)
    alone = sample(sampler.engine, [PROMPT[:9]], seed=5, ignore_eos=True)[0]
    crowd = sample(sampler.engine, [PROMPT[:9], PROMPT, PROMPT[:30]], 2, seed=5, ignore_eos=True)
    assert crowd[0].token_ids.tolist() == crowd[1].token_ids.tolist() == alone.token_ids.tolist()
    other = sample(sampler.engine, [PROMPT[:9]], seed=6, ignore_eos=True)[0]
    assert other.token_ids.tolist() != alone.token_ids.tolist()
    assert alone.token_ids.dtype == np.int64 and alone.log_probs.dtype == np.float32


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"repetition_penalty": 1.4},
        {"temperature": 0.0},
    ],
    ids=str,
)
def test_log_probs_are_of_the_distribution_sampled_from(sampler: Sampler, params: dict[str, float]) -> None:
    if sampler.kind == "sglang" and "repetition_penalty" in params:
        pytest.skip("the sglang engine refuses it")
    prompt = PROMPT[:20]
    for done in sample(sampler.engine, [prompt], 3, ignore_eos=True, **params):
        response = done.token_ids.tolist()
        for position, row in enumerate(sampler.logits(prompt, response)):
            expected = truncated(row, prompt + response[:position], params)
            if params.get("temperature") == 0.0:
                assert response[position] == int(row.argmax())
            assert abs(float(expected[response[position]]) - done.log_probs[position]) < 1e-4


def truncated(logits: torch.Tensor, seen: list[int], params: dict[str, float]) -> torch.Tensor:
    """The slow, obvious form of one parameter's effect: logits [V] to the log-probs that are sampled from."""
    logits = logits / (params.get("temperature") or 1.0)
    if "repetition_penalty" in params:
        for token in set(seen):
            by = params["repetition_penalty"]
            logits[token] = logits[token] / by if logits[token] > 0 else logits[token] * by
    probs = logits.softmax(-1)
    order = probs.argsort(descending=True).tolist()
    keep = set(order[: int(params.get("top_k", len(order)))])
    if "top_p" in params:
        keep, mass = set(), 0.0
        for token in order:
            if mass >= params["top_p"]:
                break
            keep.add(token)
            mass += float(probs[token])
    if "min_p" in params:
        keep = {t for t in order if float(probs[t]) >= params["min_p"] * float(probs.max())}
    gone = [t for t in order if t not in keep]
    logits[gone] = -torch.inf
    return logits.log_softmax(-1)


def test_end_tokens_stop_tokens_and_stop_strings_end_a_response_and_stay_in_it(sampler: Sampler) -> None:
    from tests.tiny import tiny_tokenizer

    skip_without_seeds(sampler)  # tests/integration/test_sglang.py has the same without seeds

    def response(**params: Any) -> Completion:
        return sample(sampler.engine, [PROMPT[:20]], **({"seed": 1, "max_tokens": 60} | params))[0]

    free = response(ignore_eos=True).token_ids.tolist()
    wanted = next(t for t in free if 33 <= t < 90)
    cut = free[: free.index(wanted) + 1]
    text = tiny_tokenizer().decode([wanted])
    for given in ({"stop_token_ids": (wanted,)}, {"stop": (text,)}):
        done = response(ignore_eos=True, **given)
        assert done.token_ids.tolist() == cut and done.finish_reason == "stop"
        assert len(done.log_probs) == len(cut)
    whole = response().token_ids.tolist()
    assert whole == (free[: free.index(258) + 1] if 258 in free else free)
    full = sample(sampler.engine, [(PROMPT * 2)[:200]], max_tokens=1000, ignore_eos=True)[0]
    assert len(full.token_ids) == 256 - 200 and full.finish_reason == "length", "as long as max_model_len lets it"


def test_the_prompt_of_a_group_is_computed_once(sampler: Sampler) -> None:
    if sampler.kind == "sglang":
        pytest.skip("SGLang computes the prompts of one batch each")
    fresh = [(7 * i) % 250 for i in range(100)]
    sampler.engine.stats()
    prefilled = sum(done.prefilled for done in sample(sampler.engine, [fresh], 8))
    assert 100 <= prefilled <= 100 + 7 * 32, "at least whole blocks of 32 tokens are shared"
    assert sampler.engine.stats()["busy_s"] > 0 == sampler.engine.stats()["busy_s"]


def request(engine: Any, prompt: list[int], name: str, **params: Any) -> Any:
    sampling = SamplingParams(**({"max_tokens": BUDGET, "ignore_eos": True} | params))
    return engine.generate(prompt, sampling, request_id=name)


def test_an_aborted_response_keeps_its_tokens_and_goes_on(sampler: Sampler) -> None:
    engine = sampler.engine

    async def interrupted(delay: float) -> list[Completion]:
        calls = [asyncio.create_task(request(engine, PROMPT, f"a{delay}.{i}", seed=i)) for i in range(8)]
        await asyncio.sleep(delay)
        engine.abort()
        return await asyncio.gather(*calls)

    assert {c.finish_reason for c in asyncio.run(interrupted(0.0))} == {"abort"}, "even before it began"
    for delay in (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2):
        parts = asyncio.run(interrupted(delay))
        cut = [c for c in parts if c.finish_reason == "abort" and 0 < len(c.token_ids) < BUDGET]
        if cut:
            break
    partial = cut[0]
    assert sampler.difference(PROMPT, partial) < 1e-4
    done = len(partial.token_ids)
    longer = PROMPT + partial.token_ids.tolist()
    rest = asyncio.run(request(engine, longer, "rest", max_tokens=BUDGET - done, start=done))
    assert len(rest.token_ids) == BUDGET - done and rest.finish_reason == "length"
    assert sampler.difference(longer, rest) < 1e-4


def test_asleep_nothing_is_sampled(sampler: Sampler) -> None:
    sampler.engine.sleep()
    with pytest.raises(RuntimeError, match="asleep"):
        sample(sampler.engine, [PROMPT])
    sampler.engine.wake()
    assert len(sample(sampler.engine, [PROMPT], ignore_eos=True)[0].token_ids) == 24


@pytest.mark.parametrize(
    ("prompt", "params", "said"),
    [
        (list(range(256)), {}, r"256 tokens leaves no room .* max_model_len=256"),
        ([], {}, "non-empty"),
        ([1], {"top_p": 0.0}, r"top_p=0\.0"),
        ([1], {"min_p": 2.0}, r"min_p=2\.0"),
        ([1], {"max_tokens": 0}, r"max_tokens=0"),
        ([1], {"temperature": -1.0}, r"temperature=-1\.0"),
    ],
    ids=["long", "empty", "top_p", "min_p", "max_tokens", "temperature"],
)
def test_requests_that_cannot_be_sampled_are_refused(
    sampler: Sampler, prompt: list[int], params: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        sample(sampler.engine, [prompt], **params)


def test_request_ids_are_unique(sampler: Sampler) -> None:
    async def twice() -> None:
        await asyncio.gather(request(sampler.engine, [1], "same"), request(sampler.engine, [1], "same"))

    with pytest.raises(ValueError, match="ids must be unique"):
        asyncio.run(twice())


def test_a_later_turn_of_a_session_computes_what_is_new(sampler: Sampler) -> None:
    async def turns() -> tuple[list[int], Completion]:
        ask = sampler.engine.generate
        fresh = [(11 * i) % 250 for i in range(100)]
        first = await ask(fresh, SamplingParams(max_tokens=40, ignore_eos=True), request_id="turns", session="turns")
        longer = fresh + first.token_ids.tolist() + PROMPT[:10]
        params = SamplingParams(max_tokens=20, ignore_eos=True, call=1)
        return longer, await ask(longer, params, request_id="turns.1", session="turns")

    longer, second = asyncio.run(turns())
    sampler.engine.end_session("turns")
    assert 11 <= second.prefilled <= 11 + 32, "whole blocks of 32 tokens are shared at least"
    assert sampler.difference(longer, second) < 1e-4


def test_a_grammar_is_followed_and_the_tokens_that_it_left_are_told(sampler: Sampler) -> None:
    """The sets by hand: each byte of a text is a token."""
    from tests.tiny import tiny_tokenizer

    pytest.importorskip("llguidance")
    if sampler.kind not in ("native", "vllm"):
        pytest.skip("it is not held to grammars")
    if sampler.kind == "vllm":  # it imports all that it could use
        pytest.importorskip("lmformatenforcer")
    grammar = 'start: ("ab" | "ac") /[0-7]/ "."'
    tokenizer, sets = tiny_tokenizer(), ["a", "bc", "01234567", ".", ["<|im_end|>"]]
    for done in sample(sampler.engine, [PROMPT[:20]], 4, grammar=grammar, temperature=0.7):
        response = done.token_ids.tolist()
        assert done.finish_reason == "stop" and len(response) == len(sets)
        logits = sampler.logits(PROMPT[:20], response) / 0.7
        for row, token, log_prob, names, left in zip(
            logits, response, done.log_probs, sets, done.sampling_mask, strict=True
        ):
            allowed = sorted(tokenizer.convert_tokens_to_ids(list(names)))
            assert token in allowed
            assert abs(float(row[allowed].log_softmax(0)[allowed.index(token)]) - log_prob) < 1e-4
            assert np.frombuffer(left, np.int32, offset=1).tolist() == allowed
