"""What users, plug-ins and unit tests of the public system start and import: entry points, metrics, advantages,
configurations."""

from __future__ import annotations

import asyncio
import importlib
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace as Space

import numpy as np
import pytest
import torch
from PIL import Image

import verl
from verl import DataProto
from verl.compat.paths import ENTRY_POINTS


@pytest.mark.parametrize("path", sorted(path for path, (_, default) in ENTRY_POINTS.items() if default))
def test_entry_points_run_as_modules(path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["program", "--cfg", "job"])
    monkeypatch.delitem(sys.modules, path, raising=False)  # as in the new process of `python3 -m`
    with pytest.raises(SystemExit) as left:
        runpy.run_module(path, run_name="__main__", alter_sys=True)
    out = capsys.readouterr().out
    assert left.value.code == 0 and "logger:" in out
    wanted = {
        "fully_async": "weight_sync_every: 4",
        "one_step": "max_staleness: 1",
        "main_ppo_sync": "weight_sync_every: 1",
    }
    for name, line in wanted.items():
        assert name not in path or line in out
    assert importlib.import_module(path) is importlib.import_module(ENTRY_POINTS[path][0])


# ------------------------------------------------------------------------------------------------ metrics


def metrics_module():
    return importlib.import_module("verl.trainer.ppo.metric_utils")


def test_a_metric_adds_up_values_of_its_own_kind() -> None:
    from verl.utils.metric import Metric, reduce_metrics
    from verl.utils.metric.utils import AggregationType

    total = Metric("sum", value=1.0)
    total.append(torch.tensor(2.0))
    total.append(Metric(AggregationType.SUM, 4))
    assert total.values == [1.0, 2.0, 4] and total.aggregate() == 7 and total.init_list().values == []
    assert [Metric(how, 0.5).aggregation.value for how in ("mean", "min", "max")] == ["mean", "min", "max"]
    for wrong in (torch.zeros(2), Metric("mean", 1.0)):
        with pytest.raises(ValueError):
            total.append(wrong)
    with pytest.raises(ValueError):
        Metric("median")
    ranks = [Metric.from_dict({"x": 1.0}, "sum")["x"], Metric("sum", 3.0)]
    assert Metric.aggregate_dp(ranks) == 2 and Metric.aggregate_dp([Metric("max", 1), Metric("max", 3)]) == 3
    with pytest.raises(ValueError, match="different numbers"):
        Metric.aggregate_dp([total, *ranks])
    found = reduce_metrics({"a": [1.0, 2.0], "a/max": [1.0, 2.0], "a/min": [1.0, 2.0], "b": total, "none": []})
    assert np.isnan(found.pop("none")) and found == {"a": 1.5, "a/max": 2, "a/min": 1, "b": 7}


def padded(**more) -> Space:
    """Two rows of two prompt and three response tokens; the second one's response has one."""
    seen = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    scores = torch.tensor([[0.0, 0.0, 2.0], [1.0, 0.0, 0.0]])
    columns = dict.fromkeys(("token_level_scores", "token_level_rewards", "advantages", "returns", "values"), scores)
    tensors = {"prompts": torch.zeros(2, 2), "responses": torch.zeros(2, 3), "attention_mask": seen}
    return Space(
        batch=columns | tensors | {"response_mask": seen[:, 2:]} | more,
        meta_info={"global_token_num": [5, 3]},
    )


