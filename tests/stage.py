"""A launcher and a reaper against the emulator in fake time, with the oracle that judges what became of it all."""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from hotlap.cloud import launcher, receipts
from hotlap.cloud.ledger import Ledger
from hotlap.cloud.proof import Patience
from hotlap.cloud.provider import NAME_PREFIX, Offer, Start, Tags
from hotlap.cloud.reaper import Reaper, Report
from hotlap.cloud.runpod import Runpod
from hotlap.config import CloudConfig
from hotlap.testing.containers import Job, Runtime, scripted
from hotlap.testing.fake_clock import FakeClock
from hotlap.testing.fake_runpod import FakeRunpod
from hotlap.testing.faults import Active, Fault
from hotlap.testing.machines import Pod

CREATE, LIST, DELETE = "POST /v2/pods", "GET /v2/pods", "DELETE /v2/pods/{id}"
LOGS = "GET /v2/pods/{id}/logs"
OWNER = "me"
GPU = "NVIDIA L40S"
CAP_S = 120.0
REAPER_PERIOD_S = 300.0
PROOF_S = 60.0


class Killed(BaseException):
    """The launcher died here: from now on nothing it asks for happens."""


@dataclass
class Mortal:
    """Stands before an object; after death every call raises before it has any effect."""

    _inner: Any
    _life: "Life"
    _what: str

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not callable(value):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            self._life.require()
            answer = value(*args, **kwargs)
            self._life.count(f"{self._what}.{name}")
            return answer

        return call


@dataclass
class Life:
    """When a launcher dies: right after this call was made the nth time, or when this much time has passed."""

    after_call: str = ""
    nth: int = 1
    at_s: float = float("inf")
    now_s: Callable[[], float] = lambda: 0.0
    is_over: bool = False
    calls: Counter[str] = field(default_factory=Counter[str])

    def require(self) -> None:
        self.is_over = self.is_over or self.now_s() >= self.at_s
        if self.is_over:
            raise Killed

    def count(self, call: str) -> None:
        self.calls[call] += 1
        if call == self.after_call and self.calls[call] == self.nth:
            self.is_over = True
            raise Killed


