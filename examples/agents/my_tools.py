"""A tool: `rollout.multi_turn.enable=True rollout.multi_turn.function_tool_path=examples/agents/my_tools.py`."""

from verl.tools.function_tool import function_tool


@function_tool
def calculate(expression: str) -> str:
    """Works out a product.

    Args:
        expression: Two whole numbers with * between them.
    """
    a, b = (int(number) for number in expression.split("*"))
    return str(a * b)
