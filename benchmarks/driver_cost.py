"""What a step costs the driver when the model is elsewhere, at 8,192 responses of 4,096 tokens.

    python benchmarks/driver_cost.py [--responses 8192] [--tokens 4096] [--ranks 8] [--samplers 8] [--seconds 20]
        [--steps 6] [--profile FILE] [--out FILE]

The driver's side is the real one: `ReplicaPool` and `RolloutManager` (responses come one by one over `--seconds`), the
scoring pool with a function that does nothing, `WorkerGroup`, advantages, metrics, the dump of a step's first
responses. The others are Ray actors without a model (`driver_stand_ins.py`); a sampler is the real `RolloutWorker`
around an engine that cuts its responses out of this repository's text. The tokenizer is a BPE trained on the same text.

Reported by part: seconds the driver computes (its processor time, all threads), and seconds on the clock, which
on a machine with fewer cores than processes are the others' too. `texts_decoded` is how many responses' texts the
driver decoded itself.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from driver_stand_ins import Echo, Teller, prepare
from sides import write_result

ROOT = Path(__file__).resolve().parent.parent
GROUP = 8
PROMPT_TOKENS = 200
OLD, REFERENCE = {"log_probs": "old_log_probs", "entropy": "entropy"}, {"log_probs": "ref_log_probs"}
Parts = dict[str, tuple[float, float]]


class Step:
    """The parts of a step, one method each, in their order. What is set up in `__init__` is set up once a run."""

    def __init__(self, given: argparse.Namespace, folder: Path):

        from verl.data.tokenizer import load_tokenizer
        from verl.reward.pool import FunctionSpec
        from verl.reward.runner import RewardRunner
        from verl.reward.settings import RewardSettings
        from verl.workers.roles import Policy, Role

        self.given = given
        self.loop = asyncio.Runner()
        self.tokenizer = load_tokenizer(folder)
        self.decoded = 0
        (folder / "score.py").write_text("def compute_score(*args, **kwargs):\n    return 1.0\n")
        function = FunctionSpec(path=str(folder / "score.py"))
        self.rewards = RewardRunner(None, settings=RewardSettings(function=function, num_workers=2))
        self.rollouts = self._rollouts(folder)
        self.training = self._training()
        self.policy, self.reference = (
            Policy("actor", self.training, self.training.plan),
            Role("ref", self.training),
        )
        self.algorithm = SimpleNamespace(
            adv_estimator="grpo",
            norm_adv_by_std_in_grpo=True,
            use_kl_in_reward=False,
            rollout_correction=None,
        )

    def _rollouts(self, folder: Path) -> Any:
        import ray

        from verl.data.rows import text_of
        from verl.engine.rollout.base import SamplingParams
        from verl.rollout.attempt import RolloutSettings
        from verl.rollout.groups import RolloutManager
        from verl.workers.ray.calls import WorkerHandle
        from verl.workers.ray.replicas import Replica, ReplicaPool

        given = self.given
        actor = ray.remote(max_concurrency=64, num_cpus=0)(Teller)
        handles = [actor.remote({}, i) for i in range(given.samplers)]
        ray.get([handle.begin.remote(str(folder), given.tokens, given.seconds) for handle in handles])
        hosts = [Replica(i, _never, WorkerHandle(h, f"s{i}", "here"), "here") for i, h in enumerate(handles)]

        async def later(_: Any) -> None:
            """Scoring is a part of its own here."""

        def decode(ids: np.ndarray) -> str:
            self.decoded += 1
            return text_of(self.tokenizer, ids)

        settings = RolloutSettings(SamplingParams(max_tokens=2 * given.tokens), n=GROUP, seed=0)
        return RolloutManager(
            ReplicaPool(hosts, event=print),
            settings,
            decode=decode,
            on_finished=later,
            tokenizer=self.tokenizer,
        )

    def _training(self) -> Any:
        import ray

        from verl.workers.group import WorkerGroup
        from verl.workers.ray.calls import RayCalls, WorkerHandle
        from verl.workers.update_plan import UpdatePlan

        echo = ray.remote(num_cpus=0)(Echo)
        ranks = self.given.ranks
        calls = RayCalls([WorkerHandle(echo.remote(), f"rank {i}", "here") for i in range(ranks)])
        cfg = SimpleNamespace(ppo_mini_batch_size=256, ppo_epochs=1, shuffle=False)
        plan = UpdatePlan(cfg, max_response_length=1.0, batch_prompts=self.given.responses // GROUP)
        return WorkerGroup(calls, [{"dp_rank": rank} for rank in range(ranks)], plan=plan)

    def run(self, number: int) -> tuple[Parts, dict[str, Any]]:
        """Seconds of each part: (computed, on the clock); and facts of the step."""
        parts: Parts = {}
        self.decoded = 0
        prompts = self._prompts(number)
        batch = _time(parts, "responses", lambda: self.loop.run(self._take(prompts)))
        assert all(row.text for row in batch), "a response came without its text"
        _time(parts, "scores", lambda: self.loop.run(self.rewards.score_batch(batch)))
        _time(parts, "rows", lambda: self.training.place(batch, "rows"))
        _time(parts, "old_log_prob", lambda: self.policy.forward(batch, "old_log_prob", OLD))
        _time(parts, "ref", lambda: self.reference.forward(batch, "ref", REFERENCE))
        _time(parts, "advantages", lambda: self._advantages(batch))
        _time(parts, "update", lambda: self.policy.update(batch, step=number))
        _time(parts, "metrics", lambda: self._metrics(number, batch))
        rows = _time(parts, "dump", lambda: self._dump(number, batch))
        _time(parts, "dump_write", lambda: [json.dumps(row) for row in rows])  # a run does this in a thread
        return parts, {"tokens": int(batch.lengths.sum()), "texts_decoded": self.decoded}

    def _prompts(self, number: int) -> list[Any]:
        from verl.trajectory import Prompt

        rng = np.random.default_rng(number)
        return [
            Prompt(f"0:{i}@{number}", rng.integers(0, 10_000, PROMPT_TOKENS), messages=None, data_source="bench")
            for i in range(self.given.responses // GROUP)
        ]

    async def _take(self, prompts: list[Any]) -> Any:
        batch = await self.rollouts.take(prompts)
        await self.rollouts.scored(batch)
        return batch

    def _advantages(self, batch: Any) -> None:
        from verl.algorithms.batch_advantages import compute_advantages

        compute_advantages(batch, self.algorithm, GROUP)

    def _metrics(self, number: int, batch: Any) -> None:
        from verl.tracking.step_metrics import Counters, StepFacts, step_metrics

        facts = StepFacts(
            step=number,
            epoch=0,
            timings={"step": 1.0, "gen": 1.0},
            weight_version=number,
            max_prompt_length=PROMPT_TOKENS,
            max_response_length=2 * self.given.tokens,
        )
        step_metrics(batch, facts, Counters())

    def _dump(self, number: int, batch: Any) -> list[Any]:
        from verl.tracking.responses import TokenTexts, report_rows, sampled

        return report_rows(number, sampled(list(batch)), TokenTexts(self.tokenizer))


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Seconds by part: the median of the steps after the first, which also makes the object store's pages."""
    import ray

    # The workers find this repository, and what lies beside this file, as this process does.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    ray.init("local", include_dashboard=False, object_store_memory=4 << 30, logging_level="ERROR")
    profile = cProfile.Profile() if given.profile else None
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = prepare(Path(folder), [*ROOT.glob("docs/*.md"), *ROOT.glob("verl/**/*.py")])
        step = Step(given, Path(folder))
        records = []
        gc.collect()
        gc.freeze()  # as a run does
        for number in range(given.steps):
            if profile is not None and number == given.steps - 1:
                profile.enable()
            records.append(step.run(number))
        if profile is not None:
            profile.disable()
            profile.dump_stats(given.profile)
        step.rewards.close()
        step.loop.close()
        ray.shutdown()
    late = [parts for parts, _ in records[1:]]
    out: dict[str, Any] = {
        "responses": given.responses,
        **records[-1][1],
        "ranks": given.ranks,
        "samplers": given.samplers,
        "vocabulary": vocabulary,
        "steps": len(late),
    }
    out["parts"] = {}
    for name in late[0]:
        computed, clock = ([parts[name][i] for parts in late] for i in (0, 1))
        out["parts"][name] = {
            "driver_s": round(float(np.median(computed)), 3),
            "driver_s_min": round(min(computed), 3),
            "driver_s_max": round(max(computed), 3),
            "clock_s": round(float(np.median(clock)), 3),
        }
    totals = [sum(computed for computed, _ in parts.values()) for parts in late]
    out["driver_s"] = round(float(np.median(totals)), 3)
    out["driver_us_per_response"] = round(out["driver_s"] / given.responses * 1e6, 1)
    return out


def _never() -> Any:
    raise RuntimeError("a stand-in for a sampler died")


def _time(parts: Parts, name: str, work: Callable[[], Any]) -> Any:
    cpu, clock = time.process_time(), time.perf_counter()
    result = work()
    parts[name] = (time.process_time() - cpu, time.perf_counter() - clock)
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--samplers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0, help="over which the responses of a step come")
    parser.add_argument("--steps", type=int, default=6, help="the first is not counted")
    parser.add_argument("--profile", help="where to put cProfile's record of the last step")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    from verl.platform.host_resources import prepare_process, tune_allocator

    prepare_process()  # as a run's driver does
    tune_allocator()
    found = measure(given)
    write_result(found, given.out)


if __name__ == "__main__":
    main()
