"""Everything that the loop drives, built from a checked configuration."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers.utils import logging

from verl.algorithms.kl import KLController, get_kl_controller
from verl.algorithms.needs import GREEDY_BASELINE, needed_columns, teacher_roles
from verl.algorithms.source_losses import LossNumbers, sources_with_loss
from verl.config import Config
from verl.config.layout import own_pools, sampling_mask_from
from verl.config.reward_weights import scores_by_model, user_scores
from verl.config.schema.data import DataConfig, SFTDataConfig
from verl.config.schema.model import ModelConfig
from verl.data.dataset import PromptDataset
from verl.data.demonstrations import Demonstrations
from verl.data.loss_weights import loss_weights
from verl.data.media import load_processor
from verl.data.rows import ChatRenderer, text_of
from verl.data.stream import PromptStream, open_stream
from verl.data.teacher_prompt import TeacherPrompt, WithoutImages
from verl.data.text_spans import TextTeacher
from verl.data.tokenizer import load_tokenizer, save_tokenizer, tokenizer_of
from verl.engine.rollout.base import RolloutEngine, SamplingParams
from verl.errors import UserError
from verl.platform.host_resources import tune_allocator
from verl.reward.precheck import precheck
from verl.reward.reward_model import RewardModel
from verl.reward.rules import check_truth
from verl.reward.runner import RewardRunner
from verl.rollout.attempt import RolloutSettings
from verl.rollout.event_loop import Loop
from verl.rollout.groups import RolloutManager
from verl.rollout.loop_processes import LoopProcesses
from verl.rollout.tool_agent import checked_tools
from verl.tracking.hooks import RunHooks
from verl.tracking.step_metrics import Counters
from verl.tracking.timer import Phases
from verl.tracking.tracker import Tracking
from verl.trainer.checkpoints import Checkpoints
from verl.trainer.colocation import Colocation
from verl.trainer.validation import ValidationPrompts, Validator
from verl.workers import build
from verl.workers.launch import check_cluster, start_workers
from verl.workers.roles import Classifier, Policy, Role, Teacher, WorkerSet, teacher_of


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
    estimator_state: dict[str, Any]


def build_parts(config: Config, tracking: Tracking, loop: Loop, phases: Phases, hooks: RunHooks) -> tuple[Parts, int]:
    """Everything the loop drives, in the order that finds a user's mistakes soonest: the cluster's address, then data,
    before models."""
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
    rewards = open_rewards(config, tracking, judged.judge if judged else None)
    with ExitStack() as failed:
        failed.callback(rewards.close)  # else the exit waits 3 s for its processes
        if user_scores(config) or not config.actor_rollout_ref.rollout.agent.environment.name:
            check_reward(rewards, train, loop)
        workers = judged or start_workers(config, tokenizer, total_steps, hooks)
        set_texts(config, workers.roles, tokenizer)
        colocation = Colocation(config, workers.sampler, rewards.judge)
        classifier = workers.roles.get("reward_model")
        if rewards.model is not None and isinstance(classifier, Classifier):
            rewards.model.scores = partial(classifier.scores, colocation.computing)
        settings = rollout_settings(config)
        rollouts = open_rollouts(config, settings, workers.sampler, tokenizer, rewards.score, tracking)
        validator = build_validator(config, validation, rollouts, rewards, tracking)
        tracking.bad_rows(row for data in (train, validation) if data is not None for row in data.bad_rows)
        kl_controller = get_kl_controller(algorithm.kl_ctrl) if algorithm.use_kl_in_reward else None
        counters, estimator_state = Counters(), dict[str, Any]()
        save = partial(save_tokenizer, tokenizer, None if processor is None else model.path)
        checkpoints = Checkpoints(
            config, save, tracking, workers, colocation, stream, kl_controller, counters, estimator_state
        )
        parts = Parts(
            *(stream, rollouts, rewards, workers, colocation, kl_controller, validator),
            *(checkpoints, tracking, phases, loop, counters, estimator_state),
        )
        print(
            f"Size of train dataloader: {stream.steps_per_epoch}, Size of val dataloader: {int(validation is not None)}"
        )
        failed.pop_all()
        return parts, total_steps


def open_rollouts(
    config: Config,
    settings: RolloutSettings,
    sampler: RolloutEngine,
    tokenizer: Any,
    on_finished: Any,
    tracking: Tracking,
) -> RolloutManager:
    """What asks the sampler for responses, by agent loops, and hands each to `on_finished` as soon as it is there."""
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
        shown=tracking.finished,
    )


def open_rewards(config: Config, tracking: Tracking, judging: RolloutEngine | None = None) -> RewardRunner:
    """What scores responses: the function, and a model or a judge where the configuration names one. judging: the
    judge's sampler, if it is not in this process."""
    model = RewardModel(config) if scores_by_model(config) else None
    judge = build.judge(config, judging) if config.reward_model.enable and model is None else None
    return RewardRunner(config, events=tracking.event, model=model, judge=judge)


def open_tokenizer(model: ModelConfig, data: DataConfig | SFTDataConfig, tracking: Tracking) -> tuple[Any, Any]:
    """The tokenizer, which the records get too, and the processor of a model that sees images, else None. A run loads
    them first, so libraries are set up before. model, data: the groups of the configuration."""
    tune_allocator()
    logging.disable_progress_bar()  # a run has its own progress display, which the libraries' bars would tear apart
    tokenizer = tracking.tokenizer = tokenizer_of(model, data.tokenizer)
    kwargs, trust = data.mm_processor_kwargs, model.trust_remote_code
    return tokenizer, load_processor(model.path, tokenizer, kwargs, trust_remote_code=trust)


