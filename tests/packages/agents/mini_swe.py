import json
import os
import tempfile
from pathlib import Path

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models import get_model

model = get_model(
    config={
        "model_name": "openai/policy",
        "model_kwargs": {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": "session"},
        "cost_tracking": "ignore_errors",
    }
)
with tempfile.TemporaryDirectory() as folder:
    agent = DefaultAgent(
        model, LocalEnvironment(cwd=folder), system_template="Use bash.", instance_template="{{task}}", step_limit=4
    )
    result = agent.run("Write 12 into the file answer.")
    assert Path(folder, "answer").read_text().strip() == "12", result
print(json.dumps({"reward": 1.0}))
