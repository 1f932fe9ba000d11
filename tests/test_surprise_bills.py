"""Ways to a bill that nobody expected, each with what must come of it: a provider that stalls, a computer that slept,
a disk or a book that fails in the middle, one provider's trouble in the way of another's machines."""

import math
import sqlite3
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from money import make_lease
from stage import CAP_S, CREATE, DELETE, LIST, LOGS, OWNER, REAPER_PERIOD_S, Killed, Life, Stage

from hotlap import durable
from hotlap.cli import cli, doctor_money
from hotlap.cloud import forewords, launcher, launches, modal, reaper, runpod, watch
from hotlap.cloud.local import TRAITS as LOCAL_TRAITS
from hotlap.cloud.local import LocalProvider
from hotlap.cloud.proof import Evidence, Patience, last_bill
from hotlap.cloud.provider import Machine, Provider, Start, Tags
from hotlap.cloud.runpod import Runpod
from hotlap.cloud.runpod_shapes import machine_of, machines_in
from hotlap.config import CloudConfig
from hotlap.config_cloud import DEFAULT_IMAGE
from hotlap.errors import ConfigError, ProviderFailed, StorageFailed, Survivors
from hotlap.testing.containers import Job
from hotlap.testing.faults import Fault

pytestmark = pytest.mark.long

TTL_S = 310


# --- a launcher that does not look ---


@pytest.mark.parametrize("route", [LOGS, LIST])
def test_no_wait_that_a_provider_asks_for_outlasts_the_machine(route: str, stage: Callable[..., Stage]) -> None:
    s = stage(Fault("status", route, from_s=90.0, until_s=180.0, value=429, retry_after_s=5000.0), job=Job(1e9))
    s.cloud.account.pod_key_allows = "nothing"
    s.launch()
    assert s.age_s() < TTL_S + 60.0
    s.require_sound()


def test_a_computer_that_slept_asks_the_provider_what_time_it_is(stage: Callable[..., Stage]) -> None:
    """The machine's own end fails, and the launcher's clock stood still while its lid was closed."""
    s = stage(job=Job(seconds=1e9, skew_s=-20_000.0))
    s.cloud.account.pod_key_allows = "nothing"
    slept_s = [0.0]

    def close_the_lid() -> None:
        if s.age_s() > 100.0 and not slept_s[0]:
            slept_s[0] = 1000.0
            s.clock.sleep_s(1000.0)

    s.on_sleep = close_the_lid
    world = replace(s.world(), now_s=lambda: s.clock.now_s() - slept_s[0])
    start = Start(("job",), {"HOTLAP_CAP_S": "9000"}, image="img")
    lead = launcher.Launcher(s.provider, s.ledger, s.settings, OWNER, s.stops, world)
    end = lead.launch(launcher.Job("run", CAP_S, start), s.offers())
    assert end.end and end.end.message == "its time is over by the provider's clock"
    assert s.age_s() < 100.0 + 1000.0 + 60.0 and s.alive() == []


