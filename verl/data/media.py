"""Images and videos of a row: placed in the dialogue, decoded, and processed once for sampler and trainer.

    cell ─ open_image ─▶ header (size, number of tokens) ─ at the draw ─▶ RGB ─ processor ─▶ ids, pixels, grid

The processor is the model's own class around its image processor for Pillow and the run's tokenizer, and its video
processor where torchvision is installed (docs/vision.md).
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.data.files import DataError
from verl.data.rows import BadRow, Video, path_in
from verl.data.videos import as_images, open_video
from verl.trajectory import Media

if TYPE_CHECKING:
    from PIL.Image import Image

    Change = Callable[[list[Image]], list[Image]]

Message = dict[str, Any]
MOST_PIXELS = 89_478_485
"""Pillow's own limit, from which on it warns of a decompression bomb; more is a bad row here."""
_URL_BYTES, _URL_SECONDS = 64 << 20, 30
_REPAIR = "not a whole file of a format that Pillow reads: write it anew"
# Longest side of an image, in pixels: in the report, and for what scores.
_SMALL, _SCORED = 192, 1536
_PROCESSOR_FILES = (
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *("chat_template.jinja", "chat_template.json"),
)


# ------------------------------------------------------------------------------------------------ one image


def folder_of(path: str) -> Path:
    """Where the paths in a data file begin."""
    return Path(path).expanduser().parent


def open_image(cell: Any, folder: Path, *, urls: bool = False) -> Image:
    """An image of the data, its header read and its pixels not. Raises BadRow.

    cell: encoded bytes, {bytes, path} (bytes win), {image: …}, a path (relative to `folder`), a data URI, an http URL
    where `urls` allows it, or a Pillow image.
    """
    from PIL import Image

    while isinstance(cell, Mapping):
        sources = [cell[key] for key in ("bytes", "image", "path", "url") if cell.get(key)]
        if not sources:
            raise BadRow("image missing", "neither bytes nor a path; give one, or leave the image out")
        cell = sources[0]
    if isinstance(cell, Image.Image):
        return _of_a_size(cell)
    source = _source(cell, folder, urls) if isinstance(cell, str) else cell
    if isinstance(source, bytes | bytearray | memoryview):
        source = io.BytesIO(source)
    elif not isinstance(source, Path):
        raise BadRow("wrong column type", f"an image is {type(cell).__name__}, not bytes, a path or a URI")
    elif os.path.exists(source) and not os.path.isfile(source):  # a pipe or a device may never end
        raise BadRow("image missing", f"{source}: not a regular file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # refused below, by name
            image = Image.open(source)
    except FileNotFoundError as error:
        raise BadRow("image missing", f"{source}: no such file (a path begins at the data file)") from error
    except Image.DecompressionBombError as error:
        raise BadRow("image too large", f"{error}; the most is {MOST_PIXELS}: scale it down") from error
    except Exception as error:  # of a damaged file each format has its own
        raise BadRow("undecodable image", f"{_REPAIR} ({type(error).__name__}: {error})") from error
    return _of_a_size(image)


def _of_a_size(image: Image) -> Image:
    """The image, unless it is too large."""
    if image.width * image.height > MOST_PIXELS:
        size = f"{image.width} × {image.height} pixels"
        raise BadRow("image too large", f"{size}, the most is {MOST_PIXELS}: scale it down")
    return image


def has_frames(image: Image) -> bool:
    """True for an animation and its like, of which only the first frame is used."""
    try:
        return bool(getattr(image, "is_animated", False))
    except Exception:  # a damaged one; decoding tells
        return False


def _source(text: str, folder: Path, urls: bool) -> Path | bytes:
    """What a string names: a file, or the bytes of a data URI or URL."""
    if text.startswith("data:"):
        try:
            return base64.b64decode(text.partition(",")[2], validate=True)
        except ValueError as error:
            raise BadRow("undecodable image", f"data URI: {error}") from error
    if text.startswith(("http://", "https://")):
        if not urls:
            raise BadRow("image is remote", f"{text[:200]}: data.allow_image_urls=True would fetch it")
        return _fetched(text)
    return path_in(folder, text)


def _fetched(url: str) -> bytes:
    from http.client import HTTPException
    from urllib.request import urlopen

    try:
        with urlopen(url, timeout=_URL_SECONDS) as answer:
            content = answer.read(_URL_BYTES + 1)
    except (OSError, ValueError, HTTPException) as error:
        raise BadRow("image missing", f"{url[:200]}: {error}") from error
    if len(content) > _URL_BYTES:
        raise BadRow("image too large", f"{url[:200]}: more than {_URL_BYTES} bytes")
    return bytes(content)


def decoded(image: Image) -> Image:
    """The pixels in RGB, what is transparent on white; of an animation the first frame. Raises BadRow."""
    from PIL import Image

    try:
        if image.has_transparency_data:
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image)
        return image.convert("RGB")
    except Exception as error:  # as when it is opened
        raise BadRow("undecodable image", f"{_REPAIR} ({type(error).__name__}: {error})") from error


