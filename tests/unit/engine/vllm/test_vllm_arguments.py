"""What becomes of settings on their way into vLLM; needs no vLLM."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tiny import LINEAR_ATTENTION, tiny_config
from verl.engine import registry
from verl.engine.registry import EnginePackageError
from verl.engine.rollout.base import SamplingParams, check_request
from verl.engine.rollout.vllm import ENGINE, arguments, launch
from verl.engine.rollout.vllm.arguments import (
    EngineSettings,
    cache_bytes,
    engine_arguments,
    request_arguments,
    request_seed,
)
from verl.engine.rollout.vllm.batch import BatchSampling, batch_sampling
from verl.engine.rollout.vllm.kwargs import OURS, arguments_in, translate
from verl.errors import UserError
from verl.platform.host_resources import cpu_binding

NAMES = """
model tokenizer skip_tokenizer_init trust_remote_code dtype tensor_parallel_size gpu_memory_utilization max_model_len
max_num_seqs max_num_batched_tokens enable_chunked_prefill enable_prefix_caching enforce_eager load_format logprobs_mode
scheduling_policy seed generation_config worker_extension_cls disable_log_stats hf_config_path quantization
cudagraph_capture_sizes enable_expert_parallel enable_sleep_mode block_size kv_cache_memory_bytes
distributed_executor_backend mm_processor_cache_gb compilation_config
"""
KNOWN = frozenset(NAMES.split())


def translated(given: dict[str, Any], *, text_only: bool = False, known: frozenset[str] = KNOWN) -> Any:
    rollout = dict.fromkeys(OURS.values(), None) | {"dtype": "bfloat16", "max_num_seqs": 8}
    return translate(given, known, rollout, text_only=text_only)


@pytest.mark.parametrize(
    ("given", "arguments", "notices"),
    [
        ({"block_size": 64}, {"block_size": 64}, 0),
        ({"block_size": None}, {}, 0),
        ({"disable_mm_preprocessor_cache": True}, {"mm_processor_cache_gb": 0}, 1),
        ({"disable_mm_preprocessor_cache": False}, {}, 0),
        ({"image_processor_type": "fast"}, {}, 1),
        ({"padding_mode": "x"}, {}, 1),
        ({"swap_space": 4, "preemption_mode": "swap", "num_scheduler_steps": 8}, {}, 3),
        ({"cuda_graph_sizes": [1, 2]}, {"cudagraph_capture_sizes": [1, 2]}, 1),
        ({"max_num_seqs": 8, "dtype": "bf16"}, {}, 0),
    ],
    ids=str,
)
def test_engine_kwargs_are_passed_renamed_or_dropped(given, arguments, notices) -> None:
    out = translated(given)
    assert (out.arguments, len(out.notices), out.problems) == (arguments, notices, [])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_num_seqs": 9}, "set rollout.max_num_seqs instead"),
        ({"tensor_parallel_size": 2}, "set rollout.tensor_model_parallel_size instead"),
        ({"dtype": "float32"}, "set rollout.dtype instead"),
        ({"blok_size": 1}, "nearest: block_size"),
        ({"worker_extension_cls": "x.Y"}, "remove this key"),
    ],
    ids=str,
)
def test_engine_kwargs_that_are_refused(given, said) -> None:
    (problem,) = translated(given).problems
    assert problem[0].startswith("rollout.engine_kwargs.vllm.") and said in problem[1]


def test_multimodal_keys_are_dropped_for_a_text_model() -> None:
    out = translated({"mm_processor_cache_gb": 1, "limit_mm_per_prompt": {"image": 1}}, text_only=True)
    assert out.arguments == {} and len(out.notices) == 2 and not out.problems


def test_without_an_argument_list_no_name_is_refused() -> None:
    assert translated({"anything": 1}, known=frozenset()).arguments == {"anything": 1}


def test_argument_names_are_read_from_source() -> None:
    source = "class Other:\n  no: int = 1\nclass EngineArgs:\n  a: int = 1\n  _b: int = 2\nclass AsyncEngineArgs(EngineArgs):\n  c: str = ''\n"
    assert arguments_in(source) == {"a", "c"}


@pytest.mark.parametrize("version", [None, "0.31.9", "0.34.0", "1.0", "0.32.0", "0.33.1.post2"])
def test_two_minors_are_taken_and_others_refused_with_their_names(monkeypatch, version) -> None:
    monkeypatch.setattr(registry, "version", lambda package: version)
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: object())
    if str(version).startswith(("0.32.", "0.33.")):
        assert ENGINE.installed() == version
    else:
        with pytest.raises(EnginePackageError, match=r"supported are >=0\.32,<0\.34: pip install"):
            ENGINE.installed()


def settings(**more: Any) -> EngineSettings:
    return EngineSettings("model", dtype="float32", max_model_len=100, max_num_seqs=8, **more)


def test_engine_arguments_on_a_cpu_and_elsewhere() -> None:
    cpu = engine_arguments(settings(free_cache_engine=True), KNOWN, cpu=True, sleeps=False)
    assert cpu["enforce_eager"] and cpu["block_size"] == 32 and "uniproc" in cpu["distributed_executor_backend"]
    assert not cpu["enable_sleep_mode"]
    assert not cpu["enable_chunked_prefill"] and cpu["max_num_batched_tokens"] == 8192
    device = engine_arguments(settings(free_cache_engine=True), KNOWN, cpu=False, sleeps=True)
    assert not device["enforce_eager"] and device["enable_sleep_mode"] and "block_size" not in device
    two = engine_arguments(settings(tensor_parallel_size=2), KNOWN, cpu=True, sleeps=False)
    assert two["distributed_executor_backend"] == "mp" and two["tensor_parallel_size"] == 2
    own = engine_arguments(settings(engine_kwargs={"block_size": 64}), KNOWN, cpu=True, sleeps=False)
    assert own["block_size"] == 64


def test_linear_attention_on_a_cpu() -> None:
    """Its kernels there take bfloat16 alone, and the state after a prefix is kept only where prompts are cut."""
    config = tiny_config("qwen3_5_text", **LINEAR_ATTENTION["qwen3_5_text"] | {"head_dim": 64})
    launch.check_cpu_model(config, "bfloat16")
    with pytest.raises(UserError, match=r"in bfloat16 only: set rollout.dtype=bfloat16, or rollout.name=native"):
        launch.check_cpu_model(config, "float32")
    said: list[str] = []
    for cpu in (True, False):
        found = engine_arguments(settings(), KNOWN, cpu=cpu, sleeps=False, linear=True, notice=said.append)
        assert found["enable_prefix_caching"] is not cpu
    assert [text.partition("=")[0] for text in said] == ["enable_prefix_caching"]
    few, many = (cache_bytes(config, settings(), 1 << 40), cache_bytes(tiny_config(head_dim=64), settings(), 1 << 40))
    assert few - many // 2 == 9 * 2 * 4 * 4 * 8 * 12  # keys of half the layers; a state of 4 heads for each in both


def test_prompts_are_taken_whole_on_a_cpu() -> None:
    """Cut ones would end vLLM: requests have seeds, whose generators a CPU cannot turn back."""
    said: list[str] = []
    for given, tokens in (
        ({"max_num_batched_tokens": 50}, 100),
        ({"engine_kwargs": {"enable_chunked_prefill": True}}, 8192),
    ):
        found = engine_arguments(settings(**given), KNOWN, cpu=True, sleeps=False, notice=said.append)
        assert found["enable_chunked_prefill"] is False and found["max_num_batched_tokens"] == tokens
    assert len(said) == 1 and "max_num_batched_tokens=100 instead of 50" in said[0]
    own_length = EngineSettings("model", max_num_batched_tokens=50)
    assert engine_arguments(own_length, KNOWN, cpu=True, sleeps=False)["max_num_batched_tokens"] is None
    device = engine_arguments(settings(max_num_batched_tokens=50), KNOWN, cpu=False, sleeps=False)
    assert device["enable_chunked_prefill"] and device["max_num_batched_tokens"] == 50


def test_nothing_else_cuts_prompts_on_a_cpu() -> None:
    known = KNOWN | {"long_prefill_token_threshold", "max_num_scheduled_tokens"}
    given = settings(engine_kwargs={"long_prefill_token_threshold": 20, "max_num_scheduled_tokens": 60})
    said: list[str] = []
    cpu = engine_arguments(given, known, cpu=True, sleeps=False, notice=said.append)
    assert not {"long_prefill_token_threshold", "max_num_scheduled_tokens"} & set(cpu) and len(said) == 2
    device = engine_arguments(given, known, cpu=False, sleeps=False)
    assert device["long_prefill_token_threshold"] == 20


def test_every_problem_is_said_at_once() -> None:
    given = settings(engine_kwargs={"max_num_seqs": 1, "nonsense": 2})
    with pytest.raises(UserError, match=r"(?s)max_num_seqs=1.*nonsense"):
        engine_arguments(given, KNOWN, cpu=True, sleeps=False)


def test_cache_holds_every_sequence_and_no_more_than_the_share() -> None:
    config = SimpleNamespace(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    bytes_per_token = 2 * 2 * 2 * 32 * 4
    plenty = cache_bytes(config, settings(), 1 << 40)
    assert plenty % bytes_per_token == 0 and 8 * 100 <= plenty // bytes_per_token <= 9 * (100 + 2 * 32)
    assert cache_bytes(config, settings(tensor_parallel_size=2), 1 << 40) == plenty // 2
    # one of the two layers has heads twice as wide
    own = [SimpleNamespace(**(vars(config) | {"head_dim": width})) for width in (32, 64)]
    mixed = SimpleNamespace(num_hidden_layers=2, is_heterogeneous=True, per_layer_config=own)
    assert cache_bytes(mixed, settings(), 1 << 40) == plenty * 3 // 2
    assert cache_bytes(config, settings(gpu_memory_utilization=0.25), 4000) == 1000
    assert cache_bytes(config, settings(gpu_memory_utilization=0.25, engines=2), 4000) == 500


@pytest.mark.parametrize(
    ("ranks", "cpus", "expected"),
    [(2, {0, 1}, "0|1"), (2, {1}, "1|1"), (2, {0, 1, 2, 3, 4}, "0,1|2,3"), (4, {5, 6, 7}, "5|6|7|5")],
)
def test_ranks_share_the_cpus(ranks, cpus, expected) -> None:
    assert cpu_binding(ranks, sorted(cpus)) == expected


@pytest.mark.parametrize(("cpu", "eager", "disabled"), [(True, True, "1"), (True, False, None), (False, True, None)])
def test_nothing_is_compiled_on_a_cpu_unless_asked_for(cpu: bool, eager: bool, disabled: str | None) -> None:
    """vLLM's sampler compiles a function with `enforce_eager`, too: without a C++ compiler its process ends."""
    with launch.environment(cpu, 1, "folder", eager=eager):
        assert os.environ.get("TORCH_COMPILE_DISABLE") == disabled


