"""The thirty things that go wrong with rented machines, in fake time, each with what must come of it."""

import math
import threading
from pathlib import Path
from typing import Any

import pytest
from stage import CAP_S, CREATE, DELETE, GPU, LOGS, OWNER, PROOF_S, REAPER_PERIOD_S, Killed, Life

from hotlap import durable
from hotlap.cloud import launcher, launches, rental
from hotlap.cloud.ledger import Ledger
from hotlap.cloud.proof import Patience
from hotlap.cloud.provider import Start
from hotlap.config_cloud import BudgetConfig, CloudConfig
from hotlap.errors import (
    AmbiguousCreate,
    BudgetRefused,
    CorruptFile,
    DiskFull,
    HotlapError,
    MachineLost,
    NoCapacity,
    NoFunds,
    NotCreated,
    RunLocked,
    Survivors,
)
from hotlap.testing.containers import Birth, Job, crashing, scripted
from hotlap.testing.faults import Fault

pytestmark = pytest.mark.long

TTL_S = 310
LATE_S = 3600.0


def kinds(end: launcher.LeaseEnd) -> tuple[str, Any]:
    assert end.end
    return end.end.kind, end.end.result and end.end.result["exit_code"]


def test_01_happy_path(stage: Any) -> None:
    s = stage(job=Job(seconds=60.0))
    end = s.launch()
    assert kinds(end) == ("result", 0) and len(s.posts()) == 1 and len(s.cloud.calls(DELETE)) >= 1
    assert s.cloud.usd_micros() <= end.lease.usd_micros < s.hold_of(end.lease.lease_id)
    assert end.lease.state == "settled"
    times = s.receipt(end.lease.lease_id)["times"]
    assert list(times) == ["held", "sent", "created", "booted", "ended", "proven"]
    s.require_sound()


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param((Fault("drop_after", CREATE),), id="02-socket-dropped"),
        pytest.param((Fault("status_after", CREATE, value=500), Fault("visible_late", CREATE, value=45.0)), id="03"),
        pytest.param((Fault("html_after", CREATE, value=504),), id="03-html"),
        pytest.param((Fault("truncate", CREATE),), id="06-truncated"),
    ],
)
def test_an_ambiguous_create_is_adopted_by_its_name(faults: tuple[Fault, ...], stage: Any) -> None:
    s = stage(*faults)
    assert kinds(s.launch()) == ("result", 0)
    assert len(s.posts()) == len(s.made()) == 1
    s.require_sound()


def test_04_nothing_was_made(stage: Any) -> None:
    s = stage(Fault("drop_before", CREATE))
    with pytest.raises(AmbiguousCreate):
        s.launch()
    (lease,) = s.leases()
    assert lease.state == "unresolved" and s.age_s() >= 120.0 and lease.usd_micros > 0
    s.reap_until(TTL_S + 600.0)
    assert s.leases()[0].state == "unresolved"
    s.reap_until(TTL_S + LATE_S + 2 * REAPER_PERIOD_S)
    (lease,) = s.leases()
    assert lease.state == "released" and lease.usd_micros == 0 and "no machine appeared" in lease.note
    s.require_sound()


@pytest.mark.parametrize("late_s", [130.0, 210.0, 900.0, 3000.0])
def test_05_it_was_made_late(late_s: float, stage: Any) -> None:
    s = stage(Fault("commit_late", CREATE, value=late_s))
    s.cloud.account.pod_key_allows = "nothing"
    with pytest.raises(AmbiguousCreate):
        s.launch()
    assert s.posts() == [pod.name for pod in s.made()]
    s.reap_until(late_s + 2 * REAPER_PERIOD_S)
    s.require_sound()
    assert s.leases()[0].state == "settled"


def test_07_the_third_kind_can_be_had(stage: Any) -> None:
    s = stage(Fault("capacity", CREATE, calls=(1, 2)))
    offers = s.offers("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", GPU)
    assert kinds(s.launch(offers)) == ("result", 0)
    assert [lease.state for lease in s.leases()] == ["released", "released", "settled"]
    assert [lease.usd_micros == 0 for lease in s.leases()] == [True, True, False]
    assert len(set(s.posts())) == 3 and len(s.made()) == 1
    s.require_sound()


def test_08_nothing_can_be_had(stage: Any) -> None:
    s = stage(Fault("capacity", CREATE))
    with pytest.raises(NoCapacity) as caught:
        s.launch(s.offers("NVIDIA H100 80GB HBM3", GPU))
    assert (caught.value.exit_code, caught.value.reason) == (5, "no_capacity")
    assert s.charged() == 0 and s.made() == []
    s.require_sound()


