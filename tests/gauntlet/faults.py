"""Silent errors that such systems have had, each as a patch of a line or two into this one.

`FAULTS` is the one list: tests/gauntlet/test_gauntlet.py injects each and demands that a normal run names it, and
docs/gauntlet.md is its table (`python -m tests.gauntlet.page` writes it).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from verl.engine.rollout.native import engine as sampler
from verl.engine.rollout.native import runner, scheduler
from verl.engine.training.fsdp import engine as trainer
from verl.engine.training.fsdp.engine import FSDPEngine
from verl.models.attention import TokenSpan
from verl.platform.cpu import CpuPlatform

ROLLOUT, ACTOR = "actor_rollout_ref.rollout.", "actor_rollout_ref.actor."
AWAKE = f"{ROLLOUT}free_cache_engine=False"
"""Sleep drops what is stale."""
LORA = "actor_rollout_ref.model.lora_rank=4"
KL = f"{ACTOR}use_kl_loss=True"
ONE = f"{ACTOR}ppo_micro_batch_size_per_gpu=1"
REJECTS = tuple(
    f"algorithm.rollout_correction.{word}" for word in ("rollout_rs=seq_mean_k2", "rollout_rs_threshold=1e-14")
)
COOL = f"{ROLLOUT}temperature=0.6"
Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Fault:
    """title: what is wrong, as the page says it. source: where such an error was reported. patch: injects it. caught: a
    pattern of what a normal run says, "" where nothing catches it yet; by: what says so; steps: after how many.
    prove: the check of `verl prove` that finds it, "" for none. kind: of run (`test_gauntlet.KINDS`); words: overrides;
    runs: lives of the run; quick: in `make test`.
    """

    title: str
    source: str
    patch: Patch
    by: str = ""
    caught: str = ""
    steps: int = 1
    prove: str = ""
    kind: str = "text"
    words: tuple[str, ...] = ()
    runs: int = 1
    quick: bool = False


FAULTS: list[Fault] = []
PROBE, FIRST_PUSH, FIRST_BATCH = "probe at each push", "verification of the first push", "first batch compared"
CHECKS = "check of each step"


def fault(title: str, source: str, **about: Any) -> Callable[[Patch], Patch]:
    """Add the decorated patch to `FAULTS`."""

    def add(patch: Patch) -> Patch:
        FAULTS.append(Fault(title, source, patch, **about))
        return patch

    return add


def wrap(m: pytest.MonkeyPatch, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace owner.name by around(original, *arguments)."""
    original = getattr(owner, name)
    m.setattr(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))


# -- weights on the way to the sampler -------------------------------------------------------------------------------

follows = {"by": PROBE, "caught": "the trainer's log-probs of .* tokens have moved, and the sampler's by"}

unbound = {"by": "known adapter before the first step", "steps": 0, "caught": "a known adapter moves the trainer's"}


@fault("no push after the first reaches the sampler", "verl #7495", words=(AWAKE,), prove="weights", **follows)
def never_sent(m: pytest.MonkeyPatch) -> None:
    from verl.weight_sync.sender import InProcessSync, SyncResult

    wrap(m, InProcessSync, "_push", lambda push, *a: push(*a) if a[2] else SyncResult(0, 0.0))


@fault("copies of weights are packed once and never again", "SkyRL #1680, vLLM #42821", words=(AWAKE,),
       prove="weights", quick=True, **follows)  # fmt: skip
def packed_once(m: pytest.MonkeyPatch) -> None:
    m.setattr(runner.FastLinears, "invalidate", lambda self: None)


@fault("the adapter is sent and bound to nothing", "verl-omni #552, verl #3516", words=(LORA,), prove="adapter",
       **unbound)  # fmt: skip
def adapter_unbound(m: pytest.MonkeyPatch) -> None:
    m.setattr(runner, "merged_weight", lambda layer: layer.base_layer.weight.detach())


@fault("the adapter is bound with a wrong scale", "verl #7453", words=(LORA,), prove="adapter", **unbound)
def adapter_scaled(m: pytest.MonkeyPatch) -> None:
    def half(merged: Any, layer: Any) -> torch.Tensor:
        return 0.5 * (merged(layer) + layer.base_layer.weight.detach())

    wrap(m, runner, "merged_weight", half)


@fault("keys and values of earlier weights stay cached over a push", "NeMo-RL #4018, lmdeploy #4917", words=(AWAKE,),
       prove="weights", **follows)  # fmt: skip
def cache_kept(m: pytest.MonkeyPatch) -> None:
    m.setattr(scheduler.Scheduler, "forget_cache", lambda self: None)


