"""`verl prove key=value …`: two short lives of the run of a command, and what they must have in common.

    first life    the command, shortened ── sample, score ── update ── push ── save ── sample ── update
    second life   rows cut otherwise ──────────────────────  update ────────── load ── sample ── update

All of it is done by the parts and the loop of the run.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from verl.compat.spellings import PUBLIC
from verl.config import Config, load
from verl.errors import UserError
from verl.preflight.command import resolve
from verl.proving import rewards, sampling, state, training
from verl.proving.finding import FAILED, LOOK, OK, Finding, summary, table, write_page
from verl.proving.life import STEPS, Life
from verl.tracking.tracker import Tracking
from verl.trainer.run import run_guarded
from verl.trajectory import Batch
from verl.weight_sync.verify import WeightSyncError

PROMPTS, RESPONSES, LENGTH = 4, 4, 256
"""Most prompts of a step, responses to each, and tokens of one."""
SAVED = "global_step_1"


class NotProven(RuntimeError):
    """A check failed."""

    explained = True


def main(argv: list[str]) -> int:
    """Prove a command; 0 where every check holds, 1 where one fails, 2 for a command that is wrong."""
    about = "Check in a few minutes, on the command's own model, data and template, what goes wrong silently."
    parser = argparse.ArgumentParser(prog="verl prove", description=about, allow_abbrev=False)
    parser.add_argument("--out", type=Path, help="folder of the proof (default: prove/ in the run's folder)")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate of the proof (default: 1e-3)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="the command, as of verl.trainer.main_ppo")
    args = parser.parse_intermixed_args(argv)
    if not args.overrides:
        parser.print_usage(sys.stderr)
        return 2
    given = load(args.overrides, spellings=PUBLIC)
    folder = args.out or Path(given.trainer.default_local_dir).expanduser() / "prove"
    left_overs = [*folder.glob("global_step_*")]
    if left_overs and args.out and not (folder / "prove.html").is_file():
        raise UserError(
            f"--out={folder} holds checkpoints ({left_overs[0].name}) and no earlier proof: name another folder"
        )
    for path in left_overs:
        shutil.rmtree(path)
    try:
        config = resolve([*args.overrides, *shortened(given, folder, args.rate)], "ppo", PUBLIC)
    except SystemExit as error:
        return int(error.code or 0)
    return run_guarded(config, "verl.proving.run:prove")


def shortened(config: Config, folder: Path, rate: float) -> list[str]:
    """Overrides that leave of a run two small steps, in a folder of their own."""
    devices = config.trainer.nnodes * config.trainer.n_gpus_per_node
    prompts = min(config.data.train_batch_size, max(PROMPTS, devices))
    arr, optim = config.actor_rollout_ref, ("actor_rollout_ref.actor.optim", "critic.optim")
    words = f"""
        data.train_batch_size={prompts} actor_rollout_ref.actor.ppo_mini_batch_size={prompts}
        critic.ppo_mini_batch_size={prompts} actor_rollout_ref.rollout.n={min(arr.rollout.n, RESPONSES)}
        data.max_response_length={min(config.data.max_response_length, LENGTH)} data.val_files=null
        actor_rollout_ref.actor.ppo_epochs=1 algorithm.filter_groups.enable=False
        trainer.default_local_dir={folder} trainer.default_hdfs_dir=null trainer.logger=[] trainer.resume_mode=auto
        trainer.total_training_steps={STEPS} trainer.save_freq=1000 trainer.test_freq=-1 trainer.val_before_train=False
        trainer.val_only=False trainer.critic_warmup=0 trainer.max_staleness=0 trainer.sync_proof=error
        actor_rollout_ref.actor.checkpoint.async_save=False skip.rollout.enable=False
        actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra]"""
    rates = [
        f"{group}.{key}" for group in optim for key in (f"lr={rate}", "lr_warmup_steps=0", "lr_scheduler_type=constant")
    ]
    return [*words.split(), *rates]


def prove(config: Config, tracking: Tracking) -> None:
    """Run the checks; prints the table and writes the page. NotProven where one fails."""
    started, findings = time.monotonic(), list[Finding]()
    print(f"verl prove: {config.actor_rollout_ref.model.path}, two short lives of the run", file=sys.stderr)
    try:
        for finding in _checks(config, tracking):
            findings.append(finding)
            print(f"verl prove: {finding.check}: {finding.verdict} ({finding.measured})", file=sys.stderr)
    finally:
        shutil.rmtree(tracking.run_dir / SAVED, ignore_errors=True)
        if findings:
            print(table(findings))
            page = write_page(tracking.run_dir, findings, f"{config.actor_rollout_ref.model.path}")
            print(f"{summary(findings)} in {time.monotonic() - started:.0f} s; {page}")
    if failed := [finding.check for finding in findings if finding.verdict == FAILED]:
        raise NotProven(f"these checks failed: {', '.join(failed)}")
    tracking.write_page(last=True)
    tracking.finish("finished")


def _checks(config: Config, tracking: Tracking) -> Iterator[Finding]:
    with Life.open(config, tracking) as life:
        trainer, parts = life.trainer, life.parts
        try:
            trainer.start()
        except WeightSyncError as error:
            yield Finding("weights", sampling.NOT_ARRIVED, "all", FAILED, str(error))
            return
        batch = life.sampled(1)
        yield rewards.failing(life, batch)
        yield rewards.again(life, batch)
        yield _signal(batch)
        trainer.probe.begin(batch)
        trainer.colocation.to_training()
        yield (adapter := sampling.known_adapter(life))
        if adapter.verdict == FAILED:
            return
        yield sampling.log_probs(life, batch)
        yield sampling.images(life, batch)
        before = life.log_probs(batch)
        first = trainer.train(1, batch)
        yield sampling.routes(first)
        pushing = sampling.weights(life, first)
        yield pushing
        if pushing.measured == sampling.NOT_ARRIVED:
            return  # the sampler has a mixture
        yield training.identities(life, 1, batch, first)
        trainer.colocation.to_training()
        pushed = life.log_probs(batch)
        parts.checkpoints.save(1, trainer.schedule.state(1), batch, {})
        trainer.colocation.to_sampling()
        following = life.sampled(2)
        trainer.colocation.to_training()
        yield sampling.log_probs(life, following, "log-probs, step 2")
        again = trainer.train(2, following)
        trainer.push(2, again)
        yield training.identities(life, 2, following, again)
        trainer.colocation.to_training()
        second = [now - then for now, then in zip(life.log_probs(batch), pushed, strict=True)]
    with Life.open(training.cut_otherwise(config), tracking) as life:
        trainer, saved = life.trainer, tracking.run_dir / SAVED
        trainer.colocation.to_training()
        yield training.shared_prompts(life, batch, before)
        yield training.micro_batches(life, batch, first)

        def reload() -> None:
            for role in life.parts.workers.trained(policy=True):
                role.load("weights", saved / role.name)

        yield from training.masked_tokens(life, batch, reload)
        trainer.colocation.to_sampling()
        trainer.start()
        trainer.colocation.to_training()
        yield state.saved(life, batch, pushed)
        trainer.colocation.to_sampling()
        yield state.next_batch(life.sampled(2), following)
        trainer.colocation.to_training()
        life.update(following, 2)
        yield state.next_update(
            life, [now - then for now, then in zip(life.log_probs(batch), pushed, strict=True)], second
        )


def _signal(batch: Batch) -> Finding:
    """Whether responses and scores differ within a group. Where none do, the proof goes on with scores of its own."""
    groups = batch.groups()
    differing = sum(len({t.score for t in group}) > 1 for group in groups)
    if not differing:
        for group in groups:
            for number, t in enumerate(group):
                t.score, t.score_error = float(number % 2), None
    if all(len({t.response_ids.tobytes() for t in group}) == 1 < len(group) for group in groups):
        why = "responses of a group are drawn with the same random numbers, or the policy has no doubt at all"
        return Finding("scores", "the responses of each group are the same", "other ones", FAILED, why)
    advice = "no group's scores differ, so that there is nothing to learn: look at the responses, or sample more"
    measured = f"scores differ in {differing} of {len(groups)} groups"
    return Finding("scores", measured, "1 group", OK if differing else LOOK, "" if differing else advice)
