"""What scores responses: the function and its arguments, the reward model, the weights of several rewards."""

from __future__ import annotations

import ast

from verl.config.layout import own_pools
from verl.config.matching import nearest
from verl.config.report import Report, beyond
from verl.config.reward_weights import scores_by_model
from verl.config.schema.base import Root
from verl.data.check import user_code
from verl.reward.rules import check_kwargs
from verl.reward.user_function import MANY, OF_JUDGES, ONE, misplaced

_KEY = "reward_model"
_JUDGE = "custom_reward_function.path=pkg://verl.reward.judge"


def check(config: Root, report: Report) -> None:
    """Check `custom_reward_function.*`, `reward_manager.*` and `reward_model.*`."""
    if "custom_reward_function.path" in report.keys:
        _user_code(report)
    if report.ppo:
        _reward_model(report)
        _manager_arguments(report)
    if config.entry in ("ppo", "eval"):
        _overlong(report)


def _user_code(report: Report) -> None:
    key = "custom_reward_function.name"
    if (function := user_code(report, "custom_reward_function.path", key)) is not None:
        _takes(report, key, function)
    path = report.config.select("reward_manager.module.path")
    if report.config.select("reward_manager.source") == "importlib":
        if path:
            user_code(report, "reward_manager.module.path", "reward_manager.name")
        else:
            name = report.config.select("reward_manager.name")
            report.refuse("reward_manager.source", f"needs reward_manager.module.path=FILE.py with the class {name}")
    elif path:
        report.refuse("reward_manager.module.path", "nothing is loaded without reward_manager.source=importlib")


def _takes(report: Report, key: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    """A reward function takes what the manager calls it with."""

    manager, parameters = report.config.select("reward_model.reward_manager"), function.args
    positional = [*parameters.posonlyargs, *parameters.args]
    by_position = manager == "prime" or (not report.ppo and manager != "batch")  # main_eval
    enough = bool(parameters.vararg) or len(positional) >= 3
    if by_position and enough and not misplaced([argument.arg for argument in positional]):
        return
    called = MANY if manager == "batch" else ONE
    names = [argument.arg for argument in (*positional, *parameters.kwonlyargs)]
    missing = [] if parameters.kwarg else [name for name in called if name not in names]
    supplied = {*called, *(report.config.select("custom_reward_function.reward_kwargs") or ())}
    unset = {*names[: len(positional) - len(parameters.defaults)]} - supplied - {*OF_JUDGES}
    if missing or unset:
        message = f"is called with {', '.join(called)}; it takes {', '.join(names) or 'nothing'}"
        advice = "add {} or **kwargs" if missing else "give {} a default"
        report.refuse(key, f"{message}; {advice.format(', '.join(missing or sorted(unset)))}")


def _reward_model(report: Report) -> None:
    """The reward model, the weights of several rewards, and where a judge can be served."""
    reward_model, weights, path = (
        report.config.reward_model,
        report.config.reward_model.weights,
        f"{_KEY}.model.path",
    )
    if wrong := [n for n, w in weights.items() if isinstance(w, bool) or not isinstance(w, (int, float))]:
        report.refuse(f"{_KEY}.weights", f"{', '.join(wrong)}: a weight is a number, {{function: 1, model: 0.5}}")
        return
    for at, number in beyond(weights, 10**9, f"{_KEY}.weights"):
        report.refuse(f"{at}={number}", "out of range; a weight is within ±10^9")
    if "model" in weights and not reward_model.enable:
        report.refuse(f"{_KEY}.weights", f"model needs {_KEY}.enable=True and {path}")
    if not reward_model.enable:
        return
    if not reward_model.model.path:
        report.refuse(path, f"{_KEY}.enable=True needs it")
        return
    classifier, scores, problem = _classifier(report), scores_by_model(report.config), ""
    if scores and classifier is False:
        problem = f"is no sequence classifier with one label; to ask it as a judge set {_JUDGE}"
    elif not scores and classifier:
        problem = f"a sequence classifier beside a function: set {_KEY}.weights={{function: 1, model: 1}}"
    elif not (scores or report.config.custom_reward_function.path):
        problem = f"nothing asks this model; to ask it as a judge set {_JUDGE}"
    elif not scores and "judge" not in own_pools(report.config) and report.several:
        problem = (
            f"beside several devices a judge has a pool of its own: set {_KEY}.enable_resource_pool=True, "
            f"{_KEY}.nnodes and {_KEY}.n_gpus_per_node; or start a server and set reward_kwargs.reward_router_address"
        )
    if problem:
        report.refuse(path, problem)


def _classifier(report: Report) -> bool | None:
    """Whether the reward model is a sequence classifier; None where that cannot be seen here."""
    key, path = f"{_KEY}.model.path", report.config.reward_model.model.path
    facts = report.look(key, path)
    if facts is None:
        return None
    config = facts.config
    is_classifier = any("ForSequenceClassification" in str(name) for name in config.get("architectures") or ())
    return is_classifier and len(config.get("id2label") or (0, 1)) == 1


def _overlong(report: Report) -> None:
    kwargs = report.config.reward_model.reward_kwargs
    limit = report.config.data.max_response_length if report.ppo else kwargs.max_resp_len
    buffer, key = kwargs.overlong_buffer_cfg, "reward_model.reward_kwargs"
    if not buffer.enable:
        return
    if kwargs.max_resp_len is None:
        report.refuse(f"{key}.max_resp_len", "the penalty needs it: data.max_response_length of the run")
        return
    most = report.at(f"{key}.max_resp_len")
    if not 0 < buffer.len <= kwargs.max_resp_len:
        report.refuse(f"{key}.overlong_buffer_cfg.len", f"must be above 0 and at most {most}")
    if kwargs.max_resp_len != limit:
        report.notice(f"{most} is not data.max_response_length={limit}")


def _manager_arguments(report: Report) -> None:
    """Arguments of the reward manager are open: a name close to a built-in one is taken for a mistake.

    Another name reaches only a manager class of the user's own.
    """
    arguments = report.config.reward_model.reward_kwargs
    accepted = [name for name in type(arguments).__dataclass_fields__ if not name.startswith("_")]
    for name in arguments:
        if name not in accepted and (near := nearest(name, accepted, cutoff=0.8)):
            report.refuse(f"reward_model.reward_kwargs.{name}", f"no such argument{near}")
        elif name not in accepted and report.config.reward_manager.source != "importlib":
            why = "no manager of ours takes it; those of a function are custom_reward_function.reward_kwargs"
            report.notice(f"no effect: reward_model.reward_kwargs.{name}: {why}")
    if not report.config.custom_reward_function.path:
        with report.refusing("custom_reward_function.reward_kwargs"):
            check_kwargs(report.config.custom_reward_function.reward_kwargs)