@fault("weights revert after sleep and wake", "TRL #5312", prove="weights", **follows)
def reverts(m: pytest.MonkeyPatch) -> None:
    def wake(original: Any, self: Any) -> None:
        original(self)
        self._runner.linears._stale = not self._runner.linears._forwards

    m.setattr(runner.FastLinears, "release", lambda self: None)
    wrap(m, sampler.NativeEngine, "wake", wake)


@fault("half of the layers get no new weights", "OpenRLHF #1349", words=(AWAKE,), prove="weights", **follows)
def half_pushed(m: pytest.MonkeyPatch) -> None:
    def refresh(original: Any, self: Any) -> None:
        if self._forwards:
            self._siblings = self._siblings[::2]
        original(self)

    wrap(m, runner.FastLinears, "refresh", refresh)


@fault("the rows of a weight arrive in another order", "verl #7453", by=FIRST_PUSH, steps=0,
       caught="the sampler's copy of .* is not its weight", prove="weights", quick=True)  # fmt: skip
def rows_reordered(m: pytest.MonkeyPatch) -> None:
    wrap(m, CpuPlatform, "pack_weight", lambda pack, self, weight: pack(self, weight.flip(0)))


# -- sampler and trainer compute the same tokens differently -----------------------------------------------------------

differs = {"by": FIRST_BATCH, "caught": "sampler and trainer do not compute the same model", "prove": "log-probs"}


@fault("the sampler's log-probs are those before temperature", "verl #4162, prime-rl #697", words=(COOL,),
       quick=True, **differs)  # fmt: skip
def before_temperature(m: pytest.MonkeyPatch) -> None:
    def sample(original: Any, logits: torch.Tensor, rows: Any, **more: Any) -> tuple[Any, ...]:
        plain = logits.log_softmax(-1)
        tokens, _, sets = original(logits, rows, **more)
        return tokens, plain.gather(1, tokens[:, None])[:, 0], sets

    wrap(m, sampler, "sample", sample)


@fault("the trainer's log-probs leave temperature out", "OpenRLHF #853, compose-rl #105", words=(COOL,), **differs)
def without_temperature(m: pytest.MonkeyPatch) -> None:
    wrap(m, FSDPEngine, "_outputs", lambda outputs, self, batch, names, temperature: outputs(self, batch, names, 1.0))


@fault("a response gets the log-probs of another one", "", **differs)
def log_probs_of_another(m: pytest.MonkeyPatch) -> None:
    def sample(original: Any, *args: Any, **more: Any) -> tuple[Any, ...]:
        tokens, log_probs, sets = original(*args, **more)
        return tokens, log_probs.roll(1), sets

    wrap(m, sampler, "sample", sample)


@fault("positions of decoded tokens are one too far", "TRL #6800", **differs)
def positions_shifted(m: pytest.MonkeyPatch) -> None:
    def forward(original: Any, self: Any, ids: Any, positions: Any, plan: Any, keep: Any, media: Any = None) -> Any:
        return original(self, ids, positions + isinstance(keep, int), plan, keep, media)

    wrap(m, runner.Runner, "_forward", forward)


def packed(m: pytest.MonkeyPatch, change: Callable[[Any], None]) -> None:
    """Change each pack of the trainer."""

    def pack(original: Any, *args: Any, **more: Any) -> Any:
        result = original(*args, **more)
        change(result)
        return result

    wrap(m, trainer, "pack", pack)


@fault("positions of packed sequences go on instead of beginning anew", "LLaMA-Factory #10283", **differs)
def positions_go_on(m: pytest.MonkeyPatch) -> None:
    packed(m, lambda pack: setattr(pack, "positions", torch.arange(len(pack.positions))))


@fault("packed sequences see each other", "SkyRL #2056, axolotl #3817", **differs)
def attention_leaks(m: pytest.MonkeyPatch) -> None:
    packed(m, lambda pack: setattr(pack, "segments", [TokenSpan(0, len(pack.input_ids))]))


@fault("responses do not see the prompt that they share", "", **differs)
def prompt_unseen(m: pytest.MonkeyPatch) -> None:
    packed(m, lambda pack: setattr(pack, "segments", [TokenSpan(s.start, s.end) for s in pack.segments]))


@fault("the sampler computes in a lower precision than the run says", "TRL #6688", **differs)
def lower_precision(m: pytest.MonkeyPatch) -> None:
    wrap(m, runner.FastLinears, "_weight", lambda weight, self, module: weight(self, module).bfloat16().float())


@fault("the trainer scores a token by the hidden state of the one before", "unsloth #6738", **differs)
def shifted_by_one(m: pytest.MonkeyPatch) -> None:
    packed(m, lambda pack: setattr(pack, "source", (pack.source - 1).clamp(min=0)))


