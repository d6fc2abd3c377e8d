"""From a checked configuration to a finished run: builds the parts, drives the loop, explains what went wrong."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl import interrupt
from verl.errors import UserError
from verl.platform.host import prepare_process
from verl.plugins import import_modules
from verl.tracking.console import notice, spare

if TYPE_CHECKING:
    from verl.algorithms.kl import KLController
    from verl.config import Config
    from verl.data.stream import PromptStream
    from verl.engine.rollout.base import SamplingParams
    from verl.reward.runner import RewardRunner
    from verl.rollout.event_loop import Loop
    from verl.rollout.groups import RolloutManager
    from verl.tracking.hooks import RunHooks
    from verl.tracking.step_metrics import Counters
    from verl.tracking.timer import Phases
    from verl.tracking.tracker import Tracking
    from verl.trainer.colocation import Colocation
    from verl.trainer.resume import Checkpoints
    from verl.trainer.validation import Validator
    from verl.workers.roles import WorkerSet

EXIT_USER = 2
EXIT_FAILED = 1
EXIT_UNSAVED = 4
EXIT_INTERRUPTED = 130


def run_command(argv: Sequence[str] | None, entry: str, work: str) -> int:
    """Resolve and check the configuration of an entry point, then call its function of (config, tracking), given as
    "module:name" and imported last. Returns the exit status of `run_guarded`, or that of the check."""
    from verl.config.command_line import resolve

    try:
        config = resolve(argv, entry)
    except SystemExit as error:
        return int(error.code or 0)
    module, _, name = work.partition(":")
    return run_guarded(config, getattr(importlib.import_module(module), name))


def run_guarded(config: Any, train: Callable[[Any, Any], None]) -> int:
    """Call train(config, tracking) in an opened run folder and explain how it ended.

    Returns the exit status: 0 done, 1 the run failed, 2 something the user can mend, 4 done but the last checkpoint
    could not be written (said last), 130 interrupted.
    """
    prepare_process()
    spare()
    try:
        import_plugins(config)
        tracking = open_tracking(config)
    except UserError as error:
        notice(str(error))
        return EXIT_USER
    status = _run(config, tracking, train)
    if tracking.unsaved:
        notice(tracking.unsaved)
    return status or (EXIT_UNSAVED if tracking.unsaved else 0)


def _run(config: Any, tracking: Any, train: Callable[[Any, Any], None]) -> int:
    """The exit status of `train`; says how it ended in the records and, if not well, on stderr."""
    with interrupt.handled():
        try:
            train(config, tracking)
            return 0
        except UserError as error:
            if records := getattr(error, "records", ()):
                tracking.bad_rows(records)
            return _stopped(tracking, "refused", str(error), EXIT_USER)
        except Exception as error:
            import traceback

            name = type(error).__name__
            tracking.event("failed", error=f"{name}: {error}", traceback=traceback.format_exc())
            if not getattr(error, "explained", False):
                traceback.print_exc()
            words = [f"{name}: {str(error).rstrip('.')}", _further(config, tracking.run_dir)]
            return _stopped(tracking, "failed", ". ".join(filter(None, words)), EXIT_FAILED)
        except BaseException:
            # Not only KeyboardInterrupt: libraries wrap one that comes in the middle of their work.
            if not interrupt.noted():
                raise
            return _stopped(tracking, "interrupted", _interrupted(config, tracking.run_dir), EXIT_INTERRUPTED)
        finally:
            tracking.close()


def _interrupted(config: Any, run_dir: Path) -> str:
    """How to go on after an interruption."""
    further = _further(config, run_dir)
    if config.entry in ("eval", "generation"):
        return "interrupted: the same command starts from the beginning"
    if further is None:
        return (
            "interrupted before a checkpoint was saved (trainer.save_freq): "
            "the same command starts from the beginning"
        )
    return f"interrupted. {further}"


def _further(config: Any, run_dir: Path) -> str | None:
    """How to go on from the newest checkpoint, if there is one."""
    from verl.checkpoint.read import newest_sealed

    saved = newest_sealed(run_dir)
    if saved is None:
        return None
    option = " with trainer.resume_mode=auto" if config.trainer.resume_mode != "auto" else ""
    return f"Run the same command again{option} to go on from {saved}"


def import_plugins(config: Any) -> None:
    """Import `model.external_lib` and VERL_USE_EXTERNAL_MODULES, which register estimators, losses and the like."""
    model = config.select("actor_rollout_ref.model") or config.select("model")
    import_modules(model.external_lib if model is not None else None)


def open_tracking(config: Any) -> Any:
    """The run folder's records and the trackers. UserError if the folder cannot be made or written."""
    from verl.tracking.tracker import Tracking

    folder = Path(config.trainer.default_local_dir).expanduser()
    try:
        return Tracking(config, folder)
    except OSError as error:
        raise UserError(
            f"trainer.default_local_dir={folder}: the run folder cannot be made or written "
            f"({error.strerror or error}); name another one"
        ) from error