# ------------------------------------------------------------------------------------------- in the dialogue


def with_images(messages: Sequence[Message], cells: Sequence[Any]) -> tuple[list[Message], list[Any]]:
    """The messages, with parts as content where they have images, and the images in dialogue order.

    `<image>` in a text takes the next of `cells`, and so does a part of type image without an image; the same holds for
    `<video>` if `cells` has a `Video`. Without any placeholder they go before the text of the first user message. The
    images are [] where there are neither cells nor parts. Raises BadRow where counts differ.
    """
    if not cells and all(isinstance(message["content"], str) for message in messages):
        return list(messages), []
    videos = [cell for cell in cells if isinstance(cell, Video)]
    pending = {"image": [cell for cell in cells if not isinstance(cell, Video)], "video": videos}
    ordered, placed = [], [dict(message) for message in messages]
    for message in placed:
        message["content"] = _parts(message["content"], "(<image>|<video>)" if videos else "(<image>)")
    parts = [part for message in placed for part in _images(message)]
    if not parts and cells:
        first = next((message for message in placed if message["role"] == "user"), placed[0])
        parts = [{"type": kind} for kind, unplaced in pending.items() for _ in unplaced]
        first["content"] = [*parts, *first["content"]]
    for message, before in zip(placed, messages, strict=True):
        if not _images(message):
            message["content"] = before["content"]
    for kind, unplaced in pending.items():
        places = sum(part["type"] == kind and part.get(kind) is None for part in parts)
        if places != len(unplaced):
            mismatch = f"the prompt has {places} places (<{kind}>) for {len(unplaced)} {kind}s"
            raise BadRow(f"{kind} count", f"{mismatch}; write one for each {kind}")
    for part in parts:
        kind, source = part["type"], part.pop(part["type"], None)
        if source is not None and kind == "video":
            source = Video(source)
        ordered.append(pending[kind].pop(0) if source is None else source)
    return placed, ordered


def check_number(cells: Sequence[Any], most: int | None) -> None:
    """Raises BadRow where a prompt has more images and videos than `most`."""
    if most is not None and len(cells) > most:
        raise BadRow("too many images", f"{len(cells)}, rollout.limit_images={most}")


def _scaled_down(image: Image, side: int = _SMALL, quality: int = 80) -> bytes:
    """A JPEG file of at most `side` pixels a side; of the size for the report a few kilobytes."""
    out, small = io.BytesIO(), image.copy()
    small.thumbnail((side, side))
    small.save(out, "JPEG", quality=quality)
    return out.getvalue()


def shown(cells: Sequence[Any], folder: Path) -> Media:
    """Images for what scores and for the report, without what a model sees of them. Raises BadRow."""
    images = [decoded(open_image(cell, folder)) for cell in cells]
    return Media({}, 0, tuple(map(_scaled_down, images)), _for_scoring(images))


def _for_scoring(images: Sequence[Image]) -> tuple[bytes, ...]:
    return tuple(_scaled_down(image, _SCORED, 95) for image in images)


def _images(message: Message) -> list[dict[str, Any]]:
    return [part for part in message["content"] if part["type"] != "text"]


def _parts(content: str | list[dict[str, Any]], places: str) -> list[dict[str, Any]]:
    """Content as parts of type text, image and video. places: pattern of the words in a text that stand for one."""
    out: list[dict[str, Any]] = []
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        kind = part["type"]
        if kind != "text":
            source = next((part[key] for key in (kind, "bytes", "path", "url") if part.get(key)), None)
            if kind == "video" and source is not None and part.get("fps"):
                source = {"video": source, "fps": part["fps"]}
            out.append({"type": kind} | ({} if source is None else {kind: source}))
            continue
        for number, text in enumerate(re.split(places, part["text"])):
            out += [{"type": text[1:-1]} if number % 2 else {"type": "text", "text": text}] * bool(text)
    return out


