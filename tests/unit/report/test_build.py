"""The report's page: what is packed, what is escaped, how big it gets, what the top says."""

from __future__ import annotations

import json
import re
import runpy
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fake_run import HOSTILE, hostile_response, make_run
from verl.report import summary, write_report
from verl.report.build import escape_json, page_data, thin
from verl.report.charts import CHARTS, chart_list
from verl.report.read import Metrics, read_run
from verl.report.responses import PageLimits, pack_responses, spread
from verl.tracking.metrics_table import ROWS, rank

ROOT = Path(__file__).parents[3]

DATA = re.compile(r'<script type="application/json" id="run-data">(.*?)</script>', re.DOTALL)


def data_of(page: Path) -> dict:
    """The data block of a built page."""
    return json.loads(DATA.search(page.read_text(encoding="utf-8")).group(1))


@given(st.text() | st.recursive(st.none() | st.booleans() | st.text(), st.lists, max_leaves=5))
def test_escaped_json_is_the_same_value_without_markup(value: object) -> None:
    text = escape_json({"v": value})
    assert json.loads(text) == {"v": value}
    assert not re.search("[<>&\u2028\u2029]", text)
    text.encode("utf-8")
    lacking = {"nan": float("nan"), "inf": [float("inf")], 3: Path("x"), "lone": "\ud800</script>"}
    kept = {"nan": None, "inf": [None], "3": "x", "lone": "\ud800</script>"}
    assert json.loads(escape_json(lacking)) == kept


def test_hostile_text_cannot_close_the_data_block(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 3, hostile=True)
    config = json.loads((run / "config.yaml").read_text())
    config["trainer"]["experiment_name"] = HOSTILE + "{{data}}{{script}}"
    (run / "config.yaml").write_text(json.dumps(config))
    page = write_report(run).read_text(encoding="utf-8")
    assert page.count("<script") == page.count("</script>") == 2
    assert "onerror=alert(1)>" not in page
    data = json.loads(DATA.search(page).group(1))
    assert data["experiment"] == HOSTILE + "{{data}}{{script}}"
    assert data["responses"]["prompts"][0] == HOSTILE


def test_policy_names_the_hashes_of_script_and_style(tmp_path: Path) -> None:
    import base64
    import hashlib

    page = write_report(make_run(tmp_path / "run", 2)).read_text(encoding="utf-8")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page).group(1)
    for tag, directive in (("style", "style-src"), ("script", "script-src")):
        body = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert len(body) == 1
        digest = base64.b64encode(hashlib.sha256(body[0].encode()).digest()).decode()
        assert f"{directive} &#x27;sha256-{digest}&#x27;" in policy
    assert "unsafe" not in policy and "default-src &#x27;none&#x27;" in policy
    assert not re.search(r'(src|href)="https?:', page)
    assert "Copyright (c) 2022 Leon Sorokin" in page and "The above copyright notice" in page


def test_secrets_of_the_config_are_hidden(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path / "run", 2)).read_text()
    assert "sk-do-not-show" not in page
    config = dict(data_of(tmp_path / "run/report.html")["config"])
    assert config["custom_reward_function.api_key"] == "hidden"
    assert config["actor_rollout_ref.actor.ppo_max_token_len_per_gpu"] == "8192"


def test_writing_leaves_no_other_file_and_keeps_the_old_page_on_failure(tmp_path, monkeypatch) -> None:
    run = make_run(tmp_path / "run", 2)
    before = {p.name for p in run.iterdir()}
    old = write_report(run).read_bytes()
    assert {p.name for p in run.iterdir()} - before == {"report.html"}

    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        write_report(run)
    assert (run / "report.html").read_bytes() == old
    assert {p.name for p in run.iterdir()} - before == {"report.html"}


def test_a_thousand_steps_are_fast_and_small(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 1000, every=40)
    write_report(run)
    took = []
    for _ in range(3):
        start = time.process_time()
        page = write_report(run)
        took.append(time.process_time() - start)
    assert page.stat().st_size < 8_000_000
    assert min(took) < 0.5, f"{min(took):.2f} s of CPU"


def test_page_stays_small_when_responses_are_huge(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 4)
    row = json.loads((run / "trajectories/4.jsonl").read_text().splitlines()[0])
    count = 4000
    row |= {"tokens": [f"tok{i} " for i in range(count)], "mask": [1] * count, "output": "x" * 200_000}
    row |= {k: [-0.123456789] * count for k in ("log_probs", "rollout_log_probs", "advantages")}
    for step in range(1, 41):
        rows = [json.dumps(row | {"uid": f"{step}-{i}"}) + "\n" for i in range(8)]
        (run / f"trajectories/{step}.jsonl").write_text("".join(rows))
    page = write_report(run, PageLimits(page_bytes=1_000_000))
    assert page.stat().st_size < 2_000_000
    responses = data_of(page)["responses"]
    assert responses["stepsOnDisk"] == 40 and 0 < len(responses["steps"]) < 40
    assert "more characters in the file" in responses["rows"][0]["o"]


