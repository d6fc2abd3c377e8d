"""The game of guess_env.py as an agent program that knows nothing of training: it asks a model over Chat Completions.

agent.environment.name=command agent.environment.path='python3 examples/agents/guess_program.py'
"""

import json
import os
import urllib.request

TURNS = 4


def ask(messages: list[dict[str, str]]) -> str:
    """What the model says next."""
    data = json.dumps({"model": "any", "messages": messages}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", data, headers)
    with urllib.request.urlopen(request) as answer:
        return str(json.loads(answer.read())["choices"][0]["message"]["content"])


def main() -> None:
    """Play, and print what the game earned."""
    with open(os.environ["VERL_ROW_FILE"]) as file:
        row = json.load(file)
    messages, number, won = row["messages"], int(row["extra_info"]["number"]), False
    for _ in range(TURNS):
        guess = ask(messages).strip()
        if not guess.isdecimal() or (won := int(guess) == number):
            break
        hint = "higher" if int(guess) < number else "lower"
        messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": hint}]
    print(json.dumps({"reward": float(won)}))


if __name__ == "__main__":
    main()