def test_metrics_of_a_padded_batch() -> None:
    module = metrics_module()
    found = module.compute_data_metrics(padded())
    assert found["critic/score/mean"] == 1.5 and found["critic/rewards/max"] == 2
    assert found["critic/advantages/mean"] == 0.75 and found["critic/values/min"] == 0
    assert found["critic/vf_explained_var"] == pytest.approx(1) and found["response_length/mean"] == 2
    assert found["prompt_length/clip_ratio"] == found["response_length/clip_ratio"] == 0.5
    assert found["response/aborted_ratio"] == 0
    empty = padded(response_mask=torch.tensor([[1, 1, 1], [0, 0, 0]]))
    written = module.compute_data_metrics(empty)
    names = ("response/aborted_ratio", "response_length/min", "response_length_non_aborted/min")
    assert [written[name] for name in names] == [0.5, 1, 3]
    assert "critic/values/mean" not in module.compute_data_metrics(padded(), use_critic=False)
    times = module.compute_timing_metrics(padded(), {"gen": 0.4, "ref": 0.7, "other": 1.0})
    assert times["timing_s/other"] == 1 and "timing_per_token_ms/other" not in times
    assert times["timing_per_token_ms/gen"] == pytest.approx(100) and times["timing_per_token_ms/ref"] == pytest.approx(
        100
    )
    nothing = padded(attention_mask=torch.zeros(2, 5, dtype=torch.long))
    assert module.compute_timing_metrics(nothing, {"gen": 0.4})["timing_per_token_ms/gen"] == 0
    speed = module.compute_throughout_metrics(padded(), {"step": 2.0}, n_gpus=2)
    assert speed == {"perf/total_num_tokens": 8, "perf/time_per_step": 2.0, "perf/throughput": 2.0}


def test_metrics_of_validation() -> None:
    from verl.utils.metric import Metric, reduce_metrics
    from verl.utils.py_functional import append_to_dict

    module = metrics_module()
    (mean, _), (top, spread) = module.bootstrap_metric([1, 2, 3], 2, [np.mean, np.max])
    assert mean == pytest.approx(2, abs=0.1) and 2 < top < 3 and spread > 0
    with pytest.raises(ValueError):
        module.bootstrap_metric([], 1, [np.mean])
    rows = [{"pred": "A", "val": 0.9}, {"pred": "B", "val": 0.8}, {"pred": "A", "val": 0.1}]
    assert module.calc_maj_val(rows, "pred", "val") == 0.9
    values = {"score": [1.0, 0.0, 0.5], "pred": ["a", "b", "c"]}
    found = module.process_validation_metrics(["s", "s", "t"], ["p", "p", "q"], values)
    assert found["s"]["score"]["mean@2"] == 0.5 and found["t"] == {"score": {"mean@1": 0.5}}
    assert 0 < found["s"]["score"]["maj@2/mean"] < 1 and "pred" not in found["s"]
    rows = (["s", "s", "t"], ["p", "p", "q"], {"acc": [1.0, 0.0, None]})
    assert module.process_validation_metrics(*rows, expected_acc_counts={"s": 2, "t": 0})["s"]["acc"]["mean@2"] == 0.5
    with pytest.raises(ValueError, match="data source 't' has 0 values of acc, 1 are expected"):
        module.process_validation_metrics(*rows, expected_acc_counts={"s": 2, "t": 1})
    lists: dict = {}
    for value in (1.0, Metric("sum", 2.0)):
        append_to_dict(lists, {"x": value}, prefix="a/" if isinstance(value, float) else "")
    assert lists["a/x"] == [1.0] and reduce_metrics(lists)["x"] == 2
    worker = {"disk_offload_s/param": [1.0, 3.0], "loss": [1.0]}
    assert module.extract_disk_offload_metrics(worker, "actor") == {"actor/disk_offload_s/param": 2.0}


# --------------------------------------------------------------------------------- advantages and corrections


def rows(**tensors) -> DataProto:
    mask = torch.tensor([[1, 1], [1, 0], [0, 1], [1, 1]])
    rewards = torch.tensor([[0.0, 9.0], [1.0, 0.0], [0.0, 3.0], [0.0, 2.0]])
    named = {"token_level_rewards": rewards, "response_mask": mask} | tensors
    return DataProto.from_dict(named, {"uid": np.array(["p", "p", "p", "p"], dtype=object)})


