"""Which machines must die: a function of data. And the pass that ends them, on real processes."""

import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from money import make_lease

from hotlap import clock
from hotlap.cli import cli
from hotlap.cloud import cron, reaper
from hotlap.cloud.ledger import Ledger
from hotlap.cloud.local import LocalProvider
from hotlap.cloud.machine_files import MachineFolder
from hotlap.cloud.proof import Evidence, Patience, is_proven, look
from hotlap.cloud.provider import MAX_TTL_S, Listing, ListingBroken, Machine, Start, Tags, event_in, read_tags
from hotlap.cloud.reaper import Reaper, Report, doomed, lease_of, unseen, warnings_of
from hotlap.config import CloudConfig
from hotlap.errors import ProviderFailed, Survivors, UsageError

pytestmark = pytest.mark.long

NOW_S = 1_000_000.0


def make_machine(lease_id: str | None = "lease-a", **changes: object) -> Machine:
    name = f"hotlap-{lease_id}" if lease_id else "web-server"
    machine = Machine("pod-7", name, "running", NOW_S - 100, lease_id, "me", "n")
    return replace(machine, **changes)


def reasons(machine: Machine, leases: dict[str, float] | None = None, over: tuple[str, ...] = ()) -> list[str]:
    return [reason for _, reason in doomed([machine], leases or {}, NOW_S, 1800.0, over)]


def test_expired_lease_dooms_its_machine() -> None:
    machine = make_machine()
    assert doomed([machine], leases={"lease-a": NOW_S - 1}, now_s=NOW_S) == [(machine, "expired 1 s ago")]
    assert reasons(machine, {"lease-a": NOW_S + 1}) == []


def test_the_tag_alone_is_enough() -> None:
    assert reasons(make_machine(not_after_s=int(NOW_S) - 7)) == ["expired 7 s ago"]
    assert reasons(make_machine(not_after_s=int(NOW_S))) == []


def test_the_earlier_of_tag_and_lease_counts() -> None:
    assert reasons(make_machine(not_after_s=int(NOW_S) + 50), {"lease-a": NOW_S - 3}) == ["expired 3 s ago"]


@pytest.mark.parametrize("state", ["exited", "error", "unknown", "provisioning", "starting"])
def test_a_leftover_in_any_state_is_doomed(state: str) -> None:
    assert reasons(make_machine(state=state, not_after_s=int(NOW_S) - 1))
    assert not reasons(make_machine(state="terminated", not_after_s=int(NOW_S) - 1))


def test_a_machine_of_a_lease_that_is_over_is_doomed_before_its_time() -> None:
    assert reasons(make_machine(not_after_s=int(NOW_S) + 300), over=("lease-a",)) == ["its lease is over"]


@pytest.mark.parametrize(("price", "is_doomed"), [(None, False), (3_780_000, False), (3_780_001, True)])
def test_a_machine_that_costs_more_than_was_agreed_to_is_doomed(price: int | None, is_doomed: bool) -> None:
    machine = make_machine(not_after_s=int(NOW_S) + 300, usd_micros_per_hour=price)
    found = doomed([machine], {"lease-a": NOW_S + 300}, NOW_S, 1800.0, (), {"lease-a": 3_780_000})
    assert bool(found) is is_doomed
    assert not is_doomed or found[0][1] == "it costs $3.78 an hour, and at most $3.78 was agreed to"


@pytest.mark.parametrize("text", ["", "soon", "-5", str(10**9 * 3), "12.5", "9" * 30])
def test_a_date_that_cannot_be_true_is_replaced_by_the_longest_life(text: str) -> None:
    tags = read_tags({"HOTLAP_LEASE": "lease-a", "HOTLAP_NOT_AFTER": text}, NOW_S - 100)
    assert tags.not_after_s is None and tags.problems
    assert not reasons(make_machine(problems=tags.problems))
    (reason,) = reasons(make_machine(created_at_s=NOW_S - 1801, problems=tags.problems))
    assert tags.problems[0] in reason and "1 s too old" in reason


def test_a_readable_date_is_believed_up_to_a_day() -> None:
    env = {"HOTLAP_LEASE": "x", "HOTLAP_NOT_AFTER": str(int(NOW_S) + MAX_TTL_S)}
    assert read_tags(env, NOW_S).not_after_s == int(NOW_S) + MAX_TTL_S
    assert read_tags({}, NOW_S) == read_tags(None, NOW_S)


