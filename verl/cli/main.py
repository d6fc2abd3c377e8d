"""The `verl` command: finds the subcommand and runs it. Starts without torch; each command imports its own."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Sequence

from verl.errors import UserError


def _reward(argv: list[str]) -> int:
    if argv[:1] == ["check"]:
        from verl.preflight.reward import main as run

        return run(argv[1:])
    wants_help = argv[:1] in (["-h"], ["--help"])
    if argv and not wants_help:
        print(f"verl reward: there is no {argv[0]!r}; the only one is check", file=sys.stderr)
    print("usage: verl reward check --data FILE [--reward FILE.py] …   (verl reward check --help)")
    return 0 if wants_help else 2


_DOCTOR = "what is installed, what works together, what is missing for which feature"
COMMANDS: dict[str, tuple[str | Callable[[list[str]], int], str]] = {
    "doctor": ("verl.preflight.doctor", _DOCTOR),
    "prepare": ("verl.data.prepare", "make a data set: verl prepare gsm8k"),
    "reward": (_reward, "try a reward function on rows of a data file: verl reward check"),
    "report": ("verl.cli.report", "build the page of a run: verl report RUN"),
    "export": ("verl.cli.export", "copy a run's model out: verl export RUN OUT"),
    "plan": ("verl.cli.plan", "predict memory and time of a run, propose layouts: verl plan key=value …"),
    "prove": ("verl.proving.run", "check a training command on its model and data: verl prove key=value …"),
    "replay": ("verl.cli.replay", "a step of a run again, with other settings or rewards: verl replay RUN --step N"),
    "diff": ("verl.cli.replay:diff", "the first step and tensor at which two runs part: verl diff RUN RUN"),
    "serve": (
        "verl.cli.serve",
        "a model behind the Tinker API, for training and sampling clients: verl serve --model M",
    ),
    "audit": ("verl.cli.replay:audit", "a step's log-probs against transformers: verl audit RUN --step N"),
}
"""Name → its function, or where it is (of a module: `main`), and what it does."""


def usage() -> str:
    """The text of `verl --help`."""
    rows = "\n".join(f"  {name:<10}{summary}" for name, (_, summary) in COMMANDS.items())
    return (
        "usage: verl COMMAND …        verl COMMAND --help        verl --version\n\n"
        f"{rows}\n\n"
        "Training and evaluation have their own entry points:\n"
        "  python3 -m verl.trainer.main_ppo key=value …          reinforcement learning\n"
        "  python3 -m verl.trainer.sft_trainer key=value …       supervised fine-tuning\n"
        "  python3 -m verl.trainer.main_generation key=value …   responses of a model to a file of prompts\n"
        "  python3 -m verl.trainer.main_eval key=value …         scores of such responses"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run `verl argv…`. Exit status: the command's own; 2 for the user's mistakes, 130 when interrupted."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] in (["-V"], ["--version"]):
        from verl import __version__

        print(f"verl {__version__}")
        return 0
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if args else 2
    if args[0] not in COMMANDS:
        from verl.config.matching import nearest

        near = nearest(args[0], COMMANDS)
        print(f"verl: there is no command {args[0]!r}{near}\n\n{usage()}", file=sys.stderr)
        return 2
    command, _ = COMMANDS[args[0]]
    try:
        run = (
            pkgutil.resolve_name(command if ":" in command else f"{command}:main")
            if isinstance(command, str)
            else command
        )
        return int(run(args[1:]))
    except UserError as error:
        print(f"verl {args[0]}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"verl {args[0]}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output (head, less) has left; there is nobody to tell.
        sys.stderr.close()
        return 0


if __name__ == "__main__":
    sys.exit(main())
