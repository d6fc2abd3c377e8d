"""What the tests of the check share: files of a run, and what the check says."""

from __future__ import annotations

import json

from verl.config import load
from verl.preflight.check import check

ARR = "actor_rollout_ref"
MODEL = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 512,
}


def write_model(folder, weights=True, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL | changes))
    if weights:
        (folder / "model.safetensors").write_bytes(b"")
    return folder


def write_rows(file, rows=16, **columns):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = {
        "data_source": ["openai/gsm8k"] * rows,
        "prompt": [[{"role": "user", "content": "1+1?"}]] * rows,
        "reward_model": [{"style": "rule", "ground_truth": "2"}] * rows,
    } | columns
    pq.write_table(pa.table({k: v for k, v in table.items() if v is not None}), file)
    return file


def problems(*argv, entry="ppo"):
    report = check(load(list(argv), entry=entry))
    return [f"{p.kind}: {p}" for p in report.problems]


def notices(*argv):
    return "\n".join(check(load(list(argv))).notices)


def only(found, kind, *parts):
    assert len(found) == 1, found
    assert found[0].startswith(kind)
    for part in parts:
        assert part in found[0], (part, found[0])
