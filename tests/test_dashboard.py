"""`hotlap dashboard` as it is used: the real command, a real machine on this computer, a real browser."""

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from browser import browsing
from starlette.testclient import TestClient

from hotlap import clock, durable, runs
from hotlap.cloud.lease import Lease
from hotlap.cloud.ledger import Ledger
from hotlap.cloud.local import LocalProvider
from hotlap.cloud.provider import Listing, Machine, Start, Tags
from hotlap.config import CloudConfig
from hotlap.report.dashboard import Stops, make_app
from hotlap.report.live import Follower, Slices, Verdicts, machine_rows

EVIL = "<img src=x onerror=alert(1)>"


@contextlib.contextmanager
def dashboard(folder: Path, *args: str) -> Iterator[tuple[str, str]]:
    """The address it serves, and the path it printed behind it."""
    with (folder / "dashboard.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "hotlap", "dashboard", "--port", "0", *args],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        assert process.stdout
        try:
            printed = process.stdout.readline().strip()
            assert printed.startswith("http://"), (folder / "dashboard.log").read_text()
            base, _, path = printed.rpartition("/")
            yield base, f"/{path}"
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)
            process.stdout.close()


def lease_of(run: str, number: int, now_s: float, ttl_s: int = 600) -> Lease:
    price = {"usd_micros_per_hour": 3_600_000, "num_gpus": 1, "billing_unit_s": 1}
    times = {"began_s": now_s, "not_after_s": int(now_s + ttl_s), "gpu_s": ttl_s, "usd_micros": 100_000}
    return Lease(f"{number:016x}", run, "me", "local", "local", "n", **price, **times)


# --- what it reads ---


def test_a_follower_gives_each_row_once_and_reads_again_what_was_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    follower = Follower(path)
    assert follower.new_rows() == ([], True)
    durable.append_rows(path, [{"step": 1}, {"step": 2}])
    assert follower.new_rows() == ([{"step": 1}, {"step": 2}], True)
    with path.open("a") as torn:
        torn.write('{"step": 3')
    assert follower.new_rows() == ([], False)
    with path.open("a") as whole:
        whole.write("}\n")
    assert follower.new_rows() == ([{"step": 3}], False)
    path.write_text('{"step": 1}\n')
    assert follower.new_rows() == ([{"step": 1}], True)


def test_slices_that_run_are_shown_and_others_are_not(tmp_path: Path) -> None:
    for name in ("live", "over"):
        run = runs.RunFolder(tmp_path / name)
        lock = runs.acquire(run, 100.0, print)
        durable.append_rows(run.metrics, [{"step": 4, "loss": 2.5}, {"step": 4, "val_loss": 2.0}])
        if name == "over":
            lock.release({"reason": "slice_over"})
    slices = Slices(tmp_path)
    (row,) = slices.section()
    assert (row["run"], row["slice"], row["step"], row["loss"], row["val_loss"]) == ("live", 1, 4, 2.5, 2.0)
    assert 0 < row["ends_at_s"] - clock.wall_s() <= 100.0
    durable.append_rows(tmp_path / "live" / "metrics.jsonl", [{"step": 5, "loss": 2.25}])
    assert slices.section()[0]["step"] == 5


def test_machines_are_those_of_the_book_and_those_that_are_listed(home: Path) -> None:
    known, unseen = lease_of("a", 1, 100.0), lease_of("b", 2, 50.0)
    mine = Machine("pod-1", "hotlap-" + known.lease_id, "running", 100.0, known.lease_id, "me", usd_micros_per_hour=9)
    stranger = Machine("pod-9", EVIL, "running", 90.0)
    rows = machine_rows([known, unseen], {"local": Listing(200.0, (mine, stranger))})
    told = [(row["machine"], row["state"], row["may_stop"]) for row in rows]
    assert told == [(None, "not listed", True), ("pod-1", "running", True), ("pod-9", "running", False)]
    assert rows[1]["usd_micros_per_hour"] == 9 and "leaves it alone" in rows[2]["problems"]


def test_verdicts_are_read_as_they_come(tmp_path: Path) -> None:
    journal, log = tmp_path / "studies" / "lr" / "experiments.jsonl", tmp_path / "records" / "micro" / "log.jsonl"
    verdicts = Verdicts(tmp_path / "studies", tmp_path / "records")
    assert verdicts.section() == {"studies": [], "newest": []}
    durable.make_dirs(journal.parent)
    durable.make_dirs(log.parent)
    trial = {"kind": "run", "status": "ok", "val_search_nats_per_byte": 2.0}
    decision = {"kind": "decision", "decision_id": 7, "outcome": "kept", "reason": EVIL}
    durable.append_rows(journal, [trial, {**trial, "val_search_nats_per_byte": 1.5}, {**trial, "status": "oom"}])
    durable.append_rows(log, [{"kind": "verified", "submission": "001", "verdict": "pass", "description": "fast"}])
    assert [row["verdict"] for row in verdicts.section()["newest"]] == ["pass"]
    durable.append_rows(journal, [decision])
    told = verdicts.section()
    assert told["studies"] == [{"study": "lr", "num_runs": 3, "lowest": 1.5}]
    assert [(row["what"], row["verdict"]) for row in told["newest"]] == [("7", "kept"), ("001", "pass")]


