"""Responses to the prompts of a file, by the engines, sessions and agent loops of training, written beside the prompts.

    file → prompts → `data.batch_size` of them at a time → RolloutManager.sample → the file's rows with their responses

A prompt has the seed, and so the responses, that validation on this file would give it. Nothing is scored here.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl import interrupt
from verl.config import Config, GenerationConfig
from verl.config.defaults import complete
from verl.data.dataset import PromptDataset
from verl.data.files import DataError, ParquetFile, RowFile, written_whole
from verl.data.rows import BadRow, RowRules
from verl.errors import UserError
from verl.rollout.groups import RolloutError, RolloutManager
from verl.rollout.tool_agent import checked_tools
from verl.tracking.console import Progress, notice, say
from verl.tracking.hooks import RunHooks
from verl.tracking.names import Number, spread
from verl.tracking.responses import SAMPLED
from verl.tracking.step_metrics import AgentRecord, dialogue_metrics
from verl.tracking.timer import Phases, Watchdog
from verl.tracking.tracker import Tracking
from verl.trainer.evaluation import LENGTHS
from verl.trainer.parts import open_rollouts, open_tokenizer, rollout_settings
from verl.trajectory import Batch, Trajectory
from verl.workers.launch import check_cluster, start_samplers
from verl.workers.roles import WorkerSet

COLUMN = "responses"
MAX_LOST_RATIO = 0.1


def generate(config: GenerationConfig, tracking: Tracking) -> None:
    """Sample, write `data.output_path`, and the records to the run folder; see `run_guarded` for how it ends."""
    run, phases = training_config(config), Phases()
    watchdog = Watchdog(phases, run.trainer.watchdog_timeout, tracking.event)
    output = _writable(str(config.data.output_path))
    with asyncio.Runner() as loop, watchdog:
        with phases("start-up", waits_for="data, model and samplers"):
            check_cluster(run)
            data, tokenizer = _open_data(config, run, tracking)
            rows = joined_rows(data.source.files)
            rollouts, workers = _build(run, tokenizer, tracking, watchdog.hooks(tracking))
        try:
            tracking.event("plan", device=workers.describe)
            with interrupt.patient():
                result = loop.run(_sample(data, rollouts, config.data.batch_size, phases))
        finally:
            loop.run(rollouts.stop())
            workers.close()
    try:
        write_responses(rows, data.source.files, result, output)
    except OSError as error:  # a full disk: what took hours to sample is kept elsewhere
        spare = Path(tempfile.mkdtemp(prefix="verl-responses-")) / output.name
        write_responses(rows, data.source.files, result, spare)
        raise UserError(f"{output} cannot be written ({error}); the responses are in {spare}: move them") from error
    result.record(tracking)
    say(f"{output}: {len(data.source)} rows, {len(result.texts)} of them with responses")
    if result.skipped:
        tracking.notice(f"{result.skipped} rows could not be used when they were drawn; their responses are null")
    if result.lost:
        tracking.notice(f"{result.lost} responses were lost by the sampler and are null (events.jsonl)")


def training_config(config: GenerationConfig) -> Config:
    """What engines, data and agent loops read, as a training run with this model and sampler would have it."""
    run, rollout, trainer = Config(), config.rollout, config.trainer
    arr, data = run.actor_rollout_ref, run.data
    arr.model, arr.rollout, run.ray_kwargs = config.model, rollout, config.ray_kwargs
    own = ("prompt_key", "apply_chat_template_kwargs", "image_key", "allow_image_urls", "mm_processor_kwargs")
    for name in own:
        data[name] = config.data[name]
    data.max_prompt_length, data.max_response_length = rollout.prompt_length, rollout.response_length
    data.filter_overlong_prompts, data.max_bad_row_ratio = True, 1.0
    run.trainer.nnodes, run.trainer.n_gpus_per_node = trainer.nnodes, trainer.n_gpus_per_node
    run.trainer.device, run.trainer.seed = trainer.device, rollout.seed
    run.trainer.default_local_dir = trainer.default_local_dir
    run.algorithm.adv_estimator = "grpo"  # one that needs neither a critic nor a reference
    run._set = {f"actor_rollout_ref.{key}": order for key, order in config._set.items()}
    complete(run)
    return run


def _writable(path: str) -> Path:
    """The output's place, its folder made. UserError if it cannot be written."""
    target = Path(path).expanduser()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            raise IsADirectoryError(21, "it is a directory")
    except OSError as error:
        raise UserError(f"data.output_path={path} cannot be written: {error.strerror}") from error
    return target


def _open_data(config: GenerationConfig, run: Config, tracking: Tracking) -> tuple[PromptDataset, Any]:
    """The prompts and the tokenizer; rows that cannot be used are left out and counted. UserError if none is left."""
    arr = run.actor_rollout_ref
    tokenizer, processor = open_tokenizer(arr.model, run.data, tracking)
    rules = replace(RowRules.of(run), needs_truth=False, needs_source=False)
    try:
        tools = checked_tools(arr.rollout, tokenizer, run.data.apply_chat_template_kwargs)
        options: dict[str, Any] = {"rules": rules, "tools": tools, "processor": processor}
        data = PromptDataset(config.data.path or [], run, tokenizer, split="prompts", **options)
    except DataError as error:
        message = str(error).replace("data.max_prompt_length", "rollout.prompt_length")
        raise DataError(message, error.records) from error
    tracking.data_report(data)
    return data, tokenizer