def test_request_arguments() -> None:
    base = SamplingParams(max_tokens=50, temperature=0.5, top_p=0.9, top_k=-1, seed=1 << 62)
    out = request_arguments(base, room=20, end_ids=[2, 3])
    assert (out["max_tokens"], out["top_k"], out["seed"], out["logprobs"]) == (20, 0, 1 << 62, 0)
    assert out["stop_token_ids"] == [2, 3] and out["ignore_eos"] and not out["detokenize"]
    free = SamplingParams(max_tokens=5, ignore_eos=True, stop_token_ids=(9,), stop=("x",))
    out = request_arguments(free, room=20, end_ids=[2, 3])
    assert out["stop_token_ids"] == [9] and out["stop"] == ["x"] and out["include_stop_str_in_output"]
    assert out["skip_special_tokens"] is False, "a special token may be the stop string"
    greedy = SamplingParams(max_tokens=5, temperature=0.0, top_p=0.5, top_k=4)
    assert not {"top_p", "top_k", "seed"} & request_arguments(greedy, room=9, end_ids=[]).keys()


def test_a_response_that_goes_on_has_draws_of_its_own() -> None:
    """So does every later call of a trajectory."""
    asked = [SamplingParams(9, seed=7, start=start, call=call) for start in range(50) for call in range(3)]
    seeds = {request_seed(sampling) for sampling in asked}
    assert len(seeds) == 150 and all(0 <= seed < 1 << 63 for seed in seeds)
    assert request_seed(asked[0]) == 7, "the first call has the seed itself"


