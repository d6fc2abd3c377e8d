"""Which rewards the score is made of. Read by the check and by the run."""

from typing import Any

FUNCTION, MODEL = "function", "model"
"""Names of rewards in `reward_model.weights`; every other name is a key that the function returns."""


def weights_of(config: Any) -> dict[str, float]:
    """What the score is the weighted sum of; empty: it is what the function returns. A reward model without a function of
    the user's own is the score."""
    own = config.reward_model
    custom = config.custom_reward_function.path or config.reward_manager.source == "importlib"
    alone = own.enable and not custom
    return {name: float(weight) for name, weight in own.weights.items()} or ({MODEL: 1.0} if alone else {})


def scores_by_model(config: Any) -> bool:
    """True if a sequence classifier scores; an enabled model that does not is a judge, which a function asks."""
    return MODEL in weights_of(config)