# ------------------------------------------------------------------------------------------- the processor


@dataclass
class ImageProcessor:
    """The processor of a vision-language model.

    `limit`: most images of a prompt; `counts`: images decoded, processed, and in the prompts drawn since the start;
    `scored`: what scores the responses gets the images, too.
    """

    processor: Any
    urls: bool = False
    limit: int | None = None
    scored: bool = False
    counts: dict[str, int] = field(default_factory=lambda: {"decoded": 0, "processed": 0, "drawn": 0})

    def headers(self, cells: Sequence[Any], folder: Path) -> list[Image]:
        """The images of a row, their pixels not read. Raises BadRow, for a video too."""
        if any(isinstance(cell, Video) for cell in cells):
            raise BadRow("media", "videos are not in this release here; use rows without them")
        check_number(cells, self.limit)
        return [open_image(cell, folder, urls=self.urls) for cell in cells]

    def tokens(self, images: Sequence[Image]) -> list[int]:
        """How many tokens each of these images takes, from their headers alone. Raises BadRow."""
        sizes = [(image.height, image.width) for image in images]
        try:
            numbers = self.processor._get_num_multimodal_tokens(image_sizes=sizes)["num_image_tokens"]
        except ValueError as error:
            raise BadRow("image size", f"{error}; crop it") from error
        return [int(number) for number in numbers]

    def expanded(self, ids: np.ndarray, cells: Sequence[Any], folder: Path) -> np.ndarray:
        """Repeats int64 [P] of each of ids int64 [P], in which an image has one token, in the prompt. Raises BadRow."""
        is_image = np.isin(ids, self.processor.image_token_ids)
        counts = self.tokens(self.headers(cells, folder))
        if wrong := self.wrong_tokens(ids, len(counts)):
            raise BadRow("image tokens", wrong)
        repeats = np.ones(len(ids), np.int64)
        repeats[is_image] = counts
        return repeats

    def __call__(
        self, text: str, cells: Sequence[Any], folder: Path, change: Change | None = None
    ) -> tuple[np.ndarray, Media]:
        """Token ids int64 [P] of a rendered prompt with its image tokens, and what the model sees. Raises BadRow.

        change: what is done to the decoded images before.
        """
        is_video = [isinstance(cell, Video) for cell in cells]
        pictures = [cell for cell in cells if not isinstance(cell, Video)]
        images = [decoded(open_image(cell, folder, urls=self.urls)) for cell in pictures]
        videos, more = self._videos(cells, folder)
        self.counts["decoded"] += len(cells)
        images = images if change is None else change(images)
        options = {"return_tensors": "np", "add_special_tokens": False} | more
        try:
            outputs = dict(self.processor(text=[text], images=images or None, **options))
        except (ValueError, OverflowError, StopIteration) as error:
            raise BadRow("processing failed", f"{type(error).__name__}: {error}") from error
        self.counts["processed"] += len(cells)
        ids = np.asarray(outputs.pop("input_ids")[0], np.int64)
        for name in ("attention_mask", "mm_token_type_ids"):
            outputs.pop(name, None)
        if videos:
            outputs = as_images(outputs, is_video)
            ids[ids == self.processor.video_token_id] = self.processor.image_token_id
            firsts = (iter(images), iter(videos))
            images = [next(firsts[video]) for video in is_video]
        inputs = {name: np.ascontiguousarray(value) for name, value in outputs.items()}
        merge = int(self.processor.image_processor.merge_size)
        tokens = int(inputs["image_grid_thw"].prod(-1).sum()) // merge**2
        if wrong := self.wrong_tokens(ids, tokens):
            raise BadRow("image tokens", wrong)
        small, files = tuple(map(_scaled_down, images)), _for_scoring(images) if self.scored else ()
        return ids, Media(inputs, tokens, small, files, token=int(self.processor.image_token_id))

    def _videos(self, cells: Sequence[Any], folder: Path) -> tuple[list[Image], dict[str, Any]]:
        """The first frame of each video, and the processor's arguments for videos; empty without any. Raises BadRow."""
        from PIL.Image import fromarray

        processor = getattr(self.processor, "video_processor", None)
        frame = partial(self._frame, folder)
        videos = [cell.cell for cell in cells if isinstance(cell, Video)]
        opened = [open_video(cell, folder, processor, frame) for cell in videos]
        if not opened:
            return [], {}
        frames, facts = zip(*opened, strict=True)
        arguments = {"videos": list(frames), "video_metadata": list(facts), "do_sample_frames": False}
        return [fromarray(video[0]) for video in frames], arguments

    def _frame(self, folder: Path, cell: Any) -> Image:
        return decoded(open_image(cell, folder, urls=self.urls))

    def wrong_tokens(self, ids: np.ndarray, expected: int) -> str:
        """What is wrong unless so many tokens of a prompt stand for images, "" for nothing."""
        count = int(np.isin(ids, self.processor.image_token_ids).sum())
        if count == expected:
            return ""
        why = f"does the text hold {self.processor.image_token}, or the chat template no images?"
        return f"{count} image tokens in the prompt where its images take {expected}: {why}"


