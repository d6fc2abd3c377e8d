"""Which rewards the score is made of. Read by the check and by the run."""

from verl.config.schema.entries import Config

FUNCTION, MODEL = "function", "model"
"""Names of rewards in `reward_model.weights`; every other name is a key that the function returns."""
SCORES = ("reward", "score", "seq_reward", "seq_final_reward")
"""Values of `algorithm.filter_groups.metric` that are the score itself."""


def weights_of(config: Config) -> dict[str, float]:
    """The weights of the rewards that add up to the score; empty: the score is what the function returns.

    A reward model without a function of the user's own is the score.
    """
    reward_model = config.reward_model
    alone = reward_model.enable and not _own_function(config)
    return {name: float(weight) for name, weight in reward_model.weights.items()} or ({MODEL: 1.0} if alone else {})


def scores_by_model(config: Config) -> bool:
    """True if a sequence classifier scores; an enabled model that does not is a judge, which a function asks."""
    reward_model = config.reward_model
    if reward_model.weights:
        return MODEL in reward_model.weights
    return bool(reward_model.enable and not _own_function(config))


def built_in_scores(config: Config) -> bool:
    """True if a built-in function is asked: there is none of the user's own, and no model alone is the score."""
    alone = scores_by_model(config) and not config.reward_model.weights.keys() - {MODEL}
    return not (_own_function(config) or alone)


def user_scores(config: Config) -> bool:
    """True if a function of the user's or weights say what the score is; else an environment's own rewards are it."""
    return _own_function(config) or bool(weights_of(config))


def _own_function(config: Config) -> bool:
    return bool(config.custom_reward_function.path) or config.reward_manager.source == "importlib"
