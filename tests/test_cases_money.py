"""Reports about machines that nobody ended (B59), as inputs."""

from collections.abc import Callable

import pytest
from stage import CREATE, DELETE, REAPER_PERIOD_S, Killed, Life, Stage

from hotlap.cloud.boot import orders_of, refusal
from hotlap.cloud.rental import all_traits
from hotlap.errors import BudgetRefused, Survivors
from hotlap.testing.containers import Job
from hotlap.testing.faults import Fault

pytestmark = pytest.mark.long

TTL_S = 150 + 120 + 10 + 30


def test_b59a_a_limit_that_the_provider_does_not_keep_is_not_counted_on() -> None:
    """What cannot be read back is no protection: the worst case waits for the reaper, not for the provider."""
    runpod = next(traits for traits in all_traits() if traits.name == "runpod")
    assert not runpod.has_hard_ttl


def test_b59a_a_machine_that_lives_past_its_time_is_ended_from_outside(stage: Callable[..., Stage]) -> None:
    s = stage(job=Job(seconds=1e9))
    s.cloud.account.pod_key_allows = "nothing"
    with pytest.raises(Killed):
        s.launch(life=Life("ledger.note_machine"))
    assert s.alive()
    s.reap_until(TTL_S + REAPER_PERIOD_S + 60.0)
    s.require_sound()


def test_b59b_a_terminate_that_does_nothing_is_not_believed(stage: Callable[..., Stage]) -> None:
    s = stage(Fault("no_effect", DELETE, until_s=400.0), job=Job(seconds=5.0))
    s.cloud.account.pod_key_allows = "nothing"
    with pytest.raises(Survivors, match="not proven dead"):
        s.launch()
    assert s.alive() and s.ledger.open_leases()
    s.reap_until(TTL_S + 2 * REAPER_PERIOD_S)
    s.require_sound()
    assert not s.ledger.open_leases()


def test_b59c_five_minutes_without_the_provider_end_in_order(stage: Callable[..., Stage]) -> None:
    s = stage(Fault("status", "*", from_s=60.0, until_s=360.0, value=503), job=Job(seconds=60.0))
    try:
        s.launch()
    except Survivors:
        s.reap_until(TTL_S + 2 * REAPER_PERIOD_S)
    s.require_sound()
    assert len(s.made()) == 1 and s.leases()[0].state == "settled"


def test_b59d_one_whose_id_was_never_stored_is_found_by_its_tags(stage: Callable[..., Stage]) -> None:
    s = stage(job=Job(seconds=1e9))
    s.cloud.account.pod_key_allows = "nothing"
    with pytest.raises(Killed):
        s.launch(life=Life("provider.create"))
    (lease,) = s.ledger.open_leases()
    assert lease.machine_id is None and s.alive()
    s.reap_until(TTL_S + REAPER_PERIOD_S + 60.0)
    s.require_sound()


def test_b59e_a_date_in_the_past_starts_nothing() -> None:
    late = orders_of({"HOTLAP_NOT_AFTER": "1000", "HOTLAP_CAP_S": "60"})
    refused = refusal(late, 1001.0)
    assert refused and refused[0] == "late"


def test_b59f_a_stopped_machine_is_ended_for_its_disk_still_costs(stage: Callable[..., Stage]) -> None:
    s = stage(Fault("goes_exited", CREATE, value=60.0), job=Job(seconds=1e9))
    s.launch()
    assert s.alive() == []
    s.require_sound()


def test_b59_the_worst_case_is_checked_before_the_create(stage: Callable[..., Stage]) -> None:
    s = stage()
    with pytest.raises(BudgetRefused, match="The worst case of this machine"):
        s.launch(cap_s=3600.0)
    assert s.posts() == []
