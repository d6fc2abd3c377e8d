"""With images transformers, trainer and sampler compute the same log-probs, however rows are batched and sampled."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file

from tests import ranks
from tests.tiny import HAS_KIMI_VL, tiny_model, tiny_vision_model
from tests.unit.engine.training.engine_cases import assert_close, gradients, simple_loss
from verl.config.schema.base import setting
from verl.data.media import ImageProcessor, load_processor
from verl.data.rows import ChatRenderer
from verl.data.tokenizer import load_tokenizer
from verl.engine.registry import capabilities
from verl.engine.rollout.base import Completion, SamplingParams
from verl.engine.rollout.native.engine import NativeEngine
from verl.engine.training.fsdp.engine import FSDPEngine
from verl.models.inputs import VisionInputs
from verl.models.layers import product_weights
from verl.models.pretrained import load_model
from verl.trajectory import VIDEO_SECONDS, Media, Prompt, Trajectory
from verl.versions import satisfies
from verl.weight_sync.sender import InProcessSync

RANGES = capabilities("native").image_transformers
pytestmark = pytest.mark.skipif(
    not satisfies(transformers.__version__, RANGES), reason=f"images need transformers {RANGES}"
)

ARCHITECTURES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
LINEAR = ("qwen3_5", "qwen3_5_moe")
GLM = ("glm4v", "glm46v", "glm4v_moe")
KIMI = ("kimi_vl",) if HAS_KIMI_VL else ()
LIMITS: dict[str, Any] = {"eos_token_ids": [258], "max_model_len": 320, "max_num_seqs": 16}
IMAGES: tuple[list[tuple[int, int]], ...] = ([(40, 24)], [], [(16, 16), (64, 30), (9, 80)], [(128, 128)])
"""Sizes of the images of each prompt: one, none, several, and one of 64 tokens."""


@pytest.fixture(scope="module", params=ARCHITECTURES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision_model(tmp_path_factory.mktemp("m"), request.param)


@pytest.fixture(scope="module")
def path25(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision_model(tmp_path_factory.mktemp("m25"))


def marks_of(path: Path) -> list[int]:
    """Tokens that stand for images and videos or mark where they begin and end, as the model's config.json has them."""
    config = json.loads((path / "config.json").read_text())
    kinds = ("image_", "video_", "vision_", "media_")
    return sorted(v for k, v in config.items() if k.startswith(kinds) and k.endswith("_token_id"))


def make_prompts(path: Path) -> list[Prompt]:
    tokenizer = load_tokenizer(path)
    processor, renderer = ImageProcessor(load_processor(str(path), tokenizer, {})), ChatRenderer(tokenizer)
    rng, out = np.random.default_rng(0), []
    for i, sizes in enumerate(IMAGES):
        text = {"type": "text", "text": f"what is {i}"}
        messages = [{"role": "user", "content": [*({"type": "image"} for _ in sizes), text]}]
        ids, media = renderer.ids(renderer.text(messages)), None
        if sizes:
            images = [Image.fromarray(rng.integers(0, 255, (h, w, 3), np.uint8)) for w, h in sizes]
            ids, media = processor(renderer.text(messages), images, Path())
        out.append(Prompt(f"0:{i}@0", ids, messages, media=media))
    return out


def sample(engine: NativeEngine, prompts: list[Prompt], n: int = 3, **params: Any) -> list[list[Completion]]:
    async def run() -> list[Completion]:
        settings = {"max_tokens": 24, "ignore_eos": True} | params
        calls = [
            engine.generate(
                p.ids,
                SamplingParams(seed=9 * i + j, **settings),
                request_id=f"{i}.{j}",
                group=p.uid,
                media=p.media,
            )
            for i, p in enumerate(prompts)
            for j in range(n)
        ]
        return await asyncio.gather(*calls)

    flat = asyncio.run(run())
    return [flat[i * n : (i + 1) * n] for i in range(len(prompts))]


