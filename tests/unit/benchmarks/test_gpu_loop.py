"""The benchmark of the whole loop: its arithmetic against other ways to count, and a run of it on the processor."""

from __future__ import annotations

import functools
import json
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import gpu_loop  # noqa: E402
import gpu_profile  # noqa: E402
import gpu_section  # noqa: E402
import sides  # noqa: E402


def content(**changes: Any) -> dict[str, Any]:
    shape = replace(gpu_loop.SHAPES["tiny"], **changes)
    return {"shape": asdict(shape), "parameters": 0, "prompt_tokens": [7, 3], "lengths": [[4, 9], [1, 5]]}


@pytest.mark.parametrize(("tied", "head_dim"), [(True, 0), (False, 32)])
def test_flops_of_a_pass_are_those_that_torch_counts(tied: bool, head_dim: int) -> None:
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import Qwen3Config, Qwen3ForCausalLM

    work = content(tied=tied, head_dim=head_dim)
    shape = work["shape"]
    width = head_dim or shape["hidden"] // shape["heads"]
    config = Qwen3Config(
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["intermediate"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        head_dim=width,
        tie_word_embeddings=tied,
        attn_implementation="eager",  # its products are counted on every device
    )
    model = Qwen3ForCausalLM(config)
    length = 11
    work |= {"parameters": sum(p.numel() for p in model.parameters())}
    work |= {"prompt_tokens": [0], "lengths": [[length]]}
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(length)[None], use_cache=False)
    whole = 4 * shape["layers"] * shape["heads"] * width * length**2
    causal = whole * (length + 1) / (2 * length)
    # Norms have weights and no products; torch counts all pairs of the attention.
    norms = 2 * length * sum(p.numel() for p in model.parameters() if p.ndim == 1)
    expected = counter.get_total_flops() - whole + causal + norms
    # Some versions of transformers make the angles of positions by a product.
    assert gpu_loop.pass_flops(work, repeated=True) == pytest.approx(expected, rel=2e-4)


def test_decoding_reads_weights_once_a_pass_and_what_is_cached() -> None:
    work = content() | {"parameters": 1000}
    shape = work["shape"]
    kv = 2 * shape["layers"] * shape["kv_heads"] * shape["hidden"] // shape["heads"]
    total = 0
    for number in range(1, 9):  # the pass that samples token `number`, counted from 0
        total += 1000
        for prompt, answers in zip(work["prompt_tokens"], work["lengths"], strict=True):
            going = [length for length in answers if length > number]
            total += kv * (number * len(going) + (prompt if going else 0))
    assert gpu_loop.decode_bytes(work, "bfloat16") == 2 * total


def test_the_optimizer_that_fits() -> None:
    for size, gib, wanted in ((1.7, 78, "adamw"), (8.2, 78, "lora"), (8.2, 139, "sgd"), (8.2, 200, "adamw")):
        assert gpu_loop.optimizer_for(content() | {"parameters": size * 1e9}, gib, "cuda") == wanted
    assert gpu_loop.optimizer_for(content() | {"parameters": 8e9}, 16, "cpu") == "adamw"


def test_a_side_that_ends_says_its_last_words() -> None:
    with pytest.raises(sides.SideEnded, match="out of everything"):
        sides.Side("x", [sys.executable, "-c", "import sys; sys.exit('out of everything')"], None)
    late = "print('{}', flush=True); input(); import sys; sys.exit('in the middle')"
    side, why = gpu_loop.run("x", [sys.executable, "-c", late], 2, 1)
    assert side is None and "in the middle" in why


def test_a_side_that_takes_too_long_is_ended() -> None:
    stuck = "import sys, time; print('{}', flush=True); print('thinking', file=sys.stderr, flush=True); time.sleep(60)"
    side, why = gpu_loop.run("x", [sys.executable, "-c", stuck], 2, 1, 1.0)
    assert side is None and "took too long" in why and "thinking" in why


