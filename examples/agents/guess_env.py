"""A game of several turns as an environment:
`agent.environment.name=custom agent.environment.path=examples/agents/guess_env.py:Guess`."""

from verl.rollout.environments import Observation, StepResult


class Guess:
    """Find the number in the row's `extra_info.number`; every wrong guess is answered with higher or lower."""

    def reset(self, row):
        """Begin with the row's own prompt."""
        self.number = int(row["extra_info"]["number"])
        return Observation()

    def step(self, message):
        """Answer a guess. The reward is 1 for the number, and nothing for what is none."""
        text = message["content"].strip()
        if not text.isdecimal():
            return StepResult(done=True, metrics={"found": 0})
        guess = int(text)
        if guess == self.number:
            return StepResult(reward=1.0, done=True, metrics={"found": 1})
        said = "higher" if guess < self.number else "lower"
        return StepResult([{"role": "user", "content": said}], metrics={"found": 0})

    def close(self):
        """There is nothing to give up."""