def rows_of(prompts: list[Prompt], found: list[list[Completion]]) -> list[Trajectory]:
    rows = []
    for prompt, group in zip(prompts, found, strict=True):
        for j, done in enumerate(group):
            advantages = np.full(len(done.token_ids), 1.0 if j % 2 else -1.0, np.float32)
            rows.append(
                Trajectory(prompt, j, done.token_ids, np.ones(len(done.token_ids), bool), advantages=advantages)
            )
    return rows


def sampled(found: list[list[Completion]]) -> np.ndarray:
    return np.concatenate([done.log_probs for group in found for done in group])


def trained(**more: Any) -> dict[str, Any]:
    return {"optim": {"lr": 0.01}, "fsdp_config": {"dtype": "float32"}} | more


def segments(rows: list[Trajectory]) -> list[Any]:
    return [segment for row in rows for segment in row.segments]


def plain_log_probs(path: Path, rows: list[Trajectory]) -> np.ndarray:
    """The model as transformers loads it, one whole sequence at a time, its own positions and attention."""
    from transformers import AutoModelForImageTextToText

    model, out = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval(), []
    for row in rows:
        ids = torch.from_numpy(np.concatenate((row.prompt.ids, row.response_ids)))[None]
        media = {} if row.prompt.media is None else row.prompt.media.inputs
        kinds = {"mm_token_type_ids": (ids == 263).int()} if media else {}
        with torch.no_grad():
            logits = model(input_ids=ids, **{k: torch.from_numpy(v) for k, v in media.items()}, **kinds).logits[0]
        logits[:, marks_of(path)] = -torch.inf
        start = len(row.prompt.ids) - 1
        picked = logits[start:-1].log_softmax(-1).gather(1, torch.from_numpy(row.response_ids)[:, None])
        out.append(picked[:, 0].numpy())
    return np.concatenate(out)


@pytest.mark.parametrize("path", KIMI, indirect=True)
def test_weights_have_their_published_names(path: Path, tmp_path: Path) -> None:
    """transformers writes all at once, and the trainer one by one."""
    actor = FSDPEngine(path, role_cfg=trained(), device="cpu")
    actor.save_weights(tmp_path)
    published = load_file(path / "model.safetensors")
    saved = load_file(tmp_path / "model.safetensors")
    assert published.keys() == saved.keys() == {name for name, _ in actor.named_weights()}
    assert all(torch.equal(tensor, saved[name]) for name, tensor in published.items())
    assert {"vision_tower.encoder.blocks.0.norm0.weight", "vision_tower.encoder.blocks.0.mlp.fc1.bias"} <= saved.keys()


@pytest.mark.parametrize(
    "path",
    [
        *("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe", *KIMI),
        *(pytest.param(arch, marks=pytest.mark.long) for arch in ("qwen2_vl", "qwen3_5", "glm4v", "glm46v")),
    ],
    indirect=True,
)
def test_transformers_trainer_and_sampler_agree_after_three_syncs(path: Path, tmp_path: Path) -> None:
    actor = FSDPEngine(path, role_cfg=trained(), device="cpu")
    sampler, prompts = NativeEngine(actor.module, **LIMITS), make_prompts(path)
    sync = InProcessSync(actor, sampler)
    for version in range(3):
        assert sync.push(version, verify=True).verified
        found = sample(sampler, prompts)
        rows = rows_of(prompts, found)
        ours = actor.forward(segments(rows), temperature=1.0)["log_probs"]
        assert np.abs(ours - sampled(found)).max() <= 1e-4
        assert sampler.stats()["images"] == 5, "each image once for its group"
        assert actor.images() == {"encoded": 5, "distinct": 5}
        assert not set(marks_of(path)) & {int(t) for row in rows for t in row.response_ids}
        actor.save_weights(tmp_path / str(version))
        assert np.abs(ours - plain_log_probs(tmp_path / str(version), rows)).max() <= 1e-4
        assert not actor.step(segments(rows), simple_loss(sum(r.length for r in rows)), temperature=1.0).refused
        actor.images()


