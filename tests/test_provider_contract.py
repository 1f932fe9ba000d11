"""What every provider promises, asked of each in the same words."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from hotlap import clock
from hotlap.cloud.local import LocalProvider
from hotlap.cloud.modal import ModalProvider
from hotlap.cloud.proof import Patience, end_all
from hotlap.cloud.provider import LogPage, Machine, Offer, Provider, Start, Tags
from hotlap.cloud.ssh import SshProvider
from hotlap.config_cloud import LocalConfig, ModalConfig
from hotlap.errors import AmbiguousCreate, HotlapError, NotCreated

pytestmark = pytest.mark.long

SLEEP = "import time; print('one', flush=True); time.sleep(60)"


@dataclass
class Ground:
    """A provider to try things on, its clock, and a command that prints `one` and stays."""

    provider: Provider
    start: Start
    now_s: Callable[[], float]
    sleep_s: Callable[[float], None]
    wall_s: Callable[[], float] = clock.wall_s
    """The provider's clock."""

    def tags(self, lease_id: str = "0123456789abcdef", ttl_s: float = 60.0) -> Tags:
        return Tags(lease_id, "me", "feedbeef", int(self.wall_s() + ttl_s))

    def create(self, tags: Tags | None = None) -> Machine:
        return self.provider.create(self.provider.offers()[0], tags or self.tags(), self.start)

    def wait_until(self, is_so: Callable[[], bool], patience_s: float = 130.0) -> None:
        until_s = self.now_s() + patience_s
        while not is_so():
            assert self.now_s() < until_s, "it did not come to be"
            self.sleep_s(0.02)

    def listed(self, machine_id: str) -> Machine | None:
        return self.provider.machines().find(machine_id)

    def end(self, machine: Machine) -> bool:
        patience = Patience(60.0, self.now_s, self.sleep_s)
        return end_all(self.provider, [(machine.machine_id, machine.created_at_s)], patience)[machine.machine_id][1]


def local(request: pytest.FixtureRequest) -> Iterator[Ground]:
    home = request.getfixturevalue("home")
    provider = LocalProvider(LocalConfig(usd_per_hour=0.36), home, grace_s=0.2)
    ground = Ground(provider, Start((sys.executable, "-c", SLEEP)), clock.monotonic_s, clock.sleep_s)
    yield ground
    for machine in provider.machines().machines:
        provider.terminate(machine.machine_id)


def ssh(request: pytest.FixtureRequest) -> Iterator[Ground]:
    provider = SshProvider(request.getfixturevalue("box").settings)
    yield Ground(provider, Start((sys.executable, "-c", SLEEP)), clock.monotonic_s, clock.sleep_s)


def fake_runpod(_request: pytest.FixtureRequest) -> Iterator[Ground]:
    from hotlap.cloud.runpod import Runpod
    from hotlap.testing.containers import Job, scripted
    from hotlap.testing.fake_clock import FakeClock
    from hotlap.testing.fake_runpod import FakeRunpod

    fake = FakeClock()
    with FakeRunpod(fake, runtime=scripted(Job(seconds=1e6))) as cloud:
        provider = Runpod("full-key", cloud.url, sleep_s=fake.sleep_s)
        start = Start(("job",), image="image")
        yield Ground(provider, start, fake.now_s, lambda _seconds: fake.sleep_s(1.0), lambda: provider.machines().now_s)
        provider.close()


def fake_modal(request: pytest.FixtureRequest) -> Iterator[Ground]:
    request.getfixturevalue("modal_cloud")
    provider = ModalProvider(ModalConfig())
    yield Ground(provider, Start((sys.executable, "-c", SLEEP), image="image"), clock.monotonic_s, clock.sleep_s)
    provider.close()


GROUNDS = [local, ssh, fake_runpod, fake_modal]


@pytest.fixture(params=GROUNDS, ids=lambda make: make.__name__)
def ground(request: pytest.FixtureRequest) -> Iterator[Ground]:
    yield from request.param(request)