def test_09_no_funds(stage: Any) -> None:
    s = stage()
    s.cloud.account.balance_usd = 0.5
    with pytest.raises(NoFunds, match="one hour") as caught:
        s.launch()
    assert caught.value.reason == "no_funds" and s.charged() == 0
    s.require_sound()


@pytest.mark.parametrize("profile", ["2026-08", "2026-10"])
def test_10_a_server_that_knows_no_cmd(profile: str, stage: Any) -> None:
    s = stage(profile=profile)
    assert kinds(s.launch()) == ("result", 0)
    assert [call.status for call in s.cloud.calls(CREATE)] == ([422, 201] if profile == "2026-08" else [201])
    s.require_sound()


@pytest.mark.parametrize(("status", "num_tries"), [(422, 1), (400, 1), (413, 1), (404, 1)])
def test_a_definite_no_gives_the_hold_back(status: int, num_tries: int, stage: Any) -> None:
    s = stage(Fault("status", CREATE, value=status))
    with pytest.raises(NotCreated):
        s.launch()
    assert len(s.cloud.calls(CREATE)) == num_tries and s.charged() == 0
    s.require_sound()


def test_11_asked_too_often(stage: Any) -> None:
    s = stage(Fault("status", CREATE, calls=(1,), value=429, retry_after_s=20.0))
    assert kinds(s.launch()) == ("result", 0)
    first, second = s.cloud.calls(CREATE)
    assert second.at_s - first.at_s >= 20.0
    between = [call for call in s.cloud.calls("GET /v2/pods") if first.at_s <= call.at_s <= second.at_s]
    assert between and len(s.made()) == 1
    s.require_sound()


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("stuck_provisioning", id="12"),
        pytest.param("stuck_starting", id="13"),
        pytest.param("null_runtime", id="14"),
    ],
)
def test_a_machine_that_does_not_get_ready(kind: Any, stage: Any) -> None:
    s = stage(Fault(kind, CREATE))
    end = s.launch()
    assert kinds(end) == ("provisioning", None) and 150.0 <= s.age_s() < 200.0
    if kind == "stuck_starting":
        assert any("error pulling image" in line for line in s.receipt(end.lease.lease_id)["talk"])
    s.require_sound()


def test_15_a_job_that_hangs_is_ended_inside(stage: Any) -> None:
    s = stage(job=Job(seconds=1e9))
    assert kinds(s.launch()) == ("result", 124)
    s.require_sound()


@pytest.mark.parametrize("frozen_after_s", [0.5, 30.0, 115.0])
def test_15_a_frozen_machine_is_ended_from_outside(frozen_after_s: float, stage: Any) -> None:
    s = stage(job=Job(seconds=1e9, freezes_after_s=frozen_after_s))
    end = s.launch()
    assert end.end and end.end.kind in ("silent", "overran")
    assert s.age_s() < 85.0 + CAP_S + 60.0
    s.require_sound()


def test_16_a_finished_job_is_not_run_again(stage: Any) -> None:
    s = stage(Fault("restarts", CREATE, value=3.0), job=Job(seconds=0.5))
    s.cloud.account.pod_key_allows = "nothing"
    end = s.launch()
    (pod,) = s.made()
    texts = [line.text for line in pod.log]
    assert texts.count("the job runs") == 1 and end.end and end.end.kind == "result"
    s.require_sound()


def test_16_the_second_boot_refuses_even_unwatched(stage: Any) -> None:
    """The launcher is dead, the container restarts: the job has run once, and the machine goes at its time."""
    s = stage(Fault("restarts", CREATE, value=20.0), job=Job(seconds=60.0))
    s.cloud.account.pod_key_allows = "nothing"
    with pytest.raises(Killed):
        s.launch(life=Life("provider.create"))
    s.reap_until(TTL_S + 2 * REAPER_PERIOD_S)
    (pod,) = s.made()
    texts = [line.text for line in pod.log]
    assert texts.count("the job runs") == 1 and sum('"refused"' in text for text in texts) == 1
    s.require_sound()


def test_17_a_crash_is_told_with_its_exit_code(stage: Any) -> None:
    s = stage(job=Job(seconds=5.0, exit_code=6, reason="oom"))
    end = s.launch()
    assert kinds(end) == ("result", 6) and end.lease.outcome == "oom"
    s.require_sound()


