import asyncio
import json

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def calculate(expression: str) -> str:
    """Works out a product."""
    return "12"


async def main() -> None:
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model="policy", openai_client=AsyncOpenAI())
        agent = Agent(name="Clerk", instructions="Compute.", model=model, tools=[calculate])
        assert (await Runner.run(agent, "3*4?")).final_output == "It is 12."
        streamed = Runner.run_streamed(agent, "And 3*4?")
        deltas = [
            event.data.delta
            async for event in streamed.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        assert streamed.final_output == "It is 12." and len(deltas) > 5, deltas


asyncio.run(main())
print(json.dumps({"reward": 1.0}))
