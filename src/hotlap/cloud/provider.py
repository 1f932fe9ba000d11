"""What a provider of machines promises: offers, create, machines, terminate, logs; and the tags machines carry.

A machine is told from others by what the provider itself lists, never by a file of ours: its name is `hotlap-LEASE`,
and its environment carries the lease, the owner, a nonce and the moment after which it may not live.

What runs on a machine talks in lines on its standard output, each `HOTLAP: ` and a JSON object with an `event`:
`boot` (boot_id, nonce), `heartbeat` (boot_id), whatever the slice emits, and `result` (exit_code, reason, message),
which comes once and last. Everything else is talk.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from hotlap.errors import ProviderFailed

NAME_PREFIX = "hotlap-"
LINE_PREFIX = "HOTLAP: "
PLATFORM_PREFIX = "[system] "
"""Before what the platform says, and not the machine."""

MAX_TTL_S = 24 * 3600
"""A longest life no tag can exceed; one that claims more is not believed."""

State = Literal["provisioning", "starting", "running", "exited", "error", "terminated", "unknown"]
"""`unknown`, a state we have no word for, counts as alive and billed. `exited` and `error` may still cost."""


@dataclass(frozen=True)
class Offer:
    """A priced kind of machine, in one place."""

    provider: str
    gpu: str
    """As the provider names it; `cpu` is a machine without."""

    region: str | None
    """Data center. None: the provider's choice."""

    usd_micros_per_hour: int
    num_gpus: int = 1
    billing_unit_s: int = 1
    """Seconds are billed rounded up to a multiple of this."""

    cloud: str | None = None
    """The provider's own class of machines, such as `SECURE`."""

    memory_gb: float | None = None
    """Of one GPU. None: not known."""

    has_stock: bool | None = None
    """What the catalogue says; a hint only. None: it does not say."""


@dataclass(frozen=True)
class Where:
    """Where a machine may stand."""

    volume_id: str | None = None
    """Only where this network volume is reached."""

    regions: tuple[str, ...] = ()
    """Data centers, in the order in which they are tried. Empty: the provider's choice."""

    cloud: str | None = None
    """One of the provider's classes of machines. None: any."""


ANYWHERE = Where()


@dataclass(frozen=True)
class Tags:
    """What a machine of ours carries, so that it can be found, judged and adopted without any file of ours."""

    lease_id: str
    """64 random bits in hexadecimal."""

    owner: str
    nonce: str
    """Random and only known to the launcher: a name may be anybody's, this is not."""

    not_after_s: int
    """In seconds since 1970 on the provider's clock; from then on the machine may be killed by anybody."""

    @property
    def name(self) -> str:
        return NAME_PREFIX + self.lease_id

    @property
    def env(self) -> dict[str, str]:
        return {
            "HOTLAP_LEASE": self.lease_id,
            "HOTLAP_OWNER": self.owner,
            "HOTLAP_NONCE": self.nonce,
            "HOTLAP_NOT_AFTER": str(self.not_after_s),
        }


@dataclass(frozen=True)
class Start:
    """What runs on a machine, and with what."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Besides the tags. Readable by whoever can list the machine, so never a secret."""

    secret_refs: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variable to the name of a secret that the provider keeps and puts in."""

    image: str | None = None
    volume_id: str | None = None
    volume_path: str = "/workspace"
    disk_gb: int = 20
    has_network: bool = True
    """Asked for only where `Traits.blocks_network`."""


@dataclass(frozen=True)
class Machine:
    """A machine as its provider lists it. None means that the provider does not say, or says what cannot be true."""

    machine_id: str
    name: str
    state: State
    created_at_s: float
    """In seconds since 1970 on the provider's clock."""

    lease_id: str | None = None
    owner: str | None = None
    nonce: str | None = None
    not_after_s: int | None = None
    usd_micros_per_hour: int | None = None
    is_up: bool = False
    """Whether its container is known to run; `running` alone does not say so."""

    problems: tuple[str, ...] = ()
    """What is odd about it, in words."""

    ended_at_s: float | None = None
    """Since when nothing of it runs or is billed, as the provider knows for certain."""

    @property
    def is_ours(self) -> bool:
        """Tag and name agree. One of the two alone is somebody else's, or a doubt that is reported and left alone."""
        return self.lease_id is not None and self.name == NAME_PREFIX + self.lease_id

    @property
    def running_price(self) -> int | None:
        """What an hour of it costs while it runs. One that stands still may cost its disk only, which says nothing of
        the hours before."""
        return None if self.state in ("exited", "error", "terminated") else self.usd_micros_per_hour

    @property
    def is_doubtful(self) -> bool:
        return not self.is_ours and (self.lease_id is not None or self.name.startswith(NAME_PREFIX))


@dataclass(frozen=True)
class Listing:
    """Every machine of the account, at one moment of the provider's clock."""

    now_s: float
    machines: tuple[Machine, ...]

    def find(self, machine_id: str) -> Machine | None:
        return next((machine for machine in self.machines if machine.machine_id == machine_id), None)


