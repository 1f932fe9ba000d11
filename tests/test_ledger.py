"""The ledger: what is held, what is settled, who is refused, and what a crash or a race leaves."""

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from money import NOON_S, hold_of, make_lease
from postgres import Server

from hotlap.cloud.lease import Lease, Sum, day_of, forecast, next_day_s, overdue_s
from hotlap.cloud.ledger import Ledger
from hotlap.cloud.money import Amount, Rate, loss_bound_s, ttl_s, usd, worst_rate
from hotlap.config_cloud import BudgetConfig, CloudConfig, LimitsConfig, ReaperConfig
from hotlap.errors import BudgetRefused, CorruptFile, RunLocked, StorageFailed, VolumeGone

pytestmark = pytest.mark.long

MANY = LimitsConfig(max_live_machines=1000)
Make = Callable[..., Ledger]


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, home: Path) -> str:
    """An empty book's address, on either engine."""
    if request.param == "postgresql":
        return request.getfixturevalue("postgres").make_url()
    home.mkdir(exist_ok=True)
    return f"sqlite:///{home / 'ledger.sqlite'}"


@pytest.fixture
def make(url: str) -> Iterator[Make]:
    made: list[Ledger] = []

    def open_one(**settings: Any) -> Ledger:
        made.append(Ledger(CloudConfig(**settings), url))
        return made[-1]

    yield open_one
    for each in made:
        each.close()


@pytest.fixture
def ledger(make: Make) -> Ledger:
    return make()


@pytest.fixture
def file_ledger(home: Path) -> Ledger:
    """The one that is there without any settings."""
    return Ledger(CloudConfig())


# --- integers ---


@pytest.mark.parametrize(
    ("seconds", "rate", "amount"),
    [
        (0.0, Rate(3_600_000, 1, 1), Amount(0, 0)),
        (0.001, Rate(3_600_000, 1, 1), Amount(1, 1000)),
        (60.0, Rate(3_600_000, 1, 60), Amount(60, 60_000)),
        (60.001, Rate(3_600_000, 2, 60), Amount(240, 120_000)),
        (1.0, Rate(1, 1, 1), Amount(1, 1)),
        (-5.0, Rate(3_600_000, 1, 1), Amount(0, 0)),
    ],
)
def test_costs_are_integers_rounded_up_to_what_is_billed(seconds: float, rate: Rate, amount: Amount) -> None:
    assert rate.cost(seconds) == amount


@given(st.floats(0, 1e6), st.integers(0, 10**9), st.integers(1, 8), st.sampled_from([1, 60, 3600]))
def test_a_cost_is_never_below_what_is_used(seconds: float, price: int, num_gpus: int, unit_s: int) -> None:
    cost = Rate(price, num_gpus, unit_s).cost(seconds)
    assert cost.gpu_s >= seconds * num_gpus and cost.usd_micros * 3600 >= int(seconds) * price
    assert cost.gpu_s <= (seconds + unit_s) * num_gpus


def test_the_worst_price_is_the_highest_that_is_still_taken() -> None:
    assert worst_rate(Rate(1_000_000, 1, 1)).usd_micros_per_hour == 1_050_000
    assert worst_rate(Rate(1, 1, 1)).usd_micros_per_hour == 2  # never below


def test_dollars_are_readable() -> None:
    assert [usd(value) for value in (0, 12_500, 4_980_000)] == ["$0.00", "$0.0125", "$4.98"]


# --- holding and settling ---


def test_a_hold_counts_at_once_and_a_settlement_gives_the_rest_back(ledger: Ledger) -> None:
    lease = ledger.hold(make_lease())
    assert ledger.day(lease.day).charged == Amount(100, 100_000)
    settled = ledger.settle(lease.lease_id, NOON_S + 30.2, outcome="done")
    assert (settled.state, settled.gpu_s, settled.usd_micros) == ("settled", 31, 31_000)
    assert ledger.day(lease.day).charged == Amount(31, 31_000)
    assert ledger.lease(lease.lease_id) == settled and ledger.open_leases() == []


def test_the_second_settlement_and_a_late_release_change_nothing(ledger: Ledger) -> None:
    ledger.hold(make_lease())
    first = ledger.settle("a" * 16, NOON_S + 30)
    assert ledger.settle("a" * 16, NOON_S + 90) == first == ledger.release("a" * 16, NOON_S, "no")
    assert ledger.day(first.day).charged == Amount(30, 30_000)


def test_a_definite_no_costs_nothing(ledger: Ledger) -> None:
    lease = ledger.hold(make_lease())
    released = ledger.release(lease.lease_id, NOON_S, "402")
    assert (released.state, released.amount, released.note) == ("released", Amount(), "402")
    assert ledger.day(lease.day).charged == Amount()