def test_the_batch_calls_dict() -> None:
    given = {"max_tokens": 3, "stop": "x", "n": 2, "seed": 0, "stop_token_ids": [1]}
    plain = SamplingParams(max_tokens=3, stop=("x",), stop_token_ids=(1,))
    assert batch_sampling(given) == BatchSampling(plain, 2, 0, keep_stop=False)
    assert batch_sampling(given | {"include_stop_str_in_output": True}).keep_stop
    assert batch_sampling(None).sampling.max_tokens == 512 and batch_sampling({}).seed is None
    with pytest.raises(ValueError, match="nearest: temperature"):
        batch_sampling({"temprature": 1})
    with pytest.raises(ValueError, match="n=-1"):
        batch_sampling({"n": -1})


def test_a_request_that_fits_exactly_is_taken() -> None:
    check_request("r", 99, SamplingParams(max_tokens=5), 100)
    with pytest.raises(ValueError, match="100 tokens leaves no room"):
        check_request("r", 100, SamplingParams(max_tokens=5), 100)


def test_heads_that_the_kernels_do_not_have_are_found_in_any_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_cpu_head_sizes", lambda: ([32, 64], [576]))
    own = [SimpleNamespace(head_dim=width, hidden_size=128) for width in (32, 48)]
    text = SimpleNamespace(num_attention_heads=4, is_heterogeneous=True, per_layer_config=own)
    config = SimpleNamespace(get_text_config=lambda: text)
    with pytest.raises(UserError, match="heads have 48 elements; on a CPU vLLM has kernels for 32, 64"):
        launch.check_cpu_model(config, "bfloat16")
    own[1].head_dim = 64
    launch.check_cpu_model(config, "bfloat16")