def test_advantages_of_a_padded_batch_by_any_estimator() -> None:
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, AdvantageEstimator, register_adv_est
    from verl.trainer.ppo.v1.utils import compute_advantage

    data = rows()
    found = compute_advantage(data, AdvantageEstimator.GRPO, norm_adv_by_std_in_grpo=False)
    assert found.batch["advantages"][:, -1].tolist() == [5.25, 0, -0.75, -1.75] and "advantages" not in data.batch
    gae = compute_advantage(rows(values=torch.zeros(4, 2)), "gae", gamma=0.5)
    assert gae.batch["returns"][0].tolist() == [4.5, 9.0]
    half = compute_advantage(data, "reinforce_plus_plus", gamma=0.5).batch["returns"]
    assert torch.equal(half, gae.batch["returns"])
    register_adv_est("of_uid")(
        lambda token_level_rewards, non_tensor_batch, **_: (token_level_rewards, non_tensor_batch["uid"])
    )
    assert compute_advantage(data, "of_uid").batch["returns"][0] == "p"
    del ADV_ESTIMATOR_REGISTRY["of_uid"]


def test_a_trajectory_of_several_rows_has_one_advantage() -> None:
    from verl.trainer.ppo.v1.utils import compute_advantage, compute_advantage_for_multi_trajectories

    data = rows()
    keys = ["p_0_1", "p_0_0", "p_1_0", "p_2_0"]
    found = compute_advantage_for_multi_trajectories(data, keys, "grpo").batch["advantages"]
    last = compute_advantage(data.select_idxs([0, 2, 3]), "grpo").batch["advantages"][:, 1]
    expected = torch.stack([last[0], last[0], last[1], last[2]])[:, None] * data.batch["response_mask"]
    assert torch.equal(found, expected)
    alone = [f"p_{i}_0" for i in range(4)]
    whole = compute_advantage_for_multi_trajectories(data, alone, "grpo").batch["advantages"]
    assert torch.equal(whole, compute_advantage(data, "grpo").batch["advantages"])
    other = compute_advantage_for_multi_trajectories(data, keys, "reinforce_plus_plus").batch["advantages"]
    assert torch.equal(other, compute_advantage(data, "reinforce_plus_plus").batch["advantages"])


def test_a_registry_that_is_replaced_is_the_trainers(monkeypatch) -> None:
    from verl.trainer.ppo import core_algos

    from verl.algorithms.registry import ESTIMATORS

    before = core_algos.ADV_ESTIMATOR_REGISTRY
    core_algos.ADV_ESTIMATOR_REGISTRY = {"mine": abs}
    try:
        assert ESTIMATORS.get("mine") is core_algos.get_adv_estimator_fn("mine") is abs
    finally:
        core_algos.ADV_ESTIMATOR_REGISTRY = before
    assert core_algos.ADV_ESTIMATOR_REGISTRY is before and "grpo" in before


def test_correction_of_a_batch() -> None:
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.trainer.ppo import rollout_corr_helper as helper

    old = torch.log(torch.tensor([[0.4, 0.8, 6.0]])) - 9
    config, mask = RolloutCorrectionConfig.decoupled_token_icepop(), torch.ones(1, 3)
    kinds = (config.rollout_is, config.rollout_is_threshold)
    ratio = old + 9
    weights, metrics = helper.compute_rollout_correction_weights(ratio, mask, *kinds)
    torch.testing.assert_close(weights, torch.tensor([[0.0, 0.8, 0.0]]))
    assert metrics["rollout_is_oob_ratio"] == pytest.approx(2 / 3)
    assert metrics["rollout_is_std"] == pytest.approx(np.std([0, 0.8, 0]))
    raw = helper.compute_is_metrics(ratio, ratio, torch.ones(1, 3), "token", "0.5_5.0")
    assert raw["rollout_is_oob_ratio"] == pytest.approx(2 / 3)
    ones = torch.ones(1, 3)
    for kind, weights in (("token", [0.4, 0.8, 6.0]), ("sequence", [6.0, 6.0, 6.0])):
        untruncated = torch.tensor([weights])
        found = helper.compute_is_metrics(
            untruncated.clamp(max=2), ratio * 0, ones, kind, 2.0, raw_rollout_is_weights=untruncated
        )
        assert (found["rollout_is_max"], found["rollout_is_min"]) == pytest.approx((6.0, min(weights)))
        shares = found["rollout_is_ratio_fraction_high"], found["rollout_is_ratio_fraction_low"]
        assert shares == pytest.approx((1 / 3, 1 / 3) if kind == "token" else (1, 0))
    with pytest.raises(TypeError, match="not a boolean"):
        helper.compute_rollout_correction_weights(ratio, torch.ones(1, 3), "token", True)
    for option in helper.SUPPORTED_ROLLOUT_RS_OPTIONS:
        mask, _ = helper.compute_rollout_rejection_mask(ratio, torch.ones(1, 3), option, 2.0)
        assert mask.shape == (1, 3)
    assert RolloutCorrectionConfig.decoupled_geo_rs_seq_tis(rs_threshold=1.001).rollout_rs_threshold == 1.001


