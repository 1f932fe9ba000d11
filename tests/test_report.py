"""`hotlap report`: pages that stand alone, with the numbers of their charts in them, seen in a real browser."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Browser, browsing
from click.testing import CliRunner

from hotlap import durable
from hotlap.cli import cli
from hotlap.cloud.lease import Lease
from hotlap.cloud.ledger import Ledger
from hotlap.config import CloudConfig
from hotlap.errors import UsageError
from hotlap.report import money, page, records, run, study
from hotlap.report.chart import COLORS, Chart, Line, thinned
from hotlap.research import simulate
from hotlap.research.space import StudyConfig
from hotlap.runs import Identity, RunFolder

EVIL = "</script><script>alert(1)</script>"
ROOT = Path(__file__).resolve().parent.parent
NOW_S = 1_780_000_000.0


def make_run(folder: Path, num_steps: int = 60) -> RunFolder:
    """A run as slices leave it: one that was over, one that was killed."""
    made = RunFolder(folder)
    durable.make_dirs(made.slices / "0001")
    durable.make_dirs(made.slices / "0002")
    pins = {"model.safetensors": {"sha256": "ab" * 32, "num_bytes": 1}}
    trajectory = {"base_model": EVIL, "lora": {"rank": 4}}
    Identity(trajectory, 7, pins, {"dataset": {"f.jsonl": {"sha256": "cd" * 32}}}, {}, 9, num_steps, 1, "now").write(
        made
    )
    metrics: list[dict[str, Any]] = [
        {"step": step, "loss": 3.0 - 0.02 * step, "lr": 1e-3, "grad_norm": 1.0, "num_tokens": 64}
        for step in range(1, num_steps + 1)
    ]
    durable.append_rows(made.metrics, [*metrics, {"step": num_steps, "val_loss": 1.875}])
    durable.append_rows(
        made.samples, [{"step": at, "prompt": EVIL, "text": f"answer {at} {EVIL}"} for at in (0, 10, 60)]
    )
    timeline = {"elapsed_s": 30.0, "goodput": 0.5, "step_p50_s": 0.1, "step_p95_s": 0.2, "phases_s": {"steps": 15.0}}
    result = {"reason": "slice_over", "resumed_at": 0, "step": 60, "tokens_per_s": 432.0, "timeline": timeline}
    durable.replace(made.slices / "0001" / "result.json", json.dumps(result).encode())
    durable.replace(made.slices / "0002" / "exit.json", json.dumps({"reason": "killed", "wall_s": 4.0}).encode())
    return made


def fill(ledger: Ledger) -> None:
    """Two providers, two days, and a machine that may be alive."""
    for number, (provider, days_ago, run_name) in enumerate(
        [("local", 1, "a"), ("runpod", 0, EVIL), ("local", 0, "b")]
    ):
        began_s = NOW_S - days_ago * 86_400
        price = {"usd_micros_per_hour": 3_600_000, "num_gpus": 1, "billing_unit_s": 1}
        times = {"began_s": began_s, "not_after_s": int(began_s + 500), "gpu_s": 500, "usd_micros": 500_000}
        lease = Lease(f"{number:016x}", run_name, "me", provider, "L40S", "n", **price, **times)
        ledger.hold(lease)
        if number < 2:
            ledger.settle(lease.lease_id, began_s + 100, outcome="slice_over")


def files_in(html: str) -> dict[str, str]:
    found = re.findall(r'download="([^"]+\.csv)" href="data:text/csv;charset=utf-8;base64,([^"]+)"', html)
    return {name: base64.b64decode(data).decode() for name, data in found}


# --- the numbers ---


def test_page_of_a_run_has_every_number_and_strangers_words_are_only_words(tmp_path: Path) -> None:
    html = page.render(run.page_of(make_run(tmp_path / "r"), "now"))
    files = files_in(html)
    loss = files["loss.csv"].splitlines()
    assert loss[0] == 'step,loss,"loss, mean of recent steps",val_loss' and len(loss) == 61
    assert loss[1].startswith("1,2.98,") and loss[60].endswith(",1.875")
    assert files["tokens-per-s.csv"] == "slice,tokens/s\nslice 1,432.0\nslice 2,\n"
    assert "slice 1,15.0" in files["timeline.csv"] and files["goodput.csv"].endswith("slice 1,50.0\nslice 2,\n")
    assert "Loss went from 2.98 at step 1 to 1.8 at step 60. Held-out loss was lowest at step 60: 1.875." in html
    places = [
        html.index(text) for text in ("Before training", "answer 0 ", "After step 10", "After step 60", "answer 60 ")
    ]
    assert places == sorted(places)
    assert "answer 10 &lt;/script&gt;" in html and "ab" * 32 in html
    assert EVIL not in html.replace("\\u003c", "")


def test_money_adds_up_by_day_provider_and_run_against_the_caps(home: Path) -> None:
    settings = CloudConfig()
    durable.make_dirs(home)
    ledger = Ledger(settings)
    fill(ledger)
    section = money.section_of(ledger, settings, NOW_S, 30)
    by_day, _, by_run = section.charts
    assert by_day.header() == ["day", "local", "runpod"] and by_day.limits == [("cap $5", 5.0)]
    assert by_day.rows() == [["2026-05-27", 0.1, 0.0], ["2026-05-28", 0.5, 0.1]]
    assert dict(zip(by_run.lines[0].x, by_run.lines[0].y, strict=True)) == {"b": 0.5, "a": 0.1, EVIL: 0.1}
    assert dict(section.facts)["Charged today"] == "$0.6000"
    alive, over = section.tables
    assert [row[0] for row in alive.rows] == ["b"] and len(over.rows) == 2


def test_records_show_every_regime_in_the_order_of_the_log() -> None:
    """The public contest's facts that lie in this repository."""
    sections = {section.ident: section for section in records.sections_of(ROOT)}
    (progression,) = sections["track-t1"].charts
    best = {line.name: line.y for line in progression.lines}
    assert list(best["best, cold start"]) == sorted(best["best, cold start"], reverse=True)
    assert progression.places[0].startswith("000-baseline") and len(progression.rows()) == len(progression.places)


