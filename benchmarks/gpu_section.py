"""Write what a run of tests/gpu/run.sh measured into the section "On a GPU" of docs/performance.md.

    python benchmarks/gpu_section.py RESULTS [docs/performance.md]

RESULTS is run.sh's OUT. The section says which card, when, and which parts there are no figures of. Without figures of
a CUDA device it is left as it is.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- figures of a GPU: written by benchmarks/gpu_section.py -->", "<!-- end of these figures -->"
PAGE = Path(__file__).resolve().parents[1] / "docs/performance.md"


def read(folder: Path, pattern: str) -> list[dict[str, Any]]:
    """The JSON files of that name."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob(pattern))]


def loop_rows(folder: Path) -> list[str]:
    """A row for each shape and side of the whole loop."""
    rows = []
    for found in read(folder, "gpu_loop_*.json"):
        for shape, result in found["shapes"].items():
            for side in ("native", "vllm", "trl"):
                r = result.get(side, {})
                if "step_s" in r:
                    cells = [
                        r["step_s"],
                        r["sampling_tokens_per_s"],
                        r.get("sampling_share_of_bandwidth"),
                        r.get("mfu"),
                    ]
                    cells.append(r.get("peak_gib") or max(r.get("peak_gib_by_phase", {"": None}).values()))
                    figures = " | ".join("" if c is None else f"{c:.3g}" for c in cells)
                    where = found["limits"]["device"].removeprefix("1 × NVIDIA ").split()[0]
                    rows.append(f"| {shape}, {result.get('optimizer')}, {where} | {side} | {figures} |")
                elif r:
                    rows.append(f"| {shape} | {side} | failed: {r['failed'].splitlines()[-1][:100]} | | | | |")
    return rows


def profile_rows(folder: Path) -> list[str]:
    """A row for each profiled part."""
    rows = []
    for found in read(folder, "profile_*.json"):
        for part in ("decode", "update"):
            if p := found.get(part):
                waits, top = (
                    sum(p["waits"].values()),
                    ", ".join(f"`{k['name'][:40]}` {k['ms']:.3g}" for k in p["top"][:3]),
                )
                taken = sum(c["free_before"] - c["free_after"] for c in p.get("captures", [])) / 2**20
                share = p.get("share_of_bandwidth", p.get("mfu"))
                cells = f"{p['step_s'] * 1e3:.3g} | {p['kernels_s'] * 1e3:.3g} | {p['launches']:.0f} | {waits:.0f}"
                where = found["card"].removeprefix("NVIDIA ").split()[0]
                limit = "" if share is None else f"{share:.2f}"
                rows.append(f"| {found['shape']} {part}, {where} | {cells} | {taken:.0f} | {limit} | {top} |")
    return rows


def section(folder: Path) -> str | None:
    """The section's text, None where no figures of a CUDA device are there."""
    profiles, loops = read(folder, "profile_*.json"), read(folder, "gpu_loop_*.json")
    cards = {p["card"]: p["date"] for p in profiles if p["card"] != "cpu"}
    for loop in (loop for loop in loops if loop["limits"].get("kind") == "cuda"):
        sides = [shape.get("native", {}) for shape in loop["shapes"].values()]
        cards |= {side["device"].removeprefix("1 × "): loop["date"] for side in sides if "device" in side}
    if not cards:
        return None
    lines = [f"{'; '.join(f'{card}, {date}' for card, date in cards.items())}. One run each; random weights."]
    if rows := loop_rows(folder):
        head = "step, s | sampled tokens a s | share of bandwidth | MFU in the update | most memory, GiB"
        lines += ["", f"| shape, optimizer | side | {head} |", "|---|---|---|---|---|---|---|", *rows]
    if rows := profile_rows(folder):
        names = "step, ms", "kernels, ms", "launches", "waits", "graphs took, MiB", "share of bandwidth, MFU"
        head = " | ".join([*names, "longest kernels, ms"])
        lines += ["", f"| profile | {head} |", "|---|---|---|---|---|---|---|---|", *rows]
    lines += [f"\nNo figures of: {', '.join(missing)}." for missing in [_missing(folder)] if missing]
    return "\n".join(lines)


def _missing(folder: Path) -> list[str]:
    wanted = ["gpu_tests.json", *(f"gpu_loop_{s}.json" for s in ("0.6b", "1.7b", "4b")), "profile_0.6b.json"]
    return [name for name in [*wanted, "profile_8b.json"] if not (folder / name).exists()]


def fill(page: Path, text: str) -> None:
    """Put the text between the page's two marks."""
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    written = section(Path(sys.argv[1]))
    if written is None:
        print("no figures of a CUDA device: the page stays as it is")
    else:
        fill(Path(sys.argv[2]) if len(sys.argv) > 2 else PAGE, written)
