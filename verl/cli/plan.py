"""`verl plan key=value …`: predict memory and time of a run, propose layouts."""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import TYPE_CHECKING

from verl.errors import UserError

if TYPE_CHECKING:
    from verl.config import Config


def _check(config: Config, args: argparse.Namespace) -> None:
    """What a run would refuse of values and layout, whatever this machine and its files are. UserError if anything."""
    from verl.config.problems import ConfigError
    from verl.config.report import Report
    from verl.preflight import values
    from verl.trainer import check as trainer

    report = Report(config)
    for part in (values, trainer):
        part.check(config, report)
        if problems := report.of("configuration"):
            raise ConfigError(problems)
    for name in ("prompt", "response"):
        mean, most = getattr(args, name), config.data[f"max_{name}_length"]
        if mean is not None and not 0 < mean <= most:
            raise UserError(f"--{name} {mean:g}: a mean from 1 to data.max_{name}_length={most}")


def main(argv: list[str]) -> int:
    """Print the plan; 0 where it fits, 1 where it does not, 2 with one line on what is wrong."""
    about = "Predict memory and seconds of each phase of a run from its command and the model's config.json."
    parser = argparse.ArgumentParser(prog="verl plan", description=about, allow_abbrev=False)
    add = parser.add_argument
    add("--device", help="H100, H200, A100, B200, 910B, … or cpu, as `verl doctor --bench` measured it; default: found")
    add("--prompt", type=float, help="mean tokens of a prompt (default: data.max_prompt_length)")
    add("--response", type=float, help="mean tokens of a response (default: data.max_response_length)")
    add("--search", action="store_true", help="propose the fastest layouts that fit the devices of the command")
    add("--json", action="store_true", help="print JSON")
    add("overrides", nargs="*", metavar="key=value", help="the command of the run, as of verl.trainer.main_ppo")
    args = parser.parse_intermixed_args(argv)
    if not args.overrides:
        parser.print_usage(sys.stderr)
        return 2
    from verl.compat.spellings import PUBLIC
    from verl.config import load
    from verl.config.model_facts import look
    from verl.planning import report, search
    from verl.planning.plan import advice, plan

    config = load(args.overrides, spellings=PUBLIC)
    _check(config, args)
    model = config.actor_rollout_ref.model
    if not model.path:
        raise UserError("actor_rollout_ref.model.path: name the model")
    facts = look(model.path, model.override_config, model.hf_config_path)
    device, lengths = report.device_of(config, args.device), {"prompt": args.prompt, "response": args.response}
    if args.search:
        if math.isnan(device.flops):
            raise UserError("layouts are ranked by time: run `verl doctor --bench`, or name a --device of the table")
        proposals = search.search(config, facts.config, device, **lengths)
        print(report.proposals_json(proposals) if args.json else report.proposals(proposals, device))
        return 0 if proposals else 1
    result = plan(config, facts.config, device, **lengths)
    keys, changed = ([], result) if result.fits else advice(config, facts.config, result)
    print(json.dumps(report.record(result, keys), indent=1) if args.json else report.text(result, keys, changed))
    return 0 if result.fits else 1
