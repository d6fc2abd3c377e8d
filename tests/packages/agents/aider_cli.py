import json
import os
import subprocess
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    words = [
        "--model",
        "openai/policy",
        "--openai-api-base",
        os.environ["OPENAI_BASE_URL"],
        "--openai-api-key",
        "session",
    ]
    quiet = ["--no-git", "--yes-always", "--no-show-model-warnings", "--no-check-update", "--no-analytics"]
    home = {**os.environ, "HOME": folder}
    Path(folder, "answer.txt").write_text("11\n")
    asked = ["--message", "Write 12 into answer.txt.", "answer.txt"]
    subprocess.run([os.environ["VERL_AIDER"], *words, *quiet, *asked], cwd=folder, env=home, check=True)
    assert Path(folder, "answer.txt").read_text() == "12\n"
print(json.dumps({"reward": 1.0}))
