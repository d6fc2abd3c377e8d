import json

import openai

client = openai.OpenAI()
model = client.models.retrieve(client.models.list().data[0].id).id
tools = [{"type": "function", "function": {"name": "calculate", "parameters": {"type": "object", "properties": {}}}}]
messages = [{"role": "user", "content": "3*4?"}]
with client.chat.completions.stream(model=model, messages=messages, tools=tools) as stream:
    pieces = [event.delta for event in stream if event.type == "content.delta"]
    message = stream.get_final_completion().choices[0].message
assert len(pieces) > 1 and "".join(pieces) == message.content == "I compute.", pieces
(call,) = message.tool_calls
assert json.loads(call.function.arguments) == {"expression": "3*4"}
messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "12"}]
several = client.chat.completions.create(model=model, messages=messages, n=2, logprobs=True).choices
assert [choice.message.content for choice in several] == ["It is 12.", "12."]
messages += [several[1].message, {"role": "user", "content": "Sure?"}]
parts = list(client.chat.completions.create(model=model, messages=messages, stream=True, n=2))
texts = ["".join(c.delta.content or "" for part in parts for c in part.choices if c.index == i) for i in range(2)]
assert texts == ["Yes.", "Sure."], texts
print(json.dumps({"reward": 1.0}))
