"""The report of a check: its problems, notices and plan, and the facts of model and machine that its rules share."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl.config import devices
from verl.config.conversion import check_length
from verl.config.grammar import GrammarError
from verl.config.layout import own_pools
from verl.config.model_facts import ModelFacts, ModelTrouble, look
from verl.config.problems import EXIT_CONFIGURATION, EXIT_MACHINE, EXIT_OK, Kind, Problem, problem_text
from verl.config.schema.base import Root
from verl.config.schema.fields import leaves
from verl.errors import UserError
from verl.plugins import import_modules

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


class Report:
    """One check of a configuration; every component has `check(config, report)`, which adds to it.

    Attributes:
        check_only: notices that the run gives itself.
        plan: the batches of the run in words.
        files: opened data files by key; only those with the columns they need.
        rows: rows of all files of a key, if all can be opened.
        replaced: keys out of range, which have a value in range meanwhile; nothing is said of that one.
        agent_names, sources: names of agent loops and data sources in the rows.
    """

    def __init__(self, config: Root):
        self.problems: list[Problem] = []
        self.notices = list(config.notices)
        self.check_only: list[str] = []
        self.plan: list[str] = []
        self.files: dict[str, list[Any]] = {}
        self.rows: dict[str, int] = {}
        self.replaced: set[str] = set()
        self.agent_names: set[str] = set()
        self.sources: set[str] = set()
        self.ppo = config.entry == "ppo"
        self.model_key = "actor_rollout_ref.model" if self.ppo else "model"
        self.rollout_key = ROLLOUT if self.ppo else "rollout"
        self.keys = leaves(type(config))
        self.config: Any = config
        self.model: Any = config.select(self.model_key)
        self.rollout: Any = config.select(self.rollout_key)
        self.trainer: Any = config.get("trainer")

    def of(self, kind: Kind) -> list[Problem]:
        """The problems of a class."""
        return [p for p in self.problems if p.kind == kind]

    @property
    def exit_code(self) -> int:
        """0; 2 if the configuration is wrong; 3 if only this machine lacks something."""
        if self.of("configuration"):
            return EXIT_CONFIGURATION
        return EXIT_MACHINE if self.problems else EXIT_OK

    def allow_run(self) -> None:
        """Leave to the run what it deals with itself; what it fetches becomes a notice."""
        fetched = [p.key for p in self.of("machine") if p.left_to_run]
        self.notices += [f"{key}: not on this disk, fetched at the start" for key in fetched]
        self.problems = [p for p in self.problems if not p.left_to_run]

    def problem_text(self) -> str:
        """All problems, by class, or ""."""
        return problem_text(self.problems)

    def at(self, *paths: str) -> str:
        """The keys with their values, for a message; of the second and further ones the last part."""
        shown = [path if i == 0 else path.rpartition(".")[2] for i, path in enumerate(paths)]
        return ", ".join(f"{s}={self.config.select(path)}" for s, path in zip(shown, paths, strict=True))

    def refuse(self, key: str, message: str, *, run_says: bool = False) -> None:
        """The configuration is wrong. A single key is shown with its value. `run_says`: the run finds it itself."""
        self._add(key, message, "configuration", run_says)

    def refuse_file(self, key: str, folder: Any) -> None:
        """A folder that cannot be made is wrong: its name is too long, or it, or one that it is in, is a file."""
        try:
            place = Path(str(folder or "")).expanduser()
            check_length(str(place))
        except GrammarError as error:
            self.refuse(key, str(error))
            return
        if file := next((path for path in (place, *place.parents) if path.is_file()), None):
            self.refuse(key, f"{file} is a file; name a folder")

    def lacks(self, key: str, message: str, download: bool = False) -> None:
        """This machine lacks something; `download` if a run could fetch it."""
        self._add(key, message, "machine", download)

    @contextmanager
    def refusing(self, key: str) -> Iterator[None]:
        """A UserError inside is what is wrong with `key`."""
        try:
            yield
        except UserError as error:
            self.refuse(key, str(error))

    def notice(self, text: str, *, run_says: bool = False) -> None:
        """Say it, then go on. `run_says`: the run itself tells it when it comes to it; then only --check shows it."""
        notices = self.check_only if run_says else self.notices
        if text not in notices and not self._names_replaced(text):
            notices.append(text)

    def _add(self, key: str, message: str, kind: Kind, left_to_run: bool) -> None:
        value = self.config.select(key)
        shown = f"{key}={value}" if isinstance(value, (bool, int, float, str)) else key
        problem = Problem(shown, message, kind, left_to_run)
        if problem not in self.problems and not self._names_replaced(str(problem)):
            self.problems.append(problem)

    def _names_replaced(self, text: str) -> bool:
        return any(f"{path}=" in text for path in self.replaced)

    def was_set(self, path: str) -> bool:
        """True if the user gave the key."""
        return bool(self.config.was_set(path))

    @functools.cached_property
    def devices(self) -> devices.Devices:
        """The machine's devices."""
        return devices.find()

    @functools.cached_property
    def facts(self) -> ModelFacts | None:
        """The model's config, or None if it is not to be had (which is reported once)."""
        if self.model is None or not self.model.path:
            return None
        of_model = (self.model.path, self.model.override_config, self.model.hf_config_path)
        return self.look(f"{self.model_key}.path", *of_model)

    @functools.cached_property
    def plugins(self) -> bool:
        """True if the plug-in modules import, which they are asked once; if one does not, it is reported."""
        with self.refusing(f"{self.model_key}.external_lib"):
            import_modules(self.model.external_lib if self.model is not None else None)
            return True
        return False

    def look(self, key: str, *arguments: Any) -> ModelFacts | None:
        """Facts of the model of `key` (arguments of `model_facts.look`); None, and reported, if unavailable."""
        try:
            return look(*arguments)
        except ModelTrouble as trouble:
            self._add(key, str(trouble), trouble.kind, trouble.download)
            return None

    def rows_used(self, kind: str) -> int | None:
        """Rows of the training ("train") or validation ("val") files that a run uses, as far as they are known."""
        rows, most = self.rows.get(f"data.{kind}_files"), self.config.data[f"{kind}_max_samples"]
        return min(rows, most) if rows and most >= 0 else rows

    @property
    def world(self) -> int:
        """`devices.ranks` of the run."""
        return devices.ranks(self.config)

    @property
    def several(self) -> bool:
        """True for a run of several devices, of whatever pools."""
        pools = self.ppo and (self.rollout.nnodes > 0 or own_pools(self.config))
        return self.world > 1 or bool(pools)


def beyond(value: Any, most: float, at: str) -> Iterator[tuple[str, Any]]:
    """(path, number) in an open mapping or list at path `at` of each number that is not finite or exceeds ±`most`."""
    many = enumerate(value) if isinstance(value, list) else ()
    for name, item in value.items() if isinstance(value, Mapping) else many:
        yield from beyond(item, most, f"{at}.{name}")
    if isinstance(value, (int, float)) and not abs(value) <= most:  # nan is not
        yield at, value