def test_the_newest_verdicts_are_the_newest_of_all_studies(tmp_path: Path) -> None:
    """Four studies with twenty decisions filled the list, each younger study and every contest was left out."""
    for name, hour in (("a", 1), ("b", 2), ("c", 3), ("d", 5)):
        journal = tmp_path / "studies" / name / "experiments.jsonl"
        durable.make_dirs(journal.parent)
        decision = {"kind": "decision", "outcome": "kept", "reason": ""}
        times = [f"2026-12-01T{hour:02}:{minute:02}:00Z" for minute in range(20)]
        durable.append_rows(journal, [{**decision, "decision_id": at, "at": at} for at in times])
    log = tmp_path / "records" / "micro" / "log.jsonl"
    durable.make_dirs(log.parent)
    verified = {"kind": "verified", "verdict": "pass", "description": "", "date": "2026-12-01T04:00:00Z"}
    durable.append_rows(log, [{**verified, "submission": "001"}])
    newest = Verdicts(tmp_path / "studies", tmp_path / "records").section()["newest"]
    assert [row["where"] for row in newest] == ["d"] * 20 + ["micro"] + ["c"] * 20 + ["b"] * 19
    assert newest[0]["what"] == "2026-12-01T05:19:00Z"


# --- who may come in ---


def ended_by(token: str | None = None) -> tuple[TestClient, list[str]]:
    """A dashboard with one machine, of the run `mine`, and the runs whose machines were ended."""
    ended: list[str] = []

    def end(run: str, say: Callable[[str], None]) -> str:
        ended.append(run)
        return "gone"

    app = make_app(lambda: {"machines": [{"run": "mine", "may_stop": True}]}, Stops(end), token)
    return TestClient(app, base_url="http://127.0.0.1:8787"), ended


def secret_of(client: TestClient) -> str:
    return client.get("/").text.partition('name="hotlap-secret" content="')[2].partition('"')[0]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8787", "localhost:8787", "LOCALHOST", "[::1]:8787"])
def test_a_name_of_this_machine_is_let_in(host: str) -> None:
    client, _ = ended_by()
    assert client.get("/", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8787", "127.0.0.1.evil.example", "localhost.evil.example:8787", "127.0.0.2"),
        *(
            "0.0.0.0:8787",
            "localhost.",
            "2130706433",
            "",
            "[",
            "[::1",
            "evil.example#@localhost",
            "localhost@evil.example",
        ),
    ],
)
def test_a_name_that_was_made_to_mean_this_machine_is_refused(host: str) -> None:
    """DNS rebinding: the browser believes that it talks to the other page's own server, so nothing but the name that
    it was told to go to gives it away. Nor is the page's secret shown."""
    client, ended = ended_by()
    for path in ("/", "/state", "/events", "/dashboard.js"):
        answer = client.get(path, headers={"Host": host})
        assert answer.status_code == 403 and "secret" not in answer.text
    given = {"Host": host, "X-Hotlap-Secret": secret_of(client)}
    assert client.post("/stop", json={"run": "mine"}, headers=given).status_code == 403 and ended == []


OTHER_PAGES = [
    {"Origin": "http://evil.example"},
    {"Origin": "http://127.0.0.1:9999"},  # another program of this machine
    {"Origin": "http://127.0.0.1:8787.evil.example"},
    {"Origin": "null"},  # a frame without an origin, a file
    {"Origin": ""},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"},
]


@pytest.mark.parametrize("headers", OTHER_PAGES, ids=str)
@pytest.mark.parametrize("token", [None, "t"])
def test_another_page_in_the_same_browser_is_refused(headers: dict[str, str], token: str | None) -> None:
    client, ended = ended_by(token)
    client.cookies.set("hotlap_dashboard", "t")
    given = {**headers, "X-Hotlap-Secret": secret_of(client)}
    assert client.post("/stop", json={"run": "mine"}, headers=given).status_code == 403
    assert (
        client.get("/state", headers=headers).status_code == client.get("/events", headers=headers).status_code == 403
    )
    visit = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert client.post("/stop", json={"run": "mine"}, headers={**given, **visit}).status_code == 403
    assert ended == []
    assert client.get("/", headers=visit).status_code == 200


def test_our_own_page_ends_what_is_rented_and_nothing_else() -> None:
    client, ended = ended_by()
    own = {"Origin": "http://127.0.0.1:8787", "Sec-Fetch-Site": "same-origin", "X-Hotlap-Secret": secret_of(client)}
    for body, code in ((b"", 400), (b"[]", 400), (b'{"run": ["mine"]}', 404), (b'{"run": "yours"}', 404)):
        assert client.post("/stop", content=body, headers=own).status_code == code
    assert client.post("/stop", json={"run": "mine"}, headers={**own, "X-Hotlap-Secret": "x"}).status_code == 403
    assert ended == []
    assert client.post("/stop", json={"run": "mine"}, headers=own).status_code == 202
    assert ended == ["mine"]