def test_a_masked_environment_is_known_by_its_name_if_the_book_has_it() -> None:
    machine = replace(make_machine(), lease_id=None)
    assert machine.is_doubtful and not reasons(machine)
    assert reasons(machine, {"lease-a": NOW_S - 1}) == ["expired 1 s ago"]


FOREIGN = [
    make_machine(None),
    make_machine(None, name="hotlap-something", created_at_s=0.0),
    make_machine("lease-a", name="renamed", not_after_s=1),
    make_machine("lease-a", name="hotlap-lease-b", not_after_s=1),
]


@pytest.mark.parametrize("machine", FOREIGN, ids=lambda machine: machine.name)
def test_a_foreign_machine_is_never_doomed(machine: Machine) -> None:
    assert not reasons(machine, {"other": 0.0})


@given(
    st.sampled_from(FOREIGN),
    st.dictionaries(st.sampled_from(["other", "x"]), st.floats(0, 2e6)),
    st.floats(0, 2e9),
)
def test_nothing_makes_a_foreign_machine_ours(machine: Machine, leases: dict[str, float], now_s: float) -> None:
    assert doomed([machine], leases, now_s, 0.0, ("y",)) == []
    assert lease_of(machine, leases) is None


def test_doubts_and_other_owners_are_told() -> None:
    said = warnings_of([FOREIGN[1], FOREIGN[2], make_machine(owner="you"), make_machine(None)], "me", False)
    assert len(said) == 3 and "--all-owners" in said[2]
    assert warnings_of([make_machine(owner="you")], "me", True) == []


def test_unseen_are_overdue_leases_without_a_machine() -> None:
    lease = make_lease()
    assert unseen([lease], (), lease.not_after_s) == []
    assert unseen([lease], (), lease.not_after_s + 1) == [lease]
    assert unseen([lease], ("hotlap-" + "a" * 16,), lease.not_after_s + 1) == []


# --- proof ---


def runpod_like(**changes: object) -> object:
    return replace(LocalProvider().traits, proof_listings=2, proof_gap_s=5.0, visibility_s=120.0, **changes)


def test_two_listings_far_enough_apart_prove_a_death_and_a_return_undoes_it() -> None:
    traits, born_s = runpod_like(), 0.0
    evidence = Evidence(accepted_at_s=10.0)
    for now_s, is_dead in ((11.0, False), (13.0, False), (16.1, True)):
        evidence = look(evidence, Listing(now_s, ()), "pod-7", traits)  # type: ignore[arg-type]
        assert is_proven(evidence, traits, born_s) is is_dead  # type: ignore[arg-type]
    back = look(evidence, Listing(17.0, (make_machine(),)), "pod-7", traits)  # type: ignore[arg-type]
    assert back.absent_at_s == () and not is_proven(back, traits, born_s)  # type: ignore[arg-type]


def test_absence_of_what_was_never_seen_proves_nothing_until_it_must_be_visible() -> None:
    traits = runpod_like()
    early = Evidence(absent_at_s=(10.0, 20.0, 119.0))
    assert not is_proven(early, traits, 0.0)  # type: ignore[arg-type]
    assert is_proven(replace(early, absent_at_s=(10.0, 121.0, 127.0)), traits, 0.0)  # type: ignore[arg-type]
    assert is_proven(replace(early, was_listed=True), traits, 0.0)  # type: ignore[arg-type]


# --- passes over real processes ---


def rent(provider: LocalProvider, lease_id: str, ttl_s: float, owner: str = "me", job_s: int = 600) -> Machine:
    tags = Tags(lease_id, owner, "n", int(time.time() + ttl_s))
    return provider.create(provider.offers()[0], tags, Start(("sleep", str(job_s))))


def patience(words: list[str] | None = None) -> Patience:
    say = (words if words is not None else []).append
    return Patience(20.0, clock.monotonic_s, clock.sleep_s, say=say)


