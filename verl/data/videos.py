"""Videos of a row: the frames of a cell, and the output of the model's video processor, which imports torchvision.

A model's vision tower takes a video like an image, with a grid of several rows of time, and its output replaces the
placeholder tokens, whatever their ids. So a video is passed on as an image with that grid and the seconds between its
rows; only the positions differ, and `models/inputs.py` gets them from the model's own function.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from verl.data.rows import BadRow, path_in
from verl.trajectory import VIDEO_SECONDS

FRAMES_A_SECOND = 2.0
"""Of frames that do not say, and the number taken of a file: what the Qwen-VL processors take."""
Opened = tuple[np.ndarray, Any]
_DECODERS = {"torchcodec": "torchcodec", "av": "pyav", "decord": "decord", "cv2": "opencv"}


def open_video(cell: Any, folder: Path, processor: Any, image: Callable[[Any], Any]) -> Opened:
    """Frames uint8 [T, H, W, 3] of a video of the data, and transformers' VideoMetadata of them. Raises BadRow.

    cell: a path (relative to `folder`), whose frames the model's video `processor` samples; a list of frames, each a
    cell that `image` turns into one; or {frames or path, fps}.
    """
    from transformers.video_utils import VideoMetadata

    if processor is None:
        raise BadRow("media", "a video needs torchvision and a model with a video processor; install it")
    rate = FRAMES_A_SECOND
    if isinstance(cell, Mapping):
        rate = cell.get("fps") or rate
        if not isinstance(rate, int | float) or not rate > 0:
            raise BadRow("wrong column type", f"a video's fps is {rate!r}, not frames a second")
        cell, keys = next((cell[key] for key in ("frames", "video", "path") if cell.get(key)), None), cell
        if cell is None:
            filled = ", ".join(str(key) for key, value in keys.items() if value is not None) or "nothing"
            raise BadRow("video missing", f"neither frames nor a path, but {filled}; write the file, and give its path")
    if isinstance(cell, str) and cell.startswith(("http://", "https://", "data:")):
        raise BadRow("video is remote", f"{cell[:200]}: videos are read from files alone; save it, and give its path")
    if isinstance(cell, str):
        return _read(path_in(folder, cell), rate, processor)
    if not isinstance(cell, Sequence) or isinstance(cell, bytes) or not cell:
        raise BadRow("wrong column type", f"a video is {type(cell).__name__}, not a path or a list of frames")
    frames = [np.asarray(image(frame)) for frame in cell]
    if len({frame.shape for frame in frames}) > 1:
        raise BadRow("video size", "its frames differ in size: scale them to one size")
    return np.stack(frames), VideoMetadata(len(frames), rate, frames_indices=[*range(len(frames))])


def _read(path: Path, rate: float, processor: Any) -> Opened:
    from transformers.video_utils import load_video

    decoder = next((name for module, name in _DECODERS.items() if importlib.util.find_spec(module)), None)
    if decoder is None:
        raise BadRow("media", f"{path}: nothing here decodes videos: pip install av, or give its frames")
    if not os.path.isfile(path):  # Path.is_file raises for a name that is too long
        raise BadRow("video missing", f"{path}: no such file (a path begins at the data file)")
    try:
        read: Any = load_video  # its annotations leave names of files out
        sample = partial(processor.sample_frames, fps=rate)
        frames, facts = read(str(path), backend=decoder, sample_indices_fn=sample)
        return frames, facts
    except Exception as error:  # each decoder has its own
        repair = f"not a whole video that {decoder} reads: write it anew"
        raise BadRow("undecodable video", f"{path}: {repair} ({type(error).__name__}: {error})") from error


def as_images(outputs: dict[str, Any], is_video: Sequence[bool]) -> dict[str, np.ndarray]:
    """`Media.inputs` of what a processor made of images and videos, in the order of the dialogue."""
    seconds = iter(outputs.get("second_per_grid_ts", [1.0] * len(is_video)))
    parts = {
        False: _parts(outputs, "pixel_values", "image_grid_thw"),
        True: _parts(outputs, "pixel_values_videos", "video_grid_thw"),
    }
    pixels, grids = zip(*(next(parts[video]) for video in is_video), strict=True)
    between = [float(next(seconds)) if video else 0.0 for video in is_video]
    return {
        "pixel_values": np.concatenate(pixels),
        "image_grid_thw": np.stack(grids),
        VIDEO_SECONDS: np.array(between, np.float32),
    }


def _parts(outputs: dict[str, Any], pixels: str, grids: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Patches and grid of each."""
    if grids in outputs:
        grid = np.asarray(outputs[grids])
        yield from zip(np.split(np.asarray(outputs[pixels]), grid.prod(-1).cumsum()[:-1]), grid, strict=True)