@contextmanager
def answering(answer: Callable[[BaseHTTPRequestHandler], None]) -> Generator[Runpod]:
    """A client of a server that answers everything in this way."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        do_DELETE = do_POST = do_GET

        def log_message(self, *_args: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = Runpod("key", f"http://127.0.0.1:{server.server_address[1]}/v2", sleep_s=lambda _s: None)
    try:
        yield client
    finally:
        client.close()
        server.shutdown()
        server.server_close()


def test_a_machine_that_never_falls_silent_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    num_lines = 400

    def chatter(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        for number in range(num_lines):
            event = f'id: {number}\r\ndata: {{"source": "container", "line": "step {number}"}}\r\n\r\n'
            try:
                request.wfile.write(event.encode())
            except OSError:  # whoever listened has left
                return
            time.sleep(0.1)

    monkeypatch.setattr(runpod, "_LOG_READ_S", 0.5)
    with answering(chatter) as client:
        page = client.logs("pod")
    assert page.lines[0] == "step 0" and len(page.lines) < num_lines and page.cursor == str(len(page.lines) - 1)


def test_an_answer_that_cannot_be_unpacked_is_no_answer() -> None:
    def garbage(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Encoding", "gzip")
        request.send_header("Content-Length", "4")
        request.end_headers()
        request.wfile.write(b"nope")

    with answering(garbage) as client:
        for ask in (client.machines, lambda: client.terminate("pod"), lambda: client.logs("pod"), client.offers):
            with pytest.raises(ProviderFailed):
                ask()


# --- entries that are odd ---

ENTRY = {"id": "p", "name": "hotlap-a", "status": "RUNNING", "cost": 0.86, "createdAt": "2027-01-15T08:00:00Z"}


def test_a_date_without_a_time_zone_is_the_server_s(monkeypatch: pytest.MonkeyPatch) -> None:
    with_zone = machine_of(ENTRY, 5.0)
    monkeypatch.setenv("TZ", "America/Los_Angeles")
    time.tzset()
    try:
        without = machine_of({**ENTRY, "createdAt": "2027-01-15T08:00:00"}, 5.0)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert without.created_at_s == with_zone.created_at_s


def test_one_odd_entry_hides_no_other() -> None:
    odd = {**ENTRY, "id": "q", "env": {"HOTLAP_LEASE": "a", "HOTLAP_NOT_AFTER": 5, "HOTLAP_OWNER": None}}
    machines, num_nameless = machines_in([{**ENTRY, "name": None}, odd, ENTRY], 5.0)
    assert [machine.machine_id for machine in machines] == ["q", "p"] and num_nameless == 1
    assert machines[0].is_ours and machines[0].owner is None and machines[0].not_after_s is None


def test_what_a_listing_with_a_nameless_machine_shows_is_reaped(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    s = stage()
    ours = s.plant_tagged(int(s.clock.now_s()) + 100)
    s.plant("nobody", {})
    s.sleep_s(150.0)

    def nameless(rows: Sequence[Mapping[str, Any]], now_s: float) -> tuple[list[Machine], int]:
        return machines_in([{**row, "name": None if row["name"] == "nobody" else row["name"]} for row in rows], now_s)

    monkeypatch.setattr(runpod, "machines_in", nameless)
    report = s.reap()
    assert report.failure and "1 machines without id or name" in report.failure
    assert ours.pod_id not in s.alive()


# --- what is booked ---


def test_a_minute_that_is_begun_is_paid_for(stage: Callable[..., Stage]) -> None:
    """RunPod's own pages disagree about seconds and minutes."""
    s = stage(job=Job(seconds=5.0))
    end = s.launch()
    assert end.lease.gpu_s % 60 == 0 and end.lease.gpu_s > s.cloud.meter.seconds(s.clock.now_s(), s.made()[0].pod_id)
    assert s.receipt(end.lease.lease_id)["intent"]["worst_case"]["gpu_s"] == math.ceil(TTL_S / 60) * 60


def machine(machine_id: str, state: Any, usd_micros_per_hour: int | None) -> Machine:
    return Machine(machine_id, "hotlap-a", state, 0.0, usd_micros_per_hour=usd_micros_per_hour)


@pytest.mark.parametrize(
    ("machines", "price"),
    [
        ((machine("a", "running", 3_500_000),), 3_500_000),
        ((machine("a", "exited", 2_000),), 3_600_000),  # that is its disk
        ((machine("a", "running", 3_500_000), machine("b", "starting", None)), 7_100_000),
        ((machine("stranger", "running", 1),), None),
    ],
)
def test_a_machine_is_paid_for_at_what_it_costs_while_it_runs(machines: tuple[Machine, ...], price: int | None) -> None:
    lease = make_lease()
    dead = {each.machine_id: Evidence(5.0, (lease.began_s + 10,), True) for each in machines if each.machine_id < "s"}
    dead = dead or {"a": Evidence(5.0, (lease.began_s + 10,), True)}
    assert last_bill(lease, dead, machines, CloudConfig())[1] == price


# --- disks and books that fail in the middle ---


class Full(durable.Disk):
    def create(self, path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))


