"""The report in a real browser: charts and rows exist, interaction works, model output stays text."""

from __future__ import annotations

import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_run import make_run, metrics_of, responses_of, times_of
from tests.integration import chromium
from verl.report import write_report
from verl.report.serve import open_server

pytestmark = pytest.mark.skipif(chromium.find() is None, reason="no chromium or chrome binary on this machine")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Page]:
    """One browser for all tests of this file; each opens its own report."""
    with chromium.Page(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def hostile_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Report of a finished run of 130 steps whose last step holds a hostile response."""
    return write_report(make_run(tmp_path_factory.mktemp("run"), 130, every=26, hostile=True))


def no_errors(page: chromium.Page) -> None:
    """Nothing threw, nothing was fetched, no injected script ran."""
    assert page.exceptions == []
    assert page.eval("document.documentElement.dataset.errors || ''") == ""
    assert page.eval("document.documentElement.dataset.pwned || ''") == ""
    assert [url for url in page.requests if not url.startswith(("file:", "about:", "data:"))] == []


def drawn_pixels(page: chromium.Page, selector: str) -> int:
    """Opaque pixels on a chart's canvas."""
    script = f"""(() => {{ const c = document.querySelector('{selector} canvas');
      const p = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
      let n = 0; for (let i = 3; i < p.length; i += 4) n += p[i] > 0; return n; }})()"""
    return page.eval(script)


def test_charts_and_rows_are_drawn(page: chromium.Page, hostile_report: Path, tmp_path: Path) -> None:
    page.open(hostile_report)
    shown = page.eval("[...document.querySelectorAll('.chart')].map(n => n.dataset.chart)")
    for name in (
        "reward",
        "kl",
        "entropy",
        "length",
        "clip",
        "grad",
        "timing",
        "throughput",
        "sampler",
        "memory",
        "ends",
    ):
        assert name in shown
    assert not {"loss", "critic", "stale", "filter"} & set(shown), "charts without metrics must not appear"
    for name in ("reward", "timing", "entropy"):
        assert drawn_pixels(page, f"[data-chart={name}]") > 500
    assert page.eval("document.querySelectorAll('table.responses tbody tr').length") == 24
    assert page.eval("document.querySelector('h1').textContent") == "grpo-tiny-seed1"
    assert "finished" in page.eval("document.getElementById('status').textContent")
    assert page.eval("document.querySelectorAll('.figure-card').length") == 4
    assert page.eval("document.querySelectorAll('.events > li').length") > 3
    assert "sk-do-not-show" not in page.eval("document.documentElement.outerHTML")
    # A blank picture of this size compresses to a few kilobytes.
    assert page.screenshot(tmp_path / "page.png").stat().st_size > 40_000
    no_errors(page)


def test_hostile_text_is_inert_and_visible(page: chromium.Page, hostile_report: Path) -> None:
    page.open(hostile_report)
    page.eval("R.openResponse(R.data.responses.rows.findIndex(r => r.u === '<b>uid</b>'))")
    panel = "document.getElementById('panel')"
    assert page.eval(f"{panel}.querySelectorAll('script, img, b:not(.inspector b)').length") == 0
    text = page.eval(f"{panel}.textContent")
    assert "<img src=x onerror=alert(1)>" in text
    for code in ("U+202E", "U+200B", "U+0000", "U+001B", "U+D800"):
        assert code in text
    assert "\u202e" not in text and "\u200b" not in text
    assert page.eval(f"{panel}.querySelectorAll('.tok.other').length") == 2
    assert "Scoring failed" in text
    turns = [page.eval(f"[...{panel}.querySelectorAll('.said')][{k}].textContent") for k in range(6)]
    assert turns[3].startswith("assistant250 msthen 2.0 sreward −0.5") and turns[5] == "assistant1.0 sdone"
    assert turns[1] == "assistantan earlier turn" and "result of <b>tool</b>" in turns[4]
    bars = [page.eval(f"[...{panel}.querySelectorAll('.branch')][{k}].style.cssText") for k in range(4)]
    assert bars[2] == "margin-left: 71.875%; width: 28.125%;" and bars[0].startswith("margin-left: 0%")
    assert page.eval(f"{panel}.querySelectorAll('details').length") == 2, "the call and its result, folded"
    assert page.eval(f"{panel}.querySelectorAll('details[open]').length") == 0
    assert page.eval("document.scripts.length") == 2
    no_errors(page)


def test_token_view_colours_and_keys(page: chromium.Page, hostile_report: Path) -> None:
    page.open(hostile_report)
    page.eval("document.querySelectorAll('a.open')[2].focus()")
    page.key("Enter", 13)
    page.wait("document.getElementById('panel').open")
    painted = "[...document.querySelectorAll('.tok')].filter(t => t.style.backgroundColor).length"
    assert page.eval(painted) > 5
    page.key("ArrowRight", 39)
    page.key("ArrowRight", 39)
    page.wait("document.querySelector('#inspector').textContent.includes('2 of')")
    before = page.eval("document.querySelector('.tok.at').style.backgroundColor")
    for mode in ("diff", "adv", "plain"):
        page.eval(f"document.querySelector('.segments [data-key={mode}]').click()")
        assert page.eval("document.querySelector('.segments [aria-pressed=true]').dataset.key") == mode
    assert page.eval(painted) == 0 and before is not None
    link = page.eval("window.location.hash")
    page.key("Escape", 27)
    page.wait("!document.getElementById('panel').open")
    assert page.eval("document.activeElement.className") == "open", "focus goes back to where it came from"
    page.open(hostile_report, link)
    assert page.eval("document.getElementById('panel').open"), "a response's address opens it"
    no_errors(page)


def test_filters_and_sorting(page: chromium.Page, hostile_report: Path) -> None:
    page.open(hostile_report)

    def put(key: str, value: str) -> None:
        page.eval(
            f"(() => {{ const n = document.querySelector('[data-filter={key}]'); n.value = {json.dumps(value)};"
            "n.dispatchEvent(new Event('input')); n.dispatchEvent(new Event('change')); })()"
        )

    put("step", "all")
    put("finish", "length")
    ends = page.eval("[...document.querySelectorAll('td.c-end')].map(n => n.textContent)")
    assert ends and set(ends) == {"length"}
    put("finish", "")
    put("high", "0.5")
    assert set(page.eval("R.visibleResponses.map(i => R.data.responses.rows[i].sc)")) == {0}
    put("high", "")
    put("text", "NO SUCH TEXT")
    assert "No response matches" in page.eval("document.getElementById('responses-body').textContent")
    put("text", "")
    page.eval("document.querySelector('[data-sort=n]').click()")
    lengths = page.eval("R.visibleResponses.map(i => R.data.responses.rows[i].n)")
    assert lengths == sorted(lengths, reverse=True)
    put("step", "newest")
    no_errors(page)


def test_smoothing_crosshair_and_explorer(page: chromium.Page, hostile_report: Path) -> None:
    page.open(hostile_report)
    page.eval(
        "(() => { const s = document.getElementById('smooth'); s.value = 0; s.dispatchEvent(new Event('input')); })()"
    )
    assert page.eval("document.getElementById('smooth-out').textContent") == "off"
    first = page.eval("document.querySelector('[data-chart=entropy] .legend b').textContent")
    page.eval("document.querySelector('[data-chart=reward]').focus()")
    for _ in range(3):
        page.key("PageUp", 33)
    page.wait(f"document.querySelector('[data-chart=entropy] .legend b').textContent !== {json.dumps(first)}")
    page.eval(
        "(() => { document.getElementById('explore-name').value = 'actor/pg_loss'; "
        "document.getElementById('explore-add').click(); })()"
    )
    assert page.eval("document.querySelectorAll('[data-chart=\"own-actor/pg_loss\"] canvas').length") == 1
    no_errors(page)


@pytest.mark.parametrize("width", [1400, 390])
def test_fits_the_window(page: chromium.Page, hostile_report: Path, width: int) -> None:
    page.size(width, 800)
    page.open(hostile_report)
    assert page.eval("document.documentElement.scrollWidth") <= width
    page.eval("R.openResponse(0)")
    assert page.eval("document.getElementById('panel').getBoundingClientRect().left") >= 0
    page.size(1280, 900)
    no_errors(page)


def test_dark_follows_the_system(page: chromium.Page, hostile_report: Path) -> None:
    page.theme(True)
    page.open(hostile_report)
    dark = page.eval("getComputedStyle(document.body).backgroundColor")
    page.theme(False)
    assert dark != page.eval("getComputedStyle(document.body).backgroundColor")
    no_errors(page)


def test_empty_and_young_runs(page: chromium.Page, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    page.open(write_report(empty))
    assert page.eval("document.querySelectorAll('.empty').length") == 4
    assert "starting" in page.eval("document.getElementById('status').textContent")
    no_errors(page)

    young = make_run(tmp_path / "young", 1, finished=False)
    config = (young / "config.yaml").read_text()
    (young / "config.yaml").write_text(config.replace('"total_training_steps": 1', '"total_training_steps": 50'))
    events = (young / "events.jsonl").read_text().replace('"total_steps": 1', '"total_steps": 50')
    (young / "events.jsonl").write_text(events)
    page.open(write_report(young))
    assert page.eval("document.getElementById('live-box').hidden") is False
    assert "step 1 of 50" in page.eval("document.getElementById('status').textContent")
    assert drawn_pixels(page, "[data-chart=reward]") > 100
    no_errors(page)


def test_an_evaluation_has_a_table_of_scores_and_no_curves(page: chromium.Page, tmp_path: Path) -> None:
    record = {"step": 0, "time": 1.0, "val/accuracy": 0.5, "eval/a/b/prompts": 2, "eval/a/b/pass@16": 0.75}
    record |= {"eval/a/b/accuracy": 0.5, "eval/a/b/accuracy_low": 0.25, "eval/a/b/accuracy_high": 0.75}
    record |= {"eval/a/b/pass@2": 0.625, "eval/all/accuracy": 0.5}
    record |= {"eval/all/accuracy_low": 0.4, "eval/all/accuracy_high": 0.6}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record))
    page.open(write_report(tmp_path))
    no_errors(page)
    cells = "[...document.querySelectorAll('#scores-body th, #scores-body td')].map(n => n.textContent)"
    found = page.eval(cells)
    assert found[:5] == ["data source", "prompts", "accuracy", "pass@2", "pass@16"]
    assert found[5:10] == ["a/b", "2", "50.0 % 25.0 % to 75.0 %", "62.5 %", "75.0 %"]
    assert page.eval("document.getElementById('curves').hidden") is True
    assert "Accuracy, a/b" in page.eval("document.getElementById('headline').textContent")