# -- images ------------------------------------------------------------------------------------------------------------


@fault("neither side sees the images", "", kind="images",
       by="images blanked at the first step", caught="the same with its images blanked", prove="images")  # fmt: skip
def images_unseen(m: pytest.MonkeyPatch) -> None:
    from verl.models.inputs import VisionInputs

    def nothing(original: Any, *args: Any) -> Any:
        return {name: v * 0 if v.is_floating_point() else v for name, v in original(*args).items()}

    m.setattr(VisionInputs, "tensors", staticmethod(lambda *a, f=VisionInputs.tensors: nothing(f, *a)))


@fault("the trainer gives image tokens the positions of text", "LLaMA-Factory #10283, Miles #1272", kind="images",
       **differs)  # fmt: skip
def image_positions(m: pytest.MonkeyPatch) -> None:
    from verl.engine.training import packing
    from verl.models.inputs import text_axes

    m.setattr(packing, "_axes", lambda row, first, count, vision: text_axes(first, count))


@fault("placeholders of images are sampled", "verl #7038", kind="images", **differs)  # fmt: skip
def placeholders_sampled(m: pytest.MonkeyPatch) -> None:
    m.setattr(sampler, "special_token_ids", lambda config: [])


# -- masks and turns ---------------------------------------------------------------------------------------------------


def masks(m: pytest.MonkeyPatch, change: Callable[[np.ndarray], None]) -> None:
    """Change the mask of each response."""
    from verl.rollout.record import SegmentRecord

    def response(original: Any, self: Any) -> Any:
        ids, mask, log_probs = original(self)
        change(mask)
        return ids, mask, log_probs

    wrap(m, SegmentRecord, "response", response)


@fault("tokens of tools are trained on as the policy's", "TRL #4974, slime #1418", kind="tools", **differs)
def tools_trained(m: pytest.MonkeyPatch) -> None:
    masks(m, lambda mask: mask.fill(True))


@fault("the end token is left out of the loss where it is the padding token", "TRL #6357, #3091", by=CHECKS,
       caught="tokens that the sampler drew and the mask leaves out", quick=True, prove="step")  # fmt: skip
def end_masked(m: pytest.MonkeyPatch) -> None:
    masks(m, lambda mask: mask[-1:].fill(False))


@fault("the sampler does not know the model's end token", "torchtune #949, TRL #1623", by=CHECKS,
       caught="goes on after token .*, with which the model ends a turn", prove="step", quick=True)  # fmt: skip
def never_ends(m: pytest.MonkeyPatch) -> None:
    wrap(m, scheduler.Stopper, "reason", lambda reason, self, request: reason(self, request).replace("stop", ""))


@fault("the separator between turns is dropped", "verl #6921, #3720", kind="tools", by=CHECKS,
       caught="follows the end of a turn, where the chat template writes", prove="step")  # fmt: skip
def separator_dropped(m: pytest.MonkeyPatch) -> None:
    from verl.rollout.turn_boundaries import Boundaries

    def joined(after: Any, self: Any, *more: Any) -> str:
        return str(after(self, *more)).replace("<|im_end|>\n", "<|im_end|>").lstrip("\n")

    wrap(m, Boundaries, "_after", joined)


# -- routes of experts -------------------------------------------------------------------------------------------------


@fault("replayed routes are shifted by one token", "SkyRL #1908", kind="experts", **differs)
def routes_shifted(m: pytest.MonkeyPatch) -> None:
    from verl.engine.training import packing

    wrap(m, packing, "_routes", lambda routes, runs: [np.roll(part, 1, 0) for part in routes(runs)])


@fault("replayed routes of a layer are another layer's", "Miles #2570", kind="experts", **differs)
def routes_of_another_layer(m: pytest.MonkeyPatch) -> None:
    from verl.engine.training import packing

    wrap(m, packing, "_routes", lambda routes, runs: [part[:, ::-1].copy() for part in routes(runs)])


# -- rewards and advantages --------------------------------------------------------------------------------------------


@fault("the baseline is the mean of the batch, not of the group", "Search-R1 #65", by=CHECKS,
       caught="their baseline is not the mean of their group", quick=True, prove="step")  # fmt: skip
def batch_baseline(m: pytest.MonkeyPatch) -> None:
    from verl.algorithms.advantage import GroupStatistics

    of = GroupStatistics.of
    m.setattr(GroupStatistics, "of", lambda scores, index: of(scores, [0] * len(scores)))


