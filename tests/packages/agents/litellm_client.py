import json
import os

import litellm

messages = [{"role": "user", "content": "3*4?"}]
tools = [{"type": "function", "function": {"name": "calculate", "parameters": {"type": "object", "properties": {}}}}]
bases = {"openai": os.environ["OPENAI_BASE_URL"], "anthropic": os.environ["ANTHROPIC_BASE_URL"]}
for kind in ("openai", "anthropic"):
    how = {"model": f"{kind}/policy", "api_base": bases[kind], "api_key": "session", "tools": tools}
    chunks = list(litellm.completion(messages=messages, stream=True, **how))
    message = litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message
    assert len(chunks) > 3 and message.content.strip() == "I compute.", message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"expression": "3*4"}
    following = [*messages, message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "12"}]
    assert litellm.completion(messages=following, **how).choices[0].message.content == "It is 12."
print(json.dumps({"reward": 1.0}))