def test_a_training_run_has_no_table_of_scores(page: chromium.Page, hostile_report: Path) -> None:
    page.open(hostile_report)
    assert page.eval("document.getElementById('scores').hidden") is True
    assert page.eval("document.getElementById('curves').hidden") is False


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """(folder of a run that is going on, the address of its live page)."""
    run = make_run(tmp_path / "run", 30, finished=False)
    server, address = open_server([run])
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield run, address
    server.shutdown()
    thread.join()
    server.server_close()


def grow(run: Path, step: int) -> None:
    """Add a step to all files of a run."""
    rng = random.Random(step)
    record = metrics_of(step, 200, rng)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    with (run / "timeline.jsonl").open("a") as file:
        file.write(json.dumps(times_of(record)) + "\n")
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": "notice", "step": step, "message": f"news of step {step}"}) + "\n")
    rows = "".join(json.dumps(row) + "\n" for row in responses_of(step, 200, rng, prompts=1))
    (run / "trajectories" / f"{step}.jsonl").write_text(rows)


def test_a_live_page_grows_and_keeps_what_the_reader_chose(page: chromium.Page, served: tuple[Path, str]) -> None:
    run, address = served
    page.open(address)
    page.eval("window.kept = document.querySelector('[data-chart=reward]')")
    choose = (
        "const s = document.querySelector('[data-filter=step]'); s.value = '30'; s.dispatchEvent(new Event('change'))"
    )
    page.eval(f"(() => {{ {choose} }})()")
    steps = "R.data.series.steps[R.data.series.steps.length - 1]"
    assert page.eval(steps) == 30 and page.eval("document.querySelectorAll('svg.work rect').length") > 12
    grow(run, 31)
    page.wait(f"{steps} === 31")
    assert page.eval("window.kept.isConnected") is True
    assert "news of step 31" in page.eval("document.getElementById('events-body').textContent")
    assert page.eval("document.querySelector('[data-filter=step]').value") == "30"
    page.wait("document.querySelector('[data-filter=step]').textContent.includes('31')")
    assert page.exceptions == [] and page.eval("document.documentElement.dataset.errors || ''") == ""
    (run / "trajectories" / "now.jsonl").write_text('{"uid": "u", "input": "a question", "output": "just finished"}\n')
    page.eval(
        "(() => { const s = document.querySelector('[data-filter=step]'); s.value = 'newest'; s.dispatchEvent(new Event('change')); })()"
    )
    page.wait("document.getElementById('responses-body').textContent.includes('just finished')")
    assert "refused update" not in page.eval("document.getElementById('alarms').textContent")
    page.eval("document.querySelector('#responses-body a.open').click()")
    page.wait("document.getElementById('panel').open")
    response = page.eval("document.getElementById('panel').textContent")
    with (run / "events.jsonl").open("a") as events:  # a check says its cause once, and counts from then on
        for step, more in ((31, ', "message": "step 31: loss: a mask is wrong"'), (32, "")):
            events.write(f'{{"time": {time.time()}, "event": "check_loss", "step": {step}{more}}}\n')
    grow(run, 32)
    page.wait(f"{steps} === 32")
    assert page.eval("document.getElementById('panel').textContent") == response
    assert "step 32: check loss, step 31: loss: a mask is wrong" in page.eval(
        "document.getElementById('alarms').textContent"
    )