@fault("rejected responses shift the baseline of the accepted ones", "verl #6375, NeMo-RL #4160",
       by="event rejected_in_baseline", caught="their scores still count in the mean", words=REJECTS)  # fmt: skip
def rejected_count(m: pytest.MonkeyPatch) -> None:
    """As the public verl does it: a setting here, and on."""


@fault("advantages are paired with other responses", "verl #7956, slime #36", by=CHECKS,
       caught="not in the order of its scores", prove="step")  # fmt: skip
def wrong_pairs(m: pytest.MonkeyPatch) -> None:
    from verl.algorithms import batch_advantages

    def estimate(original: Any, rows: Any, *more: Any) -> None:
        original(rows, *more)
        for group in rows.groups():
            values = [t.advantages[t.response_mask][0] for t in group]
            for t, value in zip(group, values[1:] + values[:1], strict=True):
                t.advantages = np.where(t.response_mask, value, 0).astype(np.float32)

    wrap(m, batch_advantages, "_estimate", estimate)


@fault("advantages have the wrong sign", "", by=CHECKS,
       caught="or have the wrong sign", prove="step")  # fmt: skip
def wrong_sign(m: pytest.MonkeyPatch) -> None:
    from verl.algorithms import batch_advantages

    def estimate(original: Any, rows: Any, *more: Any) -> None:
        original(rows, *more)
        for t in rows:
            t.advantages = -t.advantages

    wrap(m, batch_advantages, "_estimate", estimate)


@fault("all responses of a group are drawn with the same random numbers", "", by="event no_signal",
       caught="every advantage is 0", prove="scores")  # fmt: skip
def same_seed(m: pytest.MonkeyPatch) -> None:
    from verl.rollout import attempt

    wrap(m, attempt, "response_seed", lambda seed, run, uid, index: seed(run, uid, 0))


@fault("a reward function that fails gives 0", "NeMo-RL #431, open-r1 #134, OpenEnv #1025", prove="failing reward",
       kind="failing", by=CHECKS, caught="have a score, and their reward failed", quick=True)  # fmt: skip
def failure_is_zero(m: pytest.MonkeyPatch) -> None:
    from verl.reward.runner import RewardRunner

    m.setattr(RewardRunner, "_fail", lambda self, trajectory, outcome, label: setattr(trajectory, "score", 0.0))


@fault("a response gets the score of the one before", "slime #36", prove="step", by=CHECKS,
       caught="scores are those of other responses", quick=True)  # fmt: skip
def scores_shifted(m: pytest.MonkeyPatch) -> None:
    from verl.reward.runner import RewardRunner

    def apply(original: Any, self: Any, trajectory: Any, outcome: Any, *more: Any) -> None:
        original(self, trajectory, self.__dict__.get("_before", outcome), *more)
        self._before = outcome

    wrap(m, RewardRunner, "_apply", apply)


# -- loss and gradient -------------------------------------------------------------------------------------------------

of_loss = {"by": CHECKS, "caught": "a mask or a denominator of the loss is wrong", "prove": "micro-batches"}


@fault("the loss is normalised per micro-batch", "TRL #3021, open-instruct #1137, verl #3332", words=(ONE,),
       quick=True, **of_loss)  # fmt: skip
def per_micro_batch(m: pytest.MonkeyPatch) -> None:
    from verl.algorithms.flat_tokens import MicroBatchColumns

    def info(original: Any, self: Any, *args: Any) -> dict[str, Any]:
        return original(self, *args) | {"batch_num_tokens": self.loss_mask.sum(), "global_batch_size": None}

    wrap(m, MicroBatchColumns, "batch_info", info)


@fault("the critic's loss is normalised per micro-batch", "verl #7110, #6957", kind="critic",
       words=("critic.ppo_micro_batch_size_per_gpu=1",), **of_loss)  # fmt: skip
def critic_per_micro_batch(m: pytest.MonkeyPatch) -> None:
    per_micro_batch(m)


@fault("the mask is in the loss's numerator and not in its denominator", "TRL #6369", kind="tools", by=CHECKS,
       caught="a mask is in the loss's numerator and not in its denominator", prove="step")  # fmt: skip
def denominator_unmasked(m: pytest.MonkeyPatch) -> None:
    from verl.workers import update_plan

    def count(original: Any, rows: Any, longest: Any) -> Any:
        return replace(original(rows, longest), tokens=sum(row.length for row in rows))

    wrap(m, update_plan, "count_denominators", count)


of_gradient = {"by": CHECKS, "caught": "the gradient of actor along its last normalisation"}


@fault("gradients are divided by the number of micro-batches once more", "ms-swift #10117, NeMo-RL #84",
       prove="micro-batches", words=(ONE,), quick=True, **of_gradient)  # fmt: skip
