"""Sampling, agent loops, tools and environments: settings without effect, and names that cannot be loaded."""

from __future__ import annotations

from pathlib import Path

from verl.config.layout import sampling_mask_from
from verl.config.report import ACTOR, ROLLOUT, Report
from verl.config.schema.base import Root, select
from verl.data.tokenizer import tokenizer_of
from verl.engine.registry import capabilities
from verl.errors import UserError
from verl.rollout import environment_agent, loops
from verl.rollout.tool_agent import checked_tools

_PROGRAMS = ("command", "verifiers")
_WITHOUT_TOOLS = {"single_turn_agent", "environment_agent"}


def check(config: Root, report: Report) -> None:
    """Check how responses are sampled, and load what tools, environments and agent loops name."""
    if report.rollout is None:
        return
    if report.ppo:
        for rules in (_sampling, _routes, _stop_tokens):
            rules(report)
    elif config.entry == "generation":
        _generation(report)
    if report.model is not None:
        _agents(report)
        _loops(report)


def _sampling(report: Report) -> None:
    rollout = report.rollout
    val = rollout.val_kwargs
    if rollout.temperature <= 0:
        report.refuse(f"{ROLLOUT}.temperature", "training samples; set 1.0 (validation: val_kwargs.temperature)")
    if not rollout.do_sample:
        report.refuse(f"{ROLLOUT}.do_sample", "training samples; set True (validation: val_kwargs.do_sample)")
    if val.do_sample is True and val.temperature == 0:
        both = f"{ROLLOUT}.val_kwargs.do_sample=True, val_kwargs.temperature=0"
        report.refuse(both, "temperature 0 is greedy; set val_kwargs.temperature=1.0, or do_sample=False")
    elif val.n > 1 and (val.do_sample is False or val.temperature == 0):
        report.notice(f"{report.at(f'{ROLLOUT}.val_kwargs.n')} and greedy: all responses to a prompt will be the same")
    source = sampling_mask_from(report.config)
    if source != "sampler" and (rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0):
        consequence = "the trainer's log-probs are of the whole distribution: the ratio compares two supports"
        if source:
            consequence = (
                f"{rollout.name} does not return the tokens that are left: the trainer finds them with its own logits "
                "before the first update"
            )
        limits = f"top_p={rollout.top_p}, top_k={rollout.top_k}, min_p={rollout.min_p}"
        report.notice(f"{ROLLOUT}: {limits} truncate what is sampled; {consequence}")


def _generation(report: Report) -> None:
    rollout = report.rollout
    if rollout.n > 1 and (rollout.temperature == 0 or not rollout.do_sample):
        report.notice(f"{report.at('rollout.n')} and greedy: all responses to a prompt will be the same")
    if rollout.nnodes:
        message = "no pool of its own: trainer.nnodes and trainer.n_gpus_per_node are the sampling devices"
        report.refuse(report.at("rollout.nnodes"), message)


def _routes(report: Report) -> None:
    """Replay of expert routes: a model with experts, and a pass that records them."""
    mode, key = report.config.actor_rollout_ref.actor.router_replay.mode, f"{ACTOR}.router_replay.mode"
    recorded, switch = (
        report.rollout.enable_rollout_routing_replay,
        f"{ROLLOUT}.enable_rollout_routing_replay",
    )
    if mode != "disabled" and report.facts is not None and not report.facts.experts:
        report.refuse(key, f"{report.facts.name} is a dense model, which has no experts to choose; set it to disabled")
    if mode == "R3" and not recorded:
        report.refuse(key, f"it replays the sampler's routes; set {switch}=True")
    elif mode == "R3" and not capabilities(report.rollout.name).routes:
        report.refuse(key, f"{ROLLOUT}.name={report.rollout.name} does not return routes; use native, or R2")
    elif recorded and mode != "R3":
        report.notice(f"no effect: {switch}=True: only {key}=R3 replays the sampler's routes")
    if mode == "R2" and report.config.algorithm.rollout_correction.bypass_mode:
        report.refuse(key, "with rollout_correction.bypass_mode no pass gives old log-probs and routes; use R3")


