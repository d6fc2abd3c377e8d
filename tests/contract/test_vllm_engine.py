"""What vLLM alone does, besides the contract of all engines: many prompts, stop strings, the batch call, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.contract.conftest import Sampler
from tests.vllm_cases import sample, vllm_engine
from verl.engine.rollout.base import SamplingParams
from verl.errors import UserError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.parametrize("sampler", ["vllm"], indirect=True),
]
PROMPT = list(range(3, 103))


@pytest.fixture
def engine(sampler: Sampler) -> Any:
    return sampler.engine


def test_more_prompts_than_a_step_of_the_engine_holds(engine: Any) -> None:
    """8 × 120 tokens with 512 a step; each response is its seed's all the same."""
    prompts = [[3 + (i * 37 + j) % 200 for j in range(120)] for i in range(8)]
    crowd = sample(engine, prompts, ignore_eos=True)
    assert all(len(done.token_ids) == 24 for done in crowd)
    for i in (4, 7):
        alone = sample(engine, [prompts[i]], seed=1000 * i, ignore_eos=True)[0]
        assert alone.token_ids.tolist() == crowd[i].token_ids.tolist()


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


def test_a_temperature_that_vllm_would_raise_is_refused(engine: Any) -> None:
    with pytest.raises(ValueError, match=r"0\.01 or above"):
        sample(engine, [[1]], temperature=0.001)


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
        assert cut["text"] == (found[0]["text"][:end] if end is not None else engine.tokenizer.decode(cut["token_ids"]))
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
        ({"tensor_parallel_size": 3}, r"heads \(4\) must be divisible by tensor parallel size"),
        ({"tensor_parallel_size": 2, "expert_parallel": True}, "on a CPU vLLM does not spread experts"),
    ],
    ids=["unknown", "heads", "experts"],
)
def test_settings_that_cannot_be_are_refused_before_anything_starts(
    sampler: Sampler, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        vllm_engine(sampler.path, **given)


def test_a_model_without_a_cpu_kernel_is_refused(sampler: Sampler, tmp_path: Path) -> None:
    from tests.tiny import tiny_model
    from verl.engine.rollout.vllm import launch

    if not launch.platform()[0]:
        pytest.skip("vLLM runs on a device here: its kernels take other head sizes")
    with pytest.raises(UserError, match=r"heads have 16 elements; .*32, 64"):
        vllm_engine(tiny_model(tmp_path / "m"))