def divided_again(m: pytest.MonkeyPatch) -> None:
    def accumulate(original: Any, self: Any, rows: Any, loss: Any, outputs: Any, heat: float, scale: float) -> Any:
        count = len(trainer.split_rows(rows, self.update_batching))
        return original(self, rows, loss, outputs, heat, scale / count)

    wrap(m, FSDPEngine, "_accumulate", accumulate)


@fault("gradients of the mini-batch before are not cleared", "", prove="gradient", steps=2, **of_gradient)
def not_cleared(m: pytest.MonkeyPatch) -> None:
    m.setattr(FSDPEngine, "_clear_gradients", FSDPEngine._fill_gradients)


@fault("old log-probs are computed anew for each update", "", by=CHECKS,
       caught="the policy is exactly the old one", prove="old log-probs")  # fmt: skip
def ratio_of_one(m: pytest.MonkeyPatch) -> None:
    from verl.algorithms.flat_tokens import MicroBatchColumns

    m.setattr(MicroBatchColumns, "old_log_probs", lambda self: self.like.detach())


@fault("updates are lost: the optimizer does not hold the weights, or their precision is too low",
       "apex #1728, speculators #765", by=CHECKS, steps=2, caught="changed no log-prob at all",
       prove="weights")  # fmt: skip
def update_lost(m: pytest.MonkeyPatch) -> None:
    m.setattr(torch.optim.AdamW, "step", lambda self, closure=None: None)


# -- reference ---------------------------------------------------------------------------------------------------------


@fault("the reference is scored at another temperature", "OpenRLHF #853, slime #2085", by=CHECKS, words=(KL,),
       caught="before the first update the reference is the policy", prove="step")  # fmt: skip
def reference_temperature(m: pytest.MonkeyPatch) -> None:
    def outputs(original: Any, self: Any, batch: Any, names: Any, temperature: float) -> Any:
        return original(self, batch, names, 0.5 if self.role == "ref" else temperature)

    wrap(m, FSDPEngine, "_outputs", outputs)


@fault("the reference moves with the policy", "TRL #1340", by=CHECKS, words=(KL,), steps=2,
       caught="the reference has exactly its log-probs", prove="step")  # fmt: skip
def reference_moves(m: pytest.MonkeyPatch) -> None:
    from verl.workers import build

    m.setattr(build, "reference_engine", lambda config, actor, platform: actor)


@fault("the reference of an adapter is computed with the adapter on", "TRL #1340, #495", by=CHECKS, words=(KL, LORA),
       steps=2, caught="the reference has exactly its log-probs", prove="step")  # fmt: skip
def reference_adapted(m: pytest.MonkeyPatch) -> None:
    from contextlib import nullcontext

    m.setattr(FSDPEngine, "without_adapter", lambda self: nullcontext())


# -- data and checkpoints ----------------------------------------------------------------------------------------------


@fault("a resume skips data", "NeMo-RL #3599, verl #3457, #7401", by=CHECKS, runs=2, prove="resume",
       caught="the position in the data is that of step")  # fmt: skip
def data_skipped(m: pytest.MonkeyPatch) -> None:
    from verl.data.stream import PromptStream

    def load(original: Any, self: Any, state: Any) -> None:
        original(self, state)
        self.offset += self.batch_size

    wrap(m, PromptStream, "load_state", load)


@fault("a resume draws the order of another epoch", "ms-swift #10050, accelerate #2823", runs=2, steps=0,
       by="checks of a resume", caught="the order has changed", prove="resume")  # fmt: skip
def other_order(m: pytest.MonkeyPatch) -> None:
    from verl.data.stream import _Seeded

    def at(original: Any, self: Any, epoch: int, offset: int) -> int | None:
        return original(self, self.__dict__.setdefault("_first", epoch + offset), offset)

    wrap(m, _Seeded, "at", at)


@fault("a resume leaves the adapter as it was initialised", "TRL #6688", runs=2, words=(LORA,), steps=0,
       by="checks of a resume", caught="a part of the policy was not saved or not loaded", prove="save and load")  # fmt: skip
def adapter_not_loaded(m: pytest.MonkeyPatch) -> None:
    m.setattr(FSDPEngine, "load_weights", lambda self, directory: None)


@fault("a resume begins with a fresh optimizer", "", runs=2, steps=0, by="checks of a resume",
       caught="optimizer state is .*, and was", prove="next update", quick=True)  # fmt: skip
def fresh_optimizer(m: pytest.MonkeyPatch) -> None:
    m.setattr(FSDPEngine, "load_optimizer", lambda self, directory: None)
