import json
import os
import subprocess
import tempfile
from pathlib import Path

bases = {
    "anthropic-messages": os.environ["ANTHROPIC_BASE_URL"],
    "openai-responses": os.environ["OPENAI_BASE_URL"],
    "openai-completions": os.environ["OPENAI_BASE_URL"],
}
for api, url in bases.items():
    with tempfile.TemporaryDirectory() as folder:
        provider = {"baseUrl": url, "api": api, "apiKey": "session", "models": [{"id": "policy"}]}
        Path(folder, "models.json").write_text(json.dumps({"providers": {"session": provider}}))
        own = {**os.environ, "PI_CODING_AGENT_DIR": folder, "PI_OFFLINE": "1"}
        words = ["--provider", "session", "--model", "policy", "-p", "Write 12 into the file answer."]
        subprocess.run([os.environ["VERL_PI"], *words], cwd=folder, env=own, check=True, timeout=120)
        assert Path(folder, "answer").read_text().strip() == "12"
print(json.dumps({"reward": 1.0}))
