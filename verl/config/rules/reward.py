"""The reward model, and how several rewards add up."""

from __future__ import annotations

from verl.config.layout import own_pools
from verl.config.rules.context import Check
from verl.config.weights import scores_by_model

_KEY = "reward_model"
_JUDGE = "custom_reward_function.path=pkg://verl.reward.judge"


def check(c: Check) -> None:
    """Rule 17, the weights of several rewards, and where a judge can be served."""
    if not c.ppo:
        return
    own, weights, path = c.cfg.reward_model, c.cfg.reward_model.weights, f"{_KEY}.model.path"
    if wrong := [n for n, w in weights.items() if isinstance(w, bool) or not isinstance(w, (int, float))]:
        c.refuse(f"{_KEY}.weights", f"{', '.join(wrong)}: a weight is a number, {{function: 1, model: 0.5}}")
        return
    if "model" in weights and not own.enable:
        c.refuse(f"{_KEY}.weights", f"model needs {_KEY}.enable=True and {path}")
    if not own.enable:
        return
    if not own.model.path:
        c.refuse(path, f"{_KEY}.enable=True needs it")
        return
    classifier, scores, problem = _classifier(c), scores_by_model(c.cfg), ""
    if scores and classifier is False:
        problem = f"is no sequence classifier with one label; to ask it as a judge set {_JUDGE}"
    elif not scores and classifier:
        problem = f"a sequence classifier beside a function: set {_KEY}.weights={{function: 1, model: 1}}"
    elif not (scores or c.cfg.custom_reward_function.path):
        problem = f"nothing asks this model; to ask it as a judge set {_JUDGE}"
    elif not scores and "judge" not in own_pools(c.cfg) and c.several:
        problem = (
            f"beside several devices a judge has a pool of its own: set {_KEY}.enable_resource_pool=True, {_KEY}.nnodes and "
            f"{_KEY}.n_gpus_per_node; or start a server and set reward_kwargs.reward_router_address"
        )
    if problem:
        c.refuse(path, problem)


def _classifier(c: Check) -> bool | None:
    """Whether the reward model is a sequence classifier; None where that cannot be seen here."""
    key, path = f"{_KEY}.model.path", c.cfg.reward_model.model.path
    facts = c.look(key, path)
    if facts is None:
        return None
    config = facts.config
    named = any("ForSequenceClassification" in str(name) for name in config.get("architectures") or ())
    return named and len(config.get("id2label") or (0, 1)) == 1
