"""Every file of a sealed checkpoint damaged in every way: it is passed over with the reason, or what is loaded is what was saved."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.test_vision_runs import VisionRun
from tests.runs import TinyRun, from_step, main_ppo, records
from verl.checkpoint import manifest, newest

KINDS = {
    "text": [],
    "LoRA": ["actor_rollout_ref.model.lora_rank=4"],
    "critic": ["algorithm.adv_estimator=gae", "critic.optim.lr=1e-3"],
    "vision": [],
    "two ranks": ["trainer.n_gpus_per_node=2"],
}
SHORT = ["trainer.total_training_steps=2", "trainer.test_freq=-1", "trainer.val_before_train=False"]


def to_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


WAYS: dict[str, Callable[[Path], object]] = {
    "flipped": flip,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "emptied": lambda path: path.write_bytes(b""),
    "deleted": Path.unlink,
    "a link to nothing": lambda path: (path.unlink(), path.symlink_to("nowhere")),
    "a link to what it was": to_link,
    "a folder": to_folder,
}


def restore(path: Path, content: bytes) -> None:
    manifest.remove(path)
    path.with_name("elsewhere").unlink(missing_ok=True)
    path.write_bytes(content)


@pytest.fixture(scope="module")
def tiny_vision(tmp_path_factory) -> VisionRun:
    return VisionRun(tmp_path_factory.mktemp("vision"))


LATER = [pytest.param(kind, marks=pytest.mark.long) for kind in ("LoRA", "critic", "vision", "two ranks")]


@pytest.fixture(scope="module", params=["text", *LATER])
def saved(request, tmp_path_factory, fork_server, tiny) -> tuple[TinyRun, list[str], Path]:
    """A run of a kind, its words, and its folder with steps 1 and 2."""
    of = request.getfixturevalue("tiny_vision") if request.param == "vision" else tiny
    words, out = [*SHORT, *KINDS[request.param]], tmp_path_factory.mktemp("saved") / "run"
    if request.param == "two ranks":
        assert main_ppo(of.overrides(out, *words)).returncode == 0
    else:
        done = fork_server.run(of.overrides(out, *words))
        assert done.status == 0, done.stderr[-3000:]
    return of, words, out


def test_a_damaged_file_is_found_and_the_one_before_is_taken(saved) -> None:
    _, _, out = saved
    top = out / "global_step_2"
    names = [*manifest.files_under(top), manifest.NAME]
    assert len(names) > 10
    for name in names:
        path, content = top / name, (top / name).read_bytes()
        for way, damage in WAYS.items():
            if not content and way in ("flipped", "cut", "emptied"):
                continue
            said: list[str] = []
            damage(path)
            found = newest(out, on_event=lambda kind, said=said, **fields: said.append(str(fields)))
            if way == "a link to what it was":
                assert found is not None and found.step == 2
            else:
                assert found is not None and found.step == 1, (name, way)
                assert len(said) == 1 and "global_step_2" in said[0] and Path(name).name in said[0], (
                    name,
                    way,
                    said,
                )
            restore(path, content)
    assert newest(out).step == 2


RESEALED = ["state/rng/rng.json", "state/loop.json"]


@pytest.mark.parametrize("names", [RESEALED, pytest.param([], marks=pytest.mark.long)], ids=["two", "all"])
def test_an_empty_file_under_a_right_seal_ends_the_run_with_what_to_do(
    saved, fork_server, tmp_path, names
) -> None:
    """Or it is not read, and the run is the same."""
    of, words, whole = saved
    if "trainer.n_gpus_per_node=2" in words:
        pytest.skip("one process is enough")
    for number, name in enumerate(names or manifest.files_under(whole / "global_step_1")):
        out = from_step(whole, 1, tmp_path / str(number))
        top = out / "global_step_1"
        (top / name).write_bytes(b"{}" if name.endswith("loop.json") else b"")
        old = manifest.read_manifest(top)
        files = manifest.hash_files(top, manifest.files_under(top))
        manifest.write_manifest(top, manifest.Manifest(1, old.serial, old.time, files))
        done = fork_server.run(of.overrides(out, *words))
        assert "Traceback" not in done.stderr, (name, done.stderr[-3000:])
        if done.status == 0:
            assert "resuming from" not in done.stderr or records(out)[2] == records(whole)[2], name
        else:
            assert done.status == 2 and "move it out of the run folder" in done.stderr, (
                name,
                done.stderr[-2000:],
            )
            assert "Run the same command again" not in done.stderr
        shutil.rmtree(out)
