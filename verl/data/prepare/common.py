"""What the prepare scripts share: flags, reading raw data, writing parquet whole or not at all, the summary."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.data.files import DataError, naming, open_file, written_whole

Rows = Callable[[str | None, str], list[dict[str, Any]]]
RAW_SUFFIXES = (".jsonl", ".parquet", ".json")


def parser(name: str, about: str, *, folder: str = "", local_raw: bool = True) -> argparse.ArgumentParser:
    """The flags that every script has; `folder` is the default under ~/data."""
    out = argparse.ArgumentParser(prog=f"verl prepare {name}", description=about)
    out.set_defaults(default_folder=folder or name)
    add = out.add_argument
    add("--local_save_dir", help=f"where to write (default ~/data/{folder or name})")
    add("--local_dir", help="old name of --local_save_dir")
    if local_raw:
        add("--local_dataset_path", help="raw data on disk; without it, the hub is asked")
    add("--hdfs_dir", help="copy the result there (any fsspec URL)")
    add("--limit", type=int, help="at most so many rows per split")
    return out


def parsed(flags: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags of a command line, with `directory`: where to write. An empty --local_dir means the default."""
    args = flags.parse_args(argv)
    if args.local_dir is not None:
        print("--local_dir is the old name of --local_save_dir", file=sys.stderr)
    chosen = args.local_save_dir or args.local_dir or f"~/data/{args.default_folder}"
    args.directory = Path(os.path.expandvars(chosen)).expanduser()
    if args.limit is not None and args.limit < 1:
        raise DataError(f"--limit {args.limit}: at least one row is needed")
    return args


def chat_row(
    source: str, text: str, truth: str, split: str, index: int, *, images: Any = None, **extra: Any
) -> dict[str, Any]:
    """One row of the chat format. images: the column of that name; `extra`: what extra_info holds besides."""
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": text}],
        **({} if images is None else {"images": images}),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": index, **extra},
    }


def find_split(root: str, split: str, *, config: str | None = None) -> list[Path]:
    """Files of a split under a raw data directory: `train.jsonl`, or the hub's layout `main/train-*.parquet`.

    `config` is the hub configuration's folder. Raises DataError naming what was looked for and what is there.
    """
    base = Path(os.path.expandvars(root)).expanduser()
    if not base.is_dir():
        problem = "a file, name the directory it is in" if base.is_file() else "no such directory"
        raise DataError(f"{root}: {problem} (--local_dataset_path)")
    folders = [base, base / "data"] + ([base / config, base / config / "data"] if config else [])
    for folder in folders:
        for suffix in RAW_SUFFIXES:
            exact = folder / f"{split}{suffix}"
            matches = [exact] if exact.is_file() else sorted(folder.glob(f"{split}-*{suffix}"))
            if matches:
                return matches
    present = sorted(str(p.relative_to(base)) for p in base.rglob("*.*") if p.suffix in RAW_SUFFIXES)
    raise DataError(
        f"{root}: no file of split {split!r} (looked for {split}.jsonl, {split}.parquet, {split}-*.parquet, also in "
        f"{config or 'data'}/); it holds {', '.join(present[:8]) or 'no data file'}"
    )


def raw_rows(paths: Iterable[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """("file line n", row) of every row of the files."""
    for path in paths:
        file, unit = open_file(str(path)), "row" if path.suffix == ".parquet" else "line"
        for number in range(len(file)):
            yield f"{path} {unit} {number + 1}", file.row(number)


def raw_texts(paths: Iterable[Path], names: tuple[str, str]) -> Iterator[tuple[str, str, str]]:
    """("file line n", text, text) of the two named columns of every raw row. DataError where one is not text."""
    for where, line in raw_rows(paths):
        first, second = (line.get(name) for name in names)
        if not isinstance(first, str) or not isinstance(second, str):
            raise DataError(f"{where}: {' and '.join(names)} are needed, as text; it has {', '.join(line)}")
        yield where, first, second


def from_hub(repo: str, split: str, *, config: str | None = None) -> list[Path]:
    """Download the parquet files of a split from the hub; needs the network. Raises DataError if that fails."""
    from fnmatch import fnmatch

    from huggingface_hub import HfApi, hf_hub_download

    print(f"downloading {repo} ({split}) from the hub", file=sys.stderr)
    folder = config or "data"
    with naming(repo, "the hub could not be reached (--local_dataset_path DIR names raw data on disk)"):
        names = HfApi().list_repo_files(repo, repo_type="dataset")
        matches = [n for n in sorted(names) if fnmatch(n, f"{folder}/{split}-*.parquet")]
        if not matches:
            listing = ", ".join(names[:8])
            raise DataError(f"{repo}: the hub holds no {folder}/{split}-*.parquet; found {listing}")
        return [Path(hf_hub_download(repo, name, repo_type="dataset")) for name in matches]


def write_parquet(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write rows as parquet beside the target, then rename it into place."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not rows:
        raise DataError(f"{path}: there is no row to write")
    with written_whole(path) as beside:
        pq.write_table(pa.Table.from_pylist(list(rows)), beside)


def finish(splits: Mapping[str, Sequence[dict[str, Any]]], args: argparse.Namespace) -> int:
    """Write every split as {name}.parquet where the flags (`parsed`) say, and copy it if asked.

    Prints rows, columns, longest prompt and one row.
    """
    for name, rows in splits.items():
        limited = rows[: args.limit]
        path = args.directory / f"{name}.parquet"
        write_parquet(limited, path)
        longest = max(prompt_characters(row) for row in limited)
        print(f"{path}: {len(limited)} rows; columns {', '.join(limited[0])}; longest prompt {longest} characters")
        if args.hdfs_dir:
            _copy(path, f"{args.hdfs_dir.rstrip('/')}/{path.name}")
    first = next(iter(splits.values()))[0]
    print(json.dumps(first, ensure_ascii=False, indent=2, default=_shown))
    return 0


def _shown(value: Any) -> str:
    """What JSON does not know; the bytes of an image are only counted."""
    return f"{len(value)} bytes" if isinstance(value, bytes) else str(value)


def two_splits(name: str, about: str, rows: Rows, argv: Sequence[str] | None, folder: str = "") -> int:
    """The script of a data set with the splits train and test; `rows(local raw directory or None, split)` makes one."""
    args = parsed(parser(name, about, folder=folder), argv)
    splits = {split: rows(args.local_dataset_path, split) for split in ("train", "test")}
    if not splits["test"]:
        print(f"{args.local_dataset_path}: no row of split 'test', so no test.parquet", file=sys.stderr)
        del splits["test"]
    return finish(splits, args)


def prompt_characters(row: dict[str, Any]) -> int:
    """Characters of a row's prompt, or of its messages."""
    cell = row.get("prompt") or row.get("messages") or ""
    return len(cell) if isinstance(cell, str) else sum(len(str(m.get("content"))) for m in cell)


def _copy(path: Path, url: str) -> None:
    import fsspec

    with naming(str(path), f"it is written, but copying it to {url} failed"):
        system, remote = fsspec.core.url_to_fs(url)
        system.makedirs(remote.rsplit("/", 1)[0], exist_ok=True)
        system.put_file(str(path), remote)
    print(f"copied to {url}")