def _stopped(tracking: Any, status: str, message: str, code: int) -> int:
    tracking.finish(status, message)
    notice(message)
    return code


def train_ppo(config: Config, tracking: Any) -> None:
    """Build the parts and train by reinforcement."""
    import asyncio

    from verl.rollout.event_loop import BackgroundLoop
    from verl.tracking.profiler import announce
    from verl.tracking.timer import Phases, Watchdog
    from verl.trainer.ppo_trainer import PPOTrainer

    phases = Phases()
    watchdog = Watchdog(phases, config.trainer.watchdog_timeout, tracking.event)
    ahead = config.trainer.max_staleness or config.trainer.weight_sync_every > 1
    with BackgroundLoop() if ahead else asyncio.Runner() as loop, watchdog:
        with phases("start-up", waits_for="data, models and workers"):
            parts, total_steps = build_parts(config, tracking, loop, phases, watchdog.hooks(tracking))
        try:
            announce(config, total_steps, tracking.notice)
            tracking.event("plan", total_steps=total_steps, device=parts.workers.describe)
            gc.collect()
            gc.freeze()  # a full collection would look at torch's hundreds of thousands of objects again each time
            with interrupt.patient():
                PPOTrainer(config, parts, total_steps).fit()
        finally:
            loop.run(parts.rollouts.stop())
            parts.checkpoints.finish()
            parts.rewards.close()
            parts.workers.close()
            gc.unfreeze()


@dataclass
class Parts:
    """Everything the loop drives."""

    stream: PromptStream
    rollouts: RolloutManager
    rewards: RewardRunner
    workers: WorkerSet
    colocation: Colocation
    kl_controller: KLController | None
    validator: Validator | None
    checkpoints: Checkpoints
    tracking: Tracking
    phases: Phases
    loop: Loop
    counters: Counters


def build_parts(
    config: Config, tracking: Any, loop: Loop, phases: Phases, hooks: RunHooks
) -> tuple[Parts, int]:
    """Everything the loop drives, in the order that finds a user's mistakes soonest: the cluster's address, then data,
    before models."""
    from verl.algorithms.kl import get_kl_controller
    from verl.config.layout import own_pools
    from verl.config.weights import user_scores
    from verl.data.stream import open_stream
    from verl.data.tokenizer import save_tokenizer
    from verl.tracking.step_metrics import Counters
    from verl.trainer.colocation import Colocation
    from verl.trainer.resume import Checkpoints
    from verl.workers.roles import Classifier
    from verl.workers.start import check_cluster, start_workers

    check_cluster(config)
    model, algorithm = config.actor_rollout_ref.model, config.algorithm
    tokenizer, processor = open_tokenizer(model, config.data, tracking)
    train, validation = open_data(config, tokenizer, tracking, processor)
    check_vocabularies(config, tokenizer)
    check_teachers(config, train)
    stream = open_stream(train, config)
    total_steps = config.trainer.total_training_steps or config.trainer.total_epochs * stream.steps_per_epoch
    # Rewards are checked before a model loads, unless it is workers that serve the judge.
    judged = start_workers(config, tokenizer, total_steps, hooks) if "judge" in own_pools(config) else None
    rewards = open_rewards(config, tracking, judged and judged.judge)
    if user_scores(config) or not config.actor_rollout_ref.rollout.agent.environment.name:
        check_reward(rewards, train, loop)
    workers = judged or start_workers(config, tokenizer, total_steps, hooks)
    colocation = Colocation(config, workers.sampler, rewards.judge)
    classifier = workers.roles.get("reward_model")
    if rewards.model is not None and isinstance(classifier, Classifier):
        rewards.model.scores = partial(classifier.scores, colocation.computing)
    settings = rollout_settings(config)
    rollouts = open_rollouts(config, settings, workers.sampler, tokenizer, rewards.score, tracking)
    validator = build_validator(config, validation, rollouts, rewards, tracking)
    tracking.bad_rows(row for data in (train, validation) if data is not None for row in data.bad_rows)
    kl_controller = get_kl_controller(algorithm.kl_ctrl) if algorithm.use_kl_in_reward else None
    counters = Counters()
    parts = Parts(
        stream=stream,
        rollouts=rollouts,
        rewards=rewards,
        workers=workers,
        colocation=colocation,
        kl_controller=kl_controller,
        validator=validator,
        checkpoints=Checkpoints(
            config,
            partial(save_tokenizer, tokenizer, None if processor is None else model.path),
            tracking,
            workers=workers,
            colocation=colocation,
            stream=stream,
            kl_controller=kl_controller,
            counters=counters,
        ),
        tracking=tracking,
        phases=phases,
        loop=loop,
        counters=counters,
    )
    print(
        f"Size of train dataloader: {stream.steps_per_epoch}, Size of val dataloader: {int(validation is not None)}"
    )
    return parts, total_steps


