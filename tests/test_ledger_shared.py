"""One book for several machines: PostgreSQL, two homes, restarts, and a wire that is cut at every message."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from money import NOON_S, make_lease
from postgres import IN_URL, PASSWORD, Server, Wire
from test_ledger import cloud_toml, codes_of, start_holders
from test_rented import OFFER, Ground

from hotlap.cloud import launcher, rental
from hotlap.cloud.lease import Lease, day_of
from hotlap.cloud.ledger import Ledger
from hotlap.cloud.money import Amount
from hotlap.config_cloud import CloudConfig, LedgerConfig, LimitsConfig
from hotlap.errors import BudgetRefused, RunLocked, StorageFailed

pytestmark = pytest.mark.long

KILLED, REFUSED = -9, 3


def test_two_machines_share_one_budget(tmp_path: Path, postgres: Server) -> None:
    """Two homes, two processes, one address: together they win what fits, and a run has one machine among them."""
    url, room = postgres.make_url(), 5
    for name in ("one", "two"):
        cloud_toml(tmp_path / name, url, room)
    racers = [start_holders(tmp_path / name, 12, first) for name, first in (("one", 0), ("two", 12))]
    codes = [code for racer in racers for code in codes_of(racer)]
    assert (codes.count(KILLED), codes.count(REFUSED)) == (room, 24 - room)
    here, there = (Ledger(CloudConfig(limits=LimitsConfig(max_live_machines=100)), url) for _ in range(2))
    held = here.open_leases()
    assert held == there.open_leases() and here.day(day_of(NOON_S)).charged.gpu_s == 300 * room
    there.settle(held[0].lease_id, NOON_S + 10)
    assert here.lease(held[0].lease_id) == there.lease(held[0].lease_id)
    there.hold(make_lease("f" * 16, run="same"))
    with pytest.raises(RunLocked):
        here.hold(make_lease("e" * 16, run="same"))
    here.close()
    there.close()


def test_a_server_that_restarts_in_the_middle_of_a_race_loses_no_hold(tmp_path: Path, postgres: Server) -> None:
    """It goes down as in a power cut. Who was told of a hold finds it in the book, and the book is not overdrawn."""
    url, room = postgres.make_url(), 6
    cloud_toml(tmp_path / "home", url, room)
    racer = start_holders(tmp_path / "home", 30)
    watcher = Ledger(CloudConfig(), url)
    while not watcher.open_leases() and racer.poll() is None:
        pass
    watcher.close()
    postgres.stop("immediate")
    postgres.start()
    codes = codes_of(racer)
    ledger = Ledger(CloudConfig(), url)
    held = {lease.lease_id for lease in ledger.open_leases()}
    assert {f"{number:016x}" for number, code in enumerate(codes) if code == KILLED} <= held
    assert len(held) == codes.count(KILLED) == room and codes.count(REFUSED) == 30 - room
    assert ledger.day(day_of(NOON_S)).charged.gpu_s == 300 * room
    ledger.close()


# --- a wire that is cut ---


@pytest.fixture
def wire(postgres: Server) -> Iterator[Wire]:
    wire = Wire(postgres.port)
    yield wire
    wire.close()


ACTS: dict[str, tuple[Callable[[Ledger], Any], Callable[[Lease], bool], Amount]] = {
    "hold": (lambda book: book.hold(make_lease("b" * 16)), lambda _lease: True, Amount(200, 200_000)),
    "note": (
        lambda book: book.note_machine("a" * 16, "m"),
        lambda lease: lease.machine_id == "m",
        Amount(100, 100_000),
    ),
    "doubt": (
        lambda book: book.mark_unresolved("a" * 16, "no answer"),
        lambda lease: lease.state == "unresolved",
        Amount(100, 100_000),
    ),
    "settle": (
        lambda book: book.settle("a" * 16, NOON_S + 150),
        lambda lease: lease.state == "settled" and lease.gpu_s == 150,
        Amount(150, 150_000),
    ),
    "release": (lambda book: book.release("a" * 16, NOON_S, "no"), lambda lease: lease.state == "released", Amount()),
}
"""What is done, what is seen of the first lease when it is done, and the day's charge then."""


def through(wire: Wire, postgres: Server, name: str, sleep_s: Callable[[float], None]) -> Ledger:
    return Ledger(CloudConfig(), postgres.url_of(name, wire.port), sleep_s)


@pytest.mark.parametrize("is_after", [False, True], ids=["lost", "unheard"])
@pytest.mark.parametrize("act", ACTS)
def test_whatever_message_is_lost_the_work_is_done_once(act: str, is_after: bool, wire: Wire, postgres: Server) -> None:
    do, is_done, charged = ACTS[act]
    num_cut = 0
    while True:
        name = postgres.make_book()
        direct = Ledger(CloudConfig(), postgres.url_of(name))
        direct.hold(make_lease())
        wire.arm(None)
        book = through(wire, postgres, name, lambda _s: None)
        wire.arm(num_cut + 1, is_after)
        do(book)
        first = direct.lease("a" * 16)
        assert first and is_done(first), (act, num_cut)
        assert direct.day(day_of(NOON_S)).charged == charged
        assert sum((each.amount for each in direct.leases_since("0")), Amount()) == charged
        book.close()
        direct.close()
        if not wire.was_cut:
            break
        num_cut += 1
    assert num_cut >= 4, "a transaction is at least so many messages"