def test_groups_of_the_configuration_by_their_public_names() -> None:
    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
    from verl.workers.config.actor import ActorConfig, PolicyLossConfig

    loss = PolicyLossConfig(loss_mode="kl_cov", kl_cov_ratio=0.2)
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size=2, clip_ratio=0.2, policy_loss=loss)
    assert config.rollout_n == config["rollout_n"] == 1 and config.policy_loss.kl_cov_ratio == 0.2
    ones = torch.ones(1, 2)
    value, _ = compute_policy_loss_vanilla(-ones, -ones + 0.5, ones, ones, config=config)
    assert float(value) == pytest.approx(-1.2)


def test_functions_on_masked_tensors() -> None:
    from verl.utils.torch_functional import (
        clip_by_value,
        entropy_from_logits,
        logprobs_from_logits,
        masked_mean,
        masked_sum,
        masked_var,
        masked_whiten,
    )

    values, mask = (
        torch.tensor([[1.0, 3.0, float("nan")], [5.0, 0.0, 0.0]]),
        torch.tensor([[1, 1, 0], [1, 0, 0]]),
    )
    assert masked_sum(values, mask) == 9 and masked_mean(values, mask, axis=-1).tolist() == [2, 5]
    assert masked_var(values, mask) == 4 and masked_var(values, mask, unbiased=False) == pytest.approx(8 / 3)
    assert masked_whiten(values, mask)[mask.bool()].tolist() == pytest.approx([-1, 0, 1])
    assert masked_whiten(values, mask, shift_mean=False)[1, 0] == pytest.approx(4)
    with pytest.raises(ValueError, match="not defined"):
        masked_var(values, torch.zeros_like(mask))
    logits = torch.tensor([[0.0, 0.0]])
    assert logprobs_from_logits(logits, torch.tensor([1])).exp() == 0.5
    assert entropy_from_logits(logits) == pytest.approx(np.log(2))
    assert clip_by_value(torch.tensor([3.0]), torch.zeros(1), torch.ones(1)) == 1


# ------------------------------------------------------------------------------------------ tools and parsers

MARKED = """
from verl.tools.function_tool import function_tool

@function_tool
def {name}(x: str) -> str:
    '''Says it.

    Args:
        x: What.
    '''
    return x
"""


