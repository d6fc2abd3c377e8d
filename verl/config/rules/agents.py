"""Tools, agent loops and environments: what they name is loaded, for that is the only way to know that it can be."""

from __future__ import annotations

from pathlib import Path

from verl.config.rules.context import Check
from verl.errors import UserError


def check(c: Check) -> None:
    """Classes, schemas, names of tools; the template of a model that is here; paths of environments."""
    if c.rollout is None or c.model is None:
        return
    turns, environment, key = c.rollout.multi_turn, c.rollout.agent.environment, c.rollout_key
    if environment.name and not environment.path:
        c.refuse(f"{key}.agent.environment.path", f"environment.name={environment.name} needs it")
    if turns.tool_config_path or turns.function_tool_path or turns.interaction_config_path:
        try:
            _tools(c)
        except UserError as error:
            c.refuse(f"{key}.multi_turn", str(error))


def _tools(c: Check) -> None:
    from verl.data.tokenizer import tokenizer_of
    from verl.plugins import import_modules
    from verl.rollout.tool_agent import checked_tools

    model = c.model
    import_modules(model.external_lib)
    checked_tools(c.rollout, None, None)
    if Path(str(model.path)).expanduser().is_dir():
        tokenizer = tokenizer_of(model, c.cfg.select("data.tokenizer"))
        checked_tools(c.rollout, tokenizer, c.cfg.select("data.apply_chat_template_kwargs"))
