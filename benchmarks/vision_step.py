"""One GRPO step on prompts with images, us against TRL's GRPOTrainer, on the same work, alternating; and what an image
costs.

    python benchmarks/vision_step.py [--images 1] [--precision default|fp32] [--repeats 3] [--trl-python PYTHON]
    python benchmarks/vision_step.py --only verl --images 0,1,2,4,8

Same random Qwen2.5-VL (26 M parameters of text, 5 M of the tower), 8 prompts × 8 responses × 64 tokens, images of 224 ×
224 pixels and 64 tokens, one optimizer step. With several numbers of images a prompt each is measured in turn, in
processes of its own. The first step of each side warms up. TRL's side needs torchvision beside it (docs/vllm.md says
how).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from sides import HERE, Side, SideEnded, trl_python, write_result

FIELDS = ("step", "sampling", "training", "cpu", "peak_gib")


def measure(args: argparse.Namespace, images: int, extra: list[str]) -> dict[str, Any]:
    """Medians of both sides on prompts with so many images, and their ratios."""
    import vision_work

    folder = args.folder / f"vision_{images}_{args.side}"
    content = vision_work.build(folder, images, args.side)
    common = [str(folder), "--precision", args.precision, "--threads", str(args.threads)]
    sides: list[Side] = []
    if args.only != "trl":
        command = [sys.executable, str(HERE / "workers/verl_worker.py"), *common, *extra]
        sides.append(Side("verl", command, args.threads))
    if args.only != "verl":
        python = trl_python(args.trl_python, args.folder)
        sides.append(Side("trl", [python, str(HERE / "workers/trl_worker.py"), *common], args.threads))
    for number in range(args.repeats + 1):
        for side in sides:
            record = side.step()
            told = "  ".join(f"{name} {record[name]:.2f}" for name in FIELDS)
            print(f"{images} images  {side.name:5} step {number}  {told}", flush=True)
    found: dict[str, Any] = {"prompt_tokens": int(np.mean(content["prompt_tokens"]))}
    for side in sides:
        side.close()
        found[side.name] = {name: round(side.median(name), 2) for name in FIELDS}
        assert {record["tokens"] for record in side.records} == {sum(map(sum, content["lengths"]))}
    if len(sides) == 2:
        found["ratio_trl_over_verl"] = {name: round(found["trl"][name] / found["verl"][name], 2) for name in FIELDS}
    return found


def cost_of_an_image(by_images: dict[int, dict[str, Any]], prompts: int) -> dict[str, Any]:
    """Milliseconds that one more image takes of our sampling and training (least squares over the numbers of images),
    and the power to which a step's processor seconds beyond the text grow with their number."""
    numbers = np.array(sorted(by_images))
    cost = {}
    for name in ("sampling", "training", "cpu"):
        seconds = np.array([by_images[n]["verl"][name] for n in numbers])
        cost[f"{name}_ms"] = round(1000 * float(np.polyfit(numbers * prompts, seconds, 1)[0]), 1)
    if 0 in by_images and len(numbers) > 2:
        more = np.array([by_images[n]["verl"]["cpu"] - by_images[0]["verl"]["cpu"] for n in numbers[1:]])
        if (more > 0).all():
            cost["cpu_growth_power"] = round(float(np.polyfit(np.log(numbers[1:]), np.log(more), 1)[0]), 2)
    return cost


def main() -> None:
    import vision_work

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", default="1", help="images of a prompt; several numbers with commas")
    parser.add_argument("--side", type=int, default=224, help="pixels of a side of an image, a multiple of 28")
    parser.add_argument("--precision", choices=["default", "fp32"], default="default")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trl-python")
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache/verl/bench")
    parser.add_argument("--only", choices=["verl", "trl"])
    parser.add_argument("--json", type=Path)
    args, extra = parser.parse_known_args()
    numbers = [int(number) for number in args.images.split(",")]
    result: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "precision": args.precision}
    result |= {"threads": args.threads, "steps": args.repeats, "side": args.side}
    by_images = {number: measure(args, number, extra) for number in numbers}
    result["images_per_prompt"] = by_images
    if args.only == "verl" and len(numbers) > 1:
        result["one_image_more"] = cost_of_an_image(by_images, vision_work.SHAPE.prompts)
    write_result(result, args.json)


if __name__ == "__main__":
    try:
        main()
    except SideEnded as error:
        raise SystemExit(str(error)) from None