def test_17_a_restart_loop_ends_at_the_second_boot(stage: Any) -> None:
    def first_dies(birth: Birth) -> Job:
        return Job(seconds=1e9, exits_after_s=12.0)

    s = stage(job=None, runtime=scripted(first_dies))
    end = s.launch()
    (pod,) = s.made()
    assert end.end and end.end.kind == "restarted" and pod.num_boots <= 3
    s.require_sound()


def test_17_an_image_without_a_working_command(stage: Any) -> None:
    s = stage(runtime=crashing)
    end = s.launch()
    assert kinds(end) == ("provisioning", None)
    assert any("no such file" in line for line in s.receipt(end.lease.lease_id)["talk"])
    s.require_sound()


CRASH_POINTS = [
    Life("ledger.hold"),
    Life("provider.create"),
    Life("ledger.note_machine"),
    Life("provider.logs", 1),
    Life("provider.logs", 12),
    Life("provider.terminate"),
    Life("provider.machines", 1),
    Life("ledger.settle"),
    *(Life(at_s=at_s) for at_s in (1.0, 20.0, 60.0, 100.0, 140.0)),
]


@pytest.mark.parametrize("life", CRASH_POINTS, ids=lambda life: f"{life.after_call or life.at_s}-{life.nth}")
@pytest.mark.parametrize("allows", ["terminate", "nothing"])
def test_18_19_a_dead_launcher_s_machine_is_reaped(life: Life, allows: str, stage: Any) -> None:
    s = stage(job=Job(seconds=1e9))
    s.cloud.account.pod_key_allows = allows
    with pytest.raises(Killed):
        s.launch(life=Life(life.after_call, life.nth, life.at_s))
    s.reap_until(TTL_S + REAPER_PERIOD_S + 60.0)
    s.require_sound()
    bound_s = TTL_S + REAPER_PERIOD_S + 60.0
    assert all(s.cloud.meter.seconds(s.clock.now_s(), pod.pod_id) <= bound_s for pod in s.made())
    s.reap_until(TTL_S + LATE_S + 2 * REAPER_PERIOD_S)
    assert all(not lease.is_open for lease in s.leases())
    s.require_sound()
    for lease in s.leases():
        if life.after_call not in ("ledger.hold", "ledger.settle"):  # before its receipt's first line; after its last
            assert s.receipt(lease.lease_id)["settlement"]["state"] == lease.state


def test_20_ctrl_c_twice_during_terminate(stage: Any) -> None:
    s = stage(Fault("no_effect", DELETE, until_s=400.0), job=Job(seconds=1e9))

    def interrupt() -> None:
        if s.age_s() > 60.0:
            s.stops.num_asked = 2 if s.cloud.calls(DELETE) else 1

    s.on_sleep = interrupt
    with pytest.raises(Survivors) as caught:
        s.launch()
    (pod,) = s.made()
    assert s.cloud.calls(DELETE) and pod.pod_id in str(caught.value) and s.leases()[0].is_open
    s.reap_until(TTL_S + 2 * REAPER_PERIOD_S)
    s.require_sound()


def test_a_stop_ends_in_order(stage: Any) -> None:
    s = stage(job=Job(seconds=1e9))
    s.on_sleep = lambda: setattr(s.stops, "num_asked", int(s.age_s() > 60.0))
    end = s.launch()
    assert end.end is None and end.lease.outcome == "stopped" and s.age_s() < 90.0
    s.require_sound()


def test_21_delete_is_accepted_without_effect(stage: Any) -> None:
    s = stage(Fault("no_effect", DELETE, until_s=400.0))
    s.cloud.account.pod_key_allows = "nothing"
    with pytest.raises(Survivors) as caught:
        s.launch()
    assert (caught.value.exit_code, caught.value.reason) == (5, "survivors")
    assert len(s.cloud.calls(DELETE)) >= 5 and s.leases()[0].is_open
    s.reap_until(400.0 + 2 * REAPER_PERIOD_S)
    s.require_sound()
    assert s.leases()[0].state == "settled"


def test_22_not_found_is_no_proof_while_it_may_appear(stage: Any) -> None:
    s = stage(Fault("visible_late", CREATE, value=100.0), job=Job(seconds=1e9))
    s.on_sleep = lambda: setattr(s.stops, "num_asked", int(s.age_s() > 10.0))
    s.launch()
    assert next(call.status for call in s.cloud.calls(DELETE)) == 404
    assert [call.status for call in s.cloud.calls(DELETE)][-1] == 204
    s.require_sound()


