"""Images of rows: the forms of a cell, their places in the dialogue, lengths, and rows that cannot be used."""

from __future__ import annotations

import base64
import io
import os
import pickle
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.tiny import SPECIAL, VISION, tiny_tokenizer, tiny_vision_model
from verl.config import load
from verl.data.dataset import PromptDataset
from verl.data.files import DataError
from verl.data.media import decoded, load_processor, open_image, save_processor, with_images
from verl.data.rows import BadRow, as_messages
from verl.data.sft import SFTDataset
from verl.data.tokenizer import load_tokenizer
from verl.data.videos import open_video
from verl.trajectory import Trajectory

PAD = 263
"""The image token of the tiny tokenizer."""


def picture(size: tuple[int, int] = (40, 24), mode: str = "RGB", kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    Image.new(mode, size, **options).save(out, kind)
    return out.getvalue()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision_model(tmp_path_factory.mktemp("vision"))


def open_rows(model: Path, rows: list[dict[str, Any]], folder: Path, *more: str) -> PromptDataset:
    whole = [
        {
            "data_source": "x",
            "reward_model": {"ground_truth": "1"},
            "prompt": [{"role": "user", "content": "<image>?"}],
        }
        | row
        for row in rows
    ]
    pq.write_table(pa.Table.from_pylist(whole), folder / "x.parquet")
    words = [
        f"data.train_files={folder}/x.parquet",
        "data.val_files=null",
        f"actor_rollout_ref.model.path={model}",
    ]
    config = load([*words, "data.max_bad_row_ratio=1", *more])
    tokenizer = load_tokenizer(model)
    processor = load_processor(str(model), tokenizer, config.data.mm_processor_kwargs)
    return PromptDataset(config.data.train_files, config, tokenizer, processor=processor)


def cells(folder: Path) -> list[Any]:
    file = folder / "a.png"
    file.write_bytes(content := picture(color=(9, 8, 7)))
    uri = "data:image/png;base64," + base64.b64encode(content).decode()
    forms: list[Any] = [content, {"bytes": content, "path": None}, {"bytes": None, "path": "a.png"}, "a.png"]
    return [*forms, str(file), f"file://{file}", uri, {"image": uri}, Image.open(io.BytesIO(content))]


def test_every_form_of_a_cell_is_the_same_image(tmp_path: Path) -> None:
    for cell in cells(tmp_path):
        image = decoded(open_image(cell, tmp_path))
        assert (image.mode, image.size, image.getpixel((3, 3))) == ("RGB", (40, 24), (9, 8, 7))


@pytest.mark.parametrize(
    ("made", "pixel"),
    [
        ({"mode": "L", "color": 5}, (5, 5, 5)),
        ({"mode": "CMYK", "color": (0, 0, 0, 0), "kind": "TIFF"}, (255, 255, 255)),
        ({"mode": "RGBA", "color": (0, 0, 0, 0)}, (255, 255, 255)),
        ({"mode": "P", "color": 0, "kind": "GIF"}, (0, 0, 0)),
    ],
    ids=str,
)
def test_any_mode_becomes_rgb_and_what_is_transparent_white(made: dict[str, Any], pixel: tuple[int, ...]) -> None:
    assert decoded(open_image(picture(**made), Path())).getpixel((0, 0)) == pixel


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        (b"not an image", "undecodable image"),
        ("missing.png", "image missing"),
        ({"bytes": None, "path": None}, "image missing"),
        ("http://localhost/x.png", "image is remote"),
        ("data:image/png;base64,$$$", "undecodable image"),
        ("data:image/png;base64,ä", "undecodable image"),
        ("~nobody-of-that-name/a.png", "image missing"),
        ("pipe", "image missing"),
        ("/dev/zero", "image missing"),
        (Image.new("1", (10_000, 10_000)), "image too large"),
        (picture((20_000, 10_000), "1"), "image too large"),
        (7, "wrong column type"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_cell_that_is_no_image_is_named(tmp_path: Path, cell: Any, problem: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadRow) as bad:
        open_image(cell, tmp_path)
    assert bad.value.problem == problem


@pytest.mark.parametrize(
    ("content", "count", "expected"),
    [
        ("a<image>b<image>", 2, ["a", 0, "b", 1]),
        ("a", 1, [0, "a"]),
        (
            [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "<image>"}],
            2,
            ["a", 0, 1],
        ),
        ([{"type": "image", "image": "own"}, {"type": "text", "text": "<image>"}], 1, ["own", 0]),
        ("a<image>", 2, "1 places"),
        ("<image><image>", 1, "2 places"),
    ],
)
def test_images_take_their_places_in_order(content: Any, count: int, expected: Any) -> None:
    dialogue = [{"role": "system", "content": "s"}, {"role": "user", "content": content}]
    if isinstance(expected, str):
        with pytest.raises(BadRow, match=expected):
            with_images(dialogue, list(range(count)))
        return
    messages, ordered = with_images(dialogue, list(range(count)))
    parts, images = messages[1]["content"], iter(ordered)
    assert [part["text"] if part["type"] == "text" else next(images) for part in parts] == expected
    assert messages[0]["content"] == "s"


def test_a_prompt_has_the_tokens_that_were_measured(model: Path, tmp_path: Path) -> None:
    two = {"images": [{"bytes": picture()}, {"bytes": picture((90, 90))}]}
    two |= {"prompt": [{"role": "user", "content": "<image> or <image>"}]}
    data = open_rows(model, [{"images": [{"bytes": picture()}]}, two, {"images": None}], tmp_path)
    assert data.images is not None and not any(data.images.counts.values()), "measured without decoding"
    prompts = [data.prompt(row) for row in range(3)]
    assert [len(prompt.ids) for prompt in prompts] == data.lengths.tolist()
    assert [prompt.media and prompt.media.images for prompt in prompts] == [1, 2, None]
    for prompt in prompts[:2]:
        assert prompt.media is not None
        patches = prompt.media.inputs["image_grid_thw"].prod(-1).sum()
        assert prompt.media.tokens == (prompt.ids == PAD).sum() == patches // 4
        assert sum(prompt.media.tokens_of_images) == prompt.media.tokens
        assert len(prompt.media.inputs["pixel_values"]) == patches
        assert "images" not in prompt.columns
    assert data.images.counts == {"decoded": 3, "processed": 3, "drawn": 3}
    assert prompts[2].messages == [{"role": "user", "content": "<image>?"}], "literal text without an image"


def in_parts(*sources: Any) -> dict[str, Any]:
    """A prompt that shows images as OpenAI's clients write them."""
    parts = [{"type": "image_url", "image_url": source, "text": None} for source in sources]
    return {"prompt": [{"role": "user", "content": [*parts, {"type": "text", "text": "?", "image_url": None}]}]}


def test_image_url_parts_are_images(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture())
    uri = "data:image/png;base64," + base64.b64encode(picture((90, 90))).decode()
    rows = [
        in_parts({"url": "a.png"}, {"url": uri}) | {"images": None},
        in_parts({"url": None}) | GOOD,
        in_parts({"url": "http://x/a.png"}),
    ]
    data = open_rows(model, rows, tmp_path)
    prompts = [data.prompt(row) for row in range(2)]
    assert [len(prompt.ids) for prompt in prompts] == data.lengths[:2].tolist()
    assert [prompt.media and prompt.media.images for prompt in prompts] == [2, 1]
    assert [part["type"] for part in prompts[0].messages[0]["content"]] == ["image", "image", "text"]
    (bad,) = data.bad_rows
    assert (bad["row"], bad["problem"]) == (2, "image is remote") and "data.allow_image_urls" in bad["detail"]
    with pytest.raises(BadRow, match="'image', which this model does not see"):
        as_messages(rows[0]["prompt"])


def test_limits_of_the_size_come_from_the_configuration(model: Path, tmp_path: Path) -> None:
    row = {"images": [{"bytes": picture((200, 200))}]}
    free, small = (
        open_rows(model, [row], tmp_path, *more).prompt(0).media
        for more in ((), ("+data.mm_processor_kwargs.max_pixels=1024",))
    )
    assert free is not None and small is not None and free.tokens == 64 and small.tokens == 16
    with pytest.raises(DataError, match="max_pixles"):
        open_rows(model, [row], tmp_path, "+data.mm_processor_kwargs.max_pixles=1")


class Pictures(BaseHTTPRequestHandler):
    """/a.png is there; /cut.png is said to come in chunks, and ends within one."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path not in ("/a.png", "/cut.png"):
            return self.send_error(404)
        self.send_response(200)
        if self.path == "/cut.png":
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"50\r\nxyz" if self.path == "/cut.png" else picture())

    def log_message(self, *values: Any) -> None:
        pass


def test_images_are_fetched_where_that_is_allowed(model: Path, tmp_path: Path) -> None:
    with HTTPServer(("127.0.0.1", 0), Pictures) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        rows = [shown(path=f"{address}/{name}") for name in ("a.png", "cut.png", "gone.png", "a b.png")]
        data = open_rows(model, rows, tmp_path, "data.allow_image_urls=True")
        assert data.prompt(0).media is not None
        server.shutdown()
    found = {record["row"]: record["detail"] for record in data.bad_rows}
    assert list(found) == [1, 2, 3] and all(address in detail for detail in found.values())


def gif() -> bytes:
    out = io.BytesIO()
    frames = [Image.new("RGB", (40, 24), colour) for colour in ("red", "green", "blue")]
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:])
    return out.getvalue()


GOOD: dict[str, Any] = {"images": [{"bytes": picture(), "path": None}]}
NOISE = Image.effect_noise((99, 99), 50)


def noise(cut: int) -> bytes:
    out = io.BytesIO()
    NOISE.save(out, "PNG")
    return out.getvalue()[:-cut]


def asked(text: str) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": text}]}


def shown(content: bytes | None = None, path: str | None = None) -> dict[str, Any]:
    return {"images": [{"bytes": content, "path": path}]}


# A row, the problem it is ("" for a row that is used), words of what to change.
ROWS: list[tuple[dict[str, Any], str, str]] = [
    (GOOD | asked("<image><image>"), "image count", "2 places (<image>) for 1 images; write one for each"),
    ({"images": GOOD["images"] * 2}, "image count", "1 places (<image>) for 2 images; write one for each"),
    (GOOD | asked("<image><|image_pad|>"), "image tokens", "does the text hold <|image_pad|>"),
    ({"images": GOOD["images"] * 3} | asked("?"), "too many images", "rollout.limit_images=2"),
    (shown(picture((4000, 10))), "image size", "aspect ratio must be smaller than 200"),
    (shown(picture((10_000, 10_000), "1")), "image too large", "scale it down"),
    (shown(picture((200, 200))), "prompt too long", "raise data.max_prompt_length=80, or lower"),
    (shown(b"junk"), "undecodable image", "write it anew"),
    (shown(path="gone.png"), "image missing", "gone.png: no such file"),
    (shown(path="http://localhost/x.png"), "image is remote", "data.allow_image_urls=True"),
    (shown(b""), "image missing", "neither bytes nor a path"),
    (shown(picture((1, 1))), "", ""),
    (shown(picture((40, 24), "CMYK", "JPEG")), "", ""),
    (shown(gif()), "", ""),
]


def test_a_bad_row_says_what_to_change_and_long_ones_are_never_cut(model: Path, tmp_path: Path) -> None:
    limits = ("data.max_prompt_length=80", "actor_rollout_ref.rollout.limit_images=2")
    data = open_rows(model, [row for row, _, _ in ROWS], tmp_path, "data.truncation=left", *limits)
    bad = {record["row"]: record for record in data.bad_rows}
    for number, (_, problem, words) in enumerate(ROWS):
        found = bad.get(number, {"problem": "", "detail": ""})
        assert found["problem"] == problem and words in found["detail"], found
    assert [data.prompt(row).row for row in range(len(data))] == [11, 12, 13]
    told = "\n".join(data.describe())
    assert "2 × image count (e.g." in told
    assert f"animations in 1 of the rows, of which the first frame is used (e.g. {tmp_path}" in told
    dear = "filter_overlong_prompts=True (drops them), lower data.mm_processor_kwargs.max_pixels"
    with pytest.raises(DataError, match=re.escape(dear)):
        open_rows(model, [ROWS[6][0]], tmp_path, *limits)


def test_an_image_that_ends_early_is_left_out_where_it_is_drawn(model: Path, tmp_path: Path) -> None:
    data = open_rows(model, [GOOD, shown(noise(cut=900)), GOOD], tmp_path)
    with pytest.raises(BadRow, match=r"undecodable image: .*x\.parquet row 1: .*write it anew"):
        data.prompt(1)
    assert [prompt.row for prompt in data.prompts(range(3), most=2)] == [0, 2]
    assert [record["row"] for record in data.bad_rows] == [1]
    data.config.data.max_bad_row_ratio = 0.3
    with pytest.raises(DataError, match="1 of 3 rows cannot be used"):
        data.prompts([1])


DRAWN = Image.effect_noise((40, 24), 90).convert("RGB")
AUGMENTED = ("rotate=20", "crop=0.5", "color_jitter=0.5")
OWN = """
def augment(image, rng):
    return image.resize((image.width * 3, image.height)) if rng.random() < 2 else image
def broken(image, rng):
    return None
"""


def pixels(data: PromptDataset, row: int = 0, epoch: int = 0) -> bytes:
    media = data.prompt(row, epoch).media
    assert media is not None
    return bytes(media.inputs["pixel_values"].tobytes())


@pytest.mark.parametrize("words", [AUGMENTED[:1], AUGMENTED[1:2], AUGMENTED[2:], AUGMENTED], ids=str)
def test_training_images_are_changed_by_row_and_epoch(model: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    out = io.BytesIO()
    DRAWN.save(out, "PNG")
    rows = [shown(out.getvalue())] * 2
    plain = open_rows(model, rows, tmp_path)
    settings = [f"data.augmentation.{word}" for word in words]
    one, again = open_rows(model, rows, tmp_path, *settings), open_rows(model, rows, tmp_path, *settings)
    drawn = [pixels(one, row, epoch) for row in (0, 1) for epoch in (0, 1)]
    assert len({*drawn, pixels(plain)}) == 5, "each row and epoch has an image of its own"
    assert [pixels(again, row, epoch) for row in (1, 0) for epoch in (1, 0)] == drawn[::-1], "whenever drawn"
    assert len(one.prompt(0).ids) == one.lengths[0]
    seeded = open_rows(model, rows, tmp_path, *settings, "data.seed=7")
    assert pixels(seeded) != drawn[0]
    held_out = PromptDataset(
        one.paths,
        one.config,
        load_tokenizer(model),
        split="val",
        processor=one.images and one.images.processor,
    )
    assert pixels(held_out) == pixels(plain)


def test_a_function_of_the_users_changes_images_and_lengths_are_looked_at_again(model: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    own = f"data.augmentation.path={tmp_path}/own.py"
    longer = open_rows(model, [GOOD], tmp_path, own)
    assert len(longer.prompt(0).ids) == longer.lengths[0] + 2 * 15
    short = open_rows(model, [GOOD], tmp_path, own, f"data.max_prompt_length={longer.lengths[0]}")
    with pytest.raises(BadRow, match=r"prompt too long: .*x.parquet row 0: .*or augment less"):
        short.prompt(0)
    with pytest.raises(BadRow, match="returned NoneType, not a Pillow image"):
        open_rows(model, [GOOD], tmp_path, own, "data.augmentation.name=broken").prompt(0)


def test_a_custom_class_may_give_pillow_images(model: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from PIL import Image\nfrom verl.utils.dataset.rl_dataset import RLHFDataset\n"
        "class Own(RLHFDataset):\n"
        "    def __getitem__(self, item):\n"
        "        image = Image.new('RGB', (40, 24))\n"
        "        return super().__getitem__(item) | {'images': [image] if item else image}\n"
    )
    words = (f"data.custom_cls.path={tmp_path}/own.py", "data.custom_cls.name=Own")
    data = open_rows(model, [GOOD, GOOD], tmp_path, *words)
    assert not data.bad_rows and pixels(data, 0) == pixels(data, 1)


def frames(count: int, size: tuple[int, int] = (40, 24)) -> list[dict[str, Any]]:
    return [{"bytes": picture(size, color=(20 * i, 0, 0)), "path": None} for i in range(count)]


@pytest.mark.parametrize("arch", ["qwen2_5_vl", "qwen3_vl"])
def test_videos_stand_in_their_places(arch: str, tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    model = tiny_vision_model(tmp_path / "model", arch)
    both = {"images": GOOD["images"], "videos": [{"frames": frames(4), "fps": 4.0}]}
    rows = [both | asked("<video> or <image>?"), {"videos": [{"frames": frames(3), "fps": 2.0}]} | asked("?")]
    data = open_rows(model, rows, tmp_path)
    prompts = [data.prompt(row) for row in range(2)]
    assert [len(prompt.ids) for prompt in prompts] == data.lengths.tolist()
    times = [prompt.media.inputs["image_grid_thw"][:, 0].tolist() for prompt in prompts]
    assert times == [[2, 1], [2]], "in the order of the dialogue; an odd frame is repeated"
    seconds = [prompt.media.inputs["video_seconds"].tolist() for prompt in prompts]
    assert seconds == ([[0.5, 0], [1]] if arch == "qwen2_5_vl" else [[1, 0], [1]])
    for prompt in prompts:
        assert (prompt.ids == PAD).sum() == prompt.media.tokens and PAD + 1 not in prompt.ids
        assert len(prompt.media.small) == prompt.media.images


def test_a_video_file_is_read_where_something_decodes_it(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    cv2 = pytest.importorskip("cv2")
    out = cv2.VideoWriter(str(tmp_path / "a.avi"), cv2.VideoWriter_fourcc(*"MJPG"), 8, (48, 32))
    for i in range(16):
        out.write(np.full((32, 48, 3), 15 * i, np.uint8))
    out.release()
    (tmp_path / "b.avi").write_bytes((tmp_path / "a.avi").read_bytes()[:300])
    data = open_rows(model, [{"videos": [f"{name}.avi"]} | asked("<video>?") for name in "abc"], tmp_path)
    media = data.prompt(0).media
    assert media is not None and media.inputs["image_grid_thw"][0, 0] == 2, "two of eight frames a second"
    assert media.inputs["video_seconds"].tolist() == [1]
    assert [record["problem"] for record in data.bad_rows] == ["undecodable video", "video missing"]


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        ("https://x/a.mp4", r"video is remote: https://x/a.mp4: .* save it"),
        ({"bytes": b"abc", "path": None}, "video missing: neither frames nor a path, but bytes; write the file"),
    ],
)
def test_a_video_that_is_no_file_says_what_to_do(cell: Any, problem: str) -> None:
    with pytest.raises(BadRow, match=problem):
        open_video(cell, Path(), processor=object(), image=None)


def test_a_video_without_torchvision_is_a_bad_row(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("verl.data.media._video_processor", lambda path: None)
    video = {"images": None, "videos": [frames(2)]} | asked("<video>?")
    data = open_rows(model, [video, GOOD], tmp_path)
    (bad,) = data.bad_rows
    assert (bad["row"], bad["problem"]) == (0, "media") and "needs torchvision" in bad["detail"]


def test_a_model_without_images_has_no_processor(model: Path, tmp_path: Path) -> None:
    from tests.tiny import tiny_model

    assert load_processor(str(tiny_model(tmp_path / "text")), tiny_tokenizer(), {}) is None
    save_processor(str(model), tmp_path)
    assert (tmp_path / "preprocessor_config.json").read_bytes() == (model / "preprocessor_config.json").read_bytes()
    tokenizer = tiny_tokenizer(template=None, special=SPECIAL + VISION)
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    (tmp_path / "chat_template.json").write_text('{"chat_template": "T"}')
    processor = load_processor(str(tmp_path), tokenizer, {})
    assert tokenizer.chat_template == "T" and type(pickle.loads(pickle.dumps(processor))) is type(processor)


def test_supervised_rows_hold_their_images_before_what_is_learned(model: Path, tmp_path: Path) -> None:
    one = {"bytes": picture(), "path": None}
    ask, say = {"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "a"}
    rows = [
        {"messages": [ask, say], "images": [one]},
        {"messages": [ask, say], "images": None},
        {"messages": [ask | {"content": "b"}, say, ask, say], "images": [one]},
        {"messages": [ask, say], "images": [{"bytes": picture((200, 200)), "path": None}]},
        {"messages": [ask, say], "images": [one, one]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "s.parquet")
    words = [f"data.train_files={tmp_path}/s.parquet", f"model.path={model}", "data.max_length=70"]
    config = load([*words, "data.max_bad_row_ratio=1", "data.truncation=left"], entry="sft").data
    tokenizer = load_tokenizer(model)
    data = SFTDataset(config.train_files, tokenizer, config, load_processor(str(model), tokenizer, {}))
    assert {record["row"]: record["problem"] for record in data.bad_rows} == dict(
        enumerate(("image after an answer", "too long", "image count"), 2)
    )
    seen, blind = data[0], data[1]
    assert seen.media is not None and (seen.ids == PAD).sum() == seen.media.tokens and blind.media is None
    learned = tokenizer.decode(seen.ids[seen.mask])
    assert learned == tokenizer.decode(blind.ids[blind.mask]) and learned.startswith("a<|im_end|>")


def test_what_scores_gets_the_images_where_it_is_asked_for(model: Path, tmp_path: Path) -> None:
    from verl.reward.runner import _extra_info

    for word, expected in (("False", None), ("True", (40, 24))):
        prompt = open_rows(model, [GOOD], tmp_path, f"reward_model.images={word}").prompt(0)
        uris = _extra_info(Trajectory(prompt, 0, segments=[])).get("images")
        assert expected == (uris and open_image(uris[0], tmp_path).size)