class Stage:
    def __init__(
        self,
        home: Path,
        *faults: Fault,
        job: Job | None = None,
        runtime: Runtime | None = None,
        skew_s: float = 0.0,
        settings: CloudConfig | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.clock = FakeClock()
        self.began_s = self.clock.now_s()
        self.cloud = FakeRunpod(
            self.clock, faults=faults, runtime=runtime or scripted(job or Job()), seed=seed, **options
        )
        self.settings = settings or CloudConfig()
        self.ledger = Ledger(self.settings, f"sqlite:///{home / 'ledger.sqlite'}")
        self.stops = launcher.Stops()
        self.skew_s = skew_s
        self.words: list[str] = []
        self.on_sleep: Callable[[], None] = lambda: None
        self.breaches: list[str] = []
        self._numbers = itertools.count(1)
        self._seed = seed
        self._checked_s = 0.0
        self._strangers: set[str] = set()

    def __enter__(self) -> "Stage":
        self.cloud.__enter__()
        self.provider = Runpod("full-key", self.cloud.url, sleep_s=self.sleep_s)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.provider.close()
        self.ledger.close()
        self.cloud.__exit__(kind, error, trace)

    # --- time ---

    def age_s(self) -> float:
        return self.clock.now_s() - self.began_s

    def sleep_s(self, seconds: float) -> None:
        self.clock.sleep_s(seconds)
        self.on_sleep()
        if self.clock.now_s() - self._checked_s >= 15.0:
            self._checked_s = self.clock.now_s()
            self.breaches += self.overspent()

    # --- acts ---

    def offers(self, *gpus: str) -> list[Offer]:
        found = [offer for gpu in gpus or (GPU,) for offer in self.provider.offers(gpu)]
        return [offer for offer in found if offer.cloud == "SECURE"]

    def world(self) -> launcher.World:
        return launcher.World(
            now_s=self.clock.now_s,
            wall_s=self.clock.skewed(self.skew_s),
            sleep_s=self.sleep_s,
            draw=lambda: f"{self._seed:08x}{next(self._numbers):08x}",
            say=self.words.append,
        )

    def launch(
        self, offers: list[Offer] | None = None, run: str = "run", cap_s: float = CAP_S, life: Life | None = None
    ) -> launcher.LeaseEnd:
        life = life or Life()
        life.now_s = self.age_s
        start = Start(("job",), {"HOTLAP_CAP_S": str(cap_s + launcher.JOB_MARGIN_S)}, image="img", volume_id=None)
        offers = self.offers() if offers is None else offers
        lead = launcher.Launcher(
            Mortal(self.provider, life, "provider"),  # pyright: ignore[reportArgumentType]
            Mortal(self.ledger, life, "ledger"),  # pyright: ignore[reportArgumentType]
            self.settings,
            OWNER,
            self.stops,
            self.world(),
        )
        return lead.launch(launcher.Job(run, cap_s, start), offers)

    def reap(self, all_owners: bool = False, patience_s: float = 60.0) -> Report:
        reaper = Reaper(self.provider, self.ledger, self.settings, OWNER, all_owners)
        return reaper.reap(Patience(patience_s, self.clock.now_s, self.sleep_s))

    def reap_until(self, age_s: float) -> list[Report]:
        """A pass every period, as from cron, until that age of the emulator."""
        reports: list[Report] = []
        while age_s - self.age_s() > 0.01:  # a clock of 1970 tells no microseconds apart
            began_s = self.age_s()
            reports.append(self.reap())
            self.sleep_s(max(0.0, min(age_s, began_s + REAPER_PERIOD_S) - self.age_s()))
        return reports

    def plant(self, name: str, env: dict[str, str], *faults: Fault) -> Pod:
        """A machine that no launcher of ours made."""
        self._strangers.add(name)
        self.cloud.account.pod_key_allows = "nothing"  # it does not go by itself
        body = {"name": name, "image": "img", "gpu": {"id": GPU}, "env": env, "disk": 20}
        return self.cloud.park.create(body, self.clock.now_s(), 0.86, Active(faults))

    def plant_tagged(self, not_after_s: int | str, *faults: Fault, owner: str = OWNER) -> Pod:
        tags = Tags(f"feed{next(self._numbers):012x}", owner, "n", 0)
        return self.plant(tags.name, {**tags.env, "HOTLAP_NOT_AFTER": str(not_after_s)}, *faults)

    # --- what is seen afterwards ---

    def posts(self) -> list[str]:
        """Names of the creates that were sent, but for those refused for a field's form."""
        return [call.body["name"] for call in self.cloud.calls(CREATE) if call.body and call.status != 422]

    def made(self) -> list[Pod]:
        return [pod for pod in self.cloud.park.pods.values() if pod.name not in self._strangers]

    def alive(self) -> list[str]:
        return [pod.pod_id for pod in self.cloud.alive() if pod.name.startswith(NAME_PREFIX)]

    def leases(self, run: str = "run") -> list[Any]:
        return self.ledger.leases_of(run)

    def receipt(self, lease_id: str) -> dict[str, Any]:
        return receipts.Receipt(receipts.receipt_path(lease_id)).facts

    def hold_of(self, lease_id: str) -> int:
        return self.receipt(lease_id)["intent"]["worst_case"]["usd_micros"]

    def charged(self) -> int:
        return sum(lease.usd_micros for lease in self.leases())

    # --- the oracle ---

    def overspent(self) -> list[str]:
        """P1: leases that are charged less than their machines cost, now."""
        self.cloud.settle()
        now_s = self.clock.now_s()
        charges = {
            NAME_PREFIX + lease.lease_id: lease.usd_micros + self.ledger.overrun_of(lease, now_s).usd_micros
            for lease in self.leases()
        }
        cost: Counter[str] = Counter()
        for pod in self.made():
            cost[pod.name] += self.cloud.meter.usd_micros(now_s, pod.pod_id)
        return [
            f"at {self.age_s():.0f} s {name} cost {micros} and is charged {charges.get(name, 0)}"
            for name, micros in cost.items()
            if micros > charges.get(name, 0)
        ]

    def double_creates(self) -> list[str]:
        """P2: intents that were sent more than once, or have more than one machine."""
        sent, made = Counter(self.posts()), Counter(pod.name for pod in self.made())
        return [f"{name} sent {sent[name]}, made {made[name]}" for name in sent if sent[name] > 1 or made[name] > 1]

    def require_sound(self) -> None:
        """Nothing of ours lives, nothing was made twice, and the meter never ran ahead of the ledger."""
        assert self.alive() == []
        assert self.double_creates() == []
        assert self.breaches + self.overspent() == []
