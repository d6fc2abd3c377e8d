"""The `verl` command: dispatch, exit codes, start without torch, report and export."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fake_run import make_run
from verl import __version__
from verl.cli import main as cli
from verl.errors import UserError


def run(*argv: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of a command in this process."""
    status = cli.main(list(argv))
    out, err = capsys.readouterr()
    return status, out, err


def test_nothing_loads_torch() -> None:
    code = (
        "import sys\nfrom verl.cli.main import main\n"
        "for argv in (['--help'], ['--version'], ['doctor', '--json'], ['report', '--help'], ['plan']):\n"
        "    try: main(argv)\n    except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'hydra', 'pyarrow'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_rules_of_a_configuration_load_no_torch() -> None:
    """What is refused is refused before torch's import."""
    code = "import sys, verl.preflight.check; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_version_help_and_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version", capsys=capsys)[:2] == (0, f"verl {__version__}\n")
    status, out, _ = run("--help", capsys=capsys)
    assert status == 0 and all(name in out for name in cli.COMMANDS)
    assert run(capsys=capsys)[0] == 2


def test_unknown_commands_name_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run("reprot", "x", capsys=capsys)
    assert status == 2 and "nearest: report" in err
    status, _, err = run("reward", "chek", capsys=capsys)
    assert status == 2 and "the only one is check" in err
    assert run("plan", capsys=capsys)[0] == 2


def test_arguments_reach_the_other_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    import verl.data.prepare
    import verl.preflight.reward

    seen: list[list[str]] = []
    monkeypatch.setattr(verl.data.prepare, "main", lambda argv: seen.append(argv) or 3)
    monkeypatch.setattr(verl.preflight.reward, "main", lambda argv: seen.append(argv) or 4)
    assert cli.main(["prepare", "gsm8k", "--limit", "5"]) == 3
    assert cli.main(["reward", "check", "--data", "x.parquet"]) == 4
    assert seen == [["gsm8k", "--limit", "5"], ["--data", "x.parquet"]]


def test_users_errors_are_one_line_and_two(monkeypatch, capsys) -> None:
    def fail(argv: list[str]) -> int:
        raise UserError("the thing is wrong; change it")

    monkeypatch.setitem(cli.COMMANDS, "doctor", (fail, ""))
    assert run("doctor", capsys=capsys) == (2, "", "verl doctor: the thing is wrong; change it\n")


def test_report_builds_and_prints_the_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run", 2)
    for argument in (folder, folder / "metrics.jsonl"):
        status, out, _ = run("report", str(argument), capsys=capsys)
        assert status == 0 and Path(out.strip()) == folder / "report.html"
        assert (folder / "report.html").stat().st_size > 50_000


def test_report_names_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run("report", str(tmp_path / "absent" / "run"), capsys=capsys)
    assert status == 2 and "does not exist" in err
    make_run(tmp_path / "project" / "run", 1)
    status, _, err = run("report", str(tmp_path / "project" / "run" / "global_step_7"), capsys=capsys)
    assert status == 2 and "global_step_7 does not exist" in err
    status, _, err = run("report", str(tmp_path), capsys=capsys)
    assert status == 2 and "is not a run folder" in err and str(tmp_path / "project" / "run") in err
    assert not (tmp_path / "report.html").exists()


def test_options_may_stand_between_other_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(make_run(tmp_path / "run", 1))
    status, out, _ = run("report", folder, "--port", "1", str(make_run(tmp_path / "other", 1)), capsys=capsys)
    assert status == 0 and "report.html" in out
    status, _, err = run("report", folder, "--serve", "--port", "99999", folder, capsys=capsys)
    assert status == 2 and "--port=99999: bind(): port must be 0-65535" in err
    status, _, err = run("plan", "trainer.nnodes=1", "--device", "H100", "trainer.nonsense=3", capsys=capsys)
    assert status == 2 and "no key trainer.nonsense" in err


def sealed(root: Path, step: int, text: str = "weights") -> Path:
    """A sealed checkpoint of ours with a small actor."""
    from tests.saving import save

    def actor(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_text(f"{text} {step}")

    path = save(root, step, {"actor": actor}, loop_state={})
    assert path is not None
    return path


def test_export_takes_the_newest_or_the_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "run"
    sealed(root, 5), sealed(root, 10)
    (root / "global_step_20").mkdir()
    status, out, _ = run("export", str(root), str(tmp_path / "a" / "model"), capsys=capsys)
    assert status == 0 and "step 10" in out
    assert (tmp_path / "a/model/model.safetensors").read_text() == "weights 10"
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["model"]
    assert run("export", str(root), str(tmp_path / "b"), "--step", "5", capsys=capsys)[0] == 0
    assert (tmp_path / "b/model.safetensors").read_text() == "weights 5"
    assert run("export", str(root / "global_step_5"), str(tmp_path / "c"), capsys=capsys)[0] == 0


def test_export_of_an_adapter_alone_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.saving import save

    def actor(folder: Path) -> None:
        (folder / "lora_adapter").mkdir()
        (folder / "lora_adapter/adapter_config.json").write_text("{}")

    save(tmp_path / "run", 3, {"actor": actor}, loop_state={})
    status, out, err = run("export", str(tmp_path / "run"), str(tmp_path / "out"), capsys=capsys)
    assert status == 0 and "step 3" in out and "an adapter without the model" in err
    sealed(tmp_path / "whole", 1)
    assert run("export", str(tmp_path / "whole"), str(tmp_path / "out2"), capsys=capsys)[2] == ""


def test_export_passes_over_damage_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "run"
    sealed(root, 5)
    (sealed(root, 6) / "actor/model.safetensors").write_text("weights X")
    status, out, err = run("export", str(root), str(tmp_path / "out"), capsys=capsys)
    assert status == 0 and "step 5" in out and "global_step_6" in err
    status, _, err = run("export", str(root), str(tmp_path / "out2"), "--step", "6", capsys=capsys)
    assert status == 2 and "damaged" in err and not (tmp_path / "out2").exists()


def test_export_refuses_with_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, out = tmp_path / "run", tmp_path / "out"
    root.mkdir()
    assert "holds no global_step_N" in run("export", str(root), str(out), capsys=capsys)[2]
    sealed(root, 5)
    absent = run("export", str(root), str(out), "--step", "7", capsys=capsys)[2]
    assert "has no global_step_7; it has [5]" in absent
    out.mkdir()
    (out / "precious").write_text("mine")
    status, _, err = run("export", str(root), str(out), capsys=capsys)
    assert status == 2 and "not empty" in err and (out / "precious").read_text() == "mine"
    public = tmp_path / "public" / "global_step_3" / "actor"
    public.mkdir(parents=True)
    (public / "model_world_size_1_rank_0.pt").write_text("")
    status, _, err = run("export", str(tmp_path / "public"), str(tmp_path / "x"), capsys=capsys)
    assert status == 2 and "public verl, FSDP shards" in err
