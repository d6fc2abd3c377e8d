"""One vLLM engine: seeds, truncation, stopping, abort and going on, the shared prefix, the batch call, refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.vllm_cases import require_vllm, sample, vllm_engine, vllm_model
from verl.engine.rollout.base import Completion, SamplingParams
from verl.errors import UserError

require_vllm()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = list(range(3, 103))
BUDGET = 150


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vllm_model(tmp_path_factory.mktemp("vllm") / "model")


@pytest.fixture(scope="module")
def model(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[Any]:
    made = vllm_engine(path, load_format="auto")
    yield made
    made.close()


@torch.no_grad()
def logits_of(model: Any, prompt: list[int], response: list[int]) -> torch.Tensor:
    """Logits at each position of the response, float32 [L, V]."""
    return model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()


def worst(model: Any, prompt: list[int], done: Completion) -> float:
    """Largest difference of the response's log-probs to the model's, at temperature 1."""
    response = done.token_ids.tolist()
    table = logits_of(model, prompt, response).log_softmax(-1)
    return float(
        np.abs(table.gather(1, torch.tensor(response)[:, None])[:, 0].numpy() - done.log_probs).max()
    )


def test_a_seed_decides_an_answer_whatever_else_is_sampled(engine: Any) -> None:
    alone = sample(engine, [PROMPT[:9]], seed=5, ignore_eos=True)[0]
    crowd = sample(engine, [PROMPT[:9], PROMPT, PROMPT[:30]], 2, seed=5, ignore_eos=True)
    assert crowd[0].token_ids.tolist() == crowd[1].token_ids.tolist() == alone.token_ids.tolist()
    other = sample(engine, [PROMPT[:9]], seed=6, ignore_eos=True)[0]
    assert other.token_ids.tolist() != alone.token_ids.tolist()


def test_more_prompts_than_a_step_of_the_engine_holds(engine: Any) -> None:
    """8 × 120 tokens with 512 a step; each response is its seed's all the same."""
    prompts = [[3 + (i * 37 + j) % 200 for j in range(120)] for i in range(8)]
    crowd = sample(engine, prompts, ignore_eos=True)
    assert all(len(done.token_ids) == 24 for done in crowd)
    for i in (4, 7):
        alone = sample(engine, [prompts[i]], seed=1000 * i, ignore_eos=True)[0]
        assert alone.token_ids.tolist() == crowd[i].token_ids.tolist()


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
def test_log_probs_are_of_the_distribution_sampled_from(
    engine: Any, model: Any, params: dict[str, float]
) -> None:
    prompt = PROMPT[:20]
    for done in sample(engine, [prompt], 3, ignore_eos=True, **params):
        response = done.token_ids.tolist()
        for position, row in enumerate(logits_of(model, prompt, response)):
            expected = truncated(row, prompt + response[:position], params)
            assert abs(float(expected[response[position]]) - done.log_probs[position]) < 1e-4
            if params.get("temperature") == 0.0:
                assert response[position] == int(row.argmax())


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


def test_end_tokens_stop_tokens_and_stop_strings_end_an_answer_and_stay_in_it(engine: Any) -> None:
    free = sample(engine, [PROMPT[:20]], seed=1, max_tokens=60, ignore_eos=True)[0].token_ids.tolist()
    ends = engine.tokenizer.eos_token_id
    assert ends == 258
    wanted = next(t for t in free if 33 <= t < 90)
    cut = free[: free.index(wanted) + 1]
    by_id = sample(engine, [PROMPT[:20]], seed=1, max_tokens=60, ignore_eos=True, stop_token_ids=(wanted,))[0]
    assert by_id.token_ids.tolist() == cut and by_id.finish_reason == "stop"
    text = engine.tokenizer.decode([wanted])
    by_text = sample(engine, [PROMPT[:20]], seed=1, max_tokens=60, ignore_eos=True, stop=(text,))[0]
    assert by_text.token_ids.tolist() == cut and by_text.finish_reason == "stop"
    assert len(by_text.log_probs) == len(cut)
    whole = sample(engine, [PROMPT[:20]], seed=1, max_tokens=60)[0].token_ids.tolist()
    assert whole == (free[: free.index(258) + 1] if 258 in free else free)