def test_a_pass_ends_what_is_over_and_nothing_else(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    provider, ledger = LocalProvider(home=home, grace_s=0.2), Ledger(CloudConfig())
    now_s = time.time()
    lease = make_lease("a" * 16, began_s=now_s - 200, not_after_s=int(now_s) - 1, gpu_s=200, usd_micros=200_000)
    ledger.hold(lease)
    ours = rent(provider, lease.lease_id, 60.0)  # its tag says later than the book
    ledger.note_machine(lease.lease_id, ours.machine_id)
    young, other = rent(provider, "b" * 16, 60.0), rent(provider, "c" * 16, 60.0, owner="you")

    dry = Reaper(provider, ledger, CloudConfig(), "me").reap(patience(), is_dry_run=True)
    assert [machine.machine_id for machine, _ in dry.doomed] == [ours.machine_id] and dry.closed == []
    assert len(provider.machines().machines) == 3

    words: list[str] = []
    report = Reaper(provider, ledger, CloudConfig(), "me").reap(patience(words))
    assert report.is_clean and f"ending {ours.machine_id}" in words[0]
    assert {each.machine_id for each in provider.machines().machines} == {young.machine_id, other.machine_id}
    closed = ledger.lease(lease.lease_id)
    assert closed and closed.state == "settled" and closed.gpu_s >= 200 and report.closed == [closed]
    assert "note" in report.as_json()["closed"][0]

    again = Reaper(provider, ledger, CloudConfig(), "me").reap(patience())
    assert again.doomed == [] and again.closed == [] and again.is_clean
    for machine in (young, other):
        provider.terminate(machine.machine_id)


def test_a_lease_without_a_machine_is_closed_when_none_can_come(home: Path) -> None:
    provider, ledger = LocalProvider(home=home), Ledger(CloudConfig())
    ledger.hold(make_lease(began_s=time.time() - 200, not_after_s=int(time.time()) - 100))
    report = Reaper(provider, ledger, CloudConfig(), "me").reap(patience())
    (closed,) = report.closed
    # Nobody knows whether it was sent, so its worst case is booked.
    assert (closed.state, closed.outcome, closed.gpu_s) == ("settled", "lost", 100)


class Broken(LocalProvider):
    """Lists what it has, and then fails."""

    def __init__(self, home: Path, error: ProviderFailed) -> None:
        super().__init__(home=home, grace_s=0.2)
        self.error = error
        self.num_lists = 0

    def machines(self) -> Listing:
        self.num_lists += 1
        if self.num_lists == 1:
            raise self.error
        return super().machines()


def test_a_provider_that_does_not_answer_is_a_failure_with_what_is_at_stake(home: Path) -> None:
    ledger = Ledger(CloudConfig())
    ledger.hold(make_lease())
    report = Reaper(Broken(home, ProviderFailed("down.")), ledger, CloudConfig(), "me").reap(patience())
    assert report.failure and "down." in report.failure and f"hotlap-{'a' * 16} (at most 1.7 GPU" in report.failure
    with pytest.raises(Survivors, match="down"):
        reaper.require_clean([report])


def test_what_a_broken_listing_did_show_is_acted_on(home: Path) -> None:
    ledger = Ledger(CloudConfig())
    machine = rent(LocalProvider(home=home), "a" * 16, 60.0)
    seen = replace(machine, not_after_s=int(time.time()) - 5)
    provider = Broken(home, ListingBroken("cursor again.", Listing(time.time(), (seen,))))
    report = Reaper(provider, ledger, CloudConfig(), "me").reap(patience())
    assert report.failure == "cursor again." and report.survivors == []
    assert LocalProvider(home=home).machines().machines == ()


def test_the_sign_of_life() -> None:
    assert reaper.last_sign() is None
    reaper.leave_sign([Report("local"), Report("runpod", failure="down")], 5.0)
    assert reaper.last_sign() == {"at_s": 5.0, "providers": ["local"], "is_clean": False}
    settings = CloudConfig()
    assert reaper.is_watched("local", settings, 900.0) and not reaper.is_watched("local", settings, 906.0)
    # A key that lacks here, or that the provider refused: nobody saw what is alive there.
    assert not reaper.is_watched("runpod", settings, 6.0) and not reaper.is_watched("modal", settings, 6.0)


# --- cron ---


def test_the_crontab_gets_our_line_once_and_keeps_the_others() -> None:
    table = cron.crontab_with("0 3 * * * backup\n", 5, Path("/home/a b"))
    again = cron.crontab_with(table, 2, Path("/home/a b"))
    assert table.startswith("0 3 * * * backup\n*/5 * * * * ") and again.count("hotlap reap") == 2  # command and mark
    assert again.splitlines()[-1].startswith("*/2 ") and "'/home/a b'" in again
    assert cron.crontab_with("", 1, Path("/h")).startswith("* * * * * ")
    both = cron.crontab_with(table, 5, Path("/second")).splitlines()
    assert both[:2] == table.splitlines() and "/second" in both[2] and len(both) == 3


def test_without_cron_a_systemd_timer_is_written_and_told(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[list[str]] = []

    class Done:
        returncode, stdout, stderr = 0, "", ""

    monkeypatch.setattr(cron.shutil, "which", lambda name: "/bin/x" if name == "systemctl" else None)
    monkeypatch.setattr(cron.subprocess, "run", lambda argv, **_: called.append(argv) or Done())
    said = cron.install(CloudConfig(), tmp_path / "units")
    assert "OnUnitActiveSec=5min" in (tmp_path / "units" / "hotlap-reap.timer").read_text()
    assert f"HOTLAP_HOME={home}" in (tmp_path / "units" / "hotlap-reap.service").read_text()
    assert called[-1] == ["systemctl", "--user", "enable", "--now", "hotlap-reap.timer"]
    assert any("OnUnitActiveSec" in line for line in said) and "reaper.env" in said[-1]


def test_a_crontab_that_cannot_be_read_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real program in the place of crontab, which keeps its table in a file."""
    table, program = tmp_path / "table", tmp_path / "crontab"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    listing = f'#!/bin/sh\nif [ "$1" = -l ]; then {{}}; else cat > {table}; fi\n'
    program.write_text(listing.format("echo 'cannot open the spool' >&2; exit 1"))
    program.chmod(0o755)
    with pytest.raises(UsageError, match="left as it is: cannot open the spool"):
        cron.install(CloudConfig())
    assert not table.exists()
    program.write_text(listing.format("echo 'no crontab for me' >&2; exit 1"))
    cron.install(CloudConfig.model_validate({"reaper": {"period_minutes": 90.5}}))
    assert table.read_text().startswith("*/59 * * * * ")
    program.write_text(listing.format(f"cat {table}"))
    with pytest.raises(UsageError, match="has no --dry-run"):
        CliRunner().invoke(cli, ["reap", "--install-cron", "--dry-run"], catch_exceptions=False, standalone_mode=False)
    assert table.read_text().startswith("*/59 ")


def test_cron_s_line_runs_a_pass_in_cron_s_environment(home: Path) -> None:
    """Cron gives a command nothing but these, and unescapes percent signs."""
    home.mkdir()
    (home / "reaper.env").write_text("RUNPOD_API_KEY=\n")
    line = cron.crontab_with("", 5, home).splitlines()[-1]
    command = line.split(" ", 5)[5].replace(r"\%", "%")
    env = {"HOME": "/nonexistent", "LOGNAME": "nobody", "PATH": "/usr/bin:/bin", "SHELL": "/bin/sh"}
    began_s = time.time()
    done = subprocess.run(["/bin/sh", "-c", command], env=env, cwd="/", capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), (home / "reap.log").read_text()
    sign = reaper.last_sign()
    assert sign is not None and sign["is_clean"] and sign["at_s"] >= began_s and "local" in sign["providers"]


# --- the lines of a machine ---


def test_lines_are_events_or_talk() -> None:
    assert event_in('HOTLAP: {"event": "boot", "boot_id": "b"}') == {"event": "boot", "boot_id": "b"}
    for talk in ("hello", "HOTLAP: {", "HOTLAP: [1]", 'HOTLAP: {"event": 1}', '{"event": "boot"}'):
        assert event_in(talk) is None


def test_a_machine_that_ended_long_ago_costs_until_its_end(home: Path) -> None:
    provider, ledger = LocalProvider(home=home, grace_s=0.2), Ledger(CloudConfig())
    now_s = time.time()
    lease = make_lease("a" * 16, began_s=now_s - 100, not_after_s=int(now_s) - 30)
    ledger.hold(lease)
    machine = rent(provider, lease.lease_id, 600.0, job_s=0)
    ledger.note_machine(lease.lease_id, machine.machine_id)
    folder = MachineFolder(home / "machines" / machine.machine_id)
    while (dead := folder.dead()) is None:
        time.sleep(0.05)
    # As if nobody had come for a while.
    folder.write_dead({**dead, "at_s": now_s - 40.0})
    report = Reaper(provider, ledger, CloudConfig(), "me").reap(patience())
    (closed,) = report.closed
    assert (closed.state, closed.gpu_s, closed.usd_micros) == ("settled", 61, 61_000)