@pytest.mark.parametrize("is_broken", [False, True], ids=["three-pages", "repeated-cursor"])
def test_23_our_machine_is_on_the_third_page(is_broken: bool, stage: Any) -> None:
    s = stage(per_minute=1000)
    first = s.plant_tagged(int(s.began_s) + 300)
    for number in range(230):
        s.plant(f"theirs-{number}", {})
    last = s.plant_tagged(int(s.began_s) + 300)
    s.sleep_s(400.0)
    if is_broken:
        s.cloud.add(Fault("repeats_cursor", "GET /v2/pods", until_s=1000.0))
    report = s.reap()
    doomed = {machine.machine_id for machine, _ in report.doomed}
    if is_broken:
        assert first.pod_id in doomed and not report.is_clean
        assert first.pod_id not in [pod.pod_id for pod in s.cloud.alive()]
        s.sleep_s(700.0)
        assert s.reap().is_clean
    else:
        assert doomed == {first.pod_id, last.pod_id} and report.is_clean
    assert s.alive() == [] and len(s.cloud.alive()) == 230


@pytest.mark.parametrize("kind", ["goes_exited", "goes_error"])
def test_24_leftovers_that_only_cost_their_disk(kind: Any, stage: Any) -> None:
    s = stage()
    s.plant_tagged(int(s.began_s) + 300, Fault(kind, CREATE, value=60.0))
    s.sleep_s(100.0)
    assert s.reap().doomed == []
    s.sleep_s(300.0)
    assert [reason.startswith("expired") for _, reason in s.reap().doomed] == [True]
    assert s.alive() == []


def test_25_foreign_machines_are_left_alone(stage: Any) -> None:
    s = stage()
    old = {"HOTLAP_LEASE": "abc", "HOTLAP_OWNER": OWNER, "HOTLAP_NONCE": "n", "HOTLAP_NOT_AFTER": str(int(s.began_s))}
    plain, prefix = s.plant("theirs", {}), s.plant("hotlap-something", {})
    tag_only = s.plant("renamed", old)
    others = s.plant_tagged(int(s.began_s) + 60, owner="somebody")
    s.sleep_s(86_000.0)
    report = s.reap()
    assert report.doomed == [] and len(s.cloud.alive()) == 4 and report.is_clean
    for pod, is_named in ((plain, False), (prefix, True), (tag_only, True), (others, True)):
        assert any(pod.pod_id in warning for warning in report.warnings) is is_named
    assert [machine.machine_id for machine, _ in s.reap(all_owners=True).doomed] == [others.pod_id]
    assert {pod.pod_id for pod in s.cloud.alive()} == {plain.pod_id, prefix.pod_id, tag_only.pod_id}


@pytest.mark.parametrize("tag", ["soon", "", "-5", "1000000000", "99999999999", "1e9", "0x10"])
def test_26_a_date_that_cannot_be_believed(tag: str, stage: Any) -> None:
    s = stage()
    s.plant_tagged(tag)
    s.sleep_s(300.0)
    assert s.reap().doomed == []
    s.sleep_s(600.0)
    assert len(s.reap().doomed) == 1 and s.alive() == []


@pytest.mark.parametrize("skew_s", [600.0, -600.0])
def test_27_a_wrong_local_clock(skew_s: float, stage: Any) -> None:
    s = stage(skew_s=skew_s, job=Job(seconds=100.0))
    assert kinds(s.launch()) == ("result", 0)
    s.require_sound()
    s.plant_tagged(int(s.clock.now_s()) + 300)
    s.sleep_s(290.0)
    assert s.reap().doomed == []
    s.sleep_s(20.0)
    assert len(s.reap().doomed) == 1 and s.alive() == []


@pytest.mark.parametrize("skew_s", [600.0, -600.0])
def test_27_a_wrong_clock_on_the_machine(skew_s: float, stage: Any) -> None:
    s = stage(job=Job(seconds=1e9, skew_s=skew_s))
    end = s.launch()
    assert end.end and end.end.kind == ("refused" if skew_s > 0 else "result")
    s.require_sound()


