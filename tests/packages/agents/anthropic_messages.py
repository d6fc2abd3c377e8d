import json

import anthropic

client = anthropic.Anthropic()
tools = [{"name": "calculate", "input_schema": {"type": "object", "properties": {}}}]
asked = {"model": "policy", "max_tokens": 200, "tools": tools, "system": "Compute."}
messages = [{"role": "user", "content": "3*4?"}]
with client.messages.stream(messages=messages, **asked) as stream:
    pieces = [event.text for event in stream if event.type == "text"]
    first = stream.get_final_message()
assert [block.type for block in first.content] == ["thinking", "text", "tool_use"] and len(pieces) > 1, first
assert first.stop_reason == "tool_use" and first.content[2].input == {"expression": "3*4"} and first.usage.input_tokens
result = {"type": "tool_result", "tool_use_id": first.content[2].id, "content": "12"}
messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
counted = client.messages.count_tokens(model="policy", messages=messages, tools=tools, system="Compute.")
second = client.messages.create(messages=messages, **asked)
assert second.content[0].text == "It is 12." and second.usage.input_tokens == counted.input_tokens
try:
    client.messages.create(messages=messages, **asked | {"tool_choice": {"type": "tool", "name": "calculate"}})
except anthropic.BadRequestError as error:
    assert "tool_choice" in str(error)
    print(json.dumps({"reward": 1.0}))