def test_many_points_are_thinned_without_losing_a_spike_and_the_file_has_all() -> None:
    values: list[float | int | str | None] = [0.0] * 20_000
    values[14_321] = 9.0
    x, y = thinned(range(20_000), values)
    assert len(x) <= 1200 and (14_321, 9.0) in list(zip(x, y, strict=True))
    chart = Chart("c", "C", "step", "y", [Line("y", range(20_000), values)], "says")
    assert len(chart.shown_rows()) == 400 and chart.csv().count("\n") == 20_001


def test_of_a_long_table_the_rest_is_there_for_who_opens_it() -> None:
    rows = [[f"row {number}", number] for number in range(250)]
    html = page.render(page.Page("p", "now", [page.Section("s", "S", tables=[page.Table("T", ["a", "b"], rows)])]))
    first, rest = html.split("<details>")
    assert "<summary>T: the other 50 rows</summary>" in rest and 'aria-label="T, continued"' in rest
    assert all((f">row {number}<" in first) == (number < 200) for number in range(250))
    assert all((f">row {number}<" in rest) == (number >= 200) for number in range(250))


def test_a_spreadsheet_runs_nothing_and_a_figure_reads_no_markup() -> None:
    chart = Chart(
        "c", "$x$ <b>", "=1+1", "y", [Line("=cmd()", ["@a", "b"], [-1.0, 2.0], "bars"), Line("<i>&", ["b"], [1])], ""
    )
    assert chart.csv() == "'=1+1,'=cmd(),<i>&\n'@a,-1.0,\nb,2.0,1\n"
    assert chart.figure()["data"][1]["name"] == "&lt;i&gt;&amp;"
    assert b"&lt;b&gt;" in chart.svg() and chart.svg() == chart.svg()