def open_data(
    config: Config, tokenizer: Any, tracking: Tracking, processor: Any = None
) -> tuple[PromptDataset, PromptDataset | None]:
    """Training data, and validation data or None; reports bad rows, enforces limits. processor: of a model with
    images."""
    data = config.data
    tools = checked_tools(config.actor_rollout_ref.rollout, tokenizer, data.apply_chat_template_kwargs)
    options: dict[str, Any] = {"check_truth": check_truth, "tools": tools, "processor": processor}
    train = PromptDataset(config.as_written("data.train_files"), config, tokenizer, **options)
    validation = None
    if data.val_files:
        validation = PromptDataset(config.as_written("data.val_files"), config, tokenizer, split="val", **options)
    tracking.data_report(train, validation)
    return train, validation


def check_vocabularies(config: Config, tokenizer: Any) -> None:
    """UserError for a teacher, critic or separate reference whose token ids differ from the policy's."""
    arr, needs = config.actor_rollout_ref, needed_columns(config)
    teachers = [role for role in teacher_roles(config).values() if not role.get("own_tokenizer")]
    models = [("distillation.teacher_models", role["model_path"]) for role in teachers]
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


def check_teachers(config: Config, train: PromptDataset) -> None:
    """UserError for a row that no teacher is for."""
    choose, several = teacher_of(config), len(teacher_roles(config)) > 1
    for prompt in train.prompts(range(len(train) if several else 0)):
        choose(prompt)


def set_texts(config: Config, roles: Mapping[str, Role], tokenizer: Any) -> None:
    """Roles know the texts that they read beside the batch: prompts of teachers, the policy's demonstrations, what the
    template writes for a role."""
    actor, kwargs = config.actor_rollout_ref.actor, config.data.apply_chat_template_kwargs
    policy, weights = roles["actor"], loss_weights(actor, tokenizer, kwargs)
    assert isinstance(policy, Policy)
    policy.before_update = [] if weights is None else [weights]
    if actor.demonstrations.column:
        policy.before_update.append(Demonstrations(actor.demonstrations, tokenizer))
    if sources_with_loss(config.algorithm.by_source):
        policy.before_update.append(LossNumbers(config.algorithm.by_source))
    for name, teacher in teacher_roles(config).items():
        role, key = roles.get(name), f"distillation.teacher_models.{name.removeprefix('teacher_')}"
        if not isinstance(role, Teacher):
            continue
        if tokens := build.unseen_tokens(config, teacher):
            role.prompt = WithoutImages(tokens, key)
            continue
        least = 1.0 if teacher.get("solution_score") is None else float(teacher["solution_score"])
        template = (teacher.get("prompt") or "{prompt}", f"{key}.prompt")
        if teacher.get("own_tokenizer"):
            trusted = config.actor_rollout_ref.model.trust_remote_code
            its = load_tokenizer(teacher["model_path"], trust_remote_code=trusted)
            role.prompt = TextTeacher(*template, ChatRenderer(its, kwargs), least, tokenizer)
        elif teacher.get("prompt"):
            role.prompt = TeacherPrompt(*template, ChatRenderer(tokenizer, kwargs), least)


def check_reward(rewards: RewardRunner, train: PromptDataset, loop: Loop, rows: int = 8) -> None:
    """Call the reward function on the first rows before anything heavy is loaded; an exception refuses the run."""
    prompts = train.prompts(range(len(train)), most=rows)
    if rewards.model is not None:
        for prompt in prompts:
            rewards.model.check(prompt)
    if (
        rewards.settings.function.path is None
    ):  # a rule of ours: rows whose loop scores them need not have what it wants
        prompts = [prompt for prompt in prompts if not train.rules.loop_makes_prompt(prompt.agent_name)]
    if rewards.asks_function and prompts:
        loop.run(precheck(rewards, prompts))


def rollout_settings(config: Config) -> RolloutSettings:
    """How training responses are sampled."""
    rollout = config.actor_rollout_ref.rollout
    sampling = SamplingParams(
        max_tokens=min(rollout.response_length, config.data.max_response_length),
        temperature=rollout.temperature,
        ignore_eos=rollout.ignore_eos,
        record_mask=sampling_mask_from(config) == "sampler",
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
        count_shared=rollout.agent.count_shared,
    )


def validation_sampling(config: Config) -> SamplingParams:
    """How validation responses are sampled: `rollout.val_kwargs`, lengths and the rest as in training."""
    val = config.actor_rollout_ref.rollout.val_kwargs
    greedy = val.do_sample is False or val.temperature == 0
    return replace(
        rollout_settings(config).sampling,
        temperature=0.0 if greedy else val.temperature,
        record_mask=False,
        **_restrictions(val),
    )


def _restrictions(group: Any) -> dict[str, Any]:
    """What cuts the distribution or ends a response, the same in training and validation."""
    cut = {name: group[name] for name in ("top_p", "top_k", "min_p", "repetition_penalty")}
    return cut | {name: tuple(group[name]) for name in ("stop", "stop_token_ids")}


def build_validator(
    config: Config,
    data: PromptDataset | None,
    rollouts: RolloutManager,
    rewards: RewardRunner,
    tracking: Tracking,
) -> Validator | None:
    """The validator, or None without validation data."""
    if data is None:
        return None
    order = data.order(seed=config.data.seed, shuffle=config.data.validation_shuffle)
    prompts = ValidationPrompts(data, order, config.data.train_batch_size)
    n = config.actor_rollout_ref.rollout.val_kwargs.n
    return Validator(prompts, validation_sampling(config), n, rollouts, rewards.score_batch, tracking)
