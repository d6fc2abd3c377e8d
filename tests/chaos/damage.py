"""What the tests of damaged checkpoints share: runs of every kind with two saved steps, the ways a file is damaged,
what must follow."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.fork_server import ForkServer, Run
from tests.chaos.killing import state_files
from tests.runs import TinyRun, from_step, records
from verl.checkpoint import manifest, newest

KINDS = {
    "text": [],
    "LoRA": ["actor_rollout_ref.model.lora_rank=4"],
    "critic": ["algorithm.adv_estimator=gae", "critic.optim.lr=1e-3"],
    "vision": [],
}
SHORT = ["trainer.total_training_steps=2", "trainer.test_freq=-1", "trainer.val_before_train=False"]
RUNS = int(os.environ.get("CHAOS_DAMAGES", "2"))
"""How many of the damages of a kind are shown to the command as well."""
LINK = "a link to what it was"


def flip(path: Path) -> None:
    """One bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def to_link(path: Path) -> None:
    """The file lies beside the checkpoint, and a link to it in its place."""
    step = next(parent for parent in path.parents if manifest.step_of(parent) is not None)
    away = step.parent / "elsewhere" / path.relative_to(step)
    away.parent.mkdir(parents=True, exist_ok=True)
    path.rename(away)
    path.symlink_to(away)


def to_folder(path: Path) -> None:
    """An empty folder of the file's name."""
    path.unlink()
    path.mkdir()


def emptied(path: Path) -> None:
    """No bytes; JSON of nothing where the step is read before anything else."""
    path.write_bytes(b"{}" if path.name == "loop.json" else b"")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": flip,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "emptied": lambda path: path.write_bytes(b""),
    "deleted": Path.unlink,
    "a link to nothing": lambda path: (path.unlink(), path.symlink_to("nowhere")),
    LINK: to_link,
    "a folder": to_folder,
}
OF_BYTES = ("flipped", "cut", "emptied")
RESEALED: dict[str, Callable[[Path], object]] = {
    "emptied": emptied,
    "cut in half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "deleted": Path.unlink,
}


@dataclass(frozen=True)
class Saved:
    """A run whose steps 1 and 2 are saved, and how its command is given again."""

    out: Path
    command: Callable[[Path], Run]

    def names(self, step: int = 2) -> list[str]:
        """The files of a checkpoint, its manifest at the end."""
        return [*manifest.files_under(self.out / f"global_step_{step}"), manifest.NAME]

    def damages(self) -> list[tuple[str, str]]:
        """Every file with every damage that changes it."""
        top = self.out / "global_step_2"
        return [
            (name, how)
            for name in self.names()
            for how in DAMAGES
            if how not in OF_BYTES or (top / name).stat().st_size
        ]


def saved(server: ForkServer, of: TinyRun, out: Path, words: Iterable[str], **more: str) -> Saved:
    """Two steps of a run; `more` is the environment."""

    def command(folder: Path) -> Run:
        return server.run(of.overrides(folder, *SHORT, *words), timeout=300, **more)

    done = command(out)
    assert done.status == 0, done.stderr[-3000:]
    return Saved(out, command)


def assert_found_or_the_one_before(run: Saved) -> Counter[str]:
    """Each damage: the checkpoint is passed over with the reason, or it is what was saved; how often which."""
    top, counted = run.out / "global_step_2", Counter[str]()
    for name, how in run.damages():
        path, content, said = top / name, (top / name).read_bytes(), list[str]()
        DAMAGES[how](path)
        found = newest(run.out, on_event=lambda kind, said=said, **fields: said.append(str(fields)))
        assert found is not None
        if how == LINK:
            assert found.step == 2 and not said and path.read_bytes() == content
        else:
            assert found.step == 1, (name, how)
            assert len(said) == 1 and "global_step_2" in said[0], (name, how, said)
            assert name == manifest.NAME or Path(name).name in said[0], (name, how, said)
        counted["loaded exactly" if found.step == 2 else "passed over"] += 1
        manifest.remove(path)
        path.write_bytes(content)
    assert newest(run.out).step == 2
    return counted


def assert_the_command_goes_on(run: Saved, folder: Path) -> Counter[str]:
    """Some of these damages, and links in place of all files: the same command ends with what the whole run ended
    with."""
    chosen = random.Random(len(run.names())).sample(run.damages(), RUNS)
    counted = Counter[str]()
    for number, (name, how) in enumerate(chosen):
        out = folder / str(number)
        shutil.copytree(run.out, out)
        DAMAGES[how](out / "global_step_2" / name)
        done = run.command(out)
        assert done.status == 0, (name, how, done.stderr[-3000:])
        assert ("passed over" in done.stderr) == (how != LINK), (name, how, done.stderr[-3000:])
        assert f"global_step_{1 + (how == LINK)}" in done.stderr, (name, how, done.stderr[-3000:])
        assert_same(run, out, name, how)
        counted["loaded exactly" if how == LINK else "passed over"] += 1
        shutil.rmtree(out)
    out = from_step(run.out, 1, folder / "links")
    for name in run.names(1):
        to_link(out / "global_step_1" / name)
    done = run.command(out)
    assert done.status == 0 and "passed over" not in done.stderr, done.stderr[-3000:]
    assert_same(run, out)
    return counted


def assert_same(run: Saved, out: Path, *said: str) -> None:
    """The second step is the whole run's: what was recorded, and every file that was saved."""
    assert records(out)[2] == records(run.out)[2], said
    ours, theirs = state_files(out, 2), state_files(run.out, 2)
    assert ours.keys() == theirs.keys(), said
    differ = {n for n in ours if ours[n] != theirs[n]}
    assert all(name.endswith(".distcp") for name in differ), (differ, said)
    for part in {Path(name).parent for name in differ}:  # torch orders the tensors of a rank's file anew each time
        ones, others = (optimizer(folder / "global_step_2" / part) for folder in (out, run.out))
        assert ones == others, (part, said)
    assert newest(out).step == 2, said


def optimizer(folder: Path) -> dict[str, bytes]:
    """Name → bytes of each tensor of a saved optimizer."""
    import torch
    import torch.distributed.checkpoint as dcp

    listed = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in listed.items()}
    dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    return {name: tensor.numpy().tobytes() for name, tensor in state.items()}


def assert_a_wrong_file_under_a_right_seal_is_explained(
    run: Saved, folder: Path, how: str, names: Iterable[str]
) -> Counter[str]:
    """The first checkpoint with a file that was never what it should be: the run ends with what to do, or does not need
    the file."""
    counted = Counter[str]()
    for number, name in enumerate(names):
        out = from_step(run.out, 1, folder / str(number))
        RESEALED[how](out / "global_step_1" / name)
        seal_again(out / "global_step_1")
        done = run.command(out)
        what = (name, how, done.stderr[-3000:])
        assert "Traceback" not in done.stderr, what
        if done.status == 0:
            assert "resuming from" in done.stderr or "passed over" in done.stderr, what
            assert_same(run, out, *what)
            counted["passed over" if "passed over" in done.stderr else "not needed"] += 1
        else:
            assert done.status == 2 and "move it out of the run folder" in done.stderr, what
            assert "Run the same command again" not in done.stderr, what
            assert not re.search(r"rank \d+: *[;)]", done.stderr), what  # a reason that is none
            counted["explained"] += 1
        shutil.rmtree(out)
    return counted


def seal_again(top: Path) -> None:
    """A manifest of what is there now."""
    old, files = manifest.read_manifest(top), manifest.hash_files(top, manifest.files_under(top))
    manifest.write_manifest(top, manifest.Manifest(1, old.serial, old.time, files))
