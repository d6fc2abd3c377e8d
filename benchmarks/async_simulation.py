"""What bounded staleness gains on many devices: a discrete-event simulation with long-tailed response lengths.

    python benchmarks/async_simulation.py [--out benchmarks/results/async_simulation.json] [--steps 24]

Devices sample, train, or do both in turn. A sampling device decodes all its responses together: a pass over n responses
takes `pass_s + response_s · n`, so a response's pace depends on its neighbours. What may start when is the rule of
`verl.rollout.schedule`: the groups of step s may start once version s − 1 − k of the weights is in the samplers. The
trainer takes the oldest groups, in draw order, as the real loop does. For each way of working the split of devices
between sampling and training is the best of those tried, at 64 devices and as many prompts for each. Nothing here is
measured: the numbers say how the schedules compare under the assumptions below, not how fast any machine is.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections import Counter, deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Assumptions:
    """A model of 8 billion parameters on devices of about 800 TFLOP/s and 4 TB/s, one device an engine.

    pass_s, response_s    seconds of one decode pass: reading the weights, and per response its cache and products
    prefill_per_s       prompt tokens a sampling device computes per second (also of responses that go on)
    train_per_s         response tokens a training device trains per second, old log-probs included
    sync_s              seconds of a weight transfer, in which nothing is sampled and nothing trained
    prompt, median, sigma, longest    tokens: prompts; log-normal responses, cut at `longest`
    slots               responses a device decodes at a time
    """

    pass_s: float = 0.008
    response_s: float = 0.00006
    prefill_per_s: float = 20_000.0
    train_per_s: float = 5_000.0
    sync_s: float = 4.0
    prompt: int = 512
    median: float = 2_000.0
    sigma: float = 1.0
    longest: int = 16_384
    slots: int = 128
    group: int = 8


@dataclass(frozen=True)
class Way:
    """How a run works. staleness k; `partial`: responses in flight go on after a sync, else the sync waits for them.

    `shared`: every device samples, then every device trains (k = 0 only).
    """

    name: str
    staleness: int
    partial: bool = True
    shared: bool = False


WAYS = (
    Way("synchronous, shared devices", 0, shared=True),
    Way("synchronous, two pools", 0),
    Way("one step off, sync waits for responses", 1, partial=False),
    Way("one step off, responses continued", 1),
    Way("k = 2, responses continued", 2),
    Way("k = 4, responses continued", 4),
    Way("k = 8, responses continued", 8),
    Way("k = 4, sync waits for responses", 4, partial=False),
)
SPLITS = (0.25, 0.375, 0.5, 0.625, 0.75, 0.8125, 0.875)
"""Shares of the devices that sample, where pools are apart."""


@dataclass(slots=True, eq=False)
class GenerateResult:
    """One response: tokens to write, step it belongs to, versions that wrote its first and last token."""

    tokens: int
    step: int
    first: int = -1
    last: int = -1


@dataclass(slots=True)
class Device:
    """A sampling device. `pace` counts passes so far: a response that starts now ends at pace + tokens."""

    number: int
    owed: int = 0
    pace: float = 0.0
    since: float = 0.0
    paused_until: float = 0.0
    running: list[tuple[float, int, GenerateResult]] = field(default_factory=list)
    waiting: deque[GenerateResult] = field(default_factory=deque)
    epoch: int = 0


class Simulation:
    """One run. `samplers` and `trainers` are numbers of devices (the same ones when way.shared)."""

    def __init__(self, how: Assumptions, way: Way, samplers: int, trainers: int, prompts: int, seed: int = 0):
        self.how, self.way, self.trainers, self.prompts = how, way, trainers, prompts
        self.devices = [Device(i) for i in range(samplers)]
        self._lengths = np.random.default_rng(seed)
        self._now, self._serial, self._drawn = 0.0, 0, 0
        self.version = 0
        self._events: list[tuple[float, int, int]] = []
        self._owing = [(0, device.number) for device in self.devices]
        self._left: Counter[int] = Counter()
        self._batches: dict[int, list[GenerateResult]] = {}
        self.staleness: Counter[int] = Counter()
        self.newest: Counter[int] = Counter()
        self.spans: Counter[int] = Counter()
        self.busy_sampling = 0.0
        self.busy_training = 0.0

    def run(self, steps: int, warm_up: int) -> dict[str, Any]:
        """Train `steps` steps; figures are of those after the first `warm_up`."""
        tokens, began = 0, 0.0
        for step in range(1, steps + 1):
            self._draw_up_to(min(step + self.way.staleness, steps + self.way.staleness))
            self._until(lambda step=step: self._left[step] == 0)
            batch = self._batches.pop(step)
            written = sum(response.tokens for response in batch)
            seconds = written / (self.trainers * self.how.train_per_s)
            self._until_time(self._now + seconds)
            self._sync()
            if step == warm_up:
                began, tokens = self._now, 0
                self.busy_sampling = self.busy_training = 0.0
            elif step > warm_up:
                tokens += written
                self.busy_training += seconds
                for response in batch:
                    self.staleness[step - 1 - response.first] += 1
                    self.newest[step - 1 - response.last] += 1
                    self.spans[response.last - response.first + 1] += 1
        elapsed = self._now - began
        return {
            "step_s": elapsed / (steps - warm_up),
            "tokens_per_s": tokens / elapsed,
            "sampler_idle": 1 - self.busy_sampling / (elapsed * len(self.devices)),
            "trainer_idle": 1 - self.busy_training / elapsed,
            "staleness": _distribution(self.staleness),
            "staleness_of_last_token": _distribution(self.newest),
            "versions_per_response": _distribution(self.spans),
        }

    # -- what starts

    def _draw_up_to(self, step: int) -> None:
        how = self.how
        while self._drawn < step:
            self._drawn += 1
            size = (self.prompts, how.group)
            drawn = self._lengths.lognormal(np.log(how.median), how.sigma, size)
            lengths = np.clip(drawn.astype(int), 1, how.longest)
            self._batches[self._drawn] = []
            for group in lengths:
                device = self._least_owing()
                self._advance(device)
                # The prompt is prefilled once for the group: as many passes as that takes, before the first response.
                for tokens in group:
                    response = GenerateResult(int(tokens), self._drawn)
                    self._batches[self._drawn].append(response)
                    device.waiting.append(response)
                self._owe(device, len(group))
                self._left[self._drawn] += len(group)
                device.paused_until = max(device.paused_until, self._now) + how.prompt / how.prefill_per_s
                self._admit(device)

    def _owe(self, device: Device, responses: int) -> None:
        device.owed += responses
        heapq.heappush(self._owing, (device.owed, device.number))

    def _least_owing(self) -> Device:
        """The device with the fewest unfinished responses; entries that are out of date are dropped."""
        while self._owing[0][0] != self.devices[self._owing[0][1]].owed:
            heapq.heappop(self._owing)
        return self.devices[self._owing[0][1]]

    def _admit(self, device: Device) -> None:
        while device.waiting and len(device.running) < self.how.slots:
            response = device.waiting.popleft()
            response.first = self.version if response.first < 0 else response.first
            self._serial += 1
            heapq.heappush(device.running, (device.pace + response.tokens, self._serial, response))
        self._schedule(device)

    # -- time on a device

    def _pass(self, device: Device) -> float:
        return self.how.pass_s + self.how.response_s * len(device.running)

    def _advance(self, device: Device) -> None:
        """Bring a device to the present."""
        start = max(device.since, min(device.paused_until, self._now))
        if device.running:
            device.pace += (self._now - start) / self._pass(device)
            self.busy_sampling += self._now - start
        device.since = self._now

    def _schedule(self, device: Device) -> None:
        """The next response that ends here; what was scheduled before does not count any more."""
        device.epoch += 1
        if device.running:
            start = max(self._now, device.paused_until)
            at = start + max(0.0, device.running[0][0] - device.pace) * self._pass(device)
            heapq.heappush(self._events, (at, device.number, device.epoch))

    def _until(self, done: Any) -> None:
        while not done():
            self._next()

    def _until_time(self, end: float) -> None:
        while self._events and self._events[0][0] <= end:
            self._next()
        self._now = end

    def _next(self) -> None:
        at, number, epoch = heapq.heappop(self._events)
        device = self.devices[number]
        if epoch != device.epoch:
            return
        self._now = max(self._now, at)
        self._advance(device)
        while device.running and device.running[0][0] <= device.pace + 1e-6:
            response = heapq.heappop(device.running)[2]
            response.last = self.version
            self._owe(device, -1)
            self._left[response.step] -= 1
        self._admit(device)

    # -- weights

    def _sync(self) -> None:
        """Everything stops, the weights move; then responses go on from their prompt and what they have."""
        if not self.way.partial:
            held = [device.waiting for device in self.devices]
            for device in self.devices:
                device.waiting = deque()
            self._until(lambda: not any(device.running for device in self.devices))
            for device, waiting in zip(self.devices, held, strict=True):
                device.waiting = waiting
        for device in self.devices:
            self._advance(device)
        self.version += 1
        self._now += self.how.sync_s
        for device in self.devices:
            again = sum(self.how.prompt + response.tokens - (end - device.pace) for end, _, response in device.running)
            device.since = self._now
            device.paused_until = max(self._now, device.paused_until) + again / self.how.prefill_per_s
            self._admit(device)


def _distribution(counts: Counter[int]) -> dict[str, Any]:
    total = sum(counts.values())
    shares = {str(k): round(counts[k] / total, 4) for k in sorted(counts)}
    return {
        "mean": round(sum(k * n for k, n in counts.items()) / total, 4),
        "max": max(counts),
        "shares": shares,
    }


def best(how: Assumptions, way: Way, devices: int, prompts: int, steps: int) -> dict[str, Any]:
    """The figures of the split of devices with the most trained tokens per second, which is looked for on 64 of
    them."""
    warm_up = way.staleness + 2
    if way.shared:
        return {"samplers": devices} | Simulation(how, way, devices, devices, prompts).run(steps, warm_up)
    small = max(1, devices // 64)
    rates = {}
    for share in SPLITS:
        few = devices // small
        samplers = round(few * share)
        run = Simulation(how, way, samplers, few - samplers, prompts // small).run(steps, warm_up)
        rates[samplers * small] = run["tokens_per_s"]
    samplers = max(rates, key=lambda count: rates[count])
    return {"samplers": samplers} | Simulation(how, way, samplers, devices - samplers, prompts).run(steps, warm_up)


CASES = ((64, 256), (512, 2048), (512, 512))
"""Devices and prompts a step: the batch grows with the devices, or it does not."""


def main() -> None:
    """Run every case, print a table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=24)
    args = parser.parse_args()
    how, cases = Assumptions(), []
    for devices, prompts in CASES:
        rows, base = [], 0.0
        print(f"\n{devices} devices, {prompts} prompts × {how.group} responses a step")
        for way in WAYS:
            figures = best(how, way, devices, prompts, args.steps)
            base = base or figures["tokens_per_s"]
            figures = {"way": way.name, "gain": round(figures["tokens_per_s"] / base, 3)} | figures
            rows.append(figures)
            print(
                f"  {way.name:38s} {figures['gain']:5.2f}×  step {figures['step_s']:6.1f} s  samplers "
                f"{figures['samplers']:3d}  idle: sampler {figures['sampler_idle']:.0%}, trainer "
                f"{figures['trainer_idle']:.0%}  staleness mean {figures['staleness']['mean']:.2f}, max "
                f"{figures['staleness']['max']}",
                flush=True,
            )
        cases.append({"devices": devices, "prompts": prompts, "rows": rows})
    if args.out:
        text = json.dumps({"assumptions": asdict(how), "steps": args.steps, "cases": cases}, indent=1)
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
