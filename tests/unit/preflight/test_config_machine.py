"""The check: what the machine lacks, models, data, and the user's own code."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.tiny import HAS_KIMI_VL
from tests.unit.preflight.cases import ARR, MODEL, notices, only, problems, write_model, write_rows
from verl.config import load
from verl.config.model_facts import ModelTrouble, look
from verl.config.problems import ConfigError
from verl.config.release import built_in
from verl.config.schema.entries import ROOTS
from verl.config.schema.fields import leaves
from verl.preflight.check import check

# ---- the machine ----


def test_ray_and_open_files(base, monkeypatch):
    import resource

    many = "trainer.n_gpus_per_node=2"
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    with monkeypatch.context() as few:
        few.setattr(resource, "getrlimit", lambda which: (256, 512))
        only(problems(*base, many), "machine", "ulimit -n", "2 workers need 1280")
        assert problems(*base) == [], "one device needs none of it"
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "ray" else find(name))
    only(problems(*base, many), "machine", "pip install 'verl[ray]'")


def test_megatrons_settings_are_looked_up_in_its_source(base, tmp_path, monkeypatch):
    """Which is not run. Where megatron-core is not installed nothing is said of names."""
    key, strategy = f"{ARR}.actor.megatron.override_transformer_config", f"{ARR}.actor.strategy=megatron"
    argv = [*base, strategy, f"{ARR}.actor.use_kl_loss=True", f"+{key}.recompute_granularty=full", f"+{key}.bf16=True"]
    if importlib.util.find_spec("megatron") is None:
        assert not any("recompute" in problem for problem in problems(*argv))
    for name, field in (("model_parallel_config", "bf16"), ("transformer/transformer_config", "recompute_granularity")):
        file = tmp_path / f"megatron/core/{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"import nothing\n\nclass Config:\n    {field}: str = ''\n")
    monkeypatch.syspath_prepend(tmp_path)
    refused = [problem for problem in problems(*argv) if problem.startswith("configuration")]
    only(refused, "configuration", f"{key}.recompute_granularty", "no such setting; nearest: recompute_granularity")


def test_devices(base, monkeypatch):
    only(problems(*base, "trainer.device=cuda"), "machine", "no cuda device")
    only(problems(*base, "trainer.device=npu"), "machine", "no npu device")
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert problems(*base, "trainer.n_gpus_per_node=4") == []
    only(problems(*base, "trainer.n_gpus_per_node=8"), "machine", "8 devices", "found 4 cores", "RAY_ADDRESS")
    only(problems(*base, "trainer.nnodes=2"), "machine", "2 devices on 2 nodes", "examples/ray_start.sh")
    pool = (f"{ARR}.rollout.nnodes=1", f"{ARR}.rollout.n_gpus_per_node=2", "trainer.n_gpus_per_node=2")
    assert problems(*base, *pool) == [], "two pools of one machine"
    only(problems(*base, *pool, "trainer.n_gpus_per_node=3"), "machine", "5 devices asked for")
    apart = ("algorithm.adv_estimator=gae", "critic.nnodes=1", "critic.n_gpus_per_node=2")
    assert problems(*base, *apart) == []
    only(problems(*base, *pool, *apart), "machine", "6 devices asked for", "critic.n_gpus_per_node=2")
    with monkeypatch.context() as joined:
        joined.setenv("RAY_ADDRESS", "127.0.0.1:1")
        assert problems(*base, "trainer.nnodes=2", "trainer.device=npu") == [], (
            "the cluster's nodes are looked at later"
        )
    monkeypatch.setattr("verl.config.devices._nodes", lambda name: ["nvidia0"] if name == "nvidia" else [])
    monkeypatch.setattr("verl.config.devices.torch_build", lambda: "cuda 13.0")
    assert problems(*base, "trainer.device=cuda") == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    only(problems(*base, "trainer.device=cuda"), "machine", "no cuda device")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr("verl.config.devices.torch_build", lambda: "cpu")
    only(problems(*base, "trainer.device=cuda"), "machine", "built without CUDA")


def test_too_few_devices_name_the_pool_that_is_too_large(base, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    apart = ("algorithm.adv_estimator=gae", "critic.nnodes=1", "critic.n_gpus_per_node=2")
    (found,) = problems(*base, *apart)
    assert "3 devices asked for, found 2 cores, a rank needs one; lower critic.n_gpus_per_node, or " in found
    wide = f"{ARR}.rollout.nnodes=2"
    (found,) = problems(*base, wide)
    assert f"machine: {wide}, {ARR}.rollout.n_gpus_per_node=1: 3 devices on 2 nodes" in found
    assert "one machine with 2 cores" in found and found.endswith(f"or set {ARR}.rollout.nnodes=1")
    both = problems(*base, wide, "trainer.nnodes=2")[0]
    assert both.endswith(f"or set trainer.nnodes=1, {ARR}.rollout.nnodes=1")
    one_each = (*apart[:2], f"{ARR}.rollout.nnodes=1")
    (found,) = problems(*base, *one_each)
    assert f"; share the trainer's devices ({ARR}.rollout.nnodes=0, critic.nnodes=0), or " in found
    (found,) = problems(*base, "trainer.n_gpus_per_node=3")
    assert "; lower trainer.n_gpus_per_node (1 needs no Ray), or " in found


def test_cores_that_ray_is_told_of_count_for_processors_alone(base, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    argv, cores = [*base, "trainer.n_gpus_per_node=3"], "ray_kwargs.ray_init.num_cpus"
    only(problems(*argv), "machine", "found 2 cores", f"let ranks share cores ({cores}=3)")
    assert problems(*argv, f"{cores}=3") == []
    only(problems(*argv, f"{cores}=2"), "machine", f"{cores}=2, a rank needs one")
    only(problems(*argv, f"{cores}=0"), "machine", f"{cores}=0, a rank needs one")
    assert problems(*base, f"{cores}=0") == [], "one process needs no Ray"
    monkeypatch.setattr("verl.config.devices._nodes", lambda name: ["davinci0"] if name == "davinci" else [])
    only(problems(*argv, "trainer.device=npu", f"{cores}=3"), "machine", "found 1 npu device;")


def test_models_that_are_not_here(base, monkeypatch):
    report = check(load([*base, f"{ARR}.model.path=Org/Name"]))
    assert report.exit_code == 3 and "hf download Org/Name" in str(report.problems[0])
    report.allow_run()
    assert report.exit_code == 0 and "fetched at the start" in report.notices[-1]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    report = check(load([*base, f"{ARR}.model.path=Org/Name"]))
    report.allow_run()
    assert report.exit_code == 3
    only(problems(*base, f"{ARR}.model.path=/no/such/dir"), "machine", "no such directory")
    only(problems(*base, f"{ARR}.model.path=null"), "configuration", "is required")


def test_a_teacher_that_is_not_here(base):
    model = "distillation.teacher_models.teacher_model.model_path=/no/such"
    only(problems(*base, "distillation.enabled=True", model), "machine", model, "no such directory")
    reference = [f"{ARR}.ref.model.path=/no/such"]
    assert problems(*base, *reference) == []
    only(problems(*base, *reference, f"{ARR}.actor.use_kl_loss=True"), "machine", *reference)


def test_a_teacher_sees_what_the_policy_sees(base, tmp_path):
    facts, other = {"model_type": "qwen2_5_vl", "text_config": MODEL}, {}
    policy = write_model(tmp_path / "vl", vision_config={"patch_size": 14}, **facts)
    other["other patches"] = write_model(tmp_path / "b", vision_config={"patch_size": 16}, **facts)
    run = [*base, f"{ARR}.model.path={policy}", "distillation.enabled=True"]
    teacher = "distillation.teacher_models.teacher_model.model_path"
    assert problems(*run, f"{teacher}={policy}") == []
    for why, path in other.items():
        only(problems(*run, f"{teacher}={path}"), "configuration", why)
    text = f"{teacher}={write_model(tmp_path / 'c')}"
    assert "it reads the policy's prompts without their images" in notices(*run, text)
    own = "distillation.teacher_models.teacher_model.prompt"
    only(
        problems(*run, text, f"{own}={{prompt}}"), "configuration", f"{own}: is not in this release for a text teacher"
    )
    only(problems(*base, "distillation.enabled=True", f"{teacher}={policy}"), "configuration", "the policy does not")


def test_models_in_the_hubs_cache(base, tmp_path):
    root = tmp_path / "hub" / "hub" / "models--Org--Name"
    write_model(root / "snapshots" / "abc", max_position_embeddings=100)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("abc")
    only(problems(*base, f"{ARR}.model.path=Org/Name"), "configuration", "the model's context is 100")


@pytest.mark.parametrize("entry", ["ppo", "sft", "eval", "generation"])
@pytest.mark.parametrize("name", ["y" * 300, "file:///tmp/" + "y" * 300, ("y" * 250 + "/") * 20])
def test_names_that_are_too_long_are_refused_at_every_path(base, entry, name):
    paths = [key for key, known in leaves(ROOTS[entry]).items() if known.is_path]
    with pytest.raises(ConfigError) as refused:
        load([f"{path}={name}" for path in paths], entry)
    assert {p.key for p in refused.value.problems if "names no file" in p.message} >= {*paths}
    only(
        problems(*base, "trainer.project_name=" + "y" * 300),
        "configuration",
        "default_local_dir",
        "at most 255",
    )
    with pytest.raises(ModelTrouble, match="no such directory"):
        look("./" + "y" * 300)
    with pytest.raises(ConfigError, match="no file"):
        load([f"--config-name={name}"], entry)


DAMAGED = [
    ({"model_type": None}, "model_type is null"),
    ({"model_type": []}, "model_type is []"),
    ({"hidden_size": None}, "hidden_size is null, int is needed"),
    ({"hidden_size": -4, "head_dim": "x"}, "hidden_size is -4, at least 1 is needed; head_dim is"),
    ({"num_attention_heads": "4"}, 'num_attention_heads is "4"'),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, bool"),
    ({"rms_norm_eps": []}, "rms_norm_eps is [], float"),
    ({"layer_types": 3}, "layer_types is 3"),
    ({"rope_scaling": "yarn"}, "a mapping is needed"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, 'factor is "4"'),
    ({"text_config": 3}, "text_config is 3"),
    ({"text_config": MODEL | {"hidden_size": None}}, "hidden_size is null"),
    ({"auto_map": 3}, "auto_map is 3"),
]


@pytest.mark.parametrize(("changes", "words"), DAMAGED)
def test_damaged_model_configurations(base, tmp_path, changes, words):
    write_model(tmp_path / "model", **changes)
    only(problems(*base), "configuration", words)


@pytest.mark.parametrize("kind", ["gpt2", "deepseek_v3", "gemma3", "glm4v_moe", "qwen3_vl", "gpt_oss", "mamba2"])
def test_configurations_that_transformers_writes_are_not_damaged(tmp_path, kind):
    from transformers import CONFIG_MAPPING

    (tmp_path / "config.json").write_text(CONFIG_MAPPING[kind]().to_json_string(use_diff=False))
    assert look(str(tmp_path)).name == kind


def test_model_directories(base, tmp_path, monkeypatch):
    def path(name):
        return f"{ARR}.model.path={tmp_path / name}"

    write_model(tmp_path / "shards", weights=False)
    (tmp_path / "shards/model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    only(problems(*base, path("shards")), "configuration", "model-1.safetensors")
    write_model(tmp_path / "broken")
    (tmp_path / "broken" / "config.json").write_text("{")
    only(problems(*base, path("broken")), "configuration", "cannot be read as JSON")
    write_model(tmp_path / "vl", model_type="qwen2_5_vl", vision_config={}, text_config=MODEL)
    assert problems(*base, path("vl")) == []
    for kind in (
        "gemma3",
        "gemma4",
        "internvl",
        "mistral3",
        "llava",
        "kimi_k25",
        "ernie4_5_vl_moe",
        "paddleocr_vl",
    ):
        write_model(tmp_path / kind, model_type=kind, vision_config={}, text_config=MODEL)
        only(problems(*base, path(kind)), "configuration", kind, "not seen to be right")
    if HAS_KIMI_VL:  # the published directory names code of its own, which is not run
        own = {"auto_map": {"AutoConfig": "configuration_kimi_vl.KimiVLConfig"}, "vision_config": {}}
        write_model(tmp_path / "kimi", model_type="kimi_vl", text_config=MODEL, **own)
        assert problems(*base, path("kimi")) == []
    split = f"{ARR}.actor.fsdp_config.tensor_parallel_size=2"
    assert any("that see images are not split" in p for p in problems(*base, path("vl"), split))
    with monkeypatch.context() as patched:
        patched.setattr("verl.engine.rollout.vllm.VLLM.installed", lambda record: "")
        patched.setattr("verl.engine.rollout.vllm.kwargs.vllm_arguments", frozenset)
        patched.setattr("verl.engine.rollout.vllm.kwargs.importlib.util.find_spec", lambda name: None)
        only(problems(*base, path("vl"), f"{ARR}.rollout.name=vllm"), "machine", "torchvision")
    write_model(tmp_path / "remote", auto_map={"AutoModel": "x.Y"}, model_type="nobody_knows")
    only(problems(*base, path("remote")), "configuration", "trust_remote_code=False", "author")
    for key in (f"{ARR}.model", "data"):
        assert problems(*base, path("remote"), f"{key}.trust_remote_code=True") == []
    write_model(tmp_path / "native", auto_map={"AutoModel": "x.Y"}, model_type="qwen3")
    assert problems(*base, path("native")) == []


def test_context_counts_rope_scaling_and_overrides(base, tmp_path):
    long = [*base, "data.max_response_length=6000"]
    only(problems(*long), "configuration", "2048")
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    write_model(tmp_path / "yarn", rope_scaling=yarn)
    for given in (f"model.path={tmp_path}/yarn", "model.override_config.max_position_embeddings=8192"):
        assert problems(*long, f"{ARR}.{given}") == []
    assert problems(*long, f"{ARR}.model.override_config.model_config.max_position_embeddings=8192") == []


# ---- data ----


def test_remote_files_are_not_looked_at(base):
    assert "not looked at here" in notices(*base, "data.train_files=s3://b/x.parquet")


def test_columns(base, tmp_path):
    file = f"data.train_files={write_rows(tmp_path / 'a.parquet', Prompt=['x'] * 16, prompt=None)}"
    only(problems(*base, file), "configuration", "no column 'prompt'", "nearest: Prompt")
    file = f"data.train_files={write_rows(tmp_path / 'b.parquet', data_source=None)}"
    only(problems(*base, file), "configuration", "data_source")


def test_sources(base, tmp_path):
    rows = write_rows(tmp_path / "a.parquet", data_source=["openai/gsm8k", "my/own"] * 8)
    file = f"data.train_files={rows}"
    only(problems(*base, file), "configuration", "my/own", "openai/gsm8k")
    (tmp_path / "reward.py").write_text("def compute_score(**row): return 1.0")
    assert problems(*base, file, f"custom_reward_function.path={tmp_path}/reward.py") == []


def test_the_plain_format(base, tmp_path):
    def file(name, responses):
        columns = {"prompt": ["1+1?"] * 16, "response": responses, "reward": [0.0] * 16}
        rows = write_rows(tmp_path / name, **columns, data_source=None, reward_model=None)
        return f"data.train_files={rows}"

    assert problems(*base, file("good.parquet", ["so #### 2"] * 16)) == []
    found = check(load([*base, file("good.parquet", ["so #### 2"] * 16)]))
    assert sum("otherwise unused" in text for text in found.check_only) == 1
    assert not any("otherwise unused" in text for text in found.notices), "said when the file is read"
    only(problems(*base, file("bad.parquet", [""] * 16)), "configuration", "Every reward would be 0")


def test_json_lines(base, tmp_path):
    row = {"data_source": "openai/gsm8k", "prompt": "1+1?", "reward_model": {"ground_truth": "2"}}
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps(row)] * 9))
    report = check(load([*base, f"data.train_files={tmp_path}/a.jsonl"]))
    assert report.problems == [] and report.plan[0].startswith("9 rows")


def test_rows_with_images(base, tmp_path, monkeypatch):
    from PIL import Image

    Image.new("RGB", (9, 9)).save(tmp_path / "a.png")
    images = [[{"bytes": None, "path": "a.png"}]] * 16
    file = f"data.train_files={write_rows(tmp_path / 'a.parquet', images=images)}"
    only(problems(*base, file), "configuration", "images", "text model")
    write_model(tmp_path / "vl", model_type="qwen2_5_vl", vision_config={}, text_config=MODEL)
    vision = f"{ARR}.model.path={tmp_path / 'vl'}"
    only(problems(*base, file, vision), "configuration", "no chat template", "custom_chat_template")
    part = [{"role": "user", "content": [{"type": "image", "image": "b.png"}]}]
    inside = f"data.train_files={write_rows(tmp_path / 'd.parquet', prompt=[part] * 16)}"
    only(problems(*base, inside), "configuration", "this model does not see")
    assert "no chat template" in str(problems(*base, inside, vision))
    (tmp_path / "vl" / "chat_template.jinja").write_text("x")
    with monkeypatch.context() as patched:
        patched.setattr("verl.preflight.machine.version", lambda name: "5.17.0")
        only(problems(*base, file, vision), "machine", "pip install 'transformers>=5.18'")
    assert problems(*base, file, vision) == []
    only(problems(*base, file, vision, "critic.enable=True"), "configuration", "no critic sees images")
    asks = write_rows(tmp_path / "e.parquet", image=images, prompt=[[{"role": "user", "content": "<image>?"}]] * 16)
    told = ("data.image_key=images", "e.parquet has no images in that column", "say <image>; nearest: image (")
    only(problems(*base, f"data.train_files={asks}", vision), "configuration", *told)
    assert problems(*base, f"data.train_files={asks}", vision, "data.image_key=image") == []
    few = (*base, file, vision, f"{ARR}.rollout.limit_images=0")
    only(problems(*few), "configuration", "16 × too many images", "limit_images=0")
    only(problems(*base, inside, vision), "configuration", "16 × image missing", "b.png: no such file")
    images[3] = [{"bytes": None, "path": "b.png"}]
    bad = f"data.train_files={write_rows(tmp_path / 'c.parquet', images=images)}"
    told = ("1 × image missing", "c.parquet row 3", "b.png: no such file", "data.max_bad_row_ratio")
    only(problems(*base, bad, vision), "configuration", *told)
    enough = (*base, bad, vision, "data.max_bad_row_ratio=0.1")
    assert problems(*enough) == [] and any("row 3" in note for note in check(load(enough)).check_only)
    videos = (*base, file, vision, "data.video_key=images", "data.image_key=x")
    find = importlib.util.find_spec
    with monkeypatch.context() as patched:
        patched.setattr(importlib.util, "find_spec", lambda name: None if name == "torchvision" else find(name))
        only(problems(*videos), "machine", "videos need torchvision, which is not installed: pip install")
        patched.setattr(importlib.util, "find_spec", lambda name: name == "torchvision" or find(name))
        assert problems(*videos) == []
        told = problems(*videos, f"{ARR}.rollout.name=sglang")
        assert any(
            "configuration: " in problem and "not sampled by sglang" in problem and "rollout.name=native" in problem
            for problem in told
        )
    label = {"architectures": ["QForSequenceClassification"], "id2label": {"0": "x"}}
    scorer = write_model(tmp_path / "scorer", **label)
    scored = ["reward_model.enable=True", f"reward_model.model.path={scorer}"]
    only(problems(*base, file, vision, *scored), "configuration", "reads text")
    import pyarrow as pa

    none = pa.array([[]] * 16, pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()})))
    assert problems(*base, f"data.train_files={write_rows(tmp_path / 'b.parquet', images=none)}") == []


# ---- the user's own code ----


@pytest.mark.parametrize(
    ("code", "part"),
    [
        ("def compute_scor(data_source): pass", "nearest: compute_scor"),
        ("def compute_score(answer): pass", "it takes answer; add data_source"),
        ("def compute_score(data_source, solution_str, ground_truth): pass", "add extra_info"),
    ],
)
def test_reward_functions_that_do_not_fit(base, tmp_path, code, part):
    (tmp_path / "reward.py").write_text(code)
    only(problems(*base, f"custom_reward_function.path={tmp_path}/reward.py"), "configuration", part)


@pytest.mark.parametrize(
    "code",
    [
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None): pass",
        "async def compute_score(data_source, solution_str, **kwargs): pass",
        "compute_score = lambda **k: 1.0",
        "from math import sqrt as compute_score",
        "try:\n    from x import compute_score\nexcept ImportError:\n    pass",
        "import torch_is_never_imported_here\ndef compute_score(**kwargs): pass",
    ],
)
def test_reward_functions_that_fit(base, tmp_path, code):
    (tmp_path / "reward.py").write_text(code)
    assert problems(*base, f"custom_reward_function.path={tmp_path}/reward.py") == []


def test_batch_functions(base, tmp_path):
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos): pass"
    )
    argv = [*base, f"custom_reward_function.path={tmp_path}/reward.py"]
    assert problems(*argv, "reward_model.reward_manager=batch") == []
    only(problems(*argv), "configuration", "add data_source")


def test_plugins_bring_names(base, tmp_path, monkeypatch):
    name = f"plugin_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(
        "from verl.algorithms.registry import ESTIMATORS, LOSSES\n"
        f"ESTIMATORS.register('est_{name}')(lambda **k: None)\nLOSSES.register('loss_{name}')(lambda **k: None)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    argv = [*base, f"algorithm.adv_estimator=est_{name}", f"{ARR}.actor.policy_loss.loss_mode=loss_{name}"]
    assert len(problems(*argv)) == 2
    assert problems(*argv, f"{ARR}.model.external_lib={name}") == []
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", name)
    assert problems(*argv) == []
    found = problems(*base, "algorithm.adv_estimator=nobody", f"{ARR}.model.external_lib=no_such_plugin")
    assert sum("the plug-in module no_such_plugin" in p for p in found) == 1


def test_resume_path(base, tmp_path):
    argv = [*base, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/run"]
    (tmp_path / "run").mkdir()
    only(problems(*argv), "configuration", "holds no checkpoint")
    (tmp_path / "run" / "global_step_3").mkdir()
    assert problems(*argv) == []


def test_the_check_knows_the_algorithms_that_are_registered():
    """It reads their names from the source, without torch."""
    from verl.algorithms import advantage, entropy_losses, policy_loss, step_credit  # noqa: F401  (they fill the registries)
    from verl.algorithms.registry import ESTIMATORS, LOSSES

    for name, registry in (("ESTIMATORS", ESTIMATORS), ("LOSSES", LOSSES)):
        own = {n for n, f in registry.functions.items() if f.__module__.startswith("verl.algorithms.")}
        assert set(built_in(name)) == own - {"bypass_mode"} != set()
