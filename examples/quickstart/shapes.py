"""Drawn shapes to be counted, which cannot be done without looking: train, warm-up and test files.

    python examples/quickstart/shapes.py --out DIR [--train 4000] [--test 200] [--careless 0.65]

An image is three by three cells, some with a red circle or a blue square. The answer is how many there are. In the
warm-up's demonstrations a share of the answers is careless: it forgets the blue ones. test.parquet asks every question
twice, the second time in front of a grey image (data source `shapes_blank`).
"""

from __future__ import annotations

import argparse
import io
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

CELL, CELLS = 16, 3
QUESTION = "How many shapes?"
BACKGROUND, EMPTY = (255, 255, 255), (127, 127, 127)


def png(image: Image.Image) -> dict[str, Any]:
    out = io.BytesIO()
    image.save(out, "PNG")
    return {"bytes": out.getvalue(), "path": None}


def draw(dice: random.Random, red: int, blue: int) -> Image.Image:
    """So many red circles and blue squares in cells of their own, each of a size and place within it at random."""
    image = Image.new("RGB", (CELL * CELLS, CELL * CELLS), BACKGROUND)
    pen = ImageDraw.Draw(image)
    cells = dice.sample(range(CELLS * CELLS), red + blue)
    for number, cell in enumerate(cells):
        size = dice.randint(8, 13)
        left = cell % CELLS * CELL + dice.randint(1, CELL - size - 1)
        top = cell // CELLS * CELL + dice.randint(1, CELL - size - 1)
        box = (left, top, left + size, top + size)
        if number < red:
            pen.ellipse(box, fill=(220, 30, 30))
        else:
            pen.rectangle(box, fill=(30, 30, 220))
    return image


def problem(dice: random.Random, index: int, careless: float = 0.0) -> dict[str, Any]:
    """One row; `extra_info.answer` is what the warm-up learns."""
    total = dice.randint(1, CELLS * CELLS)
    red = dice.randint(0, total)
    image = png(draw(dice, red, total - red))
    counted = red if dice.random() < careless else total
    steps = f"{red} red" if counted == red and careless else f"{red} red {total - red} blue"
    return {
        "data_source": "shapes",
        "prompt": [{"role": "user", "content": f"<image>{QUESTION}"}],
        "images": [image],
        "reward_model": {"style": "rule", "ground_truth": str(total)},
        "extra_info": {"index": index, "question": f"<image>{QUESTION}", "answer": f"{steps} #### {counted}"},
    }


def write(rows: list[dict[str, Any]], path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path)
    print(f"{path}: {len(rows)} rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--train", type=int, default=4000)
    parser.add_argument("--test", type=int, default=200)
    parser.add_argument("--careless", type=float, default=0.65)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    dice = random.Random(args.seed)
    write([problem(dice, i, args.careless) for i in range(args.train)], args.out / "warm_up.parquet")
    write([problem(dice, i) for i in range(args.train)], args.out / "train.parquet")
    test = [problem(dice, i) for i in range(args.test)]
    empty = png(Image.new("RGB", (CELL * CELLS, CELL * CELLS), EMPTY))
    write(
        test + [row | {"images": [empty], "data_source": "shapes_blank"} for row in test],
        args.out / "test.parquet",
    )


if __name__ == "__main__":
    main()
