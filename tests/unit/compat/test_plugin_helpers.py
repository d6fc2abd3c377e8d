"""What plug-ins and preparation scripts of the public system import and derive from: helpers, managers, loops, data."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace as Space

import numpy as np
import pytest
import torch

from tests.tiny import tiny_model, tiny_tokenizer
from tests.unit.rollout.test_agents import BROKEN, CALL, TOOLS, play
from verl.compat import model_merger
from verl.compat.config_groups import BaseConfig
from verl.config import load
from verl.config.schema.base import Map
from verl.data.files import DataError
from verl.rollout import loops
from verl.trajectory import Batch, Prompt, Trajectory


def test_files_and_folders_here_and_behind_a_url(tmp_path: Path) -> None:
    from verl.utils.fs import copy_to_local
    from verl.utils.hdfs_io import copy, exists, makedirs

    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.parquet").write_text("rows")
    url = f"memory://{tmp_path.name}/sets"
    makedirs(url)
    assert copy(src=str(tmp_path / "data"), dst=url) and exists(f"{url}/data/train.parquet")
    assert not exists(f"{url}/nothing") and copy_to_local(str(tmp_path)) == str(tmp_path)
    for name in ("data", "data/train.parquet"):
        place = Path(copy_to_local(f"{url}/{name}", cache_dir=str(tmp_path / "cache")))
        assert (place / "train.parquet" if place.is_dir() else place).read_text() == "rows"
    makedirs(str(tmp_path / "a" / "b"), exist_ok=True)
    copy(str(tmp_path / "data"), str(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b" / "data" / "train.parquet").is_file()
    with pytest.raises(DataError, match="nothing"):
        copy(str(tmp_path / "nothing"), url)


@dataclass
class Inner:
    rate: float = 0.5


@dataclass
class Outer:
    inner: Inner = field(default_factory=Inner)
    steps: int = 1


@dataclass
class OfAPlugIn(BaseConfig):
    steps: int = 1


def test_small_helpers(tmp_path: Path) -> None:
    from omegaconf import OmegaConf
    from verl.experimental.agent_loop.utils import build_gpt_oss_tool_response_text
    from verl.utils import hf_processor, hf_tokenizer, omega_conf_to_dataclass
    from verl.utils.import_utils import load_extern_type
    from verl.utils.model import compute_position_id_with_mask
    from verl.utils.tokenizer import normalize_token_ids
    from verl.utils.tracking import Tracking

    model = tiny_model(tmp_path / "model")
    tokenizer = hf_tokenizer(str(model), trust_remote_code=False)
    assert tokenizer.pad_token_id is not None and hf_processor(str(model)) is None
    assert normalize_token_ids(tokenizer(["a b"])) == normalize_token_ids(torch.tensor(tokenizer("a b")["input_ids"]))
    assert compute_position_id_with_mask(torch.tensor([[0, 0, 1, 1]])).tolist() == [[0, 0, 0, 1]]
    made = omega_conf_to_dataclass(OmegaConf.create({"_target_": "x.Y", "inner": {"rate": 2.0}}), Outer)
    assert made == Outer(Inner(2.0), 1)
    assert omega_conf_to_dataclass(OmegaConf.create({"_target_": f"{__name__}.Inner", "rate": 3})) == Inner(3)
    assert dict(OfAPlugIn(4)) == {"steps": 4} and OfAPlugIn()["steps"] == 1
    group = load(["trainer.seed=3"]).trainer
    assert omega_conf_to_dataclass(group) is group
    (tmp_path / "own.py").write_text("class Own: ...")
    assert load_extern_type(str(tmp_path / "own.py"), "Own").__name__ == "Own" and load_extern_type(None, "Own") is None
    text = build_gpt_oss_tool_response_text([{"content": "12"}], ["add"])
    assert text == "<|start|>functions.add to=assistant<|channel|>commentary<|message|>12<|end|><|start|>assistant"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "log.jsonl"))
        logger = Tracking("p", "e", ["console", "file"], OmegaConf.create({"a": 1}))
        logger.log({"loss": np.float32(1)}, step=2)
        logger.finish()
    assert '"step": 2' in (tmp_path / "log.jsonl").read_text()


def test_a_dataset_of_a_user_reads_its_own_rows(tmp_path: Path) -> None:
    from verl.utils.dataset import RLHFDataset

    class Own(RLHFDataset):
        def _read_files_and_tokenize(self):
            self.dataframe = self.maybe_filter_out_long_prompts(
                [{"prompt": Path(p).read_text()} for p in self.data_files]
            )

        def _build_messages(self, example: dict):
            return [{"role": "user", "content": example[self.prompt_key] + self.truncation}]

    (tmp_path / "a.parquet").write_text("Hello")
    data = Own(str(tmp_path / "a.parquet"), None, load([]).data)
    assert len(data) == 1 and data[0]["raw_prompt"][0]["content"] == "Helloerror"
    assert (data.max_prompt_length, data.image_key, data.original_data_files) == (512, "images", data.data_files)


# ----------------------------------------------------------------------------------------------- reward managers


def batch_of(tokenizer, *texts: str):
    from verl import DataProto

    rows = []
    for number, text in enumerate(texts):
        prompt = Prompt(f"u{number}", np.arange(3), [], "s", "4")
        ids = np.array(tokenizer.encode(text))
        rows.append(Trajectory(prompt, number, response_ids=ids, response_mask=np.ones(len(ids), bool)))
    return DataProto.from_trajectories(Batch(rows))


def score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return {"score": float(ground_truth in solution_str), "pred": solution_str}


def test_reward_managers_as_classes() -> None:
    from verl.experimental.reward_loop.reward_manager.limited import RateLimitedRewardManager
    from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager as Loop
    from verl.workers.reward_manager import DAPORewardManager, NaiveRewardManager, PrimeRewardManager
    from verl.workers.reward_manager.batch import BatchRewardManager

    tokenizer = tiny_tokenizer()
    data = batch_of(tokenizer, "it is 4", "it is 5 here")
    many = lambda solution_strs, **lists: [score(None, text, "4") for text in solution_strs]  # noqa: E731
    plain = lambda *arguments: score(*arguments)["score"]  # noqa: E731
    for cls, function in ((NaiveRewardManager, score), (PrimeRewardManager, plain), (BatchRewardManager, many)):
        manager = cls(tokenizer, 0, function)
        result = manager(data, return_dict=True)
        assert result["reward_tensor"].sum(-1).tolist() == [1, 0] and manager.verify(data) == [1.0, 0.0]
        last = int(data.batch["attention_mask"][0, 3:].sum()) - 1
        assert result["reward_tensor"][0, last] == 1
        assert result["reward_extra_info"].get("pred", ["it is 4"])[0] == "it is 4"
    buffer = Map(enable=True, len=4, penalty_factor=1.0, log=True)
    with pytest.raises(ValueError, match="max_resp_len"):
        DAPORewardManager(tokenizer, 0, score, overlong_buffer_cfg=buffer)
    limit = len(tokenizer.encode("it is 5 here"))
    rewards = DAPORewardManager(tokenizer, 0, score, max_resp_len=limit, overlong_buffer_cfg=buffer)(data)
    assert rewards[1].sum() == -1
    for cls in (Loop, RateLimitedRewardManager):
        result = asyncio.run(cls(load([]), tokenizer, score).run_single(data[:1]))
        assert result["reward_score"] == 1 and result["reward_extra_info"]["pred"] == "it is 4"


def test_a_penalty_that_a_manager_charges_itself_is_not_charged_twice(tmp_path: Path) -> None:
    from verl.reward.settings import RewardSettings

    (tmp_path / "own.py").write_text(
        "from verl.workers.reward_manager import DAPORewardManager, NaiveRewardManager\n"
        "from verl.experimental.reward_loop.reward_manager.limited import RateLimitedRewardManager\n"
        "class Mine(DAPORewardManager): ...\nclass Plain(NaiveRewardManager): ...\nclass Slow(RateLimitedRewardManager): ..."
    )
    key = "reward_model.reward_kwargs.overlong_buffer_cfg"
    settings = {}
    for name in ("Mine", "Plain", "Slow"):
        words = [f"{key}.enable=True", f"{key}.len=4", "reward_manager.source=importlib", f"reward_manager.name={name}"]
        config = load([*words, f"reward_manager.module.path={tmp_path}/own.py", "reward_model.max_rpm=60"])
        settings[name] = RewardSettings.from_config(config)
    assert settings["Mine"].overlong is None and settings["Plain"].overlong is not None
    assert settings["Plain"].rate is None and settings["Slow"].rate is not None


# ------------------------------------------------------------------------------------------------- tools, loops


@pytest.mark.parametrize(
    ("texts", "status", "answers"),
    [
        ([CALL, "It is 12."], "completed", ["12"]),
        (
            [CALL.replace("calculate", "nothing"), "I see."],
            "completed",
            ["Unknown function 'nothing'. Available tools: "],
        ),
        ([BROKEN], "completed", []),
    ],
)
def test_a_subclass_of_the_tool_agent_loop(texts: list[str], status: str, answers: list[str]) -> None:
    from verl.experimental.agent_loop.tool_agent_loop import AgentState, ToolAgentLoop

    class Own(ToolAgentLoop):
        async def _handle_processing_tools_state(self, agent_data):
            state = await super()._handle_processing_tools_state(agent_data)
            assert state is AgentState.GENERATING
            agent_data.extra_fields["answers"] = [m["content"] for m in agent_data.messages if m["role"] == "tool"]
            return state

    loops._LOOPS["own_tools"] = Own
    try:
        (t,), _ = play(texts, *TOOLS, "agent.default_agent_loop=own_tools")
    finally:
        del loops._LOOPS["own_tools"]
    assert t.status == status and t.num_turns == len(texts) + len(answers) + 1 and len(t.segments) == 1
    seen = t.fields.get("answers", [])
    assert len(seen) == len(answers) and all(map(str.startswith, seen, answers))
    assert bool(answers) == (False in t.response_mask.tolist()) and "unrecorded_tokens" not in t.extra


def test_the_lengths_of_a_single_turn_loop() -> None:
    from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

    loop = SingleTurnAgentLoop(Space(config=load(["data.max_response_length=7"])), None, None)
    assert (loop.prompt_length, loop.response_length) == (512, 7)


def test_a_tool_that_runs_programs(monkeypatch) -> None:
    from verl.tools.sandbox_fusion_tools import SandboxFusionTool

    from verl.reward.sandbox.local import ProgramResult

    ran = []
    for name in ("local", "service"):
        run = lambda *a, name=name, **limits: ran.append((name, limits)) or ProgramResult("7\n", len(ran) < 2, "late")  # noqa: E731
        monkeypatch.setattr(f"verl.reward.sandbox.{name}.run", run)
    said = []
    for url in ("", "http://sandbox"):
        tool = SandboxFusionTool({"sandbox_fusion_url": url, "default_timeout": 5})
        said.append(asyncio.run(tool.execute("i", {"code": "print(7)"}))[0].text)
    assert said == ["7\n", "7\n\nlate"] and [name for name, _ in ran] == ["local", "service"]
    assert ran[0][1] == {"seconds": 5, "memory_mb": 1024} and tool.name == "code_interpreter"
    assert "python ones" in asyncio.run(tool.execute("i", {"code": "", "language": "cpp"}))[0].text


# ----------------------------------------------------------------------------------------------------- merging


def test_shards_of_two_ranks_are_merged_and_compared(tmp_path: Path, capsys) -> None:
    import torch.distributed as dist
    from safetensors.torch import load_file
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    model = tiny_model(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    actor = tmp_path / "actor"
    (actor / "huggingface").mkdir(parents=True)
    for path in model.iterdir():
        if path.suffix != ".safetensors":
            (actor / "huggingface" / path.name).write_bytes(path.read_bytes())
    for rank in (0, 1):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
        about = {name: {"shape": w.shape, "stride": w.stride()} for name, w in weights.items()}
        parts = {name: torch.tensor_split(w, 2)[rank].clone() for name, w in weights.items()}
        parts = {name: DTensor.from_local(part, mesh, [Shard(0)], **about[name]) for name, part in parts.items()}
        torch.save(parts, actor / f"model_world_size_2_rank_{rank}.pt")
        dist.destroy_process_group()
    where = ["--backend", "fsdp", "--local_dir", str(actor)]
    assert model_merger.main(["merge", *where, "--target_dir", str(tmp_path / "out")]) == 0
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert merged.keys() == weights.keys() and all(torch.equal(merged[name], w) for name, w in weights.items())
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert model_merger.main(["test", *where, "--test_hf_dir", str(model)]) == 0
    (actor / "model_world_size_2_rank_1.pt").unlink()
    nowhere = tmp_path / "nowhere"
    assert model_merger.main(["merge", *where, "--target_dir", str(nowhere)]) == 2 and not nowhere.exists()
    assert "[1] are missing" in capsys.readouterr().err
    saved = ["merge", "--local_dir", str(tmp_path / "out"), "--target_dir", str(tmp_path / "copy")]
    assert model_merger.main(saved) == 0 and (tmp_path / "copy" / "model.safetensors").is_file()
    assert model_merger.main(["test", *saved[1:3], "--test_hf_dir", str(model)]) == 0, "whole weights are compared too"


# ------------------------------------------------------------------------------------------ keys with a meaning


def noted_environment(config, tracking) -> None:
    """Work of a run: what its environment has."""
    (Path(config.trainer.default_local_dir) / "noted").write_text(os.environ.get("OF_THE_RUN", ""))


@pytest.mark.parametrize(
    "words",
    [
        ["+trainer.worker_env.OF_THE_RUN=3"],
        ["+ray_kwargs.ray_init.runtime_env.env_vars.OF_THE_RUN=3"],
        ["trainer.worker_env.OF_THE_RUN=3", "ray_kwargs.ray_init.runtime_env.env_vars.OF_THE_RUN=4"],
    ],
)
def test_variables_of_the_command_are_those_of_the_run(tmp_path: Path, monkeypatch, words: list[str]) -> None:
    from verl.trainer.run import run_guarded

    monkeypatch.setenv("OF_THE_RUN", "")
    config = load([f"trainer.default_local_dir={tmp_path}", *words])
    assert run_guarded(config, f"{__name__}:noted_environment") == 0
    assert (tmp_path / "noted").read_text() == "3"


def test_a_turn_has_a_limit_of_its_own() -> None:
    text = "four words are here"
    for words, status in (([], "completed"), (["single_turn_response_length=5"], "length")):
        (t,), _ = play([text], *TOOLS, *words)
        assert t.status == status and (t.length == 5) == bool(words)