def load_processor(
    path: str | None, tokenizer: Any, kwargs: Mapping[str, Any], *, trust_remote_code: bool = False
) -> Any:
    """The processor of a model directory or hub id, with its video processor where torchvision is installed.

    None for a model that sees no images, or for path None. kwargs: of its image processor (`data.mm_processor_kwargs`).
    A tokenizer without a chat template gets the processor's. DataError where the model has none that works here.
    """
    from transformers import PretrainedConfig, ProcessorMixin

    # Under its short name transformers 5.16 has it only where torchvision is.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name

    if path is None:
        return None
    trusted = {"trust_remote_code": trust_remote_code}
    config, _ = PretrainedConfig.get_config_dict(path, **trusted)
    if "vision_config" not in config:
        return None
    kind = config.get("model_type", "unknown")
    name = PROCESSOR_MAPPING_NAMES.get(kind)
    processor_class: Any
    try:
        if kind == "kimi_vl":
            from verl.data import kimi_images

            images: Any = kimi_images.KimiVLImageProcessor.from_pretrained(path, **kwargs)
            processor_class = kimi_images.Processor
        else:
            images = AutoImageProcessor.from_pretrained(path, backend="pil", **trusted, **kwargs)
            processor_class = processor_class_from_name(name) if name else None
    except (OSError, ValueError, TypeError, ImportError) as error:
        why = str(error).strip().partition("\n")[0]
        raise DataError(f"{path}: its image processor cannot be loaded: {why}") from error
    if processor_class is None or not issubclass(processor_class, ProcessorMixin) or not hasattr(images, "merge_size"):
        supported = "Qwen2-VL, 2.5-VL and 3-VL are"
        raise DataError(f"{path}: images of {kind} models are not in this release ({supported})")
    accepted = images.valid_kwargs.__annotations__
    if unknown := sorted(key for key in kwargs if key not in accepted and not hasattr(images, key)):
        problem = f"{', '.join(unknown)} is nothing that {type(images).__name__} takes"
        raise DataError(f"data.mm_processor_kwargs: {problem}")
    if tokenizer.chat_template is None and (file := _file(path, "chat_template.json")) is not None:
        tokenizer.chat_template = json.loads(Path(file).read_text(encoding="utf-8")).get("chat_template")
    parts = dict.fromkeys(processor_class.get_attributes()) | {
        "image_processor": images,
        "tokenizer": tokenizer,
    }
    if "video_processor" in parts:
        parts["video_processor"] = _video_processor(path)
    processor = processor_class.__new__(processor_class)
    # A part that is left out is None, which the class would refuse; it stays the class itself, for other processes.
    processor.check_argument_for_proper_class = lambda *_: None
    processor_class.__init__(processor, **parts)
    del processor.check_argument_for_proper_class
    return processor


def _video_processor(path: str) -> Any:
    """The model's own; None without torchvision, which all of them import, and for a model that has none."""
    from transformers import AutoVideoProcessor

    try:
        return AutoVideoProcessor.from_pretrained(path)
    except (OSError, ValueError, TypeError, ImportError, RuntimeError):
        return None


def _file(path: str, name: str) -> str | None:
    """The local file of that name of a model directory or hub id, None where it has none."""
    from transformers.utils import cached_file

    quiet = ("_raise_exceptions_for_missing_entries", "_raise_exceptions_for_connection_errors")
    return cached_file(path, name, **dict.fromkeys(quiet, False))


def save_processor(path: str, directory: Path) -> None:
    """Copy a model's processor files, as they are, to a checkpoint, which `AutoProcessor` then loads."""
    import shutil

    for name in _PROCESSOR_FILES:
        source = _file(path, name)
        if source is not None and not (directory / name).exists():
            shutil.copyfile(source, directory / name)
