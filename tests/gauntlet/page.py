"""Writes docs/gauntlet.md from `FAULTS`: `python -m tests.gauntlet.page`."""

from __future__ import annotations

from pathlib import Path

from tests.gauntlet.faults import FAULTS, Fault

PAGE = Path(__file__).parents[2] / "docs" / "gauntlet.md"
HEAD = """# Silent errors, and what finds them

Systems of this kind have had errors that raise nothing: the run trains, on something else. The table lists such errors
as they were reported in public threads of other systems. `tests/gauntlet` injects each into this system by a patch of a
line or two and starts a normal run of a tiny model on a CPU; the run must name the cause within two steps. A normal run
has, by itself:

- the **verification of the first push**: a sample of every tensor (up to 16,384 elements) is compared after the first
  transfer to the sampler, of packed copies two columns each ([weight-sync.md](weight-sync.md));
- the **first batch compared**: log-probs of sampler and trainer must agree within the rounding of their precisions;
- the **probe at each push**: the sampler's log-probs of a few tokens must move as the trainer's do
  ([weight-sync.md](weight-sync.md));
- the **known adapter before the first step**: an adapter begins with B = 0, so that it agrees even where it is not
  applied; one with another B is pushed, compared and taken back;
- **images blanked at the first step**: the log-probs of a response must depend on the images before it
  ([vision.md](vision.md));
- the **check of each step** (`verl/trainer/step_checks.py`): identities between numbers that the step has computed
  anyway. A difference is an event `check_mask`, `check_end`, `check_turns`, `check_data`, `check_reward`,
  `check_scores`, `check_baseline`, `check_pairing`, `check_loss`, `check_gradient`, `check_ratio`, `check_reference` or
  `check_update`, shown as a notice the first time; the run goes on;
- the **checks of a resume**: the row that comes next, the log-probs of a short response and the norm of each
  optimizer's state must be those of the checkpoint, else the events `check_data` and `check_resume`.

Three of these identities need a word. *End tokens*: a response must not go on after a token that the model's files or
its tokenizer name as an end, or that its chat template writes after a turn. *Scores*: the scoring process returns a
checksum of the text that it was given and whether the call failed, and the response keeps both beside its score. *The
gradient*: with s a factor of all logits z, d log p(y) / ds = z_y − Σ p·z = log p(y) + entropy, and the logits are
linear in the last normalisation's weights w (with the head's bias). So Σ w·∂L/∂w, after all micro-batches and ranks, is
Σ (log p + entropy)·∂L/∂log p over the tokens of the first mini-batch, where the ratio is 1 and ∂L/∂log p is −A over the
loss's divisor. It is checked for the vanilla loss (with a KL loss of k3) and for the critic. For the library's other
losses, importance weights and KL terms ∂L/∂log p comes from the loss's own function, over the first mini-batch as a
single micro-batch on the driver, as does the loss that is compared; so a mask that is wrong within such a function is
not found by it. Beside an adapter the last normalisation is not trained and gets its gradient all the same (FSDP). With
Megatron it is the gradient that the optimizer takes, of whatever layout; not beside its adapters. Not checked: the
gradient with an entropy bonus, and anything with distillation, demonstrations, bypass mode, tokens that a truncated
distribution left out, or a policy loss of your own (`verl prove` compares its norms and losses with rows cut
otherwise).

"Steps" counts until the error is named; 0 is before the first step. "`verl prove`" names the check of
[prove.md](prove.md) that finds the error before a run; it is injected there, too. An empty cell under "named by" would
mean that no check notices the error; there is no such row. "(ours)": no thread was found. Everything was run in one
process on a CPU with the embedded sampler; errors of asynchronous runs, of several ranks and of other samplers are not
in the list.

"""


def row(fault: Fault) -> str:
    """A line of the table."""
    caught, steps = (fault.by, str(fault.steps)) if fault.caught else ("**not caught**", "")
    return f"| {fault.title} | {fault.source or '(ours)'} | {caught} | {steps} | {fault.prove} |"


def text() -> str:
    """The page."""
    table = ["| error | reported | named by | steps | `verl prove` |", "|---|---|---|---|---|", *map(row, FAULTS)]
    return HEAD + "\n".join(table) + "\n"


if __name__ == "__main__":
    PAGE.write_text(text())