def test_offers_are_priced_and_the_cheapest_comes_first(ground: Ground) -> None:
    offers = ground.provider.offers()
    assert offers and [o.usd_micros_per_hour for o in offers] == sorted(o.usd_micros_per_hour for o in offers)
    assert all(isinstance(offer.usd_micros_per_hour, int) and offer.billing_unit_s >= 1 for offer in offers)
    assert {offer.gpu for offer in ground.provider.offers(offers[0].gpu)} == {offers[0].gpu}
    assert ground.provider.offers("a kind that nobody makes") == []


def test_a_machine_is_listed_with_its_tags_and_date(ground: Ground) -> None:
    tags = ground.tags()
    made = ground.create(tags)
    ground.wait_until(lambda: ground.listed(made.machine_id) is not None)
    seen = ground.listed(made.machine_id)
    assert seen and seen.is_ours and not seen.is_doubtful and seen.name == tags.name
    assert (seen.lease_id, seen.owner, seen.nonce) == (tags.lease_id, tags.owner, tags.nonce)
    assert seen.not_after_s == tags.not_after_s
    assert seen.created_at_s == pytest.approx(ground.provider.machines().now_s, abs=60.0)


def test_create_is_not_idempotent(ground: Ground) -> None:
    """So nobody may send it twice."""
    first = ground.create()
    try:
        second = ground.create()
    except AmbiguousCreate:  # where names are unique, a second of the name is told from the first by its nonce
        assert ground.end(first)
        return
    assert first.machine_id != second.machine_id and first.name == second.name
    assert ground.end(first) and ground.end(second)


def test_terminate_is_idempotent_and_death_is_proven(ground: Ground) -> None:
    machine = ground.create()
    ground.wait_until(lambda: ground.listed(machine.machine_id) is not None)
    assert ground.provider.terminate(machine.machine_id)
    ground.provider.terminate(machine.machine_id)
    assert ground.end(machine)
    assert ground.listed(machine.machine_id) is None
    is_remembered = ground.provider.traits.name == "modal"
    assert ground.provider.terminate(machine.machine_id) is is_remembered


def test_one_that_never_was_is_unknown(ground: Ground) -> None:
    made = ground.create()
    assert ground.provider.terminate(made.machine_id[:-4] + "zzzz") is False
    assert ground.end(made)


def test_logs_go_on_where_the_cursor_stands_and_repeat_for_the_same_one(ground: Ground) -> None:
    machine = ground.create()
    pages: list[LogPage] = [LogPage((), "")]

    def has_line() -> bool:
        pages.append(ground.provider.logs(machine.machine_id, pages[-1].cursor))
        return any(page.lines for page in pages)

    ground.wait_until(has_line)
    lines = [line for page in pages for line in page.lines]
    again = ground.provider.logs(machine.machine_id, "")
    assert list(again.lines[: len(lines)]) == lines
    assert ground.provider.logs(machine.machine_id, again.cursor).lines == ()
    assert ground.end(machine)
    assert ground.provider.logs(machine.machine_id, again.cursor).lines == ()


def test_the_listing_carries_the_provider_s_clock(ground: Ground) -> None:
    before = ground.provider.machines().now_s
    ground.sleep_s(1.2)
    assert 0.0 < ground.provider.machines().now_s - before < 60.0


def test_a_refusal_is_one_of_the_kinds_that_mean_nothing_exists(ground: Ground) -> None:
    names_before = {machine.name for machine in ground.provider.machines().machines}
    start = replace(ground.start, secret_refs={"TOKEN": "NO_SUCH_SECRET"}, image=None)
    with pytest.raises(NotCreated) as raised:
        ground.provider.create(ground.provider.offers()[0], ground.tags(), start)
    assert isinstance(raised.value, HotlapError) and raised.value.exit_code == 5
    assert {machine.name for machine in ground.provider.machines().machines} == names_before


def test_traits_hang_together(ground: Ground) -> None:
    traits = ground.provider.traits
    offer: Offer = ground.provider.offers()[0]
    assert offer.provider == traits.name
    assert traits.proof_listings >= 1 and traits.proof_s >= traits.proof_gap_s * (traits.proof_listings - 1)
    assert traits.poll_s < traits.provisioning_s
