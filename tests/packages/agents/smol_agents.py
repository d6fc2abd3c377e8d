import json
import os

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool


@tool
def calculate(expression: str) -> str:
    """Works out a product.

    Args:
        expression: Like 3*4.
    """
    return "12"


model = OpenAIModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key="session")
assert ToolCallingAgent([calculate], model, max_steps=3).run("3*4?") == "12"
streaming = ToolCallingAgent([calculate], model, max_steps=3, stream_outputs=True)
assert streaming.run("3*4?") == "12"
assert str(CodeAgent([calculate], model, max_steps=3).run("3*4?")) == "12"
print(json.dumps({"reward": 1.0}))