def _build(run: Config, tokenizer: Any, tracking: Tracking, hooks: RunHooks) -> tuple[RolloutManager, WorkerSet]:
    """The samplers and what drives them."""
    settings = rollout_settings(run)
    settings = replace(settings, max_lost_ratio=1.0)  # the share of a prompt's own responses says little
    if not run.actor_rollout_ref.rollout.do_sample:
        settings = replace(settings, sampling=replace(settings.sampling, temperature=0.0))
    workers = start_samplers(run, tokenizer, hooks)
    return open_rollouts(run, settings, workers.sampler, tokenizer, _unscored, tracking), workers


async def _unscored(trajectory: Trajectory) -> None:
    """Nothing scores these responses."""


# ------------------------------------------------------------------------------------------------------ sampling


@dataclass
class Generated:
    """The responses. texts: "{file number}:{row}" → responses, None where the sampler lost one; tokens: their lengths
    (of the longest segment); shown: those of the first rows, for the page; skipped: rows that failed when they were
    drawn."""

    texts: dict[str, list[str | None]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    shown: list[Trajectory] = field(default_factory=list)
    played: list[AgentRecord] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    cut: int = 0
    lost: int = 0
    skipped: int = 0
    seconds: float = 0.0

    def add(self, number: int, batch: Batch) -> None:
        """Note the responses to usable prompt `number`."""
        sampled = [t for t in batch if t.finish_reason != "lost"]
        row = batch[0].uid.removesuffix("@0")
        self.texts[row] = [None if t.finish_reason == "lost" else t.text for t in batch]
        self.tokens[row] = [t.longest for t in batch]
        self.lengths += [t.policy_tokens for t in sampled]
        self.played += AgentRecord.of(sampled)
        self.cut += sum(t.finish_reason == "length" for t in sampled)
        self.lost += len(batch) - len(sampled)
        if number < SAMPLED:
            self.shown += batch

    def metrics(self) -> dict[str, Number]:
        """generation/…, the lengths as in training, and what agent loops did as in validation."""
        tokens, count = sum(self.lengths), max(1, len(self.lengths))
        turns = spread("num_turns", [t.num_turns for t in self.played], ("min", "max", "mean"))
        return (turns | dialogue_metrics(self.played) if self.played else {}) | {
            "generation/num_prompts": len(self.texts),
            "generation/num_tokens": tokens,
            "generation/tokens_per_s": tokens / max(self.seconds, 1e-9),
            "generation/lost": self.lost,
            "response_length/mean": tokens / count,
            "response_length/max": max(self.lengths, default=0),
            "response_length/clip_ratio": self.cut / count,
        }

    def record(self, tracking: Tracking) -> None:
        """Metrics, sampled responses and the page, into the run folder."""
        tracking.log(0, self.metrics())
        tracking.dump_trajectories(0, sorted(self.shown, key=lambda t: (t.prompt.file, t.prompt.row)))
        tracking.finish("finished")
        tracking.write_page(last=True)


async def _sample(data: PromptDataset, rollouts: RolloutManager, at_a_time: int, phases: Phases) -> Generated:
    """`settings.n` responses to every prompt. As soon as one prompt is done the next begins.

    RolloutError when more than `MAX_LOST_RATIO` of all responses were lost.
    """
    result, numbers, n = Generated(), iter(range(len(data))), rollouts.settings.n
    progress, started = Progress(len(data), title="Generation"), time.perf_counter()

    async def stream() -> None:
        """One prompt after the other, of those that are left."""
        for number in numbers:
            try:
                prompt = data.prompt(number)
            except BadRow as bad:  # an image that only its decoder finds broken
                result.skipped += 1
                notice(f"prompt {number} is left out: {bad}")
                continue
            batch = await rollouts.sample([prompt], rollouts.settings.sampling, n)
            await rollouts.scored(batch)
            result.add(number, batch)
            _check_lost(result.lost, n * len(data), batch)
            phases.beat()
            progress.advance_to(len(result.texts))

    try:
        with phases("gen", waits_for=f"{n * len(data)} responses"):
            await asyncio.gather(*(stream() for _ in range(min(at_a_time, len(data)))))
    finally:
        progress.close()
    result.seconds = time.perf_counter() - started
    return result


def _check_lost(lost: int, total: int, batch: Batch) -> None:
    if lost > MAX_LOST_RATIO * total:
        last = next((t.score_error for t in batch if t.finish_reason == "lost"), "")
        raise RolloutError(f"{lost} of {total} responses are lost, nothing is written; the last: {last}")


# ------------------------------------------------------------------------------------------------------- writing


def joined_rows(files: Sequence[RowFile]) -> pa.Table:
    """All rows of the files, without the columns that `write_responses` adds. UserError for columns of one name and
    different types."""
    tables = []
    for file in files:
        if isinstance(file, ParquetFile):
            table = pq.read_table(file.local, partitioning=None)
        else:
            rows = [{name: row.get(name) for name in file.columns} for row in file.rows(0, len(file))]
            table = pa.Table.from_pylist(rows)
        # Notes of other libraries on the columns would no longer hold.
        table = table.replace_schema_metadata(None)
        tables.append(table.drop_columns([name for name in (COLUMN, LENGTHS) if name in table.column_names]))
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise UserError(f"the files of data.path do not fit into one table: {error}") from error


def write_responses(rows: pa.Table, files: Sequence[RowFile], done: Generated, target: Path) -> None:
    """Write `rows` as parquet, with columns `responses` (list of strings) and `response_lengths` (of integers, in
    tokens), both null for rows that were left out."""
    places = [f"{number}:{row}" for number, file in enumerate(files) for row in range(len(file))]
    texts = pa.array([done.texts.get(place) for place in places], pa.list_(pa.string()))
    lengths = pa.array([done.tokens.get(place) for place in places], pa.list_(pa.int64()))
    with written_whole(target) as beside:
        pq.write_table(rows.append_column(COLUMN, texts).append_column(LENGTHS, lengths), beside)