def test_an_unresolved_create_stays_charged(ledger: Ledger) -> None:
    lease = ledger.hold(make_lease())
    ledger.mark_unresolved(lease.lease_id, "no answer")
    assert ledger.day(lease.day).charged == lease.amount
    (still,) = ledger.open_leases()
    assert still.state == "unresolved" and still.is_open


def test_what_overran_is_a_debt_of_the_day_it_is_seen_on(ledger: Ledger) -> None:
    late = datetime.fromtimestamp(NOON_S, UTC).replace(hour=23, minute=59, second=0).timestamp()
    lease = ledger.hold(make_lease(began_s=late, not_after_s=int(late) + 100))
    ledger.settle(lease.lease_id, late + 500)
    assert ledger.day(day_of(late)).charged == Amount(100, 100_000)
    tomorrow = ledger.day(day_of(late + 500))
    assert tomorrow.charged == tomorrow.debt == Amount(400, 400_000)


def test_an_overdue_machine_counts_what_it_may_have_cost_until_the_reaper_must_have_come(ledger: Ledger) -> None:
    lease = ledger.hold(make_lease())
    grace_s = overdue_s(CloudConfig())
    assert lease.charge_at(NOON_S + 50, grace_s) == lease.amount
    assert lease.charge_at(NOON_S + 200, grace_s).gpu_s == 200
    assert lease.charge_at(NOON_S + 1e6, grace_s).gpu_s == 100 + grace_s
    assert ledger.state_of(NOON_S + 200)["charged"]["gpu_s"] == 200


def test_a_price_that_turned_out_higher_is_booked(ledger: Ledger) -> None:
    ledger.hold(make_lease())
    assert ledger.settle("a" * 16, NOON_S + 10, usd_micros_per_hour=3_700_000).usd_micros == -(-10 * 3_700_000 // 3600)


def test_a_price_of_zero_is_one_not_known(ledger: Ledger) -> None:
    ledger.hold(make_lease())
    assert ledger.settle("a" * 16, NOON_S + 10, usd_micros_per_hour=0).usd_micros == 10_000


# --- refusals ---


def test_a_spent_day_is_refused_with_what_is_left_and_when_it_resets(ledger: Ledger, home: Path) -> None:
    ledger.hold(make_lease(**hold_of(3000)))
    with pytest.raises(BudgetRefused) as raised:
        ledger.hold(make_lease("b" * 16, **hold_of(700)))
    words = str(raised.value)
    assert raised.value.exit_code == 3 and raised.value.reason == "budget"
    for part in ("11.7 GPU-minutes", "10.0 GPU-minutes and $2.00 left of 60.0 GPU-minutes and $5.00", "T00:00:00Z"):
        assert part in words
    assert "edit budget.gpu_minutes_per_day" in words and str(home / "cloud.toml") in words
    ledger.hold(make_lease("c" * 16, **hold_of(600)))


def test_dollars_run_out_too(make: Make) -> None:
    ledger = make(limits=MANY, budget=BudgetConfig(gpu_minutes_per_day=1000.0, usd_per_day=0.15))
    ledger.hold(make_lease())
    with pytest.raises(BudgetRefused, match=r"\$0.0500 left"):
        ledger.hold(make_lease("b" * 16))


def test_the_next_day_has_its_own_budget(ledger: Ledger) -> None:
    ledger.hold(make_lease(**hold_of(3600)))
    with pytest.raises(BudgetRefused):
        ledger.hold(make_lease("b" * 16))
    tomorrow = next_day_s(NOON_S)
    ledger.hold(make_lease("b" * 16, began_s=tomorrow, not_after_s=int(tomorrow) + 100))


def test_a_run_has_a_cap_over_all_its_days(make: Make) -> None:
    ledger = make(limits=MANY, budget=BudgetConfig(gpu_minutes_per_run=3.0))
    ledger.hold(make_lease(run="r"))
    ledger.settle("a" * 16, NOON_S + 100)
    tomorrow = next_day_s(NOON_S)
    with pytest.raises(BudgetRefused, match=r"r has 1\.3 GPU-minutes .*It does not reset.*gpu_minutes_per_run"):
        ledger.hold(make_lease("b" * 16, run="r", began_s=tomorrow, not_after_s=int(tomorrow) + 100))
    ledger.hold(make_lease("b" * 16, run="other", began_s=tomorrow, not_after_s=int(tomorrow) + 100))


def test_only_so_many_machines_may_be_alive(make: Make) -> None:
    ledger = make(limits=LimitsConfig(max_live_machines=2))
    for lease_id in ("a" * 16, "b" * 16):
        ledger.hold(make_lease(lease_id))
    with pytest.raises(BudgetRefused, match="2 machines may be alive"):
        ledger.hold(make_lease("c" * 16))
    ledger.settle("a" * 16, NOON_S + 1)
    ledger.hold(make_lease("c" * 16))


def test_a_run_has_one_machine_at_a_time(ledger: Ledger) -> None:
    ledger.hold(make_lease(run="r"))
    with pytest.raises(RunLocked, match="hotlap stop r"):
        ledger.hold(make_lease("b" * 16, run="r"))


def test_what_a_refused_hold_leaves_is_nothing(ledger: Ledger) -> None:
    with pytest.raises(BudgetRefused):
        ledger.hold(make_lease(**hold_of(10_000)))
    assert ledger.lease("a" * 16) is None and ledger.day(day_of(NOON_S)).charged == Amount()


# --- reports ---


def test_history_runs_and_forecast(ledger: Ledger) -> None:
    for number in range(3):
        began_s = NOON_S + number * 86_400
        ledger.hold(make_lease(str(number), run="r", began_s=began_s, not_after_s=int(began_s) + 100))
        ledger.settle(str(number), began_s + 50)
    days = ledger.days(day_of(NOON_S + 86_400))
    assert [(day.name, day.charged.gpu_s) for day in days] == [(day_of(NOON_S + n * 86_400), 50) for n in (1, 2)]
    (run,) = ledger.runs_since(day_of(NOON_S))
    assert run == {"run": "r", "num_machines": 3, "gpu_s": 150, "usd_micros": 150_000}
    today = days[-1].name
    assert forecast(days, CloudConfig(), today)["usd_micros_per_30_days"] == 30 * 50_000
    later = day_of(NOON_S + 10 * 86_400)  # eight days without spending count as well
    assert forecast(days, CloudConfig(), later)["usd_micros_per_30_days"] == 30 * 10_000
    assert forecast([], CloudConfig(), today)["usd_micros_per_day"] == 0
    assert len(ledger.leases_of("r")) == 3 and len(ledger.leases_since(days[0].name)) == 2


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 400), st.booleans()), max_size=12))
def test_sums_are_those_of_the_leases(steps: list[tuple[int, float, bool]]) -> None:
    """Running totals and leases never disagree, however holds, settlements and releases follow one another."""
    assert_sums_follow_leases(Ledger(CloudConfig(limits=MANY), "sqlite://"), steps)


