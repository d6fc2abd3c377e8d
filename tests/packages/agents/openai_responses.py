import json

import openai

client = openai.OpenAI()
tools = [{"type": "function", "name": "calculate", "parameters": {"type": "object", "properties": {}}, "strict": False}]
asked = {"model": "policy", "tools": tools, "instructions": "Compute."}
first = client.responses.create(input="3*4?", **asked)
assert [item.type for item in first.output] == ["reasoning", "message", "function_call"], first.output
assert first.output_text.strip() == "I compute."
output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "12"}
with client.responses.stream(input=[output], previous_response_id=first.id, **asked) as stream:
    pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
    second = stream.get_final_response()
assert len(pieces) > 1 and second.output_text == "It is 12.", second
assert client.responses.retrieve(second.id).output_text == "It is 12."
items = [
    {"role": "user", "content": "3*4?"},
    *first.output,
    output,
    *second.output,
    {"role": "user", "content": "Sure?"},
]
third = client.responses.create(input=items, **asked)
assert third.output_text == "Yes." and third.status == "completed" and third.usage.total_tokens
print(json.dumps({"reward": 1.0}))
