"""A reward function of your own: right answer, and a little for the form.

    verl reward check --data ~/data/gsm8k/train.parquet --reward examples/reward/custom_reward.py
    python3 -m verl.trainer.main_ppo … custom_reward_function.path=examples/reward/custom_reward.py

Called once per response, in a process of its own. Return a number, or a dict with `score`; every other number in the
dict becomes a column of the report. Raise when a response cannot be scored: the response is then left out and counted.
"""

import re

FINAL = re.compile(r"####\s*\$?(-?[0-9][0-9,]*(?:\.[0-9]+)?)")


def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, format_score=0.1):
    """`format_score` for a response that gives exactly one number after `####`, 1 in all if it is the right one.

    `format_score` can be set with custom_reward_function.reward_kwargs.format_score=0.2.
    """
    found = FINAL.findall(solution_str)
    well_formed = len(found) == 1
    right = well_formed and float(found[0].replace(",", "")) == float(ground_truth)
    score = format_score * well_formed + (1.0 - format_score) * right
    return {"score": score, "acc": float(right), "format": float(well_formed)}