def open_rollouts(
    config: Config, settings: Any, sampler: Any, tokenizer: Any, on_finished: Any, tracking: Any
) -> RolloutManager:
    """What asks the sampler for responses, by agent loops, and hands each to `on_finished` as soon as it is there."""
    from verl.data.rows import text_of
    from verl.rollout.groups import RolloutManager
    from verl.rollout.loop_processes import LoopProcesses

    processes = config.actor_rollout_ref.rollout.agent.num_workers
    return RolloutManager(
        sampler,
        settings,
        decode=partial(text_of, tokenizer),
        on_finished=on_finished,
        tokenizer=tokenizer,
        config=config,
        event=tracking.event,
        processes=partial(LoopProcesses, processes, config) if processes else None,
    )


def open_rewards(config: Config, tracking: Any, judging: Any = None) -> RewardRunner:
    """What scores responses: the function, and a model or a judge where the configuration names one. judging: the
    judge's sampler, if it is not in this process."""
    from verl.config.weights import scores_by_model
    from verl.reward.model import RewardModel
    from verl.reward.runner import RewardRunner
    from verl.workers import build

    model = RewardModel(config) if scores_by_model(config) else None
    judge = build.judge(config, judging) if config.reward_model.enable and model is None else None
    return RewardRunner(config, events=tracking.event, model=model, judge=judge)


def open_tokenizer(model: Any, data: Any, tracking: Any) -> tuple[Any, Any]:
    """The tokenizer, which the records get too, and the processor of a model that sees images, else None. A run loads
    them first, so libraries are set up before. model, data: the groups of the configuration."""
    import warnings

    from transformers.utils import logging

    from verl.data.media import load_processor
    from verl.data.tokenizer import tokenizer_of
    from verl.platform.host import tune_allocator

    tune_allocator()
    logging.disable_progress_bar()  # a run has its own progress display, which the libraries' bars would tear apart
    warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
    tokenizer = tracking.tokenizer = tokenizer_of(model, data.tokenizer)
    kwargs, trust = data.mm_processor_kwargs, model.trust_remote_code
    return tokenizer, load_processor(model.path, tokenizer, kwargs, trust_remote_code=trust)


def open_data(config: Config, tokenizer: Any, tracking: Any, processor: Any = None) -> tuple[Any, Any]:
    """Training data, and validation data or None; reports bad rows, enforces limits. processor: of a model with
    images."""
    from verl.data.dataset import PromptDataset
    from verl.reward.rules import check_truth
    from verl.rollout.tool_agent import checked_tools

    data = config.data
    tools = checked_tools(config.actor_rollout_ref.rollout, tokenizer, data.apply_chat_template_kwargs)
    options: dict[str, Any] = {"check_truth": check_truth, "tools": tools, "processor": processor}
    train = PromptDataset(config.as_written("data.train_files"), config, tokenizer, **options)
    validation = None
    if data.val_files:
        validation = PromptDataset(
            config.as_written("data.val_files"), config, tokenizer, split="val", **options
        )
    tracking.data_report(train, validation)
    return train, validation


