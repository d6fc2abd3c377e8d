"""Whole runs on images through the command line: records, checkpoints that load, exact resume, images that are not
seen."""

from __future__ import annotations

import importlib.util
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageDraw

from tests.chaos.killing import Kill, run_and_kill
from tests.runs import TinyRun, environment, records, weights
from tests.tiny import tiny_vision_model, unseeing
from verl.trainer.image_checks import images_dropped
from verl.trajectory import Batch, Media, Prompt, Segment, Trajectory

COLOURS = ("red", "green", "blue")


def drawn(number: int) -> bytes:
    """A shape of one colour on white, of a size of its own."""
    image = Image.new("RGB", (24 + 8 * (number % 5), 32), "white")
    draw = ImageDraw.Draw(image)
    (draw.ellipse if number % 2 else draw.rectangle)((4, 4, 20, 20), fill=COLOURS[number % 3])
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def write_shapes(path: Path, count: int) -> Path:
    """Questions about one or two drawn shapes, every fourth without any."""
    rows = []
    for i in range(count):
        images = [] if i % 4 == 3 else [{"bytes": drawn(i), "path": None}] * (1 + i % 2)
        rows.append(
            {
                "data_source": "test/shapes",
                "prompt": [{"role": "user", "content": "<image>" * len(images) + f"Colour {i}?"}],
                "images": images,
                "reward_model": {"style": "rule", "ground_truth": COLOURS[i % 3]},
                "extra_info": {"index": i},
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


class VisionRun(TinyRun):
    """A `TinyRun` of a vision-language model on drawn shapes."""

    def __init__(self, root: Path, arch: str = "qwen2_5_vl"):
        super().__init__(root, rows=1)
        self.model = tiny_vision_model(root / "vision", arch)
        self.train, self.val = write_shapes(root / "train.parquet", 16), write_shapes(root / "val.parquet", 4)

    def overrides(self, out: Path, *more: str) -> list[str]:
        return super().overrides(out, "data.max_prompt_length=160", *more)


THREE = ["trainer.total_training_steps=3", "trainer.verify_weight_sync=True", "data.augmentation.rotate=20"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> VisionRun:
    return VisionRun(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def whole(tiny: VisionRun, fork_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three steps."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    done = fork_server.run(tiny.overrides(out, *THREE))
    assert done.status == 0, done.stderr[-3000:]
    return out


def test_a_run_sees_its_images_and_resumes_exactly(
    tiny: VisionRun, whole: Path, fork_server: Any, tmp_path: Path
) -> None:
    from transformers import AutoModelForImageTextToText

    parts = tmp_path / "parts"
    words = tiny.overrides(parts, *THREE)
    _, mark = run_and_kill(fork_server, words, Kill("update_actor", 2), tmp_path / "marks")
    assert mark == "update_actor", "killed in the second step's update"
    done = fork_server.run(words)
    assert done.status == 0, done.stderr[-3000:]
    assert records(parts) == records(whole)
    assert weights(parts, 3) == weights(whole, 3) != weights(whole, 1)
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "perf/images/count" in line]
    assert len(steps) == 3
    for step in steps:
        assert step["training/rollout_logprob_abs_diff/max"] < 1e-4
        for name in ("decoded_per_image", "processed_per_image", "encoded_per_image/trainer"):
            assert step[f"perf/images/{name}"] == 1, name
        assert step["perf/images/encoded_per_image/sampler"] == 1 and step["perf/images/sent_per_node"] == 0
        assert step["training/images_dropped"] == 0
    assert "data:image/jpeg;base64," in (whole / "report.html").read_text()
    model = AutoModelForImageTextToText.from_pretrained(whole / "global_step_3" / "actor")
    assert type(model).__name__ == "Qwen2_5_VLForConditionalGeneration"


BESIDE = Path(sys.prefix) / "torchvision"
THERE = importlib.util.find_spec("torchvision") is not None or BESIDE.is_dir()
LOADED = """
import json, sys
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from verl.data.media import load_processor

path, picture = sys.argv[1:]
theirs, image = AutoProcessor.from_pretrained(path), Image.open(picture)
asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Colour?"}]}]
text = theirs.apply_chat_template(asked, add_generation_prompt=True)
given = theirs(text=[text], images=[image], return_tensors="pt")
ours = load_processor(path, theirs.tokenizer, {}).image_processor([image], return_tensors="pt")
made = AutoModelForImageTextToText.from_pretrained(path).generate(**given, max_new_tokens=4, do_sample=False)
print(json.dumps({
    "parts": [type(part).__name__ for part in (theirs, theirs.image_processor, theirs.video_processor)],
    "image_tokens": int((given["input_ids"] == theirs.image_token_id).sum()),
    "patches": int(given["image_grid_thw"].prod()),
    "merged": theirs.image_processor.merge_size ** 2,
    "same_grid": bool((given["image_grid_thw"] == ours["image_grid_thw"]).all()),
    "difference": float((given["pixel_values"] - ours["pixel_values"]).abs().max()),
    "new": made.shape[1] - given["input_ids"].shape[1],
}))
"""


WRITTEN = """
import os, sys
from transformers import AutoProcessor

made = AutoProcessor.from_pretrained(sys.argv[1])
os.unlink(os.path.join(sys.argv[1], "preprocessor_config.json"))
made.save_pretrained(sys.argv[1])
"""


def with_torchvision(program: str, *words: Path) -> str:
    """What a program prints that has torchvision on its path."""
    command = [sys.executable, "-c", program, *map(str, words)]
    path = environment(PYTHONPATH=f"{BESIDE}:{Path(__file__).parents[2]}")
    done = subprocess.run(command, env=path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def loaded_by_transformers(actor: Path, folder: Path) -> dict[str, Any]:
    """What `AutoProcessor` and `AutoModelForImageTextToText` make of a checkpoint, beside what this project reads from
    it."""
    (folder / "drawn.png").write_bytes(drawn(1))
    found: dict[str, Any] = json.loads(with_torchvision(LOADED, actor, folder / "drawn.png").splitlines()[-1])
    assert found["image_tokens"] * found["merged"] == found["patches"] > 4
    assert found["same_grid"] and found["difference"] < 0.02 and 1 <= found["new"] <= 4, found
    return found


@pytest.mark.skipif(not THERE, reason=f"AutoProcessor wants torchvision; none in {BESIDE}")
def test_transformers_loads_processor_and_model_from_a_checkpoint(whole: Path, tmp_path: Path) -> None:
    found = loaded_by_transformers(whole / "global_step_3" / "actor", tmp_path)
    assert found["parts"] == ["Qwen2_5_VLProcessor", "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor"]


@pytest.mark.long
@pytest.mark.skipif(not THERE, reason=f"AutoProcessor wants torchvision; none in {BESIDE}")
@pytest.mark.parametrize("arch", ["qwen2_vl", "qwen3_vl", "qwen3_vl_moe"])
@pytest.mark.parametrize("written", ["as published", "by AutoProcessor"])
def test_transformers_loads_a_checkpoint_of_each_kind(
    arch: str, written: str, fork_server: Any, tmp_path: Path
) -> None:
    """Also where the model's own files are those that `AutoProcessor.save_pretrained` writes."""
    run, out = VisionRun(tmp_path / "tiny", arch), tmp_path / "run"
    if written == "by AutoProcessor":
        with_torchvision(WRITTEN, run.model)
        assert not (run.model / "preprocessor_config.json").exists()
    done = fork_server.run(run.overrides(out, "trainer.total_training_steps=1"))
    assert done.status == 0, done.stderr[-3000:]
    loaded_by_transformers(out / "global_step_1" / "actor", tmp_path)


def test_images_that_a_loop_leaves_out_are_counted() -> None:
    two = Media({"image_grid_thw": np.ones((2, 3), np.int64)}, 2)
    prompt, ids, mask = Prompt("0:0@0", np.arange(4), None, media=two), np.arange(3), np.ones(3, bool)
    shown = [Segment(np.arange(4), ids, mask, media=two), Segment(np.arange(4), ids, mask)]
    batch = [Trajectory(prompt, i, segments=some) for i, some in enumerate((shown, shown[1:], shown[:1]))]
    bare = Trajectory(Prompt("0:1@0", np.arange(4), None), 0, segments=shown[1:])
    assert images_dropped(Batch([*batch, bare])) == 2


def test_responses_to_images_are_written_and_scored(tiny: VisionRun, tmp_path: Path) -> None:
    from verl.trainer import main_eval, main_generation

    out, sizes = tmp_path / "out.parquet", ["rollout.prompt_length=160", "rollout.response_length=6"]
    more = [f"data.output_path={out}", "data.n_samples=2", "rollout.dtype=float32", "trainer.device=cpu"]
    assert main_generation.main([f"model.path={tiny.model}", f"data.path={tiny.val}", *sizes, *more]) == 0
    assert [len(found) for found in pq.read_table(out)["responses"].to_pylist()] == [2] * 4
    scoring = [f"custom_reward_function.path={tiny.reward}", "reward_model.num_workers=1"]
    assert main_eval.main([f"data.path={out}", *scoring]) == 0


def test_a_model_that_does_not_see_its_images_ends_the_run(tmp_path: Path, fork_server: Any) -> None:
    tiny = VisionRun(tmp_path / "tiny", "qwen2_vl")
    unseeing(tiny.model)
    done = fork_server.run(tiny.overrides(tmp_path / "run"))
    assert done.status == 1 and "does not see them" in done.stderr[-2000:]


def test_supervised_rows_with_images(tiny: VisionRun, fork_server: Any, tmp_path: Path) -> None:
    """Learned on one process and resumed on none: the loss falls, and the checkpoint starts a run of GRPO."""
    words = [
        f"data.train_files={tiny.train}",
        "data.prompt_key=prompt",
        "data.response_key=reward_model",
        "data.response_dict_keys=[ground_truth]",
        "data.train_batch_size=8",
        "data.max_length=200",
        f"model.path={tiny.model}",
        "engine.dtype=float32",
        "optim.lr=1e-2",
        "trainer.device=cpu",
        "trainer.total_training_steps=6",
        "trainer.save_freq=6",
        "trainer.logger=[]",
        f"trainer.default_local_dir={tmp_path / 'sft'}",
    ]
    done = fork_server.run(words, module="verl.trainer.sft_trainer")
    assert done.status == 0, done.stderr[-3000:]
    losses = [r["train/loss"] for r in records(tmp_path / "sft").values() if "train/loss" in r]
    assert losses[-1] < losses[0] - 0.5
    actor = tmp_path / "sft" / "global_step_6" / "actor"
    more = [f"actor_rollout_ref.model.path={actor}", "trainer.total_training_steps=1"]
    again = fork_server.run(tiny.overrides(tmp_path / "grpo", *more))
    assert again.status == 0, again.stderr[-3000:]
