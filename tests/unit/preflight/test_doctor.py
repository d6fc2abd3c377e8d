"""`verl doctor`: version rules against pip's own, what counts as broken, what is read from the machine."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from verl import versions
from verl.platform import host_resources, probe
from verl.preflight import doctor
from verl.preflight.doctor import BAD, OK, WARN, Finding
from verl.versions import satisfies


def test_local_versions_and_wildcards() -> None:
    assert satisfies("2.13.0+cpu", ">=2.11") and satisfies("2.13.0rc1", ">=2.13,<3")
    assert satisfies("2.13.0+cpu", "==2.13.0+cpu") and satisfies("2.13.0+cpu", "<=2.13.0,==2.13")
    assert satisfies("4.9.3", "==4.9.*") and not satisfies("4.13.2", "==4.9.*")
    with pytest.raises(ValueError, match="Invalid specifier"):
        satisfies("1.0", "about 1")


def test_python_is_what_the_package_requires(installed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=" + ".".join(map(str, doctor.PYTHON))
    monkeypatch.setattr(probe, "requirements", lambda name: [])
    [_, alone] = doctor._base()
    assert alone.level == WARN and "not installed" in alone.found


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Versions that the doctor sees; starts with a sound installation."""
    sound = {"torch": "2.13.0+cpu", "transformers": "5.19.0"}
    names = [need.name for need in probe.requirements("verl")]
    found = {name: sound.get(name, "9999") for name in names} | {"antlr4-python3-runtime": "4.9.3"}
    monkeypatch.setattr(probe, "version", found.get)
    monkeypatch.setattr(probe, "torch_build", lambda: "cpu")
    monkeypatch.setattr(probe, "nvidia_gpus", list)
    monkeypatch.setattr(probe, "needs_cuda", lambda name: False)
    monkeypatch.setattr(probe, "wants", lambda name, other: None)
    monkeypatch.setattr(probe, "cpu_products", lambda: ("in hardware", "compiled kernels", "2 cores, float32 products"))
    return found


def named(name: str) -> Finding:
    """The doctor's first finding of a name that is not fine, else its first."""
    found = [f for f in doctor.check() if f.name == name]
    return next((f for f in found if f.level != OK), found[0])


def test_sound_installation_is_fine(installed: dict[str, str]) -> None:
    findings = doctor.check()
    assert not [f for f in findings if f.base and f.level == BAD]
    assert doctor.verdict(findings)[0] == 0


@pytest.mark.parametrize(
    ("name", "version", "text"),
    [
        ("torch", "2.15.0", "needs >=2.11,<2.15"),
        ("transformers", "5.24.0", "needs >=5.16,<5.24"),
        ("pyarrow", None, "missing"),
        ("antlr4-python3-runtime", "4.13.2", "omegaconf cannot parse"),
    ],
)
def test_what_breaks_the_base(installed: dict[str, str], name: str, version: str | None, text: str) -> None:
    if version is None:
        del installed[name]
    else:
        installed[name] = version
    finding = named(name if name != "antlr4-python3-runtime" else "antlr4 runtime")
    assert (finding.level, finding.base) == (BAD, True) and text in finding.found and finding.todo
    status, sentence = doctor.verdict(doctor.check())
    assert status == 1 and finding.name in sentence


@pytest.mark.parametrize("name", ["ray", "vllm"])
def test_holes_of_optional_packages_do_not_stop_the_base(installed: dict[str, str], name: str) -> None:
    installed[name] = "0.13.0"
    finding = named(name)
    assert finding.level == BAD and "refused" in finding.found and not finding.base
    assert doctor.verdict(doctor.check())[0] == 0


