"""Tools, agent loops and environments: what they name is loaded, for that is the only way to know that it can be."""

from __future__ import annotations

from pathlib import Path

from verl.config.rules.context import Check

_WITHOUT_TOOLS = {"single_turn_agent", "environment_agent"}


def check(c: Check) -> None:
    """Classes, schemas, names of tools; the template of a model that is here; paths of environments."""
    if c.rollout is None or c.model is None:
        return
    turns, environment, key = c.rollout.multi_turn, c.rollout.agent.environment, c.rollout_key
    if environment.name and not environment.path:
        c.refuse(f"{key}.agent.environment.path", f"environment.name={environment.name} needs it")
    elif environment.name and c.plugins:
        with c.refusing(f"{key}.agent.environment"):
            _environment(c)
    files = ("tool_config_path", "function_tool_path", "interaction_config_path")
    if given := [name for name in files if turns[name]]:
        if {c.rollout.agent.default_agent_loop, *c.agent_names} <= _WITHOUT_TOOLS:
            why = "no row is of tool_agent (multi_turn.enable=True, or agent_name in a row)"
            c.notice(f"no effect: {key}.multi_turn.{', '.join(given)}: {why}")
        if c.plugins:
            with c.refusing(f"{key}.multi_turn"):
                _tools(c)


def _environment(c: Check) -> None:
    from verl.rollout import environments

    tokenizer = c.cfg.select("data.tokenizer") or c.model.tokenizer_path or c.model.path
    environments.check(c.rollout.agent.environment, tokenizer)


def _tools(c: Check) -> None:
    from verl.data.tokenizer import tokenizer_of
    from verl.rollout.tool_agent import checked_tools

    model = c.model
    checked_tools(c.rollout, None, None)
    if Path(str(model.path)).expanduser().is_dir():
        tokenizer = tokenizer_of(model, c.cfg.select("data.tokenizer"))
        checked_tools(c.rollout, tokenizer, c.cfg.select("data.apply_chat_template_kwargs"))