def test_a_server_that_does_not_come_back_is_told_without_the_password(wire: Wire, postgres: Server) -> None:
    """Wherever the wire breaks for good, the book has all of a hold or nothing of it."""
    waits: list[float] = []
    told: list[int] = []
    for cut_at in range(1, 100):
        name = postgres.make_book()
        book = through(wire, postgres, name, waits.append)
        wire.arm(cut_at, is_after=True, stays_dead=True)
        error = None
        try:
            book.hold(make_lease())
        except StorageFailed as raised:
            error = raised
        book.close()
        was_cut = wire.was_cut
        wire.arm(None)
        if not was_cut:
            break
        assert "Nothing is rented without it" in str(error)
        assert not any(word in text for word in (PASSWORD, IN_URL) for text in (str(error), repr(error), book.place))
        direct = Ledger(CloudConfig(), postgres.url_of(name))
        held = direct.open_leases()
        assert direct.day(day_of(NOON_S)).charged == sum((each.amount for each in held), Amount())
        told.append(len(held))
        direct.close()
    assert set(told) == {0, 1}, "the answer to the commit itself was never lost"
    assert waits[:5] == [0.0, 1.0, 2.0, 4.0, 8.0]


def test_a_wrong_password_is_said_at_once(postgres: Server) -> None:
    url = postgres.make_url().replace(IN_URL, "a-wrong-one")
    waits: list[float] = []
    with pytest.raises(StorageFailed, match="password authentication failed") as raised:
        Ledger(CloudConfig(), url, waits.append)
    assert waits == [] and "a-wrong-one" not in str(raised.value)


def test_a_refusal_is_no_broken_wire(wire: Wire, postgres: Server) -> None:
    name = postgres.make_book()
    book = through(wire, postgres, name, lambda _s: pytest.fail("nothing is to be waited for"))
    with pytest.raises(BudgetRefused):
        book.hold(make_lease(gpu_s=10**6))
    assert book.open_leases() == []
    book.close()


def test_a_holder_that_went_silent_does_not_lock_the_book_for_ever(postgres: Server) -> None:
    """Every session has the server end what it left open; and a hold is on the server's disk before it returns."""
    book = Ledger(CloudConfig(), postgres.make_url())
    with book._reading() as db:
        for setting, value in (
            ("idle_in_transaction_session_timeout", "30s"),
            ("lock_timeout", "20s"),
            ("synchronous_commit", "on"),
        ):
            assert db.exec_driver_sql(f"SHOW {setting}").scalar() == value
    book.close()


def test_the_driver_is_named_where_it_is_missing(tmp_path: Path) -> None:
    """In an interpreter without it."""
    code = (
        "import sys; sys.modules['psycopg'] = None\n"
        "from hotlap.cloud.ledger import Ledger\nfrom hotlap.config import CloudConfig\n"
        "from hotlap.errors import StorageFailed\n"
        "try: Ledger(CloudConfig(), 'postgresql://u:hunter2@h/d')\n"
        "except StorageFailed as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "pip install 'hotlap[postgres]'" in done.stdout and "hunter2" not in done.stdout, done.stderr


def test_the_password_reaches_no_machine_no_receipt_and_no_word(tmp_path: Path, home: Path, postgres: Server) -> None:
    """A job on an emulated machine prints all it can see of itself, and the ledger's words are what they are."""
    url = postgres.make_url()
    ground = Ground(tmp_path)
    settings = CloudConfig(ledger=LedgerConfig(url=url))
    book = Ledger(settings)
    job = launcher.Job(
        "run", 20.0, ground.start(("sh", "-c", f"env; tr '\\0' ' ' </proc/$PPID/environ; echo {url}"), 20.0)
    )
    words: list[str] = []
    with ground.cloud:
        lead = rental.launcher_of(
            ground.client, book, settings, launcher.Stops(), lambda event: words.append(str(event)), words.append
        )
        end = lead.launch(replace(job, start=replace(job.start, argv=ground.start(("env",), 20.0).argv)), [OFFER])
        talk = rental.launcher_of(ground.client, book, settings, launcher.Stops(), words.append, words.append)
        talk.launch(job, [OFFER])
    ground.client.close()
    assert end.end and end.end.kind == "result" and book.leases_of("run")[0].state == "settled"
    assert any("HOTLAP_LEASE" in line for line in words)
    first = ground.cloud.park.pods[end.lease.machine_id or ""]
    receipts = "".join(path.read_text() for path in (home / "receipts").glob("*.json"))
    texts = [str(first.body), *(line.text for line in first.log), *words, receipts, book.place]
    assert receipts and not any(secret in text for secret in (PASSWORD, IN_URL) for text in texts)
    book.close()
