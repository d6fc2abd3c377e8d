"""Settings that would have no effect, another effect than meant, or fail when they are loaded: found before the run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl.config.model_facts import ModelFacts, ModelTrouble, find, flat_overrides, look
from verl.config.names import nearest
from verl.config.rules.context import Check
from verl.config.rules.data import chat_template
from verl.errors import UserError

_SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_local_experts",
    "moe_intermediate_size",
    "depth",
)
"""Entries of config.json that the shapes of a model's weights follow from."""
_ARGUMENTS_OF_TRANSFORMERS = ("tools", "documents", "continue_final_message", "add_generation_prompt")
_WITHOUT_TOOLS = {"single_turn_agent", "environment_agent"}
_TAG_OF_TRANSFORMERS = re.compile(r"{%-?\s*generation")


def check(c: Check) -> None:
    """Tools, environments, model overrides, tokenizers, templates, plug-ins, agent loops, folders, checkpoints."""
    if c.rollout is not None and c.model is not None:
        _agents(c)
    if c.model is not None:
        _overrides(c, c.model_key, c.facts)
        _tokenizer(c)
        _template_arguments(c)
        _plugins(c)
    if c.trainer is not None:
        _folders(c)
    if c.ppo:
        critic = c.cfg.critic
        if critic.enable and critic.model.path and critic.model.override_config:
            key, model = "critic.model", critic.model
            facts = c.look(f"{key}.path", model.path, model.override_config, model.hf_config_path)
            _overrides(c, key, facts)
        _lengths(c)
        _reward_arguments(c)


def _overrides(c: Check, model_key: str, facts: ModelFacts | None) -> None:
    """What transformers' configuration takes; a model with weights has the shape of its weights."""
    model: Any = c.cfg.select(model_key)
    key, changes = f"{model_key}.override_config", flat_overrides(model.override_config)
    if facts is None or not changes:
        return
    unchanged = look(model.path, None, model.hf_config_path)
    shapes = (
        dict(_contradictions(changes, unchanged.config, unchanged.text)) if unchanged.weight_names() else {}
    )
    for name, size in shapes.items():
        c.refuse(f"{key}.{name}", f"the weights of {model.path} have {name}={size}; remove it")
    if not unchanged.remote_code:
        from verl.models import overrides

        for name, why in overrides.refused(unchanged.folder, changes).items():
            if name not in shapes:
                c.refuse(f"{key}.{name}", why)


def _contradictions(
    changes: Mapping[str, Any], config: Mapping[str, Any], text: Mapping[str, Any], within: str = ""
) -> Iterator[tuple[str, Any]]:
    """Overrides of shapes that differ from the configuration, in its parts too: (name, the configuration's value)."""
    for name, value in changes.items():
        part = config.get(name)
        if isinstance(value, Mapping) and isinstance(part, Mapping):
            yield from _contradictions(value, part, part, f"{within}{name}.")
        elif name in _SHAPE and value != text.get(name):
            yield within + name, text.get(name)


def _tokenizer(c: Check) -> None:
    """A folder that is not there, and a template that does not compile."""
    from verl.data.tokenizer import template_text

    for key in ("data.tokenizer", f"{c.model_key}.tokenizer_path"):
        path = str(c.cfg.select(key) or "") if c.was_set(key) else ""
        if path.startswith(("/", "~", "./", "../")) and not Path(path).expanduser().is_dir():
            c.refuse(key, "no such directory; name one that holds the tokenizer's files, or a hub id")
        elif path:
            try:
                find(path)
            except ModelTrouble as trouble:
                c.lacks(key, str(trouble), download=trouble.download or "/" not in path)
    template, key = c.model.get("custom_chat_template"), f"{c.model_key}.custom_chat_template"
    if template is not None:
        with c.refusing(key):
            _parsed(template_text(template))
    elif text := chat_template(c):
        keys = ("data.tokenizer", f"{c.model_key}.tokenizer_path", f"{c.model_key}.path")
        with c.refusing(next(filter(c.was_set, keys), keys[-1])):
            _parsed(text)


def _parsed(text: str) -> Any:
    """A parsed template; None with a tag of transformers or several templates. UserError if it does not compile."""
    from jinja2 import TemplateSyntaxError, pass_context
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if _TAG_OF_TRANSFORMERS.search(text) or text.startswith("[{"):
        return None
    # Leaves constant expressions, which may have results of any size, to the rendering.
    lazy: Any = {"optimized": False, "finalize": pass_context(lambda _, value: value)}
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"], **lazy)
    try:
        parsed = environment.parse(text)
        environment.compile(parsed)  # filters and tests that there are not
        return parsed
    except TemplateSyntaxError as error:
        raise UserError(f"is no Jinja template: {error.message} (line {error.lineno})") from error
    except (SyntaxError, RecursionError) as error:
        raise UserError(f"is no Jinja template that can be run: {error}") from error


def _template_arguments(c: Check) -> None:
    """Arguments that the system sets, or that the chat template does not read.

    A name close to one that it reads is taken for a mistake.
    """
    key = "data.apply_chat_template_kwargs"
    text = chat_template(c) if (arguments := c.cfg.select(key)) else ""
    if arguments:
        from verl.data.rows import RESERVED

        for name in filter(RESERVED.__contains__, arguments):
            c.refuse(f"{key}.{name}", "is set by the system; remove it")
    if not text:
        return
    from jinja2 import meta

    try:
        parsed = _parsed(text)
    except UserError:  # said where it is set, or when the tokenizer is loaded
        return
    read = meta.find_undeclared_variables(parsed) if parsed is not None else arguments
    for name in arguments:
        if name in read or name in _ARGUMENTS_OF_TRANSFORMERS or name in RESERVED:
            continue
        if near := nearest(name, sorted(read), cutoff=0.8):
            c.refuse(f"{key}.{name}", f"the chat template reads no such variable{near}")
        else:
            c.notice(f"no effect: {key}.{name}: the chat template does not read it")