def prompt_with_video(kind: str, seconds: float) -> tuple[np.ndarray, Prompt]:
    """An image and a video of two rows of time, and the ids that transformers is told: one run of tokens, or with
    Qwen3-VL one for each row with its time before it."""
    place = [261, *[264] * 4, 262]
    video = [48, *place, 49, *place] if kind.startswith("qwen3") else [261, *[264] * 8, 262]
    ids = np.array([65, 261, *[263] * 4, 262, 66, *video, 67])
    patches = np.random.default_rng(3).standard_normal((48, 96)).astype(np.float32)
    inputs = {"pixel_values": patches, "image_grid_thw": np.array([[1, 4, 4], [2, 4, 4]])}
    media = Media(inputs | {VIDEO_SECONDS: np.array([0, seconds], np.float32)}, 12)
    return ids, Prompt("0:0@0", np.where(ids == 264, 263, ids), None, media=media)


def test_a_video_is_an_image_with_rows_of_time(path: Path) -> None:
    """Ids, pixels and seconds as `data/videos.py` hands them over, against transformers, which is told of a video."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(path).eval()
    kind = model.config.model_type
    ids, prompt = prompt_with_video(kind, 0.25)
    assert prompt.media is not None
    inputs, patches = prompt.media.inputs, prompt.media.inputs["pixel_values"]
    actor = FSDPEngine(path, role_cfg=trained(), device="cpu")
    found = sample(NativeEngine(actor.module, **LIMITS), [prompt])
    rows = rows_of([prompt], found)
    ours = actor.forward(segments(rows), temperature=1.0)["log_probs"]
    assert np.abs(ours - sampled(found)).max() <= 1e-4
    pixels, grids = torch.from_numpy(patches).split([16, 32]), torch.tensor(inputs["image_grid_thw"])
    given = {"pixel_values": pixels[0], "image_grid_thw": grids[:1]}
    given |= {"pixel_values_videos": pixels[1], "video_grid_thw": grids[1:]}
    if kind == "qwen2_5_vl":
        given["second_per_grid_ts"] = torch.tensor([0.25])
    for row, own in zip(rows, np.split(ours, len(rows)), strict=True):
        whole = torch.from_numpy(np.concatenate((ids, row.response_ids)))[None]
        kinds = (whole == 263).int() + 2 * (whole == 264).int()
        with torch.no_grad():
            logits = model(input_ids=whole, mm_token_type_ids=kinds, **given).logits[0, len(ids) - 1 : -1]
        logits[:, marks_of(path)] = -torch.inf
        theirs = logits.log_softmax(-1).gather(1, whole[0, len(ids) :, None])[:, 0].numpy()
        assert np.abs(own - theirs).max() <= 1e-4


@pytest.mark.parametrize(
    "how",
    [
        {"use_prefix_grouper": False},
        {"ppo_micro_batch_size_per_gpu": 1},
        {"ppo_micro_batch_size_per_gpu": 4, "use_prefix_grouper": False},
        {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 150},
    ],
    ids=str,
)
def test_batching_never_changes_the_response(path25: Path, how: dict[str, Any]) -> None:
    prompts = make_prompts(path25)
    engines = [FSDPEngine(path25, role_cfg=trained(**more), device="cpu") for more in ({}, how)]
    found = sample(NativeEngine(engines[0].module, **LIMITS), prompts)
    rows = rows_of(prompts, found)
    loss = simple_loss(sum(r.length for r in rows))
    results = [one.step(segments(rows), loss, temperature=1.0) for one in engines]
    assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=1e-4)
    assert_close(gradients(engines[0]), gradients(engines[1]), 1e-3)
    visual = [float(p.norm()) for name, p in gradients(engines[0]).items() if "visual" in name]
    assert visual and min(visual) >= 0 and max(visual) > 0, "the tower learns"


def of_two_ranks(
    path: str, shares: list[list[int]], mode: str, sequence: int = 1
) -> tuple[float, dict[str, torch.Tensor], np.ndarray]:
    """Norm, gradients and this rank's log-probs; made-up responses, the same on every rank. mode: of router replay;
    sequence: ranks that share each sequence."""
    from verl.engine.training.process_group import whole

    how = {"ppo_micro_batch_size_per_gpu": 2, "ulysses_sequence_parallel_size": sequence}
    role = trained(**how, router_replay={"mode": mode})
    engine, outputs = FSDPEngine(path, role_cfg=role, device="cpu"), ("log_probs", "routed_experts")
    rng, rows = np.random.default_rng(1), []
    for prompt in make_prompts(Path(path)):
        for j in range(2):
            ids, advantages = rng.integers(0, 250, 9), rng.standard_normal(9).astype(np.float32)
            rows.append(Trajectory(prompt, j, ids, np.ones(9, bool), advantages=advantages))
    mine = [rows[i] for i in shares[engine.dp_rank]]
    found = engine.forward(segments(mine), outputs[: 1 + (mode == "R2")], temperature=1.0)["log_probs"]
    result = engine.step(segments(mine), simple_loss(9 * len(rows)), temperature=1.0)
    assert not result.refused
    assert result.metrics.get("actor/router_replay/changed_frac") == (0.0 if mode == "R2" else None)
    given = {n: whole(p.grad).clone() for n, p in engine.module.named_parameters() if p.grad is not None}
    return result.grad_norm, given, found


@pytest.mark.parametrize(
    ("arch", "shares"),
    [
        ("qwen2_5_vl", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("qwen2_5_vl", [list(range(8)), []]),
        ("qwen3_vl_moe", [[0, 1, 4, 5, 6, 7], [2, 3]]),
        ("qwen2_5_vl", [list(range(8))] * 2),
        *(
            pytest.param(arch, shares, marks=pytest.mark.long)
            for arch in (*ARCHITECTURES, *LINEAR, *GLM, *KIMI)
            for shares in ([[0, 1, 4, 5, 6, 7], [2, 3]], [list(range(8))] * 2)
        ),
    ],
    ids=str,
)
def test_two_ranks_are_one_whoever_has_the_images(tmp_path: Path, arch: str, shares: list[list[int]]) -> None:
    """Rows 2 and 3 have none: alone on a rank, that rank still runs the tower with the other. With the same rows the
    ranks share each sequence."""
    path, mode = tiny_vision_model(tmp_path, arch), "R2" if arch.endswith(("moe", "kimi_vl")) else "disabled"
    sequence = 2 if shares[0] == shares[1] else 1
    found = ranks.run(of_two_ranks, 2, str(path), shares, mode, sequence)
    norm, expected, log_probs = of_two_ranks(str(path), [list(range(8))], mode)
    for rank, (other, given, ours) in enumerate(found):
        assert other == pytest.approx(norm, rel=1e-4)
        assert_close(given, expected, 1e-3)
        theirs = [log_probs[9 * i : 9 * i + 9] for i in shares[rank]]
        np.testing.assert_allclose(ours, np.concatenate(theirs or [log_probs[:0]]), atol=1e-5)


@pytest.mark.parametrize("limits", [{"max_num_batched_tokens": 16}, {"cache_tokens": 1024, "max_num_seqs": 4}], ids=str)
def test_prefill_in_pieces_and_a_full_cache_change_nothing(path25: Path, limits: dict[str, Any]) -> None:
    """A budget below one image cuts it into spans; a small cache throws responses out and computes them again."""
    model, prompts = FSDPEngine(path25, role_cfg=trained(), device="cpu").module, make_prompts(path25)
    whole, pieces = (sample(NativeEngine(model, **(LIMITS | more)), prompts) for more in ({}, limits))
    for one, other in zip(*([d for group in found for d in group] for found in (whole, pieces)), strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert np.abs(one.log_probs - other.log_probs).max() <= 1e-4


@pytest.mark.parametrize("arch", ["qwen3_vl_moe", "glm4v_moe"])
def test_the_sampler_records_the_trainer_s_routes(tmp_path: Path, arch: str) -> None:
    path = tiny_vision_model(tmp_path, arch)
    actor = FSDPEngine(path, role_cfg=trained(), device="cpu")
    limits = LIMITS | {"record_routes": True, "max_num_batched_tokens": 16}
    prompts = make_prompts(path)
    found = sample(NativeEngine(actor.module, **limits), prompts)
    rows = segments(rows_of(prompts, found))
    actor.forward(rows, ("log_probs", "routed_experts"), temperature=1.0)
    for row, done in zip(rows, [one for group in found for one in group], strict=True):
        theirs = np.concatenate((row.context_columns["routed_experts"], row.routed_experts))[:-1]
        assert done.routed_experts is not None
        np.testing.assert_array_equal(done.routed_experts[: len(theirs)], theirs)


def test_experts_are_written_as_published(tmp_path: Path) -> None:
    """[experts, in, out], as vLLM wants them; transformers writes them the other way round, which is read as well."""
    from safetensors.torch import load_file

    own, saved = tiny_vision_model(tmp_path / "m", "qwen3_vl_moe"), tmp_path / "saved"
    actor = FSDPEngine(own, role_cfg=trained(), device="cpu")
    actor.save_weights(saved)
    given, written = (load_file(folder / "model.safetensors") for folder in (own, saved))
    turned = [name for name in given if not torch.equal(given[name], written[name])]
    assert turned and all(name.endswith(("experts.gate_up_proj", "experts.down_proj")) for name in turned)
    assert all(torch.equal(given[name].transpose(1, 2), written[name]) for name in turned)
    again = FSDPEngine(saved, role_cfg=trained(), device="cpu").module.state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in actor.module.state_dict().items())
    actor.load_weights(saved)


def test_what_is_in_the_image_changes_the_response(path25: Path) -> None:
    actor, prompts = FSDPEngine(path25, role_cfg=trained(), device="cpu"), make_prompts(path25)[:1]
    media = prompts[0].media
    assert media is not None
    found = sample(NativeEngine(actor.module, **LIMITS), prompts)
    seen = actor.forward(segments(rows_of(prompts, found)), temperature=1.0)["log_probs"]
    prompts[0].media = media.blanked()
    blank = actor.forward(segments(rows_of(prompts, found)), temperature=1.0)["log_probs"]
    assert np.abs(seen - blank).max() > 1e-3


def test_a_later_turn_encodes_nothing_again(path25: Path) -> None:
    actor, prompts = FSDPEngine(path25, role_cfg=trained(), device="cpu"), make_prompts(path25)[2:3]
    sampler = NativeEngine(actor.module, **LIMITS)
    first = sample(sampler, prompts, 1)[0][0]
    context = np.concatenate((prompts[0].ids, first.token_ids, np.arange(65, 75)))
    later = [Prompt("0:2@0.1", context, None, media=prompts[0].media)]
    found = sample(sampler, later, 1)
    assert sampler.stats()["images"] == 3, "each of the three images once"
    ours = actor.forward(rows_of(later, found), temperature=1.0)["log_probs"]
    assert np.abs(ours - sampled(found)).max() <= 1e-4


def test_a_frozen_tower_stays(path25: Path) -> None:
    actor = FSDPEngine(path25, role_cfg=trained(freeze_vision_tower=True), device="cpu")
    before = {name: p.detach().clone() for name, p in actor.module.named_parameters()}
    prompts = make_prompts(path25)
    rows = rows_of(prompts, sample(NativeEngine(actor.module, **LIMITS), prompts))
    actor.step(segments(rows), simple_loss(sum(r.length for r in rows)), temperature=1.0)
    moved = {name for name, p in actor.module.named_parameters() if not torch.equal(p, before[name])}
    assert moved and not any("visual" in name for name in moved)
    assert any("visual" in name for name in before)


def test_adapters_leave_the_tower_out_if_asked(path25: Path) -> None:
    pytest.importorskip("peft")
    lora = {"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear", "exclude_modules": ".*visual.*"}
    actor = FSDPEngine(path25, role_cfg=trained(), model_cfg=lora, device="cpu")
    names = {name for name, p in actor.module.named_parameters() if p.requires_grad}
    assert names and not any("visual" in name for name in names) and setting(lora, "lora_rank") == 4
    sampler, prompts = NativeEngine(actor.module, **LIMITS), make_prompts(path25)
    for version in range(2):
        InProcessSync(actor, sampler).push(version)
        found = sample(sampler, prompts)
        rows = rows_of(prompts, found)
        ours = actor.forward(segments(rows), temperature=1.0)["log_probs"]
        assert np.abs(ours - sampled(found)).max() <= 1e-4
        actor.step(segments(rows), simple_loss(sum(r.length for r in rows)), temperature=1.0)


def test_the_cost_of_a_token_is_the_language_model_s(path25: Path) -> None:
    model = load_model(path25)
    text = [p for n, p in model.named_parameters() if "visual" not in n and "embed_tokens" not in n and p.ndim > 1]
    assert product_weights(model, model.config.get_text_config()) == sum(p.numel() for p in text)


def test_what_does_not_fit_is_refused_by_name(path25: Path, tmp_path: Path) -> None:
    actor, prompts = FSDPEngine(path25, role_cfg=trained(), device="cpu"), make_prompts(path25)
    sampler = NativeEngine(actor.module, **LIMITS)
    swapped = Prompt("0:0@0", prompts[0].ids, None, media=prompts[2].media)
    with pytest.raises(ValueError, match="image tokens for images"):
        sample(sampler, [swapped])
    with pytest.raises(ValueError, match="holds image tokens"):
        sample(sampler, [Prompt("0:0@0", prompts[0].ids, None)])
    row = Trajectory(swapped, 3, np.array([1, 2]), np.ones(2, bool))
    with pytest.raises(ValueError, match="response 3 of 0:0@0"):
        actor.forward(row.segments, temperature=1.0)
    text = NativeEngine(FSDPEngine(tiny_model(tmp_path / "t"), role_cfg=trained(), device="cpu").module, **LIMITS)
    with pytest.raises(ValueError, match="the model sees none"):
        sample(text, prompts[:1])


def test_text_after_a_long_video_begins_after_its_last_frame(path25: Path) -> None:
    """Three rows of time 3 seconds apart, at tokens_per_second=4: the largest position is that of the last row."""
    module = load_model(path25)
    rate = module.config.vision_config.tokens_per_second
    ids = np.array([65, 261, *[263] * 12, 262, 66, 261, *[263] * 4, 262])
    grids = np.array([[3, 4, 4], [1, 4, 4]])
    media = Media({"image_grid_thw": grids, VIDEO_SECONDS: np.array([3.0, 0.0], np.float32)}, 16)
    context = VisionInputs(module).context(ids, media)
    rows = [[2 + 3 * rate * t, 2 + y, 2 + x] for t in range(3) for y in range(2) for x in range(2)]
    after = 2 + 6 * rate + 1
    image = [[after + 3, after + 3 + y, after + 3 + x] for y in range(2) for x in range(2)]
    text = [[n] * 3 for n in (0, 1, *range(after, after + 3), after + 5)]
    assert context.positions.T.tolist() == [*text[:2], *rows, *text[2:5], *image, text[5]]
    assert context.axes(len(ids), 1).tolist() == [[after + 6]] * 3
