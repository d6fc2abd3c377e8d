"""Steps of a run again, from its journal and its checkpoints: what made a step, what another setting would have made of
it, where two runs part, and what transformers says of its log-probs.

    checkpoint c ──▶ replay steps c + 1 … N − 1 of the journal ──▶ the weights of step N ──▶ step N, as it was
                                                                                        ├──▶ step N, with changes
                                                                                        └──▶ log-probs by transformers

Nothing is sampled. In one process on the processor that trained, loss and gradient norm are those of the run, bit for
bit.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from verl.algorithms.kl import get_kl_controller
from verl.algorithms.needs import passes
from verl.checkpoint.read import open_checkpoint
from verl.checkpoint.write import sealed
from verl.config import Config
from verl.config.schema.base import put
from verl.config.yaml_files import load_yaml
from verl.data.tokenizer import tokenizer_of
from verl.engine.registry import placement
from verl.errors import UserError
from verl.models.inputs import VisionInputs, sees_images, special_token_ids
from verl.models.pretrained import load_config
from verl.models.sampling_mask import SamplingMask
from verl.rollout.schedule import Versions
from verl.tracking import journal
from verl.tracking.names import plain_metrics
from verl.tracking.run_folder import JOURNAL, METRICS
from verl.trainer.checkpoints import changes
from verl.trainer.colocation import Colocation
from verl.trainer.parts import set_texts
from verl.trainer.ppo_trainer import train_on
from verl.trajectory import COLUMNS, VIDEO_SECONDS, Batch, Segment
from verl.workers.launch import build_here
from verl.workers.roles import Policy, Role

PHASES = {"rollout": "gen"}
"""Sources of columns → the phase that fills them, where it has another name."""


@dataclass(slots=True)
class Outcome:
    """What a step came to: its metrics, the advantages of all response tokens, float32 [ΣL], and the policy's gradient
    in the first update."""

    metrics: dict[str, Any]
    advantages: np.ndarray
    gradient: list[torch.Tensor] = field(default_factory=list)


class Replica:
    """The trained roles of a run in this process. config: the run's, perhaps with changes."""

    def __init__(self, config: Config, total_steps: int):
        for path in ("actor_rollout_ref.actor", "actor_rollout_ref.ref"):
            keys = placement(config.select(path), path).keys
            for key in (keys[size] for size in ("sequence", "tensor", "pipeline", "expert") if size in keys):
                put(config, key, 1)
        self._config, algorithm = config, config.algorithm
        self._worker, _, self.roles = build_here(config, total_steps)
        policy = self.roles["actor"]
        assert isinstance(policy, Policy)
        set_texts(config, self.roles, tokenizer_of(config.actor_rollout_ref.model, config.data.tokenizer))
        self._passes = passes(config, policy.updates_per_step)
        if missing := {forward.role for forward in self._passes} - self.roles.keys():
            raise UserError(f"{', '.join(sorted(missing))}: roles with devices of their own are not replayed")
        self._kl = get_kl_controller(algorithm.kl_ctrl) if algorithm.use_kl_in_reward else None
        self._estimator_state: dict[str, Any] = {}
        self._colocation = Colocation(config, None)

    def load(self, part: Callable[[str], Path], state: Mapping[str, Any]) -> None:
        """Weights and optimizers from the folders of a checkpoint, and what its `state` of the loop has."""
        for role in (role for role in self.roles.values() if role.moves):
            role.load("weights", part(role.name))
            if role.trained:
                role.load("optimizer", part(f"state/{role.name}_optim"))
        self._estimator_state = copy.deepcopy(dict(state.get("estimator") or {}))
        if self._kl is not None and (kl := state.get("kl_controller")):
            self._kl.load_state_dict(dict(kl))

    def save(self, folder: Path) -> dict[str, Any]:
        """Write what `load` reads; returns the state that it takes."""
        for role in (role for role in self.roles.values() if role.moves):
            for part, name in (("weights", role.name), ("optimizer", f"state/{role.name}_optim"))[: 1 + role.trained]:
                (folder / name).mkdir(parents=True)
                role.save(part, folder / name)
        kl = None if self._kl is None else self._kl.state_dict()
        return {"estimator": copy.deepcopy(self._estimator_state), "kl_controller": kl}

    def train(self, batch: Batch, step: int) -> Outcome:
        """A step, from its scores on."""
        gradients: dict[int, torch.Tensor] = {}
        parameters = list(self._worker.engine().module.parameters())
        ids = {id(parameter) for parameter in parameters}

        def keep(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if id(parameter) in ids and id(parameter) not in gradients and parameter.grad is not None:
                    gradients[id(parameter)] = parameter.grad.detach().cpu().clone()

        hook = register_optimizer_step_pre_hook(keep)
        try:
            n = self._config.actor_rollout_ref.rollout.n
            metrics, updates = train_on(
                self._config, self.roles, self._passes, batch, step,
                n=n, kl=self._kl, state=self._estimator_state, within=self._within,
            )  # fmt: skip
        finally:
            hook.remove()
        for update in updates.values():
            metrics |= update.metrics
        advantages = np.concatenate([t.advantages for t in batch])
        return Outcome(metrics, advantages, [gradients[id(p)] for p in parameters if id(p) in gradients])

    @contextmanager
    def _within(self, phase: str, role: Role | None, optimizer: bool) -> Iterator[None]:
        if role is None:
            yield
            return
        with self._colocation.computing(role, optimizer=optimizer):
            yield


class Recording:
    """The journal, checkpoints and metrics of a run folder."""

    def __init__(self, run: Path):
        self.run, self.steps = run, journal.steps(run / JOURNAL)
        content = (run / METRICS).read_bytes() if (run / METRICS).is_file() else b""
        lines = content.split(b"\n")[:-1]  # a run that was killed may have begun another
        self.metrics = {record["step"]: record for record in map(json.loads, lines) if "step" in record}
        if not self.steps:
            raise UserError(f"{run} has no {JOURNAL}/: the run was made with trainer.journal=0, or before it was kept")

    def load(self, step: int, *, computed: bool = False) -> Batch:
        """The trajectories of a step. UserError where the journal lacks it."""
        return journal.read(self._path(step), computed=computed)[0]

    def about(self, step: int) -> dict[str, Any]:
        """What the journal says of a step as a whole."""
        return journal.read(self._path(step))[1]

    def _path(self, step: int) -> Path:
        if step not in self.steps:
            there = f"{min(self.steps)} to {max(self.steps)}"
            raise UserError(f"{self.run / JOURNAL} does not have step {step}, only {there} (trainer.journal, GiB)")
        return self.steps[step]

    def before(self, step: int) -> Path | None:
        """The nearest checkpoint from which the journal leads to the weights of a step; None: the start of the run."""
        starts = {at: path for _, at, path in sealed(self.run) if at < step and (path / "state/actor_optim").is_dir()}
        start = max(starts, default=0)
        if absent := [n for n in range(start + 1, step + 1) if n not in self.steps]:
            raise UserError(
                f"step {step} needs steps {start + 1} to {step} of {self.run / JOURNAL}, which lacks {absent[0]}: "
                "keep more (trainer.journal, GiB), or save checkpoints more often (trainer.save_freq)"
            )
        return starts.get(start)

    def replica(self, config: Config, step: int) -> Replica:
        """The trainer with the weights that it had before a step."""
        about, checkpoint = self.about(step), self.before(step)
        torch.set_num_threads(about["threads"])
        replica, start = Replica(config, about["total_steps"]), 0
        if checkpoint is not None:
            opened = open_checkpoint(checkpoint)
            replica.load(opened.part, opened.loop_state)
            start = opened.step
        for earlier in range(start + 1, step):
            replica.train(self.load(earlier), earlier)
        return replica


def replay(
    run: Path, step: int, config: Callable[..., Config], changed: Sequence[str] = (), reward: Path | None = None
) -> Iterator[str]:
    """Lines on a step of a run, computed again; then on the same step with other settings, or rewards. config: makes
    the run's configuration with these overrides."""
    recording = Recording(run)
    config(*changed)  # mistakes are said before the step is computed
    replica, before = recording.replica(config(), step), recording.before(step)
    yield f"step {step} of {run}, from {'the start' if before is None else before.name}"
    with TemporaryDirectory(prefix="verl-replay-") as folder:
        variation = bool(changed or reward)
        state = replica.save(Path(folder)) if variation else {}
        then = replica.train(recording.load(step), step)
        yield from _against_record(then.metrics, recording.metrics.get(step, {}))
        if not variation:
            return
        del replica
        batch = recording.load(step)
        other = config(*changed, *([f"custom_reward_function.path={reward}"] if reward else ()))
        if reward:
            score(other, batch)
        replica = Replica(other, recording.about(step)["total_steps"])
        replica.load(lambda name: Path(folder) / name, state)
        yield f"with {', '.join([*changed, *([f'--reward {reward}'] if reward else ())])}"
        scores = [[t.score for t in rows] for rows in (recording.load(step), batch)]
        if reward:
            moved = sum(a != b for a, b in zip(*scores, strict=True))
            yield f"  scores             {moved} of {len(batch)} differ"
        yield from compared(then, replica.train(batch, step))


def _against_record(metrics: Mapping[str, Any], record: Mapping[str, Any]) -> Iterator[str]:
    numbers = {name: value for name, value in plain_metrics(metrics)[0].items() if name in record}
    apart = [name for name, value in numbers.items() if not _same(value, record[name])]
    for name in dict.fromkeys([n for n in ("actor/loss", "actor/pg_loss", "actor/grad_norm") if n in numbers] + apart):
        verdict = f"recorded {record[name]!r}" if name in apart else "as recorded"
        yield f"  {name:<24} {numbers[name]!r}  {verdict}"
    yield f"  {len(numbers) - len(apart)} of {len(numbers)} recorded metrics are the same, bit for bit"


def _same(value: float, recorded: float | None) -> bool:
    return value == recorded or (recorded is None and not np.isfinite(value))


def compared(then: Outcome, other: Outcome) -> Iterator[str]:
    """Lines on what two outcomes of the same tokens have in common."""
    a, b = then.advantages, other.advantages
    moved, turned = np.mean(a != b), np.mean(a * b < 0)
    yield f"  {'advantages':<24} {moved:.1%} of the tokens differ, {turned:.1%} have another sign"
    names = [n for n in then.metrics if n in other.metrics and n.startswith(("actor/", "critic/vf"))]
    for name in names:
        if not _same(then.metrics[name], other.metrics[name]):
            yield f"  {name:<24} {then.metrics[name]:.6g} → {other.metrics[name]:.6g}"
    dot, norms = _products(then.gradient, other.gradient)
    yield f"  {'gradient':<24} cosine {dot / norms:.6f}" if norms else f"  {'gradient':<24} none to compare"


def _products(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> tuple[float, float]:
    """The product of two gradients, and that of their norms."""
    pairs = (
        [(x.double().flatten(), y.double().flatten()) for x, y in zip(a, b, strict=True)] if len(a) == len(b) else []
    )
    dot, first, second = (
        sum(float(p @ q) for p, q in parts) for parts in (pairs, [(x, x) for x, _ in pairs], [(y, y) for _, y in pairs])
    )
    return dot, (first * second) ** 0.5


def score(config: Config, batch: Batch) -> None:
    """Score the responses anew, but for those that the sampler lost."""
    from verl.reward.runner import RewardRunner

    rewards = RewardRunner(config, events=lambda kind, **fields: None)
    for t in [*batch, *(t.baseline for t in batch if t.baseline is not None)]:
        if t.finish_reason != "lost":
            t.score, t.score_parts, t.score_error = None, {}, None
    try:
        asyncio.run(rewards.score_batch(batch))
        rewards.check_errors(batch)
    finally:
        rewards.close()


# -- two runs ------------------------------------------------------------------------------------------------------


def diff(first: Path, second: Path) -> Iterator[str]:
    """Lines on the first step, phase and tensor at which two runs part."""
    one, two = Recording(first), Recording(second)
    common = sorted(one.steps.keys() & two.steps.keys())
    if not common:
        raise UserError("the two journals have no step in common")
    for key, a, b in changes(load_yaml(first / "config.yaml"), load_yaml(second / "config.yaml")):
        yield f"setting {key}: {a} and {b}"
    for step in common:
        if parts := next(_partings(one, two, step), None):
            yield f"step {step}, {parts}"
            return
    yield f"the same in steps {common[0]} to {common[-1]}, {len(common)} in common"


def _partings(one: Recording, two: Recording, step: int) -> Iterator[str]:
    """In the order of a step's phases, what differs in it."""
    a, b = (recording.load(step, computed=True) for recording in (one, two))
    rows_a, rows_b = a.segments, b.segments
    if [(r.uid, r.index) for r in rows_a] != [(r.uid, r.index) for r in rows_b]:
        place = next(
            (n for n, (x, y) in enumerate(zip(rows_a, rows_b, strict=False)) if (x.uid, x.index) != (y.uid, y.index)),
            None,
        )
        yield f"gen, prompts: {len(rows_a)} and {len(rows_b)} segments, the first other one is number {place}"
        return
    pairs = list(zip(rows_a, rows_b, strict=True))
    yield from _column("gen", "context_ids", [(r.context_ids, s.context_ids, r) for r, s in pairs])
    sources = dict.fromkeys(column.source for column in COLUMNS.values())
    for source in sources:
        phase = PHASES.get(source, source)
        if source == "reward":
            continue
        if source == "old_log_prob":
            scored = [
                (np.array([x.score], float), np.array([y.score], float), x.segments[0])
                for x, y in zip(a, b, strict=True)
            ]
            yield from _column("reward", "score", scored)
        for name in (name for name, column in COLUMNS.items() if column.source == source):
            yield from _column(phase, name, [(r.columns.get(name), s.columns.get(name), r) for r, s in pairs])
    metrics = [recording.metrics.get(step, {}) for recording in (one, two)]
    for name in (n for n in metrics[0] if n in metrics[1] and n.startswith(("actor/", "critic/"))):
        if metrics[0][name] != metrics[1][name]:
            yield f"update, {name}: {metrics[0][name]!r} and {metrics[1][name]!r}"


def _column(phase: str, name: str, triples: list[tuple[Any, Any, Segment]]) -> Iterator[str]:
    """What is to be said of a column's arrays in the two runs, if they differ."""
    other = [(x, y, row) for x, y, row in triples if not _equal(x, y)]
    if not other:
        return
    x, y, row = other[0]
    where = f"response {row.index} of {row.uid}"
    if x is None or y is None or x.shape != y.shape:
        shapes = " and ".join("absent" if v is None else str(list(v.shape)) for v in (x, y))
        yield f"{phase}, {name}: {len(other)} of {len(triples)} rows differ, first {where}: {shapes}"
        return
    place = tuple(int(i) for i in np.argwhere(~((x == y) | ((x != x) & (y != y))))[0])
    at = f"{where}, token {place[0]}: {x[place]!r} and {y[place]!r}"
    yield f"{phase}, {name}: {len(other)} of {len(triples)} rows differ, first {at}"


def _equal(x: Any, y: Any) -> bool:
    if x is None or y is None:
        return x is y
    return x.shape == y.shape and bool(((x == y) | ((x != x) & (y != y))).all())


# -- transformers ----------------------------------------------------------------------------------------------------


def audit(run: Path, step: int, config: Config) -> Iterator[str]:
    """Lines on how far the log-probs of a step's tokens, the sampler's and the trainer's, are from those of
    transformers with the weights of that step, row by row and in float32."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    recording, temperature = Recording(run), float(config.actor_rollout_ref.rollout.temperature)
    rows = [row for row in recording.load(step, computed=True).segments if row.response_mask.any()]
    if any(row.media is not None and VIDEO_SECONDS in row.media.inputs for row in rows):
        raise UserError(f"step {step} has videos: `verl audit` is for text and images; `verl replay` computes it again")
    version = Versions.of(config.trainer).at(step)
    with TemporaryDirectory(prefix="verl-audit-") as folder:
        recording.replica(config, step).roles["actor"].save("weights", Path(folder))
        trust = config.actor_rollout_ref.model.trust_remote_code
        sees = sees_images(load_config(folder, {"trust_remote_code": trust}))
        loader: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        model = loader.from_pretrained(folder, dtype=torch.float32, trust_remote_code=trust).eval()
    current = [row for row in rows if row.versions == (version,)]
    yield f"step {step} of {run}: {len(rows)} rows, {len(current)} of them sampled with the weights of this step"
    log_probs = {id(row): _log_probs(model, row, temperature) for row in rows}
    for name, of in (("rollout_log_probs", current), ("old_log_probs", rows)):
        apart = [
            (np.abs(values - log_probs[id(row)])[row.response_mask], row)
            for row in of
            if (values := row.columns.get(name)) is not None
        ]
        if apart:
            worst, row = max(apart, key=lambda pair: pair[0].max())
            mean = np.concatenate([values for values, _ in apart]).mean()
            where = f"in response {row.index} of {row.uid}"
            yield f"  {name:<18} largest difference {worst.max():.3g} nats ({where}), mean {mean:.3g}"


@torch.no_grad()
def _log_probs(model: Any, row: Segment, temperature: float) -> np.ndarray:
    """Of a row's response tokens, float32 [L], by a plain forward pass."""
    ids = torch.from_numpy(np.concatenate([row.context_ids, row.response_ids]))[None]
    images = {}
    if row.media is not None:
        images = VisionInputs.tensors([row.media], "cpu")
        if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
            in_context = torch.arange(ids.shape[1]) < len(row.context_ids)
            images["mm_token_type_ids"] = ((ids == model.config.image_token_id) & in_context).int()
    z = model(ids, **images).logits[0, len(row.context_ids) - 1 : -1].float() / temperature
    z[:, special_token_ids(model.config)] = -torch.inf
    mask = None if row.sampling_mask is None else SamplingMask.of(list(row.sampling_mask), "cpu")
    z = z if mask is None else mask.bar(z, slice(0, len(z)))
    return z.log_softmax(-1).gather(1, torch.from_numpy(row.response_ids)[:, None])[:, 0].numpy()