def test_elsewhere_nobody_comes_in_without_the_token() -> None:
    client, ended = ended_by("t")
    assert client.get("/").status_code == client.get("/?token=x").status_code == client.post("/stop").status_code == 401
    assert client.get("/", params={"token": "t"}, follow_redirects=False).status_code == 303
    assert client.get("/state").status_code == 200 and ended == []


@pytest.mark.long
def test_a_token_is_asked_for_away_from_loopback(tmp_path: Path) -> None:
    with dashboard(tmp_path, "--host", "0.0.0.0") as (base, path):
        base = base.replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{base}/state").status_code == httpx.get(f"{base}/?token=x").status_code == 401
        assert httpx.post(f"{base}/stop", json={"run": "a"}).status_code == 401
        with httpx.Client() as client:
            welcome = client.get(f"{base}{path}")
            assert welcome.status_code == 303 and welcome.headers["location"] == "/"
            assert "httponly" in welcome.headers["set-cookie"].lower()
            assert client.get(f"{base}/state").json()["slices"] == []


# --- in a browser ---


@pytest.mark.long
def test_the_button_ends_a_real_machine_with_proof(home: Path, tmp_path: Path) -> None:
    """A machine is seen, counted down and ended; a stranger's name stays text; other pages cannot press the button."""
    settings = CloudConfig()
    durable.make_dirs(home)
    ledger, provider = Ledger(settings), LocalProvider(settings.local)
    now_s = clock.wall_s()
    lease = ledger.hold(lease_of(EVIL, 1, now_s))
    (offer,) = provider.offers()
    tags = Tags(lease.lease_id, "me", "n", lease.not_after_s)
    machine = provider.create(offer, tags, Start((sys.executable, "-c", "import time; time.sleep(600)")))
    ledger.note_machine(lease.lease_id, machine.machine_id)
    try:
        with dashboard(tmp_path) as (base, _), browsing(tmp_path) as browser:
            state = httpx.get(f"{base}/state").json()
            assert [row["run"] for row in state["machines"]] == [EVIL]
            assert httpx.get(f"{base}/state", headers={"Host": "evil.example"}).status_code == 403
            secret = httpx.get(base).text.partition('name="hotlap-secret" content="')[2].partition('"')[0]
            for headers in ({}, {"X-Hotlap-Secret": "x"}, {"X-Hotlap-Secret": secret, "Origin": "http://evil.example"}):
                assert httpx.post(f"{base}/stop", json={"run": EVIL}, headers=headers).status_code == 403
            other = httpx.post(f"{base}/stop", json={"run": "other"}, headers={"X-Hotlap-Secret": secret})
            assert other.status_code == 404

            browser.look_like(width=375, height=700)
            browser.open(base)
            row = "document.querySelector('#machines tbody tr')"
            browser.wait(f"{row} && /^[0-9]+:[0-9]+/.test({row}.children[6].textContent)")
            assert browser.run(f"{row}.children[0].textContent") == EVIL and browser.run("document.images.length") == 0
            assert browser.run("document.documentElement.scrollWidth <= innerWidth")
            # The table is wider than a phone, and its button is in sight all the same.
            browser.wait(
                f"(place => place.left > 0 && place.right <= innerWidth)"
                f"({row}.querySelector('button').getBoundingClientRect())"
            )
            before = browser.run(f"{row}.children[7].textContent")
            browser.wait(f"{row}.children[7].textContent !== {json.dumps(before)}")
            names = browser.names()
            assert ("button", f"End machine {machine.machine_id} of {EVIL}") in names
            assert {("table", "Machines"), ("rowheader", EVIL), ("columnheader", "time left")} <= set(names)

            browser.run(f"{row}.querySelector('button').focus()")
            browser.press("Enter")
            browser.wait("document.getElementById('sure').open")
            browser.press("Enter")  # the focus is on keeping it
            browser.wait("!document.getElementById('sure').open")
            browser.press("Enter")
            browser.wait("document.getElementById('sure').open")
            browser.press("Tab")
            browser.press("Enter")
            browser.wait("document.getElementById('news').textContent.includes('proven dead')")
            browser.wait("document.querySelectorAll('#machines tbody tr').length === 0")
            assert browser.complaints == [] and all(
                url.startswith(base) for url in browser.requests if url[:4] == "http"
            )
        (closed,) = ledger.leases([lease.lease_id])
        assert closed.state == "settled" and closed.outcome == "stopped"
        assert provider.machines().machines == ()
    finally:
        provider.terminate(machine.machine_id)
        provider.close()
        ledger.close()
