"""A parser for models that know nothing: every turn is a call of the calculator, with what was written."""

from verl.rollout.tools.parsers import PARSERS, ToolCall

ORIGINAL = PARSERS["minimax"]


def every_turn_calls(text, types):
    return text, [ToolCall("calculate", {"expression": f"{len(text)}*2"})]


PARSERS["minimax"] = every_turn_calls