def check_vocabularies(config: Config, tokenizer: Any) -> None:
    """UserError for a teacher, critic or separate reference whose token ids differ from the policy's."""
    from verl.algorithms.needs import needed_columns, teacher_roles
    from verl.data.tokenizer import load_tokenizer

    arr, needs = config.actor_rollout_ref, needed_columns(config)
    models = [("distillation.teacher_models", role["model_path"]) for role in teacher_roles(config).values()]
    models += [("critic.model.path", config.critic.model.path)] if "values" in needs else []
    models += [("actor_rollout_ref.ref.model.path", arr.ref.model.path)] if "ref_log_probs" in needs else []
    models = [(key, path) for key, path in models if path and path != arr.model.path]
    vocab = tokenizer.get_vocab() if models else {}
    for key, path in models:
        if Path(path).is_dir() and not any(Path(path).glob("*token*")):
            continue  # weights alone
        other_vocab = load_tokenizer(path, trust_remote_code=arr.model.trust_remote_code).get_vocab()
        token = next((token for token, number in vocab.items() if other_vocab.get(token) != number), None)
        if token is not None:
            raise UserError(
                f"{key}: {path} has another vocabulary: token {token!r} is {vocab[token]} for the policy "
                f"and {other_vocab.get(token, 'absent')} there; use a model of the same family"
            )


def check_teachers(config: Config, train: Any) -> None:
    """UserError for a row that no teacher is for."""
    from verl.algorithms.needs import teacher_roles
    from verl.workers.roles import teacher_of

    choose, several = teacher_of(config), len(teacher_roles(config)) > 1
    for prompt in train.prompts(range(len(train) if several else 0)):
        choose(prompt)


def check_reward(rewards: Any, train: Any, loop: Loop, rows: int = 8) -> None:
    """Call the reward function on the first rows before anything heavy is loaded; an exception refuses the run."""
    from verl.reward.precheck import precheck

    prompts = train.prompts(range(len(train)), most=rows)
    for prompt in prompts if rewards.model is not None else ():
        rewards.model.check(prompt)
    if (
        rewards.settings.function.path is None
    ):  # a rule of ours: rows whose loop scores them need not have what it wants
        prompts = [prompt for prompt in prompts if not train.rules.loop_makes_prompt(prompt.agent_name)]
    if rewards.asks_function and prompts:
        loop.run(precheck(rewards, prompts))


def rollout_settings(config: Config) -> Any:
    """How training responses are sampled."""
    from verl.algorithms.needs import GREEDY_BASELINE, needed_columns
    from verl.engine.rollout.base import SamplingParams
    from verl.rollout.attempt import RolloutSettings

    rollout = config.actor_rollout_ref.rollout
    sampling = SamplingParams(
        max_tokens=min(rollout.response_length, config.data.max_response_length),
        temperature=rollout.temperature,
        ignore_eos=rollout.ignore_eos,
        **_restrictions(rollout),
    )
    return RolloutSettings(
        sampling=sampling,
        n=rollout.n,
        seed=rollout.seed,
        default_loop=rollout.agent.default_agent_loop,
        greedy_baseline=GREEDY_BASELINE in needed_columns(config),
        on_status=dict(rollout.agent.on_status),
        max_resamples=rollout.agent.max_resamples,
    )


def validation_sampling(config: Config) -> SamplingParams:
    """How validation responses are sampled: `rollout.val_kwargs`, lengths and the rest as in training."""
    val = config.actor_rollout_ref.rollout.val_kwargs
    greedy = val.do_sample is False or val.temperature == 0
    return replace(
        rollout_settings(config).sampling,
        temperature=0.0 if greedy else val.temperature,
        **_restrictions(val),
    )


def _restrictions(group: Any) -> dict[str, Any]:
    """What cuts the distribution or ends a response, the same in training and validation."""
    cut = {name: group[name] for name in ("top_p", "top_k", "min_p", "repetition_penalty")}
    return cut | {name: tuple(group[name]) for name in ("stop", "stop_token_ids")}


def build_validator(config: Config, data: Any, rollouts: Any, rewards: Any, tracking: Any) -> Any:
    """The validator, or None without validation data."""
    from verl.trainer.validation import ValidationPrompts, Validator

    if data is None:
        return None
    order = data.order(seed=config.data.seed, shuffle=config.data.validation_shuffle)
    prompts = ValidationPrompts(data, order, config.data.train_batch_size)
    n = config.actor_rollout_ref.rollout.val_kwargs.n
    return Validator(prompts, validation_sampling(config), n, rollouts, rewards.score_batch, tracking)