def test_only_the_token_opens_a_live_page(served: tuple[Path, str]) -> None:
    _, address = served
    assert address.startswith("http://127.0.0.1:")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(address[:-2] + "x/", timeout=10)


def test_two_runs_share_charts_and_differences_are_listed(page: chromium.Page, tmp_path: Path) -> None:
    run, other = (make_run(tmp_path / name, 20, seed=seed) for name, seed in (("a", 1), ("b", 2)))
    config = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(config.replace('"lr": 5e-05', '"lr": 1e-06'))
    page.open(write_report(run, beside=other))
    labels = page.eval("[...document.querySelectorAll('[data-chart=entropy] .legend li')].map(n => n.textContent)")
    assert [label.split(" (")[0][:6] for label in labels] == ["policy", "policy"]
    assert "actor_rollout_ref.actor.optim.lr" in page.eval("document.getElementById('differences').textContent")
    assert "planned" in page.eval("document.getElementById('planned').textContent")
    no_errors(page)


def test_charts_without_change_are_folded(page: chromium.Page, tmp_path: Path) -> None:
    run = make_run(tmp_path, 20)
    records = [json.loads(line) | {"actor/entropy": 0.25} for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    page.open(write_report(run))
    assert page.eval("document.querySelector('#flat-charts [data-chart=entropy]') !== null") is True
    assert page.eval("document.querySelector('#charts [data-chart=entropy]')") is None
    no_errors(page)