def test_function_tools_are_found_by_name_and_by_file(tmp_path) -> None:
    from verl.tools import function_tool as module
    from verl.tools.base_tool import BaseTool
    from verl.tools.tool_registry import load_all_tools

    (tmp_path / "tools.py").write_text(MARKED.format(name="said"))
    (tool,) = load_all_tools(function_tool_path=str(tmp_path / "tools.py"))
    assert module.FUNCTION_TOOL_REGISTRY["said"] is tool and not isinstance(tool, BaseTool)
    assert load_all_tools(None, str(tmp_path / "tools.py")) == [tool] and load_all_tools() == []
    assert asyncio.run(tool.call({"x": "a"})) == "a" and not tool.is_async
    (tmp_path / "tools.py").with_name("none.py").write_text("")
    assert module.load_function_tools_from_path(str(tmp_path / "none.py")) == []
    with pytest.raises(FileNotFoundError, match="function_tool_path does not exist"):
        module.load_function_tools_from_path(str(tmp_path / "nothing.py"))
    schema = {"type": "function", "function": {"name": "said"}}
    module.function_tool("other", schema=schema)(metrics_module)
    with pytest.raises(ValueError, match=r"'other': .*metrics_module is already registered, then .*padded"):
        module.function_tool("other", schema=schema)(padded)
    with pytest.raises(ValueError, match="variadic parameter"):
        module.function_tool(lambda *x: x)
    del module.FUNCTION_TOOL_REGISTRY["other"], module.FUNCTION_TOOL_REGISTRY["said"]


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("a", ("a", 0.0, {})),
        ({"a": 1}, ('{"a": 1}', 0.0, {})),
        (("a", None), ("a", 0.0, {})),
        (("a", 1, {"k": 2}), ("a", 1.0, {"k": 2})),
        ((Space,), (str(Space), 0.0, {})),
    ],
)
def test_what_function_tools_return(returned, expected) -> None:
    from verl.tools.function_tool import normalize_function_tool_return
    from verl.tools.schemas import ToolResponse

    response, *rest = normalize_function_tool_return(returned)
    assert (response, *rest) == (ToolResponse(expected[0]), *expected[1:])
    with pytest.raises(TypeError, match="length 1, 2, or 3"):
        normalize_function_tool_return(())
    assert normalize_function_tool_return(ToolResponse({"a": 1}))[0].text == '{"a": 1}'
    image = Image.new("RGB", (4, 4))
    for images in (image, [image], (image, 0.5)):
        assert normalize_function_tool_return(images)[0] == ToolResponse(image=[image])
    with pytest.raises(TypeError, match=r"returned bytes: .*ToolResponse\(text, image="):
        normalize_function_tool_return(b"PNG")
    with pytest.raises(TypeError, match="an await is missing"):
        normalize_function_tool_return((asyncio.Future(loop=asyncio.new_event_loop()), 0.5))


def test_parsers_by_format_and_by_class() -> None:
    from verl.experimental.agent_loop import tool_parser
    from verl.experimental.agent_loop.tool_parser import FunctionCall, KimiToolParser, ToolParser

    of_class = {"gemma4": "Gemma4", "gpt-oss": "GptOss", "hermes": "Hermes", "qwen3_coder": "Qwen3XML"}
    for name, cls in of_class.items():
        assert type(ToolParser.get_tool_parser(name, None)) is getattr(tool_parser, f"{cls}ToolParser")
    text = 'Look.<|tool_call_begin|>call-find-0<|tool_call_argument_begin|>{"n":1}<|tool_call_end|>'
    tools = [{"function": {"name": "find"}}]
    parser = ToolParser.get_tool_parser("kimi", Space(decode=lambda ids, skip_special_tokens: text))
    assert isinstance(parser, KimiToolParser)
    found = asyncio.run(parser.extract_tool_calls([1], tools))
    assert found == ("Look.", [FunctionCall("find", '{"n": 1}', "call-find-0")])
    with pytest.raises(ValueError, match=r"unknown tool parser 'no'; known: .*deepseek"):
        ToolParser.get_tool_parser("no", None)


def test_the_registry_of_reward_managers_is_the_runs() -> None:
    from verl.workers.reward_manager.registry import REWARD_MANAGER_REGISTRY, get_reward_manager_cls, register

    assert REWARD_MANAGER_REGISTRY.pop(register("of_test")("x") and "of_test") == "x"
    with pytest.raises(ValueError, match="Unknown reward manager: of_test"):
        get_reward_manager_cls("of_test")


def test_a_clone_in_the_working_directory_does_not_hide_the_package(tmp_path: Path) -> None:
    """An editable installation is looked up behind a folder of the package's name."""
    (tmp_path / "verl").mkdir()
    code = "import verl.trainer, verl, os; print(verl.__version__, os.environ.get('PYTHONPATH'))"
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=plain, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(verl.__version__)