def test_latent_attention_has_kernels_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of latent vectors is as wide as they are, whatever head_dim says."""
    monkeypatch.setattr(launch, "_cpu_head_sizes", lambda: ([32, 64], [576]))
    text = SimpleNamespace(
        model_type="deepseek_v2", num_attention_heads=4, head_dim=48, kv_lora_rank=512, qk_rope_head_dim=64
    )
    config = SimpleNamespace(get_text_config=lambda: text)
    launch.check_cpu_model(config, "bfloat16")
    text.kv_lora_rank = 16
    with pytest.raises(
        UserError, match=r"latent attention only with .* in .576., here it is 80: .*rollout\.name=native"
    ):
        launch.check_cpu_model(config, "bfloat16")


def test_the_router_of_deepseek_v3_is_said_by_config_json() -> None:
    text = SimpleNamespace(model_type="deepseek_v3", topk_method="noaux_tc", scoring_func="sigmoid")
    launch.check_router(SimpleNamespace(get_text_config=lambda: text))
    del text.scoring_func
    with pytest.raises(UserError, match="which lacks scoring_func: sigmoid: add it there"):
        launch.check_router(SimpleNamespace(get_text_config=lambda: text))


@pytest.mark.parametrize("ascend", [None, "0.24.0"])
def test_on_ascend_weights_may_change(ascend: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "version", {"vllm-ascend": ascend}.get)
    out = engine_arguments(EngineSettings("m"), KNOWN | {"additional_config"}, cpu=False, sleeps=True)
    assert out.get("additional_config") == ({"rl_config": {"enabled": True}} if ascend else None)
    assert ENGINE.environment["VLLM_ASCEND_ENABLE_NZ"] == "0"
