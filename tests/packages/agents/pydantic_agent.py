import asyncio
import json

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel


def calculate(expression: str) -> str:
    """Works out a product."""
    return "12"


async def main() -> None:
    for model in (OpenAIChatModel("policy"), OpenAIResponsesModel("policy"), AnthropicModel("policy")):
        agent = Agent(model, tools=[calculate], system_prompt="Compute.")
        assert (await agent.run("3*4?")).output == "It is 12."
    async with Agent(OpenAIChatModel("policy"), tools=[calculate]).run_stream("3*4?") as streamed:
        pieces = [piece async for piece in streamed.stream_text(delta=True, debounce_by=None)]
    assert "".join(pieces) == "It is 12." and len(pieces) > 1, pieces


asyncio.run(main())
print(json.dumps({"reward": 1.0}))
