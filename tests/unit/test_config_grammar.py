"""The override grammar: every row of spec config.md §1, values by type, and what is an error."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.config import Config, ConfigError, load
from verl.config.check import check
from verl.config.fields import leaves
from verl.config.grammar import GrammarError, Value, parse, parse_value, split

VLLM = "actor_rollout_ref.rollout.engine_kwargs.vllm"


def refused(*argv: str, entry: str = "ppo") -> str:
    with pytest.raises(ConfigError) as caught:
        load(list(argv), entry=entry)
    return str(caught.value)


# ---- the rows of the table ----


def test_set():
    assert load(["data.train_batch_size=8"]).data.train_batch_size == 8


def test_unknown_key_names_the_nearest():
    text = refused("data.train_bach_size=8", "actor.optim.lr=1")
    assert "no key data.train_bach_size; nearest: data.train_batch_size" in text
    assert "actor_rollout_ref.actor.optim.lr" in text


def test_plus_sets_a_known_key_adds_in_a_map_and_refuses_elsewhere():
    cfg = load(
        ["+data.train_batch_size=8", f"+{VLLM}.disable_mm_preprocessor_cache=True", f"+{VLLM}.a.b=[1,x]"]
    )
    assert cfg.data.train_batch_size == 8
    vllm = cfg.actor_rollout_ref.rollout.engine_kwargs.vllm
    assert vllm == {"disable_mm_preprocessor_cache": True, "a": {"b": [1, "x"]}}
    assert vllm.a.b == [1, "x"]
    assert "no key trainer.foo" in refused("+trainer.foo=1")


def test_double_plus_adds_anywhere_and_says_so_once():
    cfg = load(["++trainer.foo.bar=1e-3", "++mine=x", "++data.train_batch_size=4"])
    assert cfg.trainer.foo.bar == 1e-3 and cfg.mine == "x" and cfg.data.train_batch_size == 4
    said = [n for n in cfg.notices if "read by nobody" in n]
    assert said == ["added by ++, read by nobody: trainer.foo.bar, mine"]


def test_double_plus_does_not_turn_a_value_into_a_group():
    assert "is a value and has no keys of its own" in refused("++trainer.seed.x=1")


@pytest.mark.parametrize("form", ["~trainer.total_epochs", "~trainer.total_epochs=3"])
def test_tilde_goes_back_to_the_default(form):
    cfg = load(["trainer.total_epochs=3", form])
    assert cfg.trainer.total_epochs == 30
    assert not cfg.was_set("trainer.total_epochs")


def test_tilde_removes_inside_a_map_and_resets_a_group():
    cfg = load([f"+{VLLM}.a=1", f"+{VLLM}.b=2", f"~{VLLM}.a", "critic.optim.lr=1", "~critic.optim"])
    assert cfg.actor_rollout_ref.rollout.engine_kwargs.vllm == {"b": 2}
    assert cfg.critic.optim.lr == 1e-5
    assert "no key trainer.nothing" in refused("~trainer.nothing")


def test_the_later_value_counts():
    assert load(["trainer.seed=1", "trainer.seed=2"]).trainer.seed == 2


def test_an_alias_is_the_same_key_and_a_difference_is_said():
    cfg = load(["critic.grad_clip=2.0", "critic.optim.clip_grad=3.0"])
    assert cfg.critic.grad_clip == 3.0
    assert any("critic.grad_clip=2.0 and critic.optim.clip_grad=3.0" in n for n in cfg.notices)
    assert load(["critic.optim.clip_grad=3.0", "critic.grad_clip=2.0"]).critic.grad_clip == 2.0


@pytest.mark.parametrize("null", ["null", "None", "'null'", '"null"', "'None'"])
@pytest.mark.parametrize(
    "key", ["trainer.total_training_steps", "data.val_files", "trainer.wandb_proxy", "data.seed"]
)
def test_null_where_it_may_be(key, null):
    cfg = load([f"{key}={null}"])
    expected = 42 if key == "data.seed" else None
    assert cfg.select(key) == expected


def test_null_where_it_may_not_be():
    assert "may not be null" in refused("trainer.total_epochs=null")
    assert "may not be null" in refused("trainer.project_name=null")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("True", True),
        ("true", True),
        ("False", False),
        ("false", False),
        ("1", True),
        ("0", False),
        ("'True'", True),
    ],
)
def test_booleans(text, value):
    assert load([f"data.shuffle={text}"]).data.shuffle is value


@pytest.mark.parametrize(
    ("text", "value"), [("5", 5), ("2.0", 2), ("1e7", 10**7), ("1_000", 1000), ("'5'", 5), ("+5", 5)]
)
def test_whole_numbers(text, value):
    found = load([f"data.train_batch_size={text}"]).data.train_batch_size
    assert found == value and isinstance(found, int)


@pytest.mark.parametrize("text", ["1e-6", "2.5", "x", "True", "inf", "nan", "[1]", "''", "1,2"])
def test_no_whole_number(text):
    assert "data.train_batch_size" in refused(f"data.train_batch_size={text}")


@pytest.mark.parametrize(
    ("text", "value"), [("1e-6", 1e-6), ("1", 1.0), ("inf", float("inf")), ("'1e-6'", 1e-6), (".5", 0.5)]
)
def test_numbers(text, value):
    found = load([f"actor_rollout_ref.actor.optim.lr={text}"]).actor_rollout_ref.actor.optim.lr
    assert found == value and isinstance(found, float)


@pytest.mark.parametrize("text", ["x", "True", "nan", "{a:1}"])
def test_no_number(text):
    assert "optim.lr" in refused(f"actor_rollout_ref.actor.optim.lr={text}")


@pytest.mark.parametrize(
    "text",
    [
        "[console,wandb]",
        "['console','wandb']",
        '["console","wandb"]',
        '\'["console","wandb"]\'',
        "[console, wandb]",
        "console,wandb",
    ],
)
def test_lists(text):
    assert load([f"trainer.logger={text}"]).trainer.logger == ["console", "wandb"]


@pytest.mark.parametrize("text", ["console", "'console'", "[console]", "['console']"])
def test_a_scalar_is_a_list_of_one(text):
    assert load([f"trainer.logger={text}"]).trainer.logger == ["console"]


def test_list_items_have_the_lists_type():
    cfg = load(
        [
            "actor_rollout_ref.rollout.cudagraph_capture_sizes=[1,2.0,4]",
            "actor_rollout_ref.actor.optim.betas=[0.9,'0.95']",
        ]
    )
    assert cfg.actor_rollout_ref.rollout.cudagraph_capture_sizes == [1, 2, 4]
    assert cfg.actor_rollout_ref.actor.optim.betas == [0.9, 0.95]
    assert "whole number" in refused("actor_rollout_ref.rollout.cudagraph_capture_sizes=[1,x]")


def test_mappings():
    cfg = load(
        [
            "data.apply_chat_template_kwargs={enable_thinking:False,x:{y:[1,2]}}",
            "algorithm.kl_ctrl={type:adaptive,horizon:5}",
        ]
    )
    assert cfg.data.apply_chat_template_kwargs == {"enable_thinking": False, "x": {"y": [1, 2]}}
    assert cfg.algorithm.kl_ctrl.type == "adaptive" and cfg.algorithm.kl_ctrl.horizon == 5
    assert cfg.algorithm.kl_ctrl.target_kl == 0.1


def test_quoted_strings_stand_as_they_are():
    assert (
        load(["trainer.experiment_name='any, thing = here'"]).trainer.experiment_name == "any, thing = here"
    )
    assert load(['trainer.experiment_name="it\'s"']).trainer.experiment_name == "it's"


def test_unquoted_text_of_a_string_key_stays_as_written():
    for text in ("1e5", "1.10", "1_000", "True", "0012"):
        assert load([f"trainer.experiment_name={text}"]).trainer.experiment_name == text


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


def test_a_variable_that_is_not_set_is_named(monkeypatch):
    monkeypatch.delenv("NO_SUCH_THING", raising=False)
    assert "NO_SUCH_THING" in refused("data.train_files=$NO_SUCH_THING/x.parquet")


def test_remote_paths_are_left_alone(monkeypatch):
    monkeypatch.setenv("X", "changed")
    cfg = load(["data.train_files=hdfs://h/p?x=1&y=2", "data.val_files=s3://bucket/$X/~/v.parquet"])
    assert cfg.data.train_files == ["hdfs://h/p?x=1&y=2"]
    assert cfg.data.val_files == ["s3://bucket/$X/~/v.parquet"]


@pytest.mark.parametrize("text", ["b=c", "x;y", "é", "a(b)", "`x`", "a#b", "x y&z"])
def test_what_hydras_lexer_refuses_is_a_string(text):
    assert load([f"trainer.experiment_name={text}"]).trainer.experiment_name == text


@pytest.mark.parametrize("text", ["'abc", "it's", "[1,2", "1]", "{a:1", "(a", 'a"b'])
def test_unbalanced_is_an_error(text):
    message = refused(f"trainer.experiment_name={text}")
    assert "balance" in message or "not closed" in message


def test_comma_outside_brackets():
    assert "comma" in refused("trainer.experiment_name=x,y")
    assert "comma" in refused(f"+{VLLM}.a=x,y")
    assert load(["data.val_files=~/a,~/b"]).data.val_files[1].endswith("/b")


@pytest.mark.parametrize("text", ["choice(a,b)", "range(1,3)", "glob(*)", "interval(0,1)"])
def test_sweeps_are_refused(text):
    assert "sweeps" in refused(f"trainer.seed={text}")


def test_group_overrides():
    cfg = load(["actor@actor_rollout_ref.actor=megatron_actor", "model_engine=dp"])
    assert cfg.actor_rollout_ref.actor.strategy == "fsdp"
    cfg = load(["actor@actor_rollout_ref.actor=megatron_actor"])
    assert (
        cfg.actor_rollout_ref.actor.strategy == "megatron"
        and cfg.actor_rollout_ref.ref.strategy == "megatron"
    )
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
    cfg = load(
        ["trainer.experiment_name=run-${data.train_batch_size}", "data.seed=${oc.select:trainer.nothing,7}"]
    )
    assert cfg.trainer.experiment_name == "run-1024" and cfg.data.seed == 7
    cfg = load(
        [
            "critic.ppo_mini_batch_size=${actor_rollout_ref.actor.ppo_mini_batch_size}",
            "actor_rollout_ref.actor.ppo_mini_batch_size=3",
        ]
    )
    assert cfg.critic.ppo_mini_batch_size == 3
    assert "cannot be resolved" in refused("trainer.seed=${no.such.key}")


# ---- forms that are no overrides ----


@pytest.mark.parametrize("text", ["trainer.seed", "a b=1", "=1", "+", ""])
def test_no_override(text):
    assert "problem" in refused(text)


def test_all_problems_come_together():
    message = refused("trainer.seed=x", "data.nothing=1", "data.shuffle=maybe", "trainer.seed", "a='")
    assert message.startswith("5 problems")


def test_a_group_is_not_a_value():
    assert "is a group of keys" in refused("algorithm.kl_ctrl=3")


# ---- properties ----

plain = st.text("abcXYZ019_./-", min_size=1, max_size=12)


@given(plain)
def test_plain_text_of_a_string_key_is_itself(text):
    null = text in ("null", "None")
    if not null:
        assert load([f"trainer.experiment_name={text}"]).trainer.experiment_name == text


@given(
    st.lists(st.one_of(st.integers(-5, 5), st.sampled_from(["a", "b c", "x/y"]), st.booleans()), max_size=4)
)
def test_a_list_comes_back(values):
    text = "[" + ",".join(f"'{v}'" if isinstance(v, str) else str(v) for v in values) + "]"
    assert parse_value(text).data == values


@given(st.text("ab ,'\"[](){}=~:", max_size=14))
@settings(max_examples=200)
def test_any_right_side_is_a_value_or_a_grammar_error(text):
    try:
        found = parse_value(text)
    except GrammarError:
        return
    assert isinstance(found, Value)


@given(st.text("ab,'[]{}", max_size=12))
def test_split_loses_nothing(text):
    try:
        parts = split(text)
    except GrammarError:
        return
    assert ",".join(parts).replace(" ", "") == text.replace(" ", "") or not text.strip()


def test_parse_keeps_the_parts():
    found = parse("++a.b@c.d='x'")
    assert (found.op, found.key, found.package) == ("++", "a.b", "c.d")
    assert found.value == Value("x", "x", quoted=True)


_KEYS = sorted(leaves(Config))
_RIGHT = [
    "0",
    "-1",
    "null",
    "[]",
    "[a]",
    "{}",
    "{a:1}",
    "True",
    "x",
    "1e-6",
    "1e7",
    "inf",
    "''",
    "~/x",
    "a,b",
    "{a:[1,{b:c}]}",
]
_RIGHT += [
    "${trainer.seed}",
    "${nothing}",
    "[[1]]",
    "{a:{b:}}",
    "=x",
    "[~/x,'b']",
    "1_0",
    "[null]",
    "'{a:1}'",
    "a b",
    "\\",
    "'",
]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", "+", "++", "~"]),
            st.sampled_from(_KEYS),
            st.sampled_from(["", ".x"]),
            st.sampled_from(_RIGHT),
        ),
        max_size=4,
    )
)
@settings(max_examples=150, deadline=None)
def test_whatever_is_written_is_a_configuration_or_a_config_error(parts):
    """And what is a configuration can be checked without an exception."""
    try:
        cfg = load([f"{op}{key}{end}={right}" for op, key, end, right in parts])
    except ConfigError:
        return
    check(cfg).problem_text()