def test_lines_and_words_stand_out_from_both_pages() -> None:
    """WCAG's contrast: 3 : 1 for what is drawn, 4.5 : 1 for text; of the light colors and of the dark ones."""
    style = (ROOT / "src/hotlap/report/templates/style.css").read_text()
    light, dark = (dict(re.findall(r"--(\w+): (#\w{6})", part)) for part in style.split("@media", 2)[:2])

    def luminance(color: str) -> float:
        parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    for colors in (light, dark):
        for ground in (colors["page"], colors["card"]):
            assert min(contrast(color, ground) for color in COLORS) >= 3.0
            assert min(contrast(colors[name], ground) for name in ("ink", "soft", "link", "bad")) >= 4.5


def test_a_name_that_is_nothing_is_told_with_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "mine")
    with pytest.raises(UsageError, match=r"no run 'other' in runs/ and no study in studies/ \(there: mine\)"):
        CliRunner().invoke(cli, ["report", "other"], catch_exceptions=False, standalone_mode=False)
    (tmp_path / "studies" / "cut").mkdir(parents=True)
    (tmp_path / "studies" / "cut" / "experiments.jsonl").write_text('{"kind": "camp')  # its first row was cut off
    with pytest.raises(UsageError, match="no study in studies/cut"):
        CliRunner().invoke(cli, ["report", "cut"], catch_exceptions=False, standalone_mode=False)
    result = CliRunner().invoke(cli, ["report"], catch_exceptions=False)
    assert result.output == "reports/overview.html\n"
    assert ">mine</th>" in Path("reports/overview.html").read_text()


# --- in a browser ---


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory):
    with browsing(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


def open_page(browser: Browser, made: page.Page, path: Path) -> None:
    path.write_text(page.render(made))
    browser.complaints.clear()
    browser.requests.clear()
    browser.open(path.as_uri())
    browser.wait("document.documentElement.dataset.drawn === 'yes'")


@pytest.mark.long
def test_a_run_s_page_in_a_browser(browser: Browser, tmp_path: Path) -> None:
    """Nothing but the file is asked for, nothing runs that is not ours; light, dark, phone, keyboard, screen reader."""
    browser.look_like()
    open_page(browser, run.page_of(make_run(tmp_path / "r"), "now"), tmp_path / "run.html")
    assert browser.complaints == [] and {url.split(":")[0] for url in browser.requests} <= {"file", "data"}
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert browser.run(
        "[...document.querySelectorAll('[data-chart]')].every(place => place.querySelector('.main-svg'))"
    )
    assert browser.run("document.querySelectorAll('script').length") == 3

    def ink() -> str:
        return browser.run("getComputedStyle(document.querySelector('[data-chart] .xtick text')).fill")

    light = ink()
    browser.look_like(dark=True)
    browser.wait(f"getComputedStyle(document.querySelector('[data-chart] .xtick text')).fill !== {json.dumps(light)}")
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(21, 23, 27)"
    browser.look_like(width=375, height=700)
    browser.wait("document.documentElement.scrollWidth <= innerWidth")

    browser.press("Tab")
    assert browser.run("document.activeElement.textContent") == "Skip to the content"
    for _ in range(60):
        browser.press("Tab")
        if browser.run("document.activeElement.tagName") == "SUMMARY":
            break
    browser.press("Enter")
    browser.wait("document.activeElement.parentElement.open")
    names = browser.names()
    assert ("heading", "Losses") in names and ("image", "Loss") in names
    assert any(role == "table" and name.startswith("Loss (60 of 60 rows)") for role, name in names)


@pytest.mark.long
def test_without_script_a_page_shows_its_charts_as_pictures(tmp_path: Path) -> None:
    history = simulate.search(
        StudyConfig(name="s", baseline_runs=2), simulate.draw_bowl(np.random.default_rng(1)), 12, 1
    )
    made = study.page_of(EVIL, history, "now")
    path = tmp_path / "study.html"
    path.write_text(page.render(made))
    with browsing(tmp_path) as browser:
        browser.without_script()
        browser.open(path.as_uri())
        shown = "[...document.querySelectorAll('noscript img')].filter(i => i.naturalWidth > 0).length"
        assert browser.run(shown) == len(files_in(path.read_text())) >= 5
        assert browser.run("document.querySelector('h1').textContent") == f"Study {EVIL}"