def test_the_steps_shown_have_the_ends_and_no_repeats() -> None:
    assert spread([1, 5, 9], 3) == [9, 1, 5] and spread([4], 3) == [4]
    picked = spread(list(range(0, 1000, 7)), 20)
    assert picked[:2] == [994, 0] and len(set(picked)) == len(picked) <= 20


def test_packed_responses_unpack_to_what_was_written(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 2, prompts=2)
    rows = [json.loads(x) for x in (run / "trajectories/2.jsonl").read_text().splitlines()]
    packed = pack_responses(read_run(run).response_files, Counter())
    mine = [r for r in packed.rows if r["s"] == 2]
    assert len(mine) == len(rows) == 16
    for got, want in zip(mine, rows, strict=True):
        assert [packed.tokens[i] for i in got["t"]] == want["tokens"]
        assert packed.prompts[got["p"]] == want["input"]
        assert "o" not in got and got["z"] == 1, "the text is the tokens joined but the last: stored once"
        assert [x * 1e-4 for x in got["l"]] == pytest.approx(want["log_probs"], abs=6e-5)
        diff = [m - o for m, o in zip(want["rollout_log_probs"], want["log_probs"], strict=True)]
        assert [x * 1e-6 for x in got["q"]] == pytest.approx(diff, abs=6e-7)
        assert got["w"] == pytest.approx(want["advantage"], abs=1e-4), "one number when all tokens share it"


def test_images_of_a_dialogue_are_at_the_messages_that_hold_them(tmp_path: Path) -> None:
    uris = ["data:image/jpeg;base64,AA", "data:image/jpeg;base64,BB"]
    said = [("user", [{"type": "image"}, {"type": "text", "text": "?"}]), ("assistant", "<image>"), ("tool", "<image>a"),
            ("tool", "<image><image>")]  # fmt: skip
    messages = [{"role": role, "content": content} for role, content in said]
    row = {"step": 1, "uid": "a", "index": 0, "messages": messages, "shown": [*uris, "https://elsewhere"]}
    (tmp_path / "1.jsonl").write_text(json.dumps(row) + "\n")
    packed = pack_responses({1: tmp_path / "1.jsonl"}, Counter())
    assert [m.get("im") for m in packed.rows[0]["dl"]] == [None, None, [0], [1]] and packed.images == uris
    assert packed.rows[0]["dl"][0]["c"] == "<image>?"


def test_missing_token_columns_and_failed_scores_are_kept_as_such(tmp_path: Path) -> None:
    file = tmp_path / "1.jsonl"
    bare = {"step": 1, "uid": "a", "index": 0, "input": "p", "output": "o", "gts": "g", "score": 0.5}
    odd = hostile_response(1) | {"log_probs": None, "advantages": [1.0], "mask": None}
    file.write_text(json.dumps(bare) + "\n" + json.dumps(odd) + "\n" + '{"torn')
    bad: Counter[str] = Counter()
    packed = pack_responses({1: file}, bad)
    assert bad == {"1.jsonl": 1}
    first, second = packed.rows
    assert "t" not in first and first["sc"] == 0.5 and first["a"] is None
    assert second["sc"] is None and second["e"].startswith("ValueError")
    assert [m.get("v") for m in second["dl"]] == [
        None,
        None,
        None,
        [0.0, 0.25, -0.5],
        None,
        [2.25, 1.0, None],
    ]
    assert not {"l", "q", "w", "m"} & set(second) and second["r"][6] is None


def test_groups_stay_whole(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 3)
    packed = pack_responses(
        read_run(run).response_files, Counter(), PageLimits(responses_between=10, responses_ends=20)
    )
    sizes = Counter((r["s"], r["u"]) for r in packed.rows)
    assert set(sizes.values()) == {8}
    assert Counter(r["s"] for r in packed.rows) == {1: 24, 2: 16, 3: 24}


def test_thinning_follows_the_rule_of_names() -> None:
    count = 4000
    values = [float(i) for i in range(count)]
    sparse: list[float | None] = [None] * count
    sparse[5] = 7.0
    columns = {"x/mean": values, "x/max": values, "x/min": values, "val/accuracy": sparse}
    columns["timing_s/gen"] = values
    got = thin(Metrics(list(range(1, count + 1)), [None] * count, dict(columns)))
    every = got["every"]
    assert every == 3 and got["steps"][0] == 3 and got["steps"][-1] == count
    assert len(got["steps"]) == len(got["columns"]["x/mean"]) <= 1500
    assert (got["columns"]["timing_s/gen"][0], got["columns"]["x/max"][0], got["columns"]["x/min"][0]) == (
        1,
        2,
        0,
    )
    assert [v for v in got["columns"]["val/accuracy"] if v is not None] == [7]