class ListingBroken(ProviderFailed):
    """A listing that could not be completed. `seen` is what was there; what is missing from it may exist."""

    def __init__(self, message: str, seen: Listing) -> None:
        super().__init__(message)
        self.seen = seen


@dataclass(frozen=True)
class LogPage:
    """Lines after a cursor, and the cursor for what comes next."""

    lines: tuple[str, ...]
    cursor: str


@dataclass(frozen=True)
class Traits:
    """How a provider behaves, as far as decisions depend on it."""

    name: str
    has_hard_ttl: bool
    """Whether the provider itself ends a machine at its `not_after_s`, whatever becomes of us."""

    proof_listings: int
    """After an accepted terminate, in how many full listings in a row the machine must be missing to be dead."""

    proof_gap_s: float
    """Seconds between those listings, at least."""

    proof_s: float
    """How long terminate and proof take at worst while the provider answers."""

    visibility_s: float
    """For how long a machine that was made may be missing from listings. Until then, absence proves nothing."""

    poll_s: float
    """How often one machine may be asked after."""

    provisioning_s: float
    """How long a machine may take from create until its job's first line."""

    needs_volume: bool
    """Whether what a slice saved is lost with the machine unless a volume was named."""

    restarts: bool
    """Whether a command that ended is started again."""

    blocks_network: bool = False
    """Whether it makes machines without a network."""

    billing_unit_s: int = 1
    """As of its offers."""


class Provider(Protocol):
    """Every method may raise `ProviderFailed`, and `NoPermission` or `RateLimited` below it."""

    @property
    def traits(self) -> Traits: ...

    def offers(self, gpu: str | None = None, where: Where = ANYWHERE) -> list[Offer]:
        """What can be rented there, cheapest first; `gpu` narrows it to one kind. Nothing fits: an empty list.
        `has_stock` is that of the offer's region.

        Raises:
            UsageError: there is no such volume, or it is reached from none of these regions.
        """
        ...

    def create(self, offer: Offer, tags: Tags, start: Start) -> Machine:
        """Rent one machine. Not idempotent, and sent exactly once: no attempt is repeated in here, but for one that
        was definitely refused for the form of a named field. The caller has written its intent down before.

        Raises:
            NotCreated: (`NoCapacity`, `NoFunds`) or `NoPermission` or `RateLimited`: a definite no, nothing exists.
            AmbiguousCreate: every other failure, a lost or unreadable answer above all: it may exist, or appear later.
        """
        ...

    def machines(self) -> Listing:
        """Every machine of the account on every page, ours or not, ended ones that may still cost included. Reads
        only. It raises rather than return a part: what is missing from a listing was not there."""
        ...

    def terminate(self, machine_id: str) -> bool:
        """Ask for the end of a machine. Idempotent. True: accepted, which is no proof (see `Traits`). False: the
        provider does not know it, being gone already or not visible yet."""
        ...

    def logs(self, machine_id: str, cursor: str = "") -> LogPage:
        """What the machine wrote on its standard output after the cursor, as far as it is there now; returns within
        seconds. Reads only; the same cursor gives the same lines again, and none is given twice along a chain of
        cursors. Of a machine that is gone: an empty page."""
        ...

    def close(self) -> None:
        """Let go of connections."""
        ...


@dataclass(frozen=True)
class ReadTags:
    """What a machine's environment says. Each None has its reason in `problems`, or was not there."""

    lease_id: str | None = None
    owner: str | None = None
    nonce: str | None = None
    not_after_s: int | None = None
    problems: tuple[str, ...] = ()


def read_tags(env: Mapping[str, str] | None, created_at_s: float) -> ReadTags:
    """The tags in a listed environment. A death date that cannot be read, lies before the birth or beyond
    `MAX_TTL_S` is not believed: its place is taken by the longest life that the reaper allows."""
    env = env or {}
    lease_id = env.get("HOTLAP_LEASE")
    if lease_id is None:
        return ReadTags()
    problems: list[str] = []
    text = env.get("HOTLAP_NOT_AFTER", "")
    not_after_s = int(text) if re.fullmatch(r"-?[0-9]{1,15}", text) else None
    if not_after_s is None:
        problems.append(f"its not-after tag {text[:32]!r} cannot be read")
    elif not created_at_s <= not_after_s <= created_at_s + MAX_TTL_S:
        problems.append(f"its not-after tag {text} is no moment of its life")
        not_after_s = None
    return ReadTags(lease_id, env.get("HOTLAP_OWNER"), env.get("HOTLAP_NONCE"), not_after_s, tuple(problems))


def event_in(line: str) -> dict[str, Any] | None:
    """The event that a line of a machine's log holds; None for talk."""
    if not line.startswith(LINE_PREFIX):
        return None
    try:
        event = json.loads(line[len(LINE_PREFIX) :])
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


# Boot and worker, as the launcher starts them:
#   python -S -I boot.py JOB...                  tags and HOTLAP_CAP_S (the job's longest life) in the environment
#   python -m hotlap.cloud.worker ORDER          ORDER is JSON: {"config": RunConfig, "cap_s": seconds for the slice}