def test_a_special_token_may_be_the_stop_string(engine: Any) -> None:
    end = engine.tokenizer.decode([258])
    free = sample(engine, [PROMPT[:20]], 40, max_tokens=60, ignore_eos=True)
    wanted = next(i for i, done in enumerate(free) if 258 in done.token_ids[:-1])
    ids = free[wanted].token_ids.tolist()
    cut = sample(engine, [PROMPT[:20]], seed=wanted, max_tokens=60, ignore_eos=True, stop=("zzz", end))[0]
    assert cut.token_ids.tolist() == ids[: ids.index(258) + 1] and cut.finish_reason == "stop"


def test_a_stop_string_is_found_across_an_interruption(engine: Any) -> None:
    """It began in the part of the response that was written before, and ends in the first new token."""
    greedy = {"temperature": 0.0, "ignore_eos": True}
    prompts = [PROMPT[:length] for length in range(10, 40)]
    responses = [done.token_ids.tolist() for done in sample(engine, prompts, max_tokens=60, **greedy)]
    number, at = next(
        (number, i)
        for number, ids in enumerate(responses)
        for i in range(1, 50)
        if all(33 <= token < 90 for token in ids[i - 1 : i + 1])
    )
    free, prompt = responses[number], prompts[number]
    text = engine.tokenizer.decode(free[at - 1 : at + 1])
    going_on = {"max_tokens": 60 - at, "start": at, "stop": (text,)}
    rest = sample(engine, [prompt + free[:at]], **going_on, **greedy)[0]
    assert rest.token_ids.tolist() == [free[at]] and rest.finish_reason == "stop"
    assert len(rest.log_probs) == 1


def test_the_prompt_of_a_group_is_computed_once(engine: Any) -> None:
    fresh = [(7 * i) % 250 for i in range(100)]
    engine.stats()
    sample(engine, [fresh], 8)
    seen = engine.stats()
    assert 100 <= seen["prompt_tokens"] <= 100 + 7 * 32, "whole blocks of 32 tokens are shared"
    assert seen["tokens"] > 0 and seen["busy_s"] > 0
    assert engine.stats() == {"busy_s": 0.0, "prompt_tokens": 0.0, "tokens": 0.0, "preempted": 0.0}


def request(engine: Any, prompt: list[int], name: str, **params: Any) -> Any:
    sampling = SamplingParams(**({"max_tokens": BUDGET, "ignore_eos": True} | params))
    return engine.generate(prompt, sampling, request_id=name)


def test_an_aborted_answer_keeps_its_tokens_and_goes_on(engine: Any, model: Any) -> None:
    async def interrupted(delay: float) -> list[Completion]:
        calls = [asyncio.create_task(request(engine, PROMPT, f"a{delay}.{i}", seed=i)) for i in range(8)]
        await asyncio.sleep(delay)
        engine.abort()
        return await asyncio.gather(*calls)

    assert {c.finish_reason for c in asyncio.run(interrupted(0.0))} == {"abort"}, "even before it began"
    for delay in (0.05, 0.1, 0.2, 0.4, 0.8, 1.6):
        parts = asyncio.run(interrupted(delay))
        cut = [c for c in parts if c.finish_reason == "abort" and 0 < len(c.token_ids) < BUDGET]
        if cut:
            break
    partial = cut[0]
    assert worst(model, PROMPT, partial) < 1e-4
    done = len(partial.token_ids)
    longer = PROMPT + partial.token_ids.tolist()
    rest = asyncio.run(request(engine, longer, "rest", max_tokens=BUDGET - done, start=done))
    assert len(rest.token_ids) == BUDGET - done and rest.finish_reason == "length"
    assert worst(model, longer, rest) < 1e-4


def test_requests_under_way_go_on_with_new_weights(engine: Any, model: Any) -> None:
    """Twice the same values: every token agrees with them, and both versions are recorded."""

    async def run() -> tuple[list[Completion], list[Completion]]:
        calls = [asyncio.create_task(request(engine, PROMPT, f"l{i}", seed=i)) for i in range(8)]
        await asyncio.sleep(0.1)
        await asyncio.to_thread(engine.load_weights, model.state_dict().items(), 7)
        first = await asyncio.gather(*calls)
        return first, await asyncio.gather(request(engine, PROMPT, "after"))

    first, after = asyncio.run(run())
    assert {c.versions for c in first} <= {(0,), (0, 7)} and after[0].versions == (7,)
    assert all(len(c.token_ids) == BUDGET and c.finish_reason == "length" for c in first)
    assert max(worst(model, PROMPT, c) for c in first) < 1e-4