def test_headline_says_first_and_last(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 100)
    by_label = {f["label"]: f for f in summary.headline(read_run(run).metrics)}
    rows = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
    accuracy = [r["val/accuracy"] for r in rows if "val/accuracy" in r]
    assert by_label["Validation accuracy"]["from"] == accuracy[0]
    assert by_label["Validation accuracy"]["to"] == accuracy[-1]
    scores = [r["critic/score/mean"] for r in rows if "critic/score/mean" in r]
    assert by_label["Mean score"]["to"] == pytest.approx(sum(scores[-5:]) / 5)
    assert set(by_label) == {"Validation accuracy", "Mean score", "Throughput", "Step time"}


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (["val-core/s/reward/mean@1", "val-core/s/acc/mean@1", "val/accuracy"], "Validation accuracy"),
        (["val-core/s/reward/mean@1", "val/accuracy"], "Validation reward"),
        (["val/accuracy"], "Validation accuracy"),
        (
            ["val-core/o/a/acc/mean@1", "val-core/o/b/acc/mean@1", "val/accuracy"],
            "Validation accuracy, mean of 2 data sources",
        ),
        (["val/loss"], "Validation loss"),
    ],
)
def test_a_mean_reward_is_not_called_an_accuracy(names: list[str], label: str) -> None:
    metrics = Metrics([1], [None], {name: [0.5] for name in names})
    assert summary.headline(metrics)[0]["label"] == label


def test_charts_show_listed_metrics_and_none_is_empty() -> None:
    assert all(rank(name) < len(ROWS) for chart in CHARTS for line in chart.lines for name in [line.metric])
    columns = {
        "actor/ppo_kl": [0, 0],
        "actor/entropy": [0, 0],
        "critic/score/mean": [0, 1],
        "val/accuracy": [0, 1],
    }
    columns |= {"val-core/a/b/mean@1": [0, 1], "val-core/a/b/best@2/mean": [1, 1], "train/loss": [None, 2]}
    shown = {chart["id"]: chart["series"] for chart in chart_list(Metrics([1, 2], [None, None], columns))}
    assert list(shown) == ["reward", "loss", "validation", "entropy"]
    assert [line["label"] for line in shown["validation"]] == ["a/b/best@2"]


def test_the_metrics_page_is_current() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "write_metrics_page.py"))
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert page == script["render"](page), "docs/metrics.md is out of date: make docs"


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([], "finished"),
        ([{"event": "run_end", "status": "interrupted", "text": "Ctrl-C"}], "failed"),
        ([{"event": "run_end", "status": "failed"}, {"event": "resumed", "step": 1}], "finished"),
        ([{"event": "run_start", "total_steps": 9}], "running"),
    ],
)
def test_status_comes_from_the_end_event_or_the_steps(tmp_path: Path, events: list[dict], state: str) -> None:
    run = make_run(tmp_path / "run", 3, finished=False)
    (run / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    data = read_run(run)
    got = summary.status(data)
    assert got["state"] == state
    if events and events[-1].get("text"):
        assert (got["word"], got["why"]) == ("interrupted", "Ctrl-C")


def test_the_curves_mark_resumes_and_lost_workers_and_torn_lines_are_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 3)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "actor/ent')
    resumed = {"event": "resumed", "step": 1}
    died = {"event": "sampler_died", "sampler": "s0", "step": 3}
    others = [{"event": "sampler_died", "sampler": "before any step"}, {"event": "checkpoint", "step": 2}]
    (run / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in [resumed, died, *others]))
    read = read_run(run)
    data = page_data(read, pack_responses(read.response_files, read.unreadable))
    assert data["marks"] == [{"kind": "resumed", "step": 1}, {"kind": "sampler_died", "step": 3}]
    assert data["unreadable"] == {"metrics.jsonl": 1}, "the page says what could not be read"


def test_sft_runs_have_their_own_headline(tmp_path: Path) -> None:
    rows = [{"step": i, "train/loss": 3 / i, "train/time": 0.5, "val/loss": 4 / i} for i in range(1, 5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    run = read_run(tmp_path)
    labels = {f["label"]: f for f in summary.headline(run.metrics)}
    assert labels["Training loss"]["to"] == 0.75 and labels["Training loss"]["up"] is False
    assert labels["Validation loss"]["from"] == 4 and labels["Step time"]["value"] == 0.5
    assert summary.elapsed(run.metrics) == 2.0