def _plugins(c: Check) -> None:
    """Plug-in modules import, and register the agent loops that the run and its rows name."""
    if not c.plugins:
        return
    sources = {} if c.rollout is None else dict.fromkeys(c.agent_names, "a row's agent_name")
    key = f"{c.rollout_key}.agent.default_agent_loop"
    if c.rollout is not None and c.was_set(key):
        sources[c.rollout.agent.default_agent_loop] = key
    path = None if c.rollout is None else c.rollout.agent.agent_loop_config_path
    if not (sources or path):
        return
    from verl.rollout import loops

    try:
        loops.load_listed(path)
    except UserError as error:
        c.refuse(f"{c.rollout_key}.agent.agent_loop_config_path", str(error))
        return
    for name, where in sources.items():
        try:
            loops.get(name)
        except ValueError as error:
            c.refuse(where if where == key else f"{where} {name!r}", str(error))


def _agents(c: Check) -> None:
    """What tools and environments name is loaded, for that is the only way to know that it can be."""
    turns, environment, key = c.rollout.multi_turn, c.rollout.agent.environment, c.rollout_key
    if environment.name and not environment.path:
        c.refuse(f"{key}.agent.environment.path", f"environment.name={environment.name} needs it")
    elif environment.path and not environment.name:
        c.refuse(f"{key}.agent.environment.name", f"{c.at(f'{key}.agent.environment.path')} needs it")
    elif environment.name and c.plugins:
        from verl.rollout import environment_agent

        with c.refusing(f"{key}.agent.environment"):
            tokenizer = c.cfg.select("data.tokenizer") or c.model.tokenizer_path or c.model.path
            environment_agent.check(environment, tokenizer)
    files = ("tool_config_path", "function_tool_path", "interaction_config_path")
    if configured := [name for name in files if turns[name]]:
        if {c.rollout.agent.default_agent_loop, *c.agent_names} <= _WITHOUT_TOOLS:
            why = "no row is of tool_agent (multi_turn.enable=True, or agent_name in a row)"
            c.notice(f"no effect: {key}.multi_turn.{', '.join(configured)}: {why}")
        if c.plugins:
            with c.refusing(f"{key}.multi_turn"):
                _tools(c)


def _tools(c: Check) -> None:
    from verl.data.tokenizer import tokenizer_of
    from verl.rollout.tool_agent import checked_tools

    model = c.model
    checked_tools(c.rollout, None, None)
    if Path(str(model.path)).expanduser().is_dir():
        tokenizer = tokenizer_of(model, c.cfg.select("data.tokenizer"))
        checked_tools(c.rollout, tokenizer, c.cfg.select("data.apply_chat_template_kwargs"))


def _folders(c: Check) -> None:
    """Where a run writes, and that its checkpoints hold something."""
    key = "trainer.default_local_dir"
    if c.was_set(key) and str(c.trainer.get("default_local_dir")).lower() in ("", "false", "true"):
        c.refuse(key, "name a folder")
    c.refuse_file(key, c.trainer.get("default_local_dir"))
    for name in ("project_name", "experiment_name"):
        folder_name = c.trainer.get(name)
        if folder_name == "":
            c.refuse(f"trainer.{name}", "is part of the run's folder; name something")
        elif ".." in Path(str(folder_name or "")).parts:
            c.refuse(f"trainer.{name}", "is part of the run's folder and may not lead out of it; remove '..'")
    for role in ("actor_rollout_ref.actor.checkpoint", "checkpoint"):
        contents: Any = c.cfg.select(f"{role}.save_contents")
        if contents == [] and c.trainer.get("save_freq") not in (-1, 0):
            c.refuse(f"{role}.save_contents", "a checkpoint would hold nothing; name model, optimizer, extra")


def _lengths(c: Check) -> None:
    size = c.facts.text.get("vocab_size") if c.facts is not None else None
    for key in (f"{c.rollout_key}.stop_token_ids", f"{c.rollout_key}.val_kwargs.stop_token_ids"):
        token_ids = c.cfg.select(key) if size and c.was_set(key) else None
        if wrong := [token for token in token_ids or () if token >= size]:
            c.refuse(f"{key}={wrong[0]}", f"the model's vocabulary has {size} tokens")
    own_key, of_data = f"{c.rollout_key}.response_length", "data.max_response_length"
    if c.was_set(own_key) and c.cfg.select(own_key) != c.cfg.select(of_data):
        c.notice(f"{c.at(own_key)} differs from {c.at(of_data)}: responses end at the smaller one")


def _reward_arguments(c: Check) -> None:
    """Arguments of the reward manager are open: a name close to a built-in one is taken for a mistake.

    Another name reaches only a manager class of the user's own.
    """
    arguments = c.cfg.reward_model.reward_kwargs
    accepted = [name for name in type(arguments).__dataclass_fields__ if not name.startswith("_")]
    for name in arguments:
        if name not in accepted and (near := nearest(name, accepted, cutoff=0.8)):
            c.refuse(f"reward_model.reward_kwargs.{name}", f"no such argument{near}")
        elif name not in accepted and c.cfg.reward_manager.source != "importlib":
            why = "no manager of ours takes it; those of a function are custom_reward_function.reward_kwargs"
            c.notice(f"no effect: reward_model.reward_kwargs.{name}: {why}")
    if not c.cfg.custom_reward_function.path:
        from verl.reward.rules import check_kwargs

        with c.refusing("custom_reward_function.reward_kwargs"):
            check_kwargs(c.cfg.custom_reward_function.reward_kwargs)
