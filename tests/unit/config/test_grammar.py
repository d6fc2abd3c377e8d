"""The override grammar: every kind of override, values by type, and what is an error."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.compat.spellings import load
from verl.config import Config, ConfigError
from verl.config.grammar import parse_value
from verl.config.matching import nearest
from verl.config.schema.fields import leaves
from verl.preflight.check import check

VLLM = "actor_rollout_ref.rollout.engine_kwargs.vllm"


def refused(*argv: str, entry: str = "ppo") -> str:
    with pytest.raises(ConfigError) as caught:
        load(list(argv), entry=entry)
    return str(caught.value)


# ---- the rows of the table ----


def test_unknown_key_names_the_nearest():
    text = refused("data.train_bach_size=8", "actor.optim.lr=1")
    assert "no key data.train_bach_size; nearest: data.train_batch_size" in text
    assert "actor_rollout_ref.actor.optim.lr" in text


def test_letters_that_changed_places_are_the_nearest():
    assert nearest("gpro", ["hgpo", "grpo", "gspo"]) == "; nearest: grpo"


def test_plus_sets_a_known_key_adds_in_a_map_and_refuses_elsewhere():
    cfg = load(["+data.train_batch_size=8", f"+{VLLM}.cache=True", f"+{VLLM}.a.b=[1,x]"])
    assert cfg.data.train_batch_size == 8
    vllm = cfg.actor_rollout_ref.rollout.engine_kwargs.vllm
    assert vllm == {"cache": True, "a": {"b": [1, "x"]}} and vllm.a.b == [1, "x"]
    assert "no key trainer.foo" in refused("+trainer.foo=1")


def test_double_plus_adds_anywhere_and_says_so_once():
    cfg = load(["++trainer.foo.bar=1e-3", "++mine=x", "++data.train_batch_size=4"])
    assert cfg.trainer.foo.bar == 1e-3 and cfg.mine == "x" and cfg.data.train_batch_size == 4
    said = [n for n in cfg.notices if "nothing reads it" in n]
    assert said == ["no effect: trainer.foo.bar, mine: added by ++, nothing reads it"]


@pytest.mark.parametrize("form", ["~trainer.total_epochs", "~trainer.total_epochs=3"])
def test_tilde_goes_back_to_the_default(form):
    cfg = load(["trainer.total_epochs=3", form])
    assert cfg.trainer.total_epochs == 30
    assert not cfg.was_set("trainer.total_epochs")
    assert "trainer.total_epochs is 3, not 4" in refused("trainer.total_epochs=3", "~trainer.total_epochs=4")


def test_three_question_marks_ask_for_a_value():
    key = "trainer.project_name"
    assert f"{key}: ??? stands for a value" in refused(f"{key}=???")
    assert load([f"{key}=???", f"{key}=mine"]).trainer.project_name == "mine"
    assert load([f"{key}=???", f"~{key}"]).trainer.project_name == load([]).trainer.project_name


def test_tilde_removes_inside_a_map_and_resets_a_group():
    cfg = load([f"+{VLLM}.a=1", f"+{VLLM}.b=2", f"~{VLLM}.a", "critic.optim.lr=1", "~critic.optim"])
    assert cfg.actor_rollout_ref.rollout.engine_kwargs.vllm == {"b": 2}
    assert cfg.critic.optim.lr == 1e-5
    assert "no key trainer.nothing" in refused("~trainer.nothing")


def test_an_alias_is_the_same_key_and_a_difference_is_said():
    cfg = load(["critic.grad_clip=2.0", "critic.optim.clip_grad=3.0"])
    assert cfg.critic.grad_clip == 3.0
    assert any("critic.grad_clip=2.0 and critic.optim.clip_grad=3.0" in n for n in cfg.notices)
    assert load(["critic.optim.clip_grad=3.0", "critic.grad_clip=2.0"]).critic.grad_clip == 2.0


NULLS = ("null", "None", "'null'", '"null"', "'None'")
LISTS = ("[console,wandb]", "['console','wandb']", '["console","wandb"]', "[console, wandb]", "console,wandb")
# key: (texts, what they mean)
VALUES = {
    "trainer.total_training_steps": [(NULLS, None)],
    "data.val_files": [(NULLS, None)],
    "trainer.wandb_proxy": [(NULLS, None)],
    "data.seed": [(NULLS, 42)],
    "data.shuffle": [(("True", "true", "1", "'True'"), True), (("False", "false", "0"), False)],
    "data.train_batch_size": [(("5", "'5'", "+5"), 5), (("2.0",), 2), (("1e7",), 10**7), (("1_000",), 1000)],
    "critic.optim.lr": [(("1e-6", "'1e-6'"), 1e-6), (("1",), 1.0), (("inf",), float("inf")), ((".5",), 0.5)],
    "trainer.logger": [
        ((*LISTS, '\'["console","wandb"]\''), ["console", "wandb"]),
        (("console", "'console'", "[console]", "['console']"), ["console"]),
    ],
    "trainer.experiment_name": [
        (("'any, thing = here'",), "any, thing = here"),
        (('"it\'s"',), "it's"),
        # Text without quotes stays as written, and so does what Hydra's lexer refuses.
        *(((text,), text) for text in ("1e5", "1.10", "1_000", "True", "0012")),
        *(((text,), text) for text in ("b=c", "x;y", "é", "a(b)", "`x`", "a#b", "x y&z")),
    ],
}


@pytest.mark.parametrize("key", VALUES)
def test_values_by_the_type_of_their_key(key):
    for texts, value in VALUES[key]:
        for text in texts:
            cfg = load(["trainer.total_training_steps=7", "data.shuffle=False", f"{key}={text}"])
            found = cfg.select(key)
            assert found == value and type(found) is type(value), text


@pytest.mark.parametrize(
    ("key", "texts", "said"),
    [
        ("trainer.total_epochs", ["null"], "may not be null"),
        ("trainer.project_name", ["null"], "may not be null"),
        ("data.train_batch_size", ["1e-6", "2.5", "x", "True", "inf", "nan", "[1]", "''", "1,2"], "size"),
        ("critic.optim.lr", ["x", "True", "nan", "{a:1}"], "optim.lr"),
        ("trainer.experiment_name", ["x,y"], "comma; quote it twice, \"key='x,y'\""),
        (f"+{VLLM}.a", ["x,y"], "comma"),
        ("trainer.seed", ["choice(a,b)", "range(1,3)", "glob(*)", "interval(0,1)"], "sweeps"),
        ("++trainer.seed.x", ["1"], "is a value and has no keys of its own"),
        ("algorithm.kl_ctrl", ["3"], "is a group of keys"),
        ("data.train_files", ["$NO_SUCH_THING/x.parquet"], "NO_SUCH_THING"),
    ],
)
def test_values_that_do_not_fit(key, texts, said, monkeypatch):
    monkeypatch.delenv("NO_SUCH_THING", raising=False)
    for text in texts:
        assert said in refused(f"{key}={text}"), text


def test_list_items_have_the_lists_type():
    sizes = "actor_rollout_ref.rollout.cudagraph_capture_sizes"
    cfg = load([f"{sizes}=[1,2.0,4]", "critic.optim.betas=[0.9,'0.95']"])
    assert cfg.select(sizes) == [1, 2, 4] and cfg.critic.optim.betas == [0.9, 0.95]
    assert "whole number" in refused(f"{sizes}=[1,x]")


def test_mappings():
    words = ["data.apply_chat_template_kwargs={enable_thinking:False,x:{y:[1,2]}}"]
    cfg = load([*words, "algorithm.kl_ctrl={type:adaptive,horizon:5}"])
    assert cfg.data.apply_chat_template_kwargs == {"enable_thinking": False, "x": {"y": [1, 2]}}
    control = {"type": "adaptive", "kl_coef": 0.001, "horizon": 5, "target_kl": 0.1}
    assert dict(cfg.algorithm.kl_ctrl) == control


def test_paths_expand_home_and_variables(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("WHERE", "/disk")
    cfg = load(
        [
            "data.train_files=~/data/x.parquet",
            "data.val_files=[~/x,$WHERE/y]",
            "actor_rollout_ref.model.path='${WHERE}/m'",
            "trainer.default_local_dir=$HOME/run",
            "trainer.experiment_name=~/not-a-path",
        ]
    )
    assert cfg.data.train_files == ["/home/someone/data/x.parquet"]
    assert cfg.data.val_files == ["/home/someone/x", "/disk/y"]
    assert cfg.actor_rollout_ref.model.path == "/disk/m"
    assert cfg.trainer.default_local_dir == "/home/someone/run"
    assert cfg.trainer.experiment_name == "~/not-a-path"
    assert cfg.data.cache_dir == "/home/someone/.cache/verl/rlhf"


def test_remote_paths_are_left_alone(monkeypatch):
    monkeypatch.setenv("X", "changed")
    cfg = load(["data.train_files=hdfs://h/p?x=1&y=2", "data.val_files=s3://bucket/$X/~/v.parquet"])
    assert cfg.data.train_files == ["hdfs://h/p?x=1&y=2"]
    assert cfg.data.val_files == ["s3://bucket/$X/~/v.parquet"]


@pytest.mark.parametrize("text", ["'abc", "it's", "[1,2", "1]", "{a:1", "(a", 'a"b'])
def test_unbalanced_is_an_error(text):
    message = refused(f"trainer.experiment_name={text}")
    assert "balance" in message or "not closed" in message


def test_group_overrides():
    cfg = load(["actor@actor_rollout_ref.actor=megatron_actor", "model_engine=dp"])
    assert cfg.actor_rollout_ref.actor.strategy == "fsdp"
    cfg = load(["actor@actor_rollout_ref.actor=megatron_actor"])
    roles = cfg.actor_rollout_ref
    assert roles.actor.strategy == roles.ref.strategy == "megatron"
    cfg = load(["model_engine=megatron"])
    assert cfg.critic.strategy == "megatron"
    assert load(["engine=megatron"], entry="sft").engine.strategy == "megatron"
    assert load(["data@data=legacy_data"]) == load([])
    assert "megatron_actor" in refused("actor@actor_rollout_ref.actor=nothing")
    assert "megatron" in refused("model_engine=nothing")


def test_hydra_overrides_are_not_needed():
    cfg = load(["hydra.run.dir=/x", "hydra/job_logging=disabled", "+hydra.x=1"])
    assert cfg.notices == []


def test_interpolation():
    cfg = load(["trainer.experiment_name=run-${data.train_batch_size}", "data.seed=${oc.select:trainer.nothing,7}"])
    assert cfg.trainer.experiment_name == "run-1024" and cfg.data.seed == 7
    for broken in ("${no.such.key}", "${}", '${data["seed"]}', "${", "${trainer.seed"):
        assert "problem" in refused(f"trainer.seed={broken}")


# ---- forms that are no overrides ----


@pytest.mark.parametrize(
    "text", ["trainer.seed", "a b=1", "=1", "+", "", ".trainer.seed=1", "trainer.seed.=1", "trainer..seed=1"]
)
def test_no_override(text):
    assert "problem" in refused(text)


def test_all_problems_come_together():
    message = refused("trainer.seed=x", "data.nothing=1", "data.shuffle=maybe", "trainer.seed", "a='")
    assert "(5 problems)" in message


# ---- properties ----

plain = st.text("abcXYZ019_./-", min_size=1, max_size=12)


@given(plain)
def test_plain_text_of_a_string_key_is_itself(text):
    null = text in ("null", "None")
    if not null:
        assert load([f"trainer.experiment_name={text}"]).trainer.experiment_name == text


@given(st.lists(st.one_of(st.integers(-5, 5), st.sampled_from(["a", "b c", "x/y"]), st.booleans()), max_size=4))
def test_a_list_comes_back(values):
    text = "[" + ",".join(f"'{v}'" if isinstance(v, str) else str(v) for v in values) + "]"
    assert parse_value(text).data == values


_KEYS = sorted(leaves(Config))
_PLAIN = "0 -1 null [] [a] {} {a:1} True x 1e-6 1e7 inf '' ~/x a,b {a:[1,{b:c}]} ${trainer.seed} ${nothing}"
_ODD = "[[1]] {a:{b:}} =x [~/x,'b'] 1_0 [null] '{a:1}' \\ '"
_RIGHT = [*_PLAIN.split(), *_ODD.split(), "a b"]
_RIGHT_SIDES = st.one_of(st.sampled_from(_RIGHT), st.text("ab ,'\"[](){}=~:", max_size=14))
_PARTS = [st.sampled_from(values) for values in (["", "+", "++", "~"], _KEYS, ["", ".x"])]


@given(st.lists(st.tuples(*_PARTS, _RIGHT_SIDES), max_size=4))
@settings(max_examples=150, deadline=None)
def test_whatever_is_written_is_a_configuration_or_a_config_error(parts):
    """And what is a configuration can be checked without an exception."""
    try:
        cfg = load([f"{op}{key}{end}={right}" for op, key, end, right in parts])
    except ConfigError:
        return
    check(cfg).problem_text()