def test_cuda_vision_beside_cpu_torch(installed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    installed["torchvision"] = "0.28.0"
    assert named("torchvision").level == OK
    monkeypatch.setattr(probe, "needs_cuda", lambda name: name == "torchvision")
    finding = named("torchvision")
    assert finding.level == BAD and finding.base and finding.todo == "pip uninstall torchvision"
    monkeypatch.setattr(probe, "torch_build", lambda: "cuda 13.0")
    assert named("torchvision").level == OK
    monkeypatch.setattr(probe, "wants", lambda name, other: "==2.12.0" if name == "torchvision" else None)
    assert "built for torch==2.12.0" in named("torchvision").found


def test_pins_of_engines_and_gpu_without_cuda_build(installed, monkeypatch) -> None:
    installed["vllm"] = "0.32.0"
    pins = {("vllm", "torch"): "==2.12.1"}
    monkeypatch.setattr(probe, "wants", lambda *pair: pins.get(pair))
    assert [f.level for f in doctor.check() if f.area == "together" and f.name == "vllm"] == [WARN]
    monkeypatch.setattr(probe, "nvidia_gpus", lambda: ["NVIDIA H100, 81559 MiB, 580.1"])
    findings = doctor.check()
    assert any(f.name == "cuda:0" and "H100" in f.found for f in findings)
    assert any(f.area == "devices" and f.name == "torch" and f.level == WARN for f in findings)


def test_small_limits_are_warned_of(installed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"open files": (256, 256), "processes": (None, None), "locked memory": (65536, None)}
    monkeypatch.setattr(probe, "limits", lambda: limits)
    monkeypatch.setattr(probe, "shared_memory", lambda: {"free": 64 << 20})
    monkeypatch.setattr(probe, "memory", lambda: (64 << 30, 1 << 30))
    monkeypatch.setattr(probe, "loopback", lambda: "Operation not permitted")
    levels = {f.name: f.level for f in doctor.check()}
    small = ("limit: open files", "/dev/shm", "memory", "loopback ports")
    assert {levels[name] for name in small} == {WARN} and levels["limit: processes"] == OK
    assert "ulimit -n 4096" in named("limit: open files").todo


def test_json_and_table(installed: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert got["ok"] is True and {"area", "name", "found", "level", "todo", "base"} == set(got["findings"][0])
    del installed["rich"]
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert "pip install 'rich>=13'" in out and "Training cannot work here" in out


def test_table_without_rich(installed, monkeypatch, capsys) -> None:
    for name in [m for m in sys.modules if m == "rich" or m.startswith("rich.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    doctor.show([Finding("packages", "rich", "missing", BAD, "pip install rich")])
    assert re.search(r"bad\s+packages\s+rich\s+missing\s+-> pip install rich", capsys.readouterr().out)


def test_self_test_that_fails_is_bad(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor.devices, "bench_file", lambda: tmp_path / "bench.json")
    monkeypatch.setattr(doctor, "_BENCH", "raise ImportError('libcudart.so.13: cannot open')")
    (finding,) = doctor._bench()
    assert finding.level == BAD and finding.base and "libcudart.so.13" in finding.found
    report = {"threads": 1, "fp32": 50, "bf16": 200, "bandwidth": 12.5, "devices": 0}
    monkeypatch.setattr(doctor, "_BENCH", f"print({json.dumps(json.dumps(report))})")
    assert "bf16 is 4.0× as fast" in list(doctor._bench())[1].found
    assert doctor.devices.named("cpu").bandwidth == 12.5e9


def test_how_a_run_on_this_processor_computes_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    probe.cpu_products.cache_clear()
    try:
        assert "multiplies in fp32" in named("bf16").found
        assert re.search(
            r"\d threads?, float32 products, .*kernels.*; default: float32$", named("a run on the cpu").found
        )
        assert f"about {doctor.QUICKSTART['float32']} tokens/s" in named("quickstart").found
    finally:
        probe.cpu_products.cache_clear()
    figures = json.loads((Path(__file__).parents[3] / "benchmarks/results/quickstart.json").read_text())
    assert figures["tokens_per_s"] == doctor.QUICKSTART


def test_torch_build_is_read_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "package_folder", lambda name: tmp_path)
    for text, build in (
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "cuda 13.0"),
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n", "cpu"),
        ("cuda = None\nhip = '6.4.1'\n", "rocm 6.4.1"),
    ):
        (tmp_path / "version.py").write_text(text)
        assert probe.torch_build() == build


def test_torch_build_agrees_with_torch() -> None:
    import torch

    assert (probe.torch_build() == "cpu") == (torch.version.cuda is None and torch.version.hip is None)


def test_cuda_links_are_found_in_compiled_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "package_folder", lambda name: tmp_path)
    assert probe.needs_cuda("x") is None
    (tmp_path / "_C.so").write_bytes(b"\x7fELF...libtorch_cpu.so\0")
    assert probe.needs_cuda("x") is False
    (tmp_path / "image.so").write_bytes(b"\x7fELF...libcudart.so.13\0")
    assert probe.needs_cuda("x") is True


def test_requirements_of_installed_packages_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["torch (==2.13.0)", "numpy", "torch>=2 ; extra == 'all'", "Pillow!=8.3.*,>=5.3.0"]
    lines += ["a[b]<2,>=1; python_version<'4'"]
    monkeypatch.setattr(probe.metadata, "requires", lambda name: lines)
    assert probe.wants("x", "torch") == "==2.13.0"
    assert probe.wants("x", "pillow") == "!=8.3.*,>=5.3.0"
    assert probe.wants("x", "a") == "<2,>=1"
    assert probe.wants("x", "numpy") is None and probe.wants("x", "absent") is None


def test_tightest_memory_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    limits = {tmp_path: ("max", "9"), tmp_path / "a": ("1000", "400"), inner: ("5000", "10")}
    for place, (limit, used) in limits.items():
        (place / "memory.max").write_text(limit + "\n")
        (place / "memory.current").write_text(used + "\n")
    monkeypatch.setattr(host_resources, "cgroups", lambda controller: [inner, tmp_path / "a", tmp_path])
    assert host_resources.memory_limit() == (1000, 400)


def test_what_ascend_devices_need_is_named(installed, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    monkeypatch.setattr(probe, "npus", lambda: 8)
    installed["torch_npu"] = "2.10.0"
    found = {f.name: f for f in doctor.check() if f.area == "devices"}
    assert found["npu"].found == "8 Ascend devices, torch_npu 2.10.0"
    assert found["CANN"].level == WARN and found["driver"].found == "not found"
    (tmp_path / "version.cfg").write_text("# version\nruntime_running_version=[9.0.0.1:CANN-9.0.0]\n")
    assert {f.name: f.found for f in doctor.check()}["CANN"] == "9.0.0"