@pytest.mark.slow
@pytest.mark.long
def test_it_runs_on_a_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.json"
    command = ["gpu_loop.py", "--shape", "tiny", "--device", "cpu"]
    command += ["--steps", "1", "--threads", "1", "--dtype", "float32", "--json", str(out), "--trl"]
    command += ["--engine", "native,no_such_engine", "--trl-python", str(shutil.which("false"))]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(gpu_loop, "limits", functools.cache(gpu_loop.limits))  # measured once is enough here
    gpu_loop.main()
    result = json.loads(out.read_text())
    tiny = result["shapes"]["tiny"]
    assert tiny["no_such_engine"]["failed"] == "no_such_engine is not installed here"
    assert "failed" in tiny["trl"]
    native = tiny["native"]
    assert result["limits"]["matmul_flops"] > 1e8 and result["limits"]["copy_bytes"] > 1e8
    assert 0 < native["mfu"] < native["mfu_as_repeated"] < 1
    assert 0 < native["sampling_share_of_bandwidth"] < 1
    assert native["sampling_tokens_per_s"] == pytest.approx(32 / native["phases_s"]["gen"], rel=1e-2)
    assert native["start_to_first_token_s"] > 0.5
    assert native["peak_gib_by_phase"].keys() >= {"gen", "update_actor", "update_weights"}


def test_figures_of_a_card_reach_the_page_and_those_of_a_processor_do_not(tmp_path: Path) -> None:
    found = {"card": "cpu", "date": "2026-01-02", "shape": "0.6b"}
    part = {"step_s": 0.02, "kernels_s": 0.015, "launches": 700.0, "waits": {"cudaStreamSynchronize": 1.0}}
    part |= {"top": [{"name": "a kernel", "ms": 3.0}], "captures": [{"free_before": 5 << 20, "free_after": 1 << 20}]}
    (tmp_path / "profile_0.6b.json").write_text(json.dumps(found | {"decode": part}))
    assert gpu_section.section(tmp_path) is None
    (tmp_path / "profile_0.6b.json").write_text(json.dumps(found | {"decode": part, "card": "NVIDIA H100"}))
    native = {
        "step_s": 4.0,
        "sampling_tokens_per_s": 9000.0,
        "device": "NVIDIA H100",
        "peak_gib_by_phase": {"gen": 7.0},
    }
    shapes = {"0.6b": {"optimizer": "adamw", "native": native, "trl": {"failed": "out of memory"}}}
    loop = {"date": "2026-01-02", "limits": {"kind": "cuda", "device": "1 × NVIDIA H100"}, "shapes": shapes}
    (tmp_path / "gpu_loop_0.6b.json").write_text(json.dumps(loop))
    page = tmp_path / "page.md"
    page.write_text(gpu_section.PAGE.read_text())
    for _ in range(2):  # again: in place of the first
        gpu_section.fill(page, str(gpu_section.section(tmp_path)))
    text = page.read_text()
    assert text.count("NVIDIA H100, 2026-01-02") == 1
    assert "| 0.6b decode, H100 | 20 | 15 | 700 | 1 | 4 |  | `a kernel` 3 |" in text
    assert "| 0.6b, adamw, H100 | native | 4 | 9e+03 |  |  | 7 |" in text and "failed: out of memory" in text
    assert "No figures of: gpu_tests.json" in text and "Nothing has run" not in text and "## `perf/mfu" in text


@pytest.mark.long
def test_profiles_of_decode_steps_and_of_an_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_profile, "WARM", 4)
    monkeypatch.setattr(gpu_profile, "STEPS", 3)
    monkeypatch.setattr(sys, "argv", ["x", "--shape", "tiny", "--device", "cpu", "--out", str(tmp_path)])
    gpu_profile.main()
    found = json.loads((tmp_path / "profile_tiny.json").read_text())
    for part in ("decode", "update"):
        assert found[part]["top"] and found[part]["step_s"] > 0 and (tmp_path / f"{part}_tiny.json.gz").exists()
    assert any(kernel["name"].startswith("aten::") for kernel in found["update"]["top"])
