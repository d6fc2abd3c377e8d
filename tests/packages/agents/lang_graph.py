import json

from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


def calculate(expression: str) -> str:
    """Works out a product."""
    return "12"


for responses in (False, True):
    agent = create_react_agent(ChatOpenAI(model="policy", use_responses_api=responses), [calculate])
    tokens = []
    for chunk, _ in agent.stream({"messages": [("user", "3*4?")]}, stream_mode="messages"):
        if chunk.type == "AIMessageChunk":
            tokens.append(chunk.text if isinstance(chunk.text, str) else chunk.text())
    assert "".join(tokens).endswith("It is 12.") and len(tokens) > 10, tokens
print(json.dumps({"reward": 1.0}))