@pytest.mark.parametrize("allows", ["terminate", "nothing"])
def test_28_the_provider_is_down_for_twenty_minutes(allows: str, stage: Any) -> None:
    s = stage(Fault("status", from_s=100.0, until_s=1300.0, value=503), job=Job(seconds=1e9))
    s.cloud.account.pod_key_allows = allows
    try:
        s.launch()
    except HotlapError as error:
        assert error.exit_code == 5
    reports = s.reap_until(1300.0 + 2 * REAPER_PERIOD_S)
    assert reports[0].failure and "may be alive" in reports[0].failure and reports[-1].is_clean
    # While nobody could look, the charge grew no further than the bound; what went beyond it is today's debt.
    s.breaches.clear()
    s.require_sound()
    (lease,) = s.leases()
    assert not lease.is_open
    if allows == "nothing":
        assert s.ledger.day(lease.day).debt.usd_micros == lease.usd_micros - s.hold_of(lease.lease_id) > 0


def test_29_two_launchers_race_for_the_last_minutes(home: Path, stage: Any) -> None:
    s = stage(settings=CloudConfig(budget=BudgetConfig(gpu_minutes_per_day=7.0)), job=Job(seconds=5.0))
    offers = s.offers()
    barrier = threading.Barrier(2)
    results: list[object] = []

    def race(run: str) -> None:
        ledger = Ledger(s.settings, f"sqlite:///{home / 'ledger.sqlite'}")
        lead = launcher.Launcher(s.provider, ledger, s.settings, OWNER, launcher.Stops(), s.world())
        job = launcher.Job(run, CAP_S, launcher.Start(("job",), {"HOTLAP_CAP_S": "130"}, image="img"))
        barrier.wait()
        try:
            results.append(lead.launch(job, offers))
        except BudgetRefused as error:
            results.append(error)
        ledger.close()

    threads = [threading.Thread(target=race, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(isinstance(result, BudgetRefused) for result in results) == [False, True]
    assert len(s.posts()) == 1 and s.alive() == []


def test_29_a_damaged_ledger_rents_nothing(home: Path, stage: Any) -> None:
    s = stage()
    offers = s.offers()
    s.ledger.close()
    (home / "ledger.sqlite").write_bytes(b"SQLite format 3\0" + b"x" * 5000)
    for name in ("ledger.sqlite-wal", "ledger.sqlite-shm"):
        (home / name).unlink(missing_ok=True)
    with pytest.raises((CorruptFile, HotlapError)):
        s.launch(offers)
    assert s.posts() == []


def test_29_a_full_disk_rents_nothing(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    s = stage()

    class Full(durable.Disk):
        def create(self, path: Path, data: bytes) -> None:
            raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(durable, "disk", Full())
    with pytest.raises(DiskFull):
        s.launch()
    assert s.posts() == [] and s.charged() == 0


def test_30_the_price_is_twice_the_offer_s(stage: Any) -> None:
    s = stage(Fault("price", CREATE, value=2.0))
    end = s.launch()
    assert end.end and end.end.kind == "price" and s.age_s() < 30.0
    s.require_sound()


@pytest.mark.parametrize("kind", ["zero_cost", "null_cost"])
def test_30_a_price_of_zero_is_no_price(kind: Any, stage: Any) -> None:
    s = stage(Fault(kind))
    end = s.launch()
    assert kinds(end) == ("result", 0) and end.lease.usd_micros >= s.cloud.usd_micros() > 0
    s.require_sound()


# --- beside the thirty ---


def test_a_machine_that_vanishes_is_lost(stage: Any) -> None:
    s = stage(Fault("vanishes", CREATE, value=100.0), job=Job(seconds=1e9))
    end = s.launch()
    assert end.end and end.end.kind in ("vanished", "silent")
    s.require_sound()


@pytest.mark.parametrize("kind", ["goes_error", "goes_exited"])
def test_a_machine_that_ends_by_itself_is_deleted(kind: Any, stage: Any) -> None:
    s = stage(Fault(kind, CREATE, value=100.0), job=Job(seconds=1e9))
    end = s.launch()
    assert end.end and end.end.kind == "ended"
    s.require_sound()


def test_a_locked_machine_is_unlocked_and_deleted(stage: Any) -> None:
    s = stage(Fault("locked", CREATE))
    assert kinds(s.launch()) == ("result", 0)
    s.require_sound()


def test_two_machines_of_one_name_are_both_ended(stage: Any) -> None:
    """A provider that made two of one create; found by name, since the answer was lost."""
    s = stage(Fault("twice", CREATE), Fault("drop_after", CREATE))
    with pytest.raises(MachineLost):
        s.launch()
    assert s.alive() == [] and len(s.posts()) == 1
    assert s.overspent() == [] and s.leases()[0].state == "settled"


def test_a_log_that_is_cut_and_repeats_itself_is_read_once(stage: Any) -> None:
    s = stage(Fault("cut", LOGS, probability=0.5), Fault("duplicates", LOGS, probability=0.5))
    assert kinds(s.launch()) == ("result", 0)
    s.require_sound()


def test_nobody_talks_more_than_the_announced_quota_allows(stage: Any) -> None:
    """P7: a run of five minutes and a reaper beside it, on an account with 60 requests a minute."""
    s = stage(job=Job(seconds=1e9))
    s.launch(cap_s=300.0)
    s.reap_until(900.0)
    assert not [call for call in s.cloud.requests if call.status == 429]
    times = [call.at_s for call in s.cloud.requests]
    assert max(sum(at_s <= other < at_s + 60.0 for other in times) for at_s in times) <= 50


def test_a_second_launcher_of_the_same_run_is_refused(stage: Any) -> None:
    s = stage(job=Job(seconds=1e9))
    with pytest.raises(Killed):
        s.launch(life=Life("provider.create"))
    with pytest.raises(RunLocked):
        s.launch()
    assert len(s.posts()) == 1


def test_reaping_twice_at_once_is_fine(home: Path, stage: Any) -> None:
    """P5: two reapers on the same leftovers."""
    s = stage(job=Job(seconds=1e9))
    s.cloud.account.pod_key_allows = "nothing"
    with pytest.raises(Killed):
        s.launch(life=Life("provider.create"))
    s.sleep_s(TTL_S + 10.0)
    reports: list[Any] = []
    threads = [threading.Thread(target=lambda: reports.append(s.reap())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(report.is_clean for report in reports) and s.reap().is_clean
    s.require_sound()
    assert s.leases()[0].state == "settled"


def test_after_a_stop_nothing_more_is_rented(stage: Any) -> None:
    s = stage(job=Job(seconds=20, exit_code=75, reason="slice_over"))
    job = launcher.Job("run", CAP_S, Start(("job",), {"HOTLAP_CAP_S": str(CAP_S + 10)}, image="img"))
    lead = launcher.Launcher(s.provider, s.ledger, s.settings, OWNER, s.stops, s.world())

    def ask(_end: launcher.LeaseEnd) -> None:
        s.stops.num_asked = 1

    end = rental.chain(lead, job, s.offers(), 5, ask)
    assert (end.exit_code, len(end.leases), len(s.posts())) == (75, 1, 1)


def test_a_stop_while_there_is_no_capacity_tries_no_other_kind(stage: Any) -> None:
    s = stage(Fault("capacity", CREATE))
    s.stops.num_asked = 1
    with pytest.raises(NoCapacity):
        s.launch(s.offers(GPU, "NVIDIA H100 80GB HBM3"))
    assert len(s.posts()) == 1


def test_a_stop_the_day_after_books_no_more_than_the_machine_can_have_cost(stage: Any) -> None:
    s = stage(job=Job(seconds=60, exit_code=75))
    with pytest.raises(Killed):
        s.launch(life=Life("ledger.note_machine"))
    s.sleep_s(86_400.0)
    assert s.alive() == []
    patience = Patience(60.0, s.clock.now_s, s.sleep_s)
    (closed,) = launches.stop("run", s.ledger, s.settings, lambda _name: s.provider, patience, s.words.append)
    at_most_s = math.ceil((TTL_S + REAPER_PERIOD_S + PROOF_S) / 60) * 60  # each minute that is begun
    assert (closed.state, closed.gpu_s) == ("settled", at_most_s)
    assert closed.usd_micros == math.ceil(at_most_s * closed.usd_micros_per_hour * 1.05 / 3600)
    s.require_sound()


def test_the_machine_gets_no_key_and_no_database(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """P6: what is planted where secrets live is found nowhere."""
    planted = "planted-secret-value"
    for name in ("RUNPOD_API_KEY", "HF_TOKEN", "HOTLAP_LEDGER_PASSWORD"):
        monkeypatch.setenv(name, planted)
    s = stage()
    end = s.launch()
    (pod,) = s.made()
    assert planted not in repr(pod.body) and "full-key" not in repr(pod.body)
    assert not any("postgresql" in value or "sqlite" in value for value in pod.body["env"].values())
    assert planted not in repr(s.receipt(end.lease.lease_id)) and planted not in repr(s.words)