@pytest.mark.parametrize("seed", range(3))
def test_sums_are_those_of_the_leases_on_a_server(seed: int, postgres: Server) -> None:
    chance = random.Random(seed)
    steps = [(chance.randrange(6), 400 * chance.random(), chance.random() < 0.5) for _ in range(12)]
    assert_sums_follow_leases(Ledger(CloudConfig(limits=MANY), postgres.make_url()), steps)


def assert_sums_follow_leases(ledger: Ledger, steps: Sequence[tuple[int, float, bool]]) -> None:
    for number, (which, seconds, is_release) in enumerate(steps):
        try:
            ledger.hold(make_lease(str(number)))
        except BudgetRefused:
            continue
        target = str(min(which, number))
        if ledger.lease(target) is not None:
            ledger.release(target, NOON_S, "") if is_release else ledger.settle(target, NOON_S + seconds)
    leases = ledger.leases_since("0")
    assert ledger.day(day_of(NOON_S)).charged == sum((lease.amount for lease in leases), Amount())
    assert ledger.day(day_of(NOON_S)).charged.usd_micros >= 0
    ledger.close()


# --- crashes and races ---

HOLDERS = """
import os, signal, sys
from money import make_lease
from hotlap.cloud.ledger import Ledger
from hotlap.config import load_cloud
from hotlap.errors import BudgetRefused, VolumeGone

settings = load_cloud()
Ledger(settings).close()
ready, go = os.pipe()
hear, tell = os.pipe()
pids = []
for number in range(int(sys.argv[1])):
    if (pid := os.fork()) == 0:
        os.close(go)
        ledger = Ledger(settings)
        os.write(tell, b"x")
        os.read(ready, 1)  # until the parent closes its end: all at once
        try:
            lease_id = f"{int(sys.argv[2]) + number:016x}"
            ledger.hold(make_lease(lease_id, gpu_s=300, usd_micros=300_000))
        except BudgetRefused:
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    pids.append(pid)
for _ in pids:
    os.read(hear, 1)
os.close(go)
print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])
"""
"""Holders as processes of their own, forked from one that has imported it all. Who wins is killed the moment its hold
returns; who loses exits 3."""


def cloud_toml(home: Path, url: str, room: int) -> None:
    home.mkdir(exist_ok=True)
    (home / "cloud.toml").write_text(
        f"[limits]\nmax_live_machines = 100\n[budget]\ngpu_minutes_per_day = {room * 5 + 4.0}\n"
        f'usd_per_day = 100.0\n[ledger]\nurl = "{url}"\n'
    )


