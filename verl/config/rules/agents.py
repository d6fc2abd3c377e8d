"""Tools, agent loops and environments: what they name is loaded, for that is the only way to know that it can be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl.config.rules.context import Check
from verl.errors import UserError


def check(c: Check) -> None:
    """Classes, schemas, names of tools; the template of a model that is here; paths of environments."""
    if c.rollout is None or not c.rollout.get("agent"):
        return
    turns, agent, key = c.rollout.multi_turn, c.rollout.agent, c.rollout_key
    if turns.enable and not (
        turns.tool_config_path or turns.function_tool_path or turns.interaction_config_path
    ):
        c.notice(
            f"{key}.multi_turn.enable=True without tool_config_path, function_tool_path or interactions: no tools"
        )
    if agent.environment.name and not agent.environment.path:
        c.refuse(f"{key}.agent.environment.path", f"environment.name={agent.environment.name} needs it")
    if not (turns.tool_config_path or turns.function_tool_path or turns.interaction_config_path):
        return
    try:
        _tools(c, turns)
    except UserError as error:
        c.refuse(f"{key}.multi_turn", str(error))


def _tools(c: Check, turns: Any) -> None:
    from verl.plugins import import_modules
    from verl.rollout.tools.interactions import load_interactions
    from verl.rollout.tools.toolbox import Toolbox

    import_modules(c.model.external_lib if c.model is not None else None)
    load_interactions(turns.interaction_config_path)
    tools = Toolbox.load(turns)
    if not tools.tools or c.model is None or not Path(str(c.model.path)).expanduser().is_dir():
        return
    from verl.data.rows import ChatRenderer
    from verl.data.tokenizer import load_tokenizer
    from verl.rollout.tool_agent import check_template

    tokenizer = load_tokenizer(
        c.model.path,
        tokenizer_path=c.cfg.select("data.tokenizer") or c.model.tokenizer_path,
        trust_remote_code=c.model.trust_remote_code,
        chat_template=c.model.custom_chat_template,
    )
    chat = ChatRenderer(tokenizer, c.cfg.select("data.apply_chat_template_kwargs"))
    if problem := check_template(chat, list(tools.schemas.values()), turns.format):
        c.refuse(f"{c.rollout_key}.multi_turn.format", problem)
