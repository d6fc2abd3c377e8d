"""A parser for models that know nothing: every turn is a call of the calculator, with what was written."""

import json

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser


@ToolParser.register("every_turn_calls")
class EveryTurnCalls(ToolParser):
    async def extract_tool_calls(self, responses_ids):
        text = self.tokenizer.decode(responses_ids)
        return text, [FunctionCall(name="calculate", arguments=json.dumps({"expression": f"{len(text)}*2"}))]