def start_holders(home: Path, num: int, first: int = 0) -> "subprocess.Popen[str]":
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "HOTLAP_HOME": str(home)}
    argv = [sys.executable, "-c", HOLDERS, str(num), str(first)]
    return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def codes_of(process: "subprocess.Popen[str]") -> list[int]:
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    return json.loads(out)


@pytest.mark.parametrize(("num", "room"), [(1, 1), (2, 1), (50, 7)])
def test_of_those_who_race_for_the_last_minutes_so_many_win_as_fit(num: int, room: int, home: Path, url: str) -> None:
    """And a hold that returned is on the disk, whatever becomes of the process."""
    cloud_toml(home, url, room)
    codes = codes_of(start_holders(home, num))
    assert (codes.count(-signal.SIGKILL), codes.count(3)) == (room, num - room)
    ledger = Ledger(CloudConfig(), url)
    assert ledger.day(day_of(NOON_S)).charged.gpu_s == 300 * room and len(ledger.open_leases()) == room
    ledger.close()


def test_sqlite_syncs_every_commit(file_ledger: Ledger, home: Path) -> None:
    """WAL with synchronous=FULL: the log is synced before a commit returns."""
    with file_ledger._reading() as db:
        assert db.exec_driver_sql("PRAGMA synchronous").scalar() == 2
        assert db.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"


def test_a_torn_tail_counts_what_was_committed(file_ledger: Ledger, home: Path) -> None:
    file_ledger.hold(make_lease())
    wal = home / "ledger.sqlite-wal"
    with wal.open("ab") as file:
        file.write(b"\x37" * 4096)
    copy = home / "copy"
    copy.mkdir()
    for name in ("ledger.sqlite", "ledger.sqlite-wal"):
        (copy / name).write_bytes((home / name).read_bytes())
    torn = Ledger(CloudConfig(), f"sqlite:///{copy / 'ledger.sqlite'}")
    assert torn.day(day_of(NOON_S)).charged == Amount(100, 100_000)


def test_a_damaged_book_is_refused_in_words(file_ledger: Ledger, home: Path) -> None:
    file_ledger.close()
    (home / "ledger.sqlite").write_bytes(b"this is no database at all" * 400)
    for name in ("ledger.sqlite-wal", "ledger.sqlite-shm"):
        (home / name).unlink(missing_ok=True)
    with pytest.raises(CorruptFile, match="nothing is rented"):
        Ledger(CloudConfig())


def test_a_book_that_is_locked_for_good_is_told(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(CloudConfig())
    with ledger._reading() as db:
        db.exec_driver_sql("SELECT 1")
        other = sqlite3.connect(home / "ledger.sqlite", timeout=0)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("BEGIN IMMEDIATE")
        other.close()


@pytest.mark.parametrize("url", ["postgresql://user:hunter2secret@127.0.0.1:1/none", "nonsense"])
def test_a_ledger_that_cannot_be_opened_is_told_without_its_password(url: str) -> None:
    with pytest.raises(StorageFailed) as raised:
        Ledger(CloudConfig(), url)
    assert "hunter2secret" not in str(raised.value)


# --- the formula of docs/money.md ---


def test_the_worst_case_loss_is_ttl_reaper_period_and_proof() -> None:
    from hotlap.cloud.rental import all_traits

    traits = {each.name: each for each in all_traits()}
    local, runpod = traits["local"], traits["runpod"]
    ttl = ttl_s(310.0, runpod)
    assert (ttl, loss_bound_s(ttl, 300.0, runpod)) == (490, 490 + 300 + 60)
    assert loss_bound_s(ttl_s(310.0, local), 300.0, local) == 370 + 15
    assert overdue_s(CloudConfig(reaper=ReaperConfig(period_minutes=2))) == 180.0
    page = (Path(__file__).parents[1] / "docs" / "money.md").read_text()
    assert "490 s + 300 s + 60 s = 850 s" in page
    assert runpod.billing_unit_s == 60 and usd(Rate(3_000_000, 1, 60).cost(850).usd_micros) == "$0.7500"
    assert "850 s, at $3 an hour\n$0.75:" in page


def test_sum_and_lease_are_plain_data() -> None:
    lease: Lease = make_lease()
    assert lease.amount == Amount(100, 100_000) and Sum("d", Amount(1, 2), Amount()).charged.gpu_s == 1


@pytest.mark.parametrize("url", ["no address", "postgresql://u:planted@h:abc/d"])
def test_an_address_that_is_none_is_told_without_its_password(url: str) -> None:
    with pytest.raises(VolumeGone, match=r"ledger.url in cloud.toml is no address") as caught:
        Ledger(CloudConfig(), url)
    assert "planted" not in str(caught.value)
