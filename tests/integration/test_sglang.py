"""SGLang: what the contract suites show of other engines with seeds; two training steps, as a user starts them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runs import TinyRun, records
from tests.sglang_cases import require_sglang, sglang_engine
from tests.tiny import tiny_tokenizer
from tests.vllm_cases import sample, vllm_model

require_sglang()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    made = sglang_engine(vllm_model(tmp_path_factory.mktemp("sglang") / "model"), eos_token_ids=[])
    yield made
    made.close()


def test_stop_tokens_and_stop_strings_end_a_response_and_stay_in_it(engine: Any) -> None:
    for first in range(3, 60):
        prompt = list(range(first, first + 20))
        free = sample(engine, [prompt], temperature=0.0)[0].token_ids.tolist()
        wanted = next((token for token in free[1:] if 33 <= token < 90), None)
        if wanted is not None:
            break
    cut = free[: free.index(wanted) + 1]
    for stop in ({"stop_token_ids": (wanted,)}, {"stop": (tiny_tokenizer().decode([wanted]),)}):
        done = sample(engine, [prompt], temperature=0.0, **stop)[0]
        assert done.token_ids.tolist() == cut and done.finish_reason == "stop" and len(done.log_probs) == len(cut)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"ignore_eos": True, "stop_token_ids": (5,)}, "no stop_token_ids with ignore_eos"),
        ({"repetition_penalty": 1.5}, "not the one of the other engines"),
    ],
)
def test_requests_that_sglang_cannot_sample_are_refused(engine: Any, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample(engine, [[1]], **params)


def test_two_steps(tmp_path: Path, fork_server: Any) -> None:
    run, out = TinyRun(tmp_path), tmp_path / "out"
    words = (
        "actor_rollout_ref.rollout.name=sglang",
        "actor_rollout_ref.rollout.dtype=float32",
        "trainer.total_training_steps=2",
        "trainer.verify_weight_sync=True",
        "trainer.logprob_diff_limit=1e-4",
        "trainer.save_freq=-1",
        "trainer.test_freq=0",
    )
    done = fork_server.run(run.overrides(out, *words), timeout=500, teardown=True)
    assert done.status == 0, done.stderr[-4000:]
    for step in (1, 2):
        assert records(out)[step]["training/rollout_logprob_abs_diff/max"] < 1e-4
        assert records(out)[step]["actor/grad_norm"] > 0