def test_asleep_nothing_is_sampled(engine: Any) -> None:
    engine.sleep()
    with pytest.raises(RuntimeError, match="asleep"):
        sample(engine, [PROMPT])
    engine.wake()
    assert len(sample(engine, [PROMPT], ignore_eos=True)[0].token_ids) == 24


def test_requests_that_cannot_be_sampled_are_refused(engine: Any) -> None:
    for prompt, params, said in (
        (list(range(256)), {}, r"256 tokens leaves no room .* max_model_len=256"),
        ([], {}, "non-empty"),
        ([1], {"temperature": 0.001}, r"0\.01 or above"),
        ([1], {"top_p": 0.0}, r"top_p=0\.0"),
        ([1], {"min_p": 2.0}, r"min_p=2\.0"),
    ):
        with pytest.raises(ValueError, match=said):
            sample(engine, [prompt], **params)

    async def twice() -> None:
        await asyncio.gather(request(engine, [1], "same"), request(engine, [1], "same"))

    with pytest.raises(ValueError, match="ids must be unique"):
        asyncio.run(twice())


def test_the_batch_call(engine: Any) -> None:
    texts = ["Question: 1 + 1", "Another"]
    params = {"max_tokens": 10, "temperature": 0.9, "seed": 3, "n": 2}
    found = engine.generate(texts, sampling_params=params)
    assert [(f["prompt_index"], f["index"]) for f in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(f["text"] == engine.tokenizer.decode(f["token_ids"], skip_special_tokens=True) for f in found)
    assert all(len(f["log_probs"]) == len(f["token_ids"]) <= 10 for f in found)
    assert {f["finish_reason"] for f in found} <= {"stop", "length"}
    assert engine.generate(texts, sampling_params=params) == found
    assert engine.generate(texts, {"max_tokens": 10}) != engine.generate(texts, {"max_tokens": 10})
    stop = {"stop": found[0]["text"][4:6]}
    for more, end in (
        (stop, found[0]["text"].index(stop["stop"])),
        (stop | {"include_stop_str_in_output": True}, None),
    ):
        cut = engine.generate(texts, sampling_params=params | more)[0]
        assert cut["finish_reason"] == "stop" and stop["stop"] in engine.tokenizer.decode(cut["token_ids"])
        assert cut["text"] == (
            found[0]["text"][:end] if end is not None else engine.tokenizer.decode(cut["token_ids"])
        )
    ids = engine.tokenizer("Another")["input_ids"]
    assert engine.generate([ids], params)[0]["token_ids"] != []
    chat = [[{"role": "user", "content": "hello"}]]
    assert engine.generate(chat, {"max_tokens": 3, "ignore_eos": True})[0]["finish_reason"] == "length"
    with pytest.raises(ValueError, match="nearest: max_tokens"):
        engine.generate(texts, sampling_params={"max_token": 3})
    with pytest.raises(ValueError, match="request_id"):
        engine.generate([1, 2], SamplingParams(max_tokens=1))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"engine_kwargs": {"max_num_seq": 3}}, "nearest: max_num_seqs"),
        ({"engine_kwargs": {"max_num_seqs": 3}}, r"rollout\.max_num_seqs=8 sets it"),
        ({"engine_kwargs": {"model": "x"}}, "remove this key"),
        ({"tensor_parallel_size": 3}, "does not divide the model's 4 attention heads; use one of 1, 2, 4"),
    ],
    ids=["unknown", "ours", "fixed", "heads"],
)
def test_settings_that_cannot_be_are_refused_before_anything_starts(
    path: Path, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        vllm_engine(path, **given)


def test_a_model_without_a_cpu_kernel_is_refused(tmp_path: Path) -> None:
    from tests.tiny import tiny_model
    from verl.engine.rollout.vllm import launch

    if not launch.platform()[0]:
        pytest.skip("vLLM runs on a device here: its kernels take other head sizes")
    with pytest.raises(UserError, match=r"heads have 16 elements; .*32, 64"):
        vllm_engine(tiny_model(tmp_path / "m"))