def _stop_tokens(report: Report) -> None:
    size = report.facts.text.get("vocab_size") if report.facts is not None else None
    for key in (f"{report.rollout_key}.stop_token_ids", f"{report.rollout_key}.val_kwargs.stop_token_ids"):
        token_ids = report.config.select(key) if size and report.was_set(key) else None
        if wrong := [token for token in token_ids or () if token >= size]:
            report.refuse(f"{key}={wrong[0]}", f"the model's vocabulary has {size} tokens")
    own_key, of_data = f"{report.rollout_key}.response_length", "data.max_response_length"
    if report.was_set(own_key) and report.config.select(own_key) != report.config.select(of_data):
        report.notice(f"{report.at(own_key)} differs from {report.at(of_data)}: responses end at the smaller one")


def _agents(report: Report) -> None:
    """What tools and environments name is loaded, for that is the only way to know that it can be."""
    turns, environment, key = report.rollout.multi_turn, report.rollout.agent.environment, report.rollout_key
    if environment.name and not environment.path:
        report.refuse(f"{key}.agent.environment.path", f"environment.name={environment.name} needs it")
    elif environment.path and not environment.name:
        report.refuse(f"{key}.agent.environment.name", f"{report.at(f'{key}.agent.environment.path')} needs it")
    elif environment.name and report.plugins:
        with report.refusing(f"{key}.agent.environment"):
            tokenizer = report.config.select("data.tokenizer") or report.model.tokenizer_path or report.model.path
            environment_agent.check(environment, tokenizer)
    limits = ("multi_turn.max_assistant_turns", "multi_turn.max_user_turns", "agent.max_calls")
    if environment.name in _PROGRAMS and (
        unused := [name for name in limits if select(report.rollout, name) is not None]
    ):
        why = f"environment.name={environment.name} decides itself how many turns it takes"
        report.notice(f"no effect: {key}.{', '.join(unused)}: {why}; agent.trajectory_timeout limits its time")
    files = ("tool_config_path", "function_tool_path", "interaction_config_path")
    if configured := [name for name in files if turns[name]]:
        if {report.rollout.agent.default_agent_loop, *report.agent_names} <= _WITHOUT_TOOLS:
            why = "no row is of tool_agent (multi_turn.enable=True, or agent_name in a row)"
            report.notice(f"no effect: {key}.multi_turn.{', '.join(configured)}: {why}")
        if report.plugins:
            with report.refusing(f"{key}.multi_turn"):
                _tools(report)


def _tools(report: Report) -> None:
    model = report.model
    checked_tools(report.rollout, None, None)
    if Path(str(model.path)).expanduser().is_dir():
        tokenizer = tokenizer_of(model, report.config.select("data.tokenizer"))
        checked_tools(report.rollout, tokenizer, report.config.select("data.apply_chat_template_kwargs"))


def _loops(report: Report) -> None:
    """Plug-in modules import, and register the agent loops that the run and its rows name."""
    if not report.plugins:
        return
    sources = {} if report.rollout is None else dict.fromkeys(report.agent_names, "a row's agent_name")
    key = f"{report.rollout_key}.agent.default_agent_loop"
    if report.rollout is not None and report.was_set(key):
        sources[report.rollout.agent.default_agent_loop] = key
    path = None if report.rollout is None else report.rollout.agent.agent_loop_config_path
    try:
        listed = loops.load_listed(path)
    except UserError as error:
        report.refuse(f"{report.rollout_key}.agent.agent_loop_config_path", str(error))
        return
    for name, where in sources.items():
        try:
            loops.get(name)
        except ValueError as error:
            report.refuse(where if where == key else f"{where} {name!r}", str(error))
    libraries = report.model.external_lib if report.model is not None else None
    modules = [libraries] if isinstance(libraries, str) else libraries or []
    of_user = {*listed, *(name for module in modules for name in loops.of_module(module))}
    if report.rollout is None or not of_user or report.config.select("data.custom_cls.path"):
        return
    if not of_user & {report.rollout.agent.default_agent_loop, *report.agent_names}:
        why = f"no row chooses one; set {key}={min(of_user)}, or give the rows a column agent_name"
        report.notice(f"no effect: the agent loops {', '.join(sorted(of_user))}: {why}")