def test_a_full_disk_does_not_hide_that_a_machine_is_alive(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    s = stage(Fault("no_effect", DELETE, until_s=500.0), job=Job(seconds=5.0))
    s.cloud.account.pod_key_allows = "nothing"

    def fill() -> None:
        if s.cloud.calls(DELETE):
            monkeypatch.setattr(durable, "disk", Full())

    s.on_sleep = fill
    with pytest.raises(Survivors, match="not proven dead"):
        s.launch()
    monkeypatch.undo()
    s.on_sleep = lambda: None
    s.reap_until(TTL_S + 3 * REAPER_PERIOD_S)
    s.require_sound()


def test_a_book_that_is_away_at_the_end_is_told_beside_the_proof(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    s = stage(job=Job(seconds=5.0))

    def away(*_args: object) -> None:
        raise StorageFailed("The ledger does not answer.")

    monkeypatch.setattr(s.ledger, "settle", away)
    with pytest.raises(StorageFailed):
        s.launch()
    monkeypatch.undo()
    (pod,) = s.made()
    assert s.alive() == [] and s.words[-1] == f"{pod.pod_id} is proven dead; hotlap reap will book what it cost."
    s.reap_until(TTL_S + REAPER_PERIOD_S)
    assert s.leases()[0].state == "settled"
    s.require_sound()


def test_a_book_that_is_away_when_the_machine_is_there_costs_that_machine_its_life(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    s = stage(job=Job(seconds=1e9))

    def away(*_args: object) -> None:
        raise StorageFailed("The ledger does not answer.")

    monkeypatch.setattr(s.ledger, "note_machine", away)
    with pytest.raises(StorageFailed):
        s.launch()
    assert len(s.made()) == 1 and s.leases()[0].state == "settled" and s.age_s() < 60.0
    s.require_sound()


def test_a_book_that_opens_and_cannot_be_read_spares_no_machine(home: Path, stage: Callable[..., Stage]) -> None:
    s = stage()
    s.plant_tagged(int(s.clock.now_s()) + 100)
    s.sleep_s(150.0)
    with sqlite3.connect(home / "ledger.sqlite") as db:
        db.execute("DROP TABLE leases")
    report = s.reap()
    assert s.alive() == [] and len(report.doomed) == 1
    assert report.failure and "judged by their tags alone" in report.failure


# --- one provider's trouble ---


def test_a_provider_that_does_not_open_spares_no_machine_of_another(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = LocalProvider(grace_s=0.2)
    tags = Tags("a" * 16, OWNER, "n", int(time.time()) + 2)
    made = provider.create(provider.offers()[0], tags, Start(("sleep", "600")))
    while provider.machines().machines[0].state != "exited" or time.time() <= tags.not_after_s:
        time.sleep(0.05)
    (home / "cloud.toml").write_text(f'[reaper]\nowner = "{OWNER}"\n')
    monkeypatch.setenv("RUNPOD_API_KEY", "planted-secret")
    monkeypatch.setenv("HOTLAP_RUNPOD_URL", "http://runpod.example")
    seen = CliRunner().invoke(cli, ["machines", "--json"])
    assert made.machine_id in seen.stdout and isinstance(seen.exception, ConfigError)
    swept = CliRunner().invoke(cli, ["reap", "--json"])
    assert isinstance(swept.exception, Survivors) and "the pass over runpod broke off" in str(swept.exception)
    assert provider.machines().machines == () and "planted-secret" not in swept.output + str(swept.exception)


# --- what is said before ---


@pytest.mark.parametrize(
    ("line", "is_over"),
    [
        ("[system] error pulling image: manifest for a@sha256:0 not found: manifest unknown: manifest unknown", True),
        ("[system] pull access denied for a, repository does not exist or may require login", True),
        ("[system] error pulling image: net/http: TLS handshake timeout", False),  # it is tried again
        ("manifest unknown", False),  # the machine's own words
    ],
)
def test_an_image_that_does_not_exist_is_not_waited_for(line: str, is_over: bool) -> None:
    plan = watch.Plan(provisioning_s=150.0, cap_s=100.0, ttl_s=300.0)
    seen = watch.hear(watch.Seen(), [line], "n", 5.0)
    end = watch.end_of(seen, plan, 6.0)
    assert (end is not None and end.kind == "provisioning" and "--image" in end.message) is is_over
    booted = watch.hear(seen, ['HOTLAP: {"event": "boot", "boot_id": "b", "nonce": "n"}'], "n", 7.0)
    assert watch.end_of(booted, plan, 8.0) is None


def test_a_reaper_without_the_key_is_none(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, now_s = CloudConfig(), time.time()
    monkeypatch.setenv("RUNPOD_API_KEY", "planted-secret")
    monkeypatch.setenv("HOTLAP_RUNPOD_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(runpod.Runpod, "key_scope", lambda _self: "it opens pods")
    for looked_at, is_watched in (["local"], False), (["local", "runpod"], True):
        reaper.leave_sign([reaper.Report(name) for name in looked_at], now_s)
        problems: list[str] = []
        found = doctor_money.examine(problems)
        assert found and found["reaper"]["is_active"] is is_watched and (problems == []) is is_watched
        row = dict(doctor_money.rows(found))["reaper"]
        assert ("NOT active" in row and "did not look at runpod" in row) is not is_watched
        said = forewords.unwatched_in_words(runpod.TRAITS, settings)
        assert (said is None) is is_watched and (is_watched or "none of this home looked at runpod" in str(said))
    assert forewords.unwatched_in_words(LOCAL_TRAITS, settings) is None  # it keeps its time without one


def test_nothing_more_is_rented_while_what_should_be_dead_is_alive(stage: Callable[..., Stage]) -> None:
    s = stage(job=Job(seconds=5.0))
    s.plant_tagged(int(s.clock.now_s()) + 100)
    s.sleep_s(100.0 + REAPER_PERIOD_S + 60.0)
    assert s.launch().lease.state == "settled"  # so late a reaper may still be on its way
    s.sleep_s(5.0)
    with pytest.raises(Survivors, match=r"should be dead since 20.* run hotlap reap"):
        s.launch(run="other")
    assert len(s.posts()) == 1 and s.leases("other") == []
    s.reap()
    assert s.launch(run="other").lease.state == "settled"


def test_an_image_nobody_has_pulled_is_told_as_that() -> None:
    said = forewords.image_in_words(runpod.TRAITS, DEFAULT_IMAGE)
    assert said and "ended as soon as the log says so, after 150 s at the latest" in said
    assert "nothing is made" in str(forewords.image_in_words(modal.TRAITS, DEFAULT_IMAGE))
    assert forewords.image_in_words(runpod.TRAITS, "mine@sha256:0") is None
    assert forewords.image_in_words(LOCAL_TRAITS, None) is None


def test_what_another_owner_rented_is_not_proven_dead_by_its_absence_here(stage: Callable[..., Stage]) -> None:
    """A team shares its ledger, and not its accounts: the machine is alive in one that this key does not see."""
    s = stage()
    theirs = make_lease("f" * 16, run="run", owner="you", provider="runpod", began_s=s.clock.now_s() - 1000)
    theirs = s.ledger.hold(replace(theirs, not_after_s=int(s.clock.now_s()) - 500))
    s.ledger.note_machine(theirs.lease_id, "pod-of-theirs")
    assert s.reap().closed == [] and s.ledger.open_leases("run")
    (closed,) = s.reap(all_owners=True).closed  # the account is the same, whoever says so
    assert closed.lease_id == theirs.lease_id and closed.state == "settled"


# --- hotlap stop ---


def stop(s: Stage, provider_of: Callable[[str], Provider]) -> Any:
    patience = Patience(60.0, s.clock.now_s, s.sleep_s)
    return launches.stop("run", s.ledger, s.settings, provider_of, patience, s.words.append)


def test_a_stop_does_not_say_that_nothing_is_rented_while_a_machine_may_appear(stage: Callable[..., Stage]) -> None:
    s = stage(Fault("commit_late", CREATE, value=900.0))
    with pytest.raises(ProviderFailed):
        s.launch()
    (lease,) = s.leases()
    with pytest.raises(Survivors, match=f"hotlap-{lease.lease_id} was asked for, and nobody saw it"):
        stop(s, lambda _name: s.provider)
    s.reap_until(900.0 + 2 * REAPER_PERIOD_S)
    s.require_sound()


def test_a_stop_does_not_take_another_owner_s_machine_for_dead(stage: Callable[..., Stage]) -> None:
    s = stage()
    theirs = make_lease("f" * 16, run="run", owner="you", provider="runpod", began_s=s.clock.now_s() - 300)
    s.ledger.hold(replace(theirs, not_after_s=int(s.clock.now_s()) + 100))
    s.ledger.note_machine(theirs.lease_id, "pod-of-theirs")
    with pytest.raises(Survivors, match="pod-of-theirs of run was rented by you, and is not seen from here"):
        stop(s, lambda _name: s.provider)
    assert s.ledger.open_leases("run")


def test_a_stop_goes_on_behind_a_provider_that_fails(stage: Callable[..., Stage]) -> None:
    s = stage(job=Job(seconds=1e9))
    first = make_lease("f" * 16, run="run", provider="modal", began_s=s.clock.now_s() - 1, not_after_s=2_000_000_000)
    s.ledger.hold(first)
    s.ledger.mark_unresolved(first.lease_id, "no clear answer")
    with pytest.raises(Killed):
        s.launch(life=Life("provider.logs", 3))
    assert len(s.alive()) == 1

    def provider_of(name: str) -> Provider:
        if name == "modal":
            raise ProviderFailed("Modal is away.")
        return s.provider

    with pytest.raises(ProviderFailed, match="Modal is away"):
        stop(s, provider_of)
    assert s.alive() == []
